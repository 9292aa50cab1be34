"""Models and errors in the form of Anthropic's API, for clients that send its header."""

from __future__ import annotations

from datetime import datetime

import anthropic
import httpx
import pytest

from minisgl.server.apis.anthropic.models import shown_models
from minisgl.server.core.errors import FORM, MESSAGES
from tests.helpers.server import MODEL, Frontend

VERSION = {"anthropic-version": "2023-06-01"}


def test_the_official_client_lists_and_finds_models(server: Frontend) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="any") as client:
        [model] = list(client.models.list())
        assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)
        assert isinstance(model.created_at, datetime) and client.models.retrieve(MODEL) == model
        with pytest.raises(anthropic.NotFoundError) as found:
            client.models.retrieve("nope")
    body = found.value.body
    assert isinstance(body, dict) and body["type"] == "error" and body["error"]["type"] == "not_found_error"
    assert body["request_id"] == found.value.request_id


def test_models_without_the_header_have_openai_shape(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["object"] == "list"
    assert "code" in http.get("/v1/models/nope").json()["error"]
    assert "request_id" not in http.get("/v1/nope", headers=VERSION).json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages/none", 404),
        ("GET", "/v1/models?limit=0", 400),
        ("GET", "/v1/models?after_id=nope", 400),
    ],
)
def test_errors_have_the_id_of_their_request(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path, json={} if method == "POST" else None, headers=VERSION)
    body = answer.json()
    assert answer.status_code == status and list(body) == ["type", "error", "request_id"]
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        (b"", "abcd", False),
        (b"limit=2", "ab", True),
        (b"limit=2&after_id=b", "cd", False),
        (b"after_id=d", "", False),
        (b"limit=1&before_id=c", "b", True),
        (b"before_id=b", "a", False),
    ],
)
def test_the_list_has_pages(query: bytes, ids: str, has_more: bool) -> None:
    cards = [{"id": one, "created": 0} for one in "abcd"]
    found = shown_models(cards, {FORM: (MESSAGES, "req-1"), "query_string": query})
    assert "".join(one["id"] for one in found["data"]) == ids and found["has_more"] is has_more
    assert (found["first_id"], found["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    assert all(one["created_at"] == "1970-01-01T00:00:00Z" for one in found["data"])
