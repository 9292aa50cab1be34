"""The model's sampling defaults: for what a request leaves out, on every endpoint, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.sampling_params import SamplingParams
from tests.helpers.server import Frontend, chat_body, frontend

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.5, "max_tokens": 77}


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(defaults=DEFAULTS, front_end=front_end) as found:
        yield found


def asked(server: Frontend, path: str, body: dict[str, Any], marker: str) -> SamplingParams:
    """What reached the engine."""
    assert httpx.post(server.url + path, json=body).status_code == 200
    return server.engine.wait_for_request(marker).sampling


def as_dict(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in DEFAULTS}


def test_chat_uses_all_model_defaults(server: Frontend) -> None:
    params = asked(server, "/v1/chat/completions", chat_body("say:chat"), "say:chat")
    assert as_dict(params) == DEFAULTS


@pytest.mark.parametrize(("path", "limit"), [("/v1/completions", 16), ("/generate", 128)])
def test_completions_and_generate_keep_their_own_limit(server: Frontend, path: str, limit: int) -> None:
    marker = f"say:{path}"
    assert as_dict(asked(server, path, {"prompt": marker}, marker)) == {**DEFAULTS, "max_tokens": limit}


def test_request_fields_override_defaults(server: Frontend) -> None:
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 99}
    params = asked(server, "/v1/chat/completions", chat_body("say:own", **own), "say:own")
    assert as_dict(params) == own
    params = asked(server, "/v1/completions", {"prompt": "say:cold", "temperature": 0, "top_p": None}, "say:cold")
    assert as_dict(params) == {**DEFAULTS, "temperature": 0.0, "max_tokens": 16}
    body = {"prompt": "say:inner", "sampling_params": {"top_k": 3, "max_new_tokens": 5}}
    assert as_dict(asked(server, "/generate", body, "say:inner")) == {**DEFAULTS, "top_k": 3, "max_tokens": 5}


def test_without_model_defaults_protocol_defaults_hold(front_end: str) -> None:
    with frontend(front_end=front_end) as server:
        params = asked(server, "/v1/chat/completions", chat_body("say:plain"), "say:plain")
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, -1, 1.0)
