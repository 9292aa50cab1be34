"""docs/api.md names every route and every field, with what the code says about it."""

from __future__ import annotations

import inspect

import pytest
from pydantic import BaseModel

from minisgl.server import bodies
from minisgl.server.openapi import ROUTES
from tools.write_api_page import PAGE, written

BODIES = [
    one
    for _, one in inspect.getmembers(bodies, inspect.isclass)
    if issubclass(one, BaseModel) and one.__module__ == bodies.__name__ and not one.__name__.startswith("_")
]


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_would_be_written() -> None:
    assert page() == written(page()), "run: python -m tools.write_api_page"


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_is_on_it(path: str) -> None:
    assert f"{ROUTES[path].method.upper()} {path}" in page()


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_every_field_is_on_it(model: type[bodies.Body]) -> None:
    text = page()
    for name in [*model.model_fields, *model.NOT_YET]:
        assert f"| `{name}` |" in text or model in (bodies.TextPart, bodies.RefusalPart), name


def test_a_new_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(bodies.StreamOptions):
        new_field: int | None = None

    monkeypatch.setattr(bodies, "StreamOptions", Longer)
    assert page() != written(page())
