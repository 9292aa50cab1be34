"""Writes the tables of docs/api.md out of the server's bodies, answers and routes: `python -m tools.write_api_page`.

What stands between a `begin` and an `end` mark is made here, the rest of the page by hand; a test fails
when the page is not what this would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from pydantic import BaseModel

from minisgl.server import answers, bodies
from minisgl.server.openapi import ROUTES, bounds, kind

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MARKED = re.compile(r"(<!-- begin (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(model: type[BaseModel], leave_out: frozenset[str] = frozenset()) -> str:
    """The fields of a body or an answer."""
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    explained = any("description" in one for one in schema.get("properties", {}).values())
    rows = ["| field | type | meaning |", "|---|---|---|"] if explained else ["| field | type |", "|---|---|"]
    for name, one in schema.get("properties", {}).items():
        if name in leave_out:
            continue
        limits = bounds(one)
        shown = kind(one) + (f", {limits}" if limits else "") + (" (required)" if name in required else "")
        rows.append(f"| `{name}` | {shown} |" + (f" {one.get('description', '')} |" if explained else ""))
    return "\n".join(rows) + "\n"


def routes() -> str:
    rows = ["| route | what | errors |", "|---|---|---|"]
    for path, route in ROUTES.items():
        rows.append(f"| `{route.method.upper()} {path}` | {route.summary} | {', '.join(map(str, route.errors))} |")
    return "\n".join(rows) + "\n"


def part(what: str, name: str) -> str:
    if what == "routes":
        return routes()
    if what == "refused":
        model = getattr(bodies, name)
        rows = ["| field | accepted values |", "|---|---|"]
        shared = {} if model is bodies.Sampling else bodies.Sampling.NOT_YET
        for field, nothing in model.NOT_YET.items():
            if shared.get(field) == nothing:
                continue
            rows.append(f"| `{field}` | {', '.join(f'`{json.dumps(value)}`' for value in nothing) or 'none'} |")
        return "\n".join(rows) + "\n"
    if what == "body":
        model = getattr(bodies, name)
        shared = model is not bodies.Sampling and issubclass(model, bodies.Sampling)
        return table(model, frozenset(bodies.Sampling.model_fields) if shared else frozenset())
    if what == "answer":
        return table(getattr(answers, name))
    raise ValueError(f"no such part: {what}")


def written(page: str) -> str:
    return MARKED.sub(lambda found: found[1] + part(found[2], found[3]) + found[4], page)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(before), encoding="utf-8")
    sys.exit(0)
