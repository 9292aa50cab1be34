"""The pages about the API name every route and every field, with what the code says about it."""

from __future__ import annotations

import inspect

import pytest

from minisgl.server.core import bodies, fields, sampling_fields
from minisgl.server.routes import ROUTES, Route
from tools.write_api_page import PAGES, written

BODIES = [
    one
    for module in (bodies, fields, sampling_fields)
    for _, one in inspect.getmembers(module, inspect.isclass)
    if issubclass(one, fields.Body) and one.__module__ == module.__name__ and not one.__name__.startswith("_")
]


def pages() -> str:
    return "".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_the_pages_are_what_would_be_written() -> None:
    assert pages() == written(pages()), "run: python -m tools.write_api_page"


@pytest.mark.parametrize("route", ROUTES, ids=lambda one: f"{one.method} {one.path}")
def test_every_route_is_on_it(route: Route) -> None:
    assert f"`{route.method.upper()} {route.path}`" in pages()


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_every_field_is_on_it(model: type[bodies.Body]) -> None:
    text = pages()
    names = [field.alias or name for name, field in model.model_fields.items()]
    assert [name for name in model.NOT_YET if f"`{name}`" not in text] == []
    for name in names:
        assert f"| `{name}` |" in text or model in (bodies.TextPart, bodies.RefusalPart, bodies.ImagePart), name
