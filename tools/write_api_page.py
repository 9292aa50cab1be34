"""Write the field tables of the API pages from the server's request bodies, responses and routes:
`python -m tools.write_api_page`.

Text between a `begin` and an `end` mark is generated, the rest of a page is written by hand; a test fails when a page
differs from the generated text. `begin body A except B C` omits the fields that A shares with B or C; `begin answer A B
C` has a line for each.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from minisgl.server.admin import body as admin
from minisgl.server.apis.anthropic import body as anthropic
from minisgl.server.apis.llama_cpp import body as llama_cpp
from minisgl.server.apis.ollama import body as ollama
from minisgl.server.apis.openai import answers as openai
from minisgl.server.apis.openai import classify, rerank
from minisgl.server.apis.responses import body as responses
from minisgl.server.apis.sglang import body as sglang
from minisgl.server.core import answers, bodies, sampling_fields
from minisgl.server.core.sampling_fields import Sampling, Structured
from minisgl.server.openapi import bounds, kind
from minisgl.server.routes import ROUTES

PAGES = [Path(__file__).parents[1] / "docs" / f"{name}.md" for name in ("api", "other-apis", "vectors")]
MODULES = (
    bodies,
    sampling_fields,
    answers,
    openai,
    rerank,
    classify,
    sglang,
    responses,
    anthropic,
    llama_cpp,
    ollama,
    admin,
)
MARKED = re.compile(r"(<!-- begin (\S+) ([\w ]+?)(?: except ([\w ]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def table(model: type[BaseModel], leave_out: frozenset[str]) -> str:
    """Return the fields of a request body as table rows, without those of `leave_out`."""
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for name, one in schema.get("properties", {}).items():
        if name not in leave_out:
            limits = bounds(one)
            shown = kind(one) + (f", {limits}" if limits else "") + (" (required)" if name in required else "")
            rows.append(f"| `{name}` | {shown} | {one.get('description', '')} |")
    return "\n".join(rows) + "\n"


def answer(model: type[BaseModel]) -> str:
    """Return the fields of a response as a list item: first those that are always present."""
    schema = model.model_json_schema()
    shown = {name: f"`{name}` ({kind(field)})" for name, field in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    text = f"- `{model.__name__}`: " + ", ".join(field for name, field in shown.items() if name in required)
    if optional := [field for name, field in shown.items() if name not in required]:
        text += "; where it applies " + ", ".join(optional)
    return paragraph(text, "  ")


def paragraph(text: str, indent: str = "") -> str:
    """Wrap a text at 120 columns, never within backticks; `indent` starts all lines but the first."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ") + "\n"


def routes() -> str:
    rows = ["| route | what | errors |", "|---|---|---|"]
    for route in ROUTES:
        rows.append(
            f"| `{route.method.upper()} {route.path}` | {route.summary} | {', '.join(map(str, route.errors))} |"
        )
    return "\n".join(rows) + "\n"


def model_of(name: str) -> type[BaseModel]:
    model: type[BaseModel] = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    return model


def shared(model: type[BaseModel], others: Iterable[type[BaseModel]]) -> frozenset[str]:
    """Return the fields of a model that have the same meaning in one of the others."""
    same = (
        name
        for other in others
        for name, one in other.model_fields.items()
        if name in model.model_fields and model.model_fields[name].description == one.description
    )
    return frozenset(same)


def refused(model: type[Sampling]) -> str:
    """Return the fields that are refused, each with the values that are accepted."""
    common = {} if model is Sampling else Sampling.NOT_YET
    told = [
        f"`{name}`" + (f" ({', '.join(f'`{json.dumps(value)}`' for value in nothing)})" if nothing else "")
        for name, nothing in model.NOT_YET.items()
        if common.get(name) != nothing
    ]
    return paragraph(", ".join(told) + ".")


def part(what: str, name: str, others: str) -> str:
    if what == "routes":
        return routes()
    if what == "answer":
        return "".join(answer(model_of(one)) for one in name.split())
    model = model_of(name)
    if what == "refused":
        return refused(model)  # type: ignore[arg-type]
    if what == "body":
        common = [one for one in (Sampling, Structured) if model is not one and issubclass(model, one)]
        return table(model, shared(model, [*common[:1], *map(model_of, others.split())]))
    raise ValueError(f"no such part: {what}")


def written(page: str) -> str:
    return MARKED.sub(lambda found: found[1] + part(found[2], found[3], found[4] or "") + found[5], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
