"""Bounds on the pixels that requests send to the engine: of one request, and of all in progress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.message import AbortRequest
from minisgl.server.core import context
from minisgl.server.prepare import IMAGES_BYTES
from tests.helpers.image_files import encoded, picture
from tests.helpers.server import Frontend, check_error
from tests.helpers.sight import data_url, png, prepared, seeing_frontend

CHAT = "/v1/chat/completions"
ONE, OTHER = png(), png(40, 16, seed=1)


@pytest.fixture
def server(front_end: str, tmp_path: Path) -> Iterator[Frontend]:
    with seeing_frontend(tmp_path, front_end=front_end) as running:
        yield running


def chat(words: str, *images: bytes, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    content = [*parts, {"type": "text", "text": words}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


def size(folder: Path, *images: bytes) -> int:
    return sum(prepared(folder, one, None).num_bytes for one in images)


def test_pixels_of_a_request_are_bounded_and_count_once(
    server: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_PIXEL_BYTES", size(tmp_path, ONE, OTHER) - 1)
    with server.http() as http:
        error = check_error(http.post(CHAT, json=chat("say:ok", ONE, OTHER)), 400)
        assert f"have {size(tmp_path, ONE, OTHER)} bytes of pixels" in error["message"] and error["param"] == "messages"
        assert http.post(CHAT, json=chat("say:ok", ONE, ONE, n=3)).status_code == 200


def test_pixels_in_progress_are_bounded(server: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MAX_LIVE_PIXEL_BYTES", size(tmp_path, ONE, ONE, ONE))
    with server.http() as http:
        with server.send(CHAT, chat("first hang:", ONE, n=2), "content-type: application/json"):
            first = server.engine.wait_for_request("first ")
            server.wait_until(lambda: server.num_live == 2)
            assert server.client.num_pixel_bytes == size(tmp_path, ONE)
            error = check_error(http.post(CHAT, json=chat("say:ok", ONE, OTHER, OTHER, png(seed=2))), 429)
            assert error["code"] == "queue_full" and "bytes of pixels" in error["message"]
            assert http.post(CHAT, json=chat("say:ok", ONE)).status_code == 200
            assert http.post(CHAT, json=chat("say:ok")).status_code == 200
        server.engine.wait_for_end(AbortRequest, {first.req_id})
        server.wait_until(lambda: server.num_live == 0)
        assert server.client.num_pixel_bytes == 0
        assert http.post(CHAT, json=chat("say:ok", ONE, OTHER, png(seed=2))).status_code == 200, "alone it may"


def test_a_large_body_with_an_image_is_answered(server: Frontend) -> None:
    """The gateway asks about its headers only, and forwards it."""
    large = encoded(picture(1000, 700, seed=3))
    with server.http() as http:
        answer = http.post(CHAT, json=chat("say:ok", large))
        assert answer.status_code == 200 and len(answer.request.content) > IMAGES_BYTES
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
