"""The documented bounds of each field are those that hold, whichever API it stands in."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from minisgl.server.routes import POSTS
from tests.helpers.edges import bounds
from tests.server.core.test_unserved import ASKED, GENERATE

BEHIND = ("must be", "at most", "at least")
"""What errors of bounds say."""


def refused(http: httpx.Client, path: str, name: str, value: Any) -> str | None:
    """Return the error about the bounds of the field, if there is one."""
    asked = {"text": "say:ok"} if path == GENERATE else ASKED[path]
    answer = http.post(path, json={**asked, name: value})
    assert answer.status_code in (200, 400), answer.text
    error = answer.json().get("error") if answer.status_code == 400 else None
    message = error["message"] if isinstance(error, dict) else error
    return message if message and message.startswith(name) and any(words in message for words in BEHIND) else None


@pytest.mark.parametrize("path", ASKED)
def test_a_field_takes_its_bounds_and_nothing_behind_them(http: httpx.Client, path: str) -> None:
    model: Any = POSTS[path][0]
    for name, inside, outside in bounds(path):
        if name not in model.NOT_YET and name not in ("prompt_logprobs", "best_of"):
            assert refused(http, path, name, outside), (name, outside)
            assert not refused(http, path, name, inside), (name, inside)
