"""What the gateway is told is what the Python server goes by."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from minisgl.config import AdaptiveMaxTokens, ApiKey, EngineConfig, Limits, ServerConfig
from minisgl.message.heartbeat import TIMES
from minisgl.metrics.server_metrics import SECONDS, TOKENS
from minisgl.server.gateway_config import encoded
from minisgl.tokenizer import Tokenizer
from tests.helpers.server import CONFIG, MODEL, READY, Frontend, frontend


def told(server: Frontend, config: ServerConfig = CONFIG, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encoded(config, server.app, tokenizer or Tokenizer.echo(), {"temperature": 0.5}))
    return found


def test_of_a_plain_server(server: Frontend, http: httpx.Client) -> None:
    found = told(server)
    assert found["model_name"] == MODEL and not found["any_model_name"]
    assert json.loads(found["models"]) == http.get("/v1/models").json()
    assert (found["max_seq_len"], found["vocab_size"]) == (READY.max_seq_len, READY.vocab_size)
    assert found["chat_templates"]["default"]["content"] == "string"
    assert found["special_tokens"] == Tokenizer.echo().special_tokens
    assert found["defaults"] == {"temperature": 0.5}
    assert found["limits"] == {name: getattr(Limits(), name) for name in Limits.__struct_fields__}
    assert found["api_keys"] == []
    assert found["hosts"] == ["127.0.0.1", "::1", "localhost"]
    assert (found["api_key"], found["cors_origins"]) == (None, [])
    assert found["log"] == {"json": False, "access": True, "probes": False}


def test_of_flags() -> None:
    config = ServerConfig(
        engine=EngineConfig(model=MODEL, log_level="warning"),
        host="0.0.0.0",
        any_model_name=True,
        served_model_name="other",
        api_key="secret",
        api_keys=(ApiKey(name="a", key="other", share=2, tokens_per_minute=5),),
        cors_origins=("HTTPS://Page.example:443", "*"),
        limits=Limits(request_timeout=2.5, adaptive_max_tokens=AdaptiveMaxTokens(3, 500_000), context_margin=7),
        log_format="json",
    )
    with frontend(config=config) as server:
        found = told(server, config)
        assert found["hosts"] is None
        named = msgspec.structs.replace(config, allowed_hosts=("Api.example",))
        assert "api.example" in told(server, named)["hosts"]
    assert (found["model_name"], found["any_model_name"], found["api_key"]) == ("other", True, "secret")
    assert found["cors_origins"] == ["*", "https://page.example"]
    assert found["limits"]["request_timeout"] == 2.5
    assert found["limits"]["adaptive_max_tokens"] == {"threshold": 3, "millionths": 500_000}
    assert found["limits"]["context_margin"] == 7
    (key,) = found["api_keys"]
    assert (key["name"], key["key"], key["share"], key["tokens_per_minute"]) == ("a", "other", 2, 5)
    assert found["log"] == {"json": True, "access": False, "probes": False}


def test_a_template_that_does_not_parse_is_left_out(server: Frontend) -> None:
    broken = Tokenizer.open(None, "{% for %}")
    assert told(server, tokenizer=broken)["chat_templates"] == {}


def test_how_it_measures_and_watches(server: Frontend) -> None:
    found = told(server)
    assert found["metrics"] == {"seconds": list(SECONDS), "tokens": list(TOKENS), "window_s": 10.0}
    assert found["watch"] == {name: getattr(TIMES, name) for name in TIMES.__struct_fields__}
