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

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
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
    for route in ROUTES:
        rows.append(
            f"| `{route.method.upper()} {route.path}` | {route.summary} | {', '.join(map(str, route.errors))} |"
        )
    return "\n".join(rows) + "\n"


def model_of(name: str) -> type[BaseModel]:
    found: type[BaseModel] = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    return found


def as_usual(model: type[BaseModel]) -> frozenset[str]:
    """Fields that mean what they mean in every request that generates."""
    common = next((one for one in (Sampling, Structured) if model is not one and issubclass(model, one)), None)
    found = common.model_fields.items() if common is not None else ()
    return frozenset(name for name, one in found if model.model_fields[name].description == one.description)


def part(what: str, name: str) -> str:
    if what == "routes":
        return routes()
    if what == "refused":
        model = model_of(name)
        rows = ["| field | accepted values |", "|---|---|"]
        shared = {} if model is Sampling else Sampling.NOT_YET
        for field, nothing in model.NOT_YET.items():
            if shared.get(field) == nothing:
                continue
            rows.append(f"| `{field}` | {', '.join(f'`{json.dumps(value)}`' for value in nothing) or 'none'} |")
        return "\n".join(rows) + "\n"
    if what == "body":
        model = model_of(name)
        return table(model, as_usual(model))
    if what == "answer":
        return table(model_of(name))
    raise ValueError(f"no such part: {what}")


def written(page: str) -> str:
    return MARKED.sub(lambda found: found[1] + part(found[2], found[3]) + found[4], page)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(before), encoding="utf-8")
    sys.exit(0)
