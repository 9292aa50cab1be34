"""The OpenAPI page says what the server does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from minisgl.server.admin import body as admin_body
from minisgl.server.apis.anthropic import body as messages_answers
from minisgl.server.apis.anthropic.body import CountTokensRequest, MessagesRequest
from minisgl.server.apis.openai import answers as openai
from minisgl.server.apis.responses import body as responses_answers
from minisgl.server.apis.responses.body import ResponsesRequest
from minisgl.server.apis.sglang import body as sglang_body
from minisgl.server.core import answers, bodies
from minisgl.server.routes import ROUTES
from tests.helpers.server import frontend

CHAT = {"messages": [{"role": "user", "content": "say:ok"}]}
REAL: list[tuple[str, str, dict[str, Any] | None, type[BaseModel]]] = [
    ("POST", "/v1/chat/completions", CHAT, openai.ChatAnswer),
    ("POST", "/v1/completions", {"prompt": "say:ok"}, openai.CompletionAnswer),
    ("POST", "/generate", {"prompt": "say:ok"}, sglang_body.GenerateAnswer),
    ("POST", "/generate", {"text": "say:ok"}, sglang_body.SglangAnswer),
    ("POST", "/generate", {"text": ["say:ok"]}, sglang_body.GenerateAnswers),
    ("GET", "/get_model_info", None, sglang_body.ModelInfo),
    ("GET", "/health_generate", None, admin_body.Status),
    ("POST", "/tokenize", {"prompt": "ok"}, openai.TokenizeAnswer),
    ("POST", "/detokenize", {"tokens": [104]}, openai.DetokenizeAnswer),
    ("GET", "/v1/models", None, openai.ModelList),
    ("GET", "/v1/models/scripted", None, openai.ModelCard),
    ("GET", "/version", None, admin_body.Version),
    ("GET", "/livez", None, admin_body.Status),
    ("GET", "/readyz", None, admin_body.Status),
    ("GET", "/health", None, admin_body.Health),
    ("GET", "/stats", None, admin_body.Stats),
    ("GET", "/v1/models/other", None, answers.ErrorAnswer),
    ("POST", "/tokenize", {}, answers.ErrorAnswer),
    ("POST", "/v1/responses", {"input": "say:ok"}, responses_answers.ResponseAnswer),
    ("POST", "/v1/responses/resp_x/cancel", None, answers.ErrorAnswer),
    ("GET", "/v1/responses/resp_x", None, answers.ErrorAnswer),
    ("POST", "/v1/messages", CHAT | {"max_tokens": 9}, messages_answers.MessageAnswer),
    ("POST", "/v1/messages/count_tokens", CHAT, messages_answers.TokenCount),
    ("POST", "/v1/messages", CHAT, messages_answers.AnthropicErrorAnswer),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with frontend() as running, running.http() as client:
        yield client


@pytest.mark.parametrize(("method", "path", "body", "shape"), REAL)
def test_answers_have_their_shapes(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, shape: type[BaseModel]
) -> None:
    shape.model_validate_json(http.request(method, path, json=body).content, strict=True)


def test_every_field_is_described(http: httpx.Client) -> None:
    page = http.get("/openapi.json").json()
    assert set(page["paths"]) == {route.path for route in ROUTES}
    schemas = page["components"]["schemas"]
    of_bodies = (bodies.ChatRequest, bodies.CompletionRequest, sglang_body.GenerateSampling, bodies.TokenizeRequest)
    for model in (*of_bodies, ResponsesRequest, MessagesRequest, CountTokensRequest):
        properties = schemas[model.__name__]["properties"]
        assert set(properties) == set(model.model_fields)
        assert all(found.get("description") for found in properties.values()), model


def test_references_lead_somewhere(http: httpx.Client) -> None:
    page = http.get("/openapi.json").json()

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for one in value.values() for ref in references(one)]
        return [ref for one in value for ref in references(one)] if isinstance(value, list) else []

    found = set(references(page))
    assert len(found) > 15
    assert {ref.rsplit("/", 1)[1] for ref in found} <= set(page["components"]["schemas"])
