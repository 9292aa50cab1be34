"""What the gateway is told is what the Python server goes by."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from minisgl.config import ApiKey, EngineConfig, Limits, ServerConfig
from minisgl.message.heartbeat import TIMES
from minisgl.metrics.server_metrics import SECONDS, TOKENS
from minisgl.server.gateway_config import encoded
from tests.helpers.server import CONFIG, MODEL


def told(config: ServerConfig = CONFIG) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encoded(config))
    return found


def test_config_of_a_plain_server_has_its_values() -> None:
    found = told()
    assert found["limits"] == {name: getattr(Limits(), name) for name in Limits.__struct_fields__}
    assert found["silence"] == {"head_wait": CONFIG.silence.head_wait, "longest": 15.0}
    assert (found["num_keys"], found["hosts"]) == (0, ["127.0.0.1", "::1", "localhost"])
    assert found["log"] == {"json": False, "times": True, "access": True, "probes": False}
    assert found["metrics"] == {"seconds": list(SECONDS), "tokens": list(TOKENS), "window_s": 10.0}
    assert found["watch"] == {name: getattr(TIMES, name) for name in TIMES.__struct_fields__}


def test_config_follows_flags() -> None:
    config = ServerConfig(
        engine=EngineConfig(model=MODEL, log_level="warning"),
        host="0.0.0.0",
        api_key="secret",
        api_keys=(ApiKey(name="a", key="other", share=2, tokens_per_minute=5),),
        limits=Limits(request_timeout=2.5),
        log_format="json",
        managed=True,
    )
    found = told(config)
    assert (found["hosts"], found["num_keys"]) == (None, 2)
    assert "api.example" in told(msgspec.structs.replace(config, allowed_hosts=("Api.example",)))["hosts"]
    assert found["limits"]["request_timeout"] == 2.5
    assert found["log"] == {"json": True, "times": False, "access": False, "probes": False}
    assert "secret" not in json.dumps(found) and "other" not in json.dumps(found), "keys are Python's alone"
