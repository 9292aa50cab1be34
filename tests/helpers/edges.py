"""Values at and beyond the bounds of each field of a request body, from the types and tables that define the rules."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

OF_ANY: tuple[Any, ...] = (None, 0, -1, 1, 2, 0.5, 2**63, True, False, "", "1", [], {}, [None], {"a": 1})


@functools.cache
def properties(path: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the fields of a route's body."""
    from minisgl.server.routes import POSTS  # a test lowers limits before a server is imported

    model = POSTS[path][0]
    assert model is not None
    fields: dict[str, dict[str, Any]] = model.model_json_schema()["properties"]
    return fields


def bounds(path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each documented bound: the field, the last value that it allows, and the next one, which it refuses."""
    for name, schema in properties(path).items():
        step = 0.5 if any(one.get("type") == "number" for one in schema.get("anyOf", [schema])) else 1
        for bound, behind in (("minimum", -step), ("maximum", step)):
            if bound in schema:
                yield name, schema[bound], schema[bound] + behind
        if (open_least := schema.get("exclusiveMinimum")) is not None:
            yield name, open_least + step, open_least


@functools.cache
def edges(path: str) -> dict[str, list[Any]]:
    """Return values to try by name: fields of a body, their aliases, and all names in tables of unsupported ones."""
    from minisgl.server.core import fields
    from minisgl.server.routes import POSTS

    model: Any = POSTS[path][0]
    values = {name: [*OF_ANY] for name in properties(path)}
    for name, inside, outside in bounds(path):
        values[name] += [inside, outside]
    for table in (model.NOT_YET, model.OTHERS, model.IGNORED, fields.IGNORED, fields.LLAMA_CPP_IGNORED):
        for name, nothing in table.items():
            values.setdefault(name, [*OF_ANY]).extend(nothing)
    values |= {alias: values[name] for alias, name in model.ALIASES.items()}
    return values


def at_edges(path: str) -> st.SearchStrategy[tuple[str, Any]]:
    """Draw a field of a body with a value at or beyond its bounds."""
    values = edges(path)
    return st.sampled_from(sorted(values)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(values[name])))
