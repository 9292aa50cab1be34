"""Several API keys: whose a request is, what each may have, and what is counted for it. Under both front ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config import ApiKey
from minisgl.metrics.keys import KeyReading
from minisgl.server.core.api_keys import Bucket, KeyUse
from minisgl.server.core.errors import ApiError
from tests.helpers.gateway import PASSED_ON
from tests.helpers.server import CONFIG, Frontend, chat_body, check_error, frontend, hanging

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
KEYS = (
    ApiKey(name="plain", key="sk-plain"),
    ApiKey(name="queue", key="sk-queue", max_queued_requests=2),
    ApiKey(name="slow", key="sk-slow", tokens_per_minute=60),
    ApiKey(name="other.slow", key="sk-other-slow", tokens_per_minute=60),
    ApiKey(name="urgent", key="sk-urgent", max_priority=20),
    ApiKey(name="calm", key="sk-calm", max_priority=0),
    ApiKey(name="keeper", key="sk-keeper", cache=True),
)
QUEUE = "authorization: Bearer sk-queue"


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    config = msgspec.structs.replace(CONFIG, api_key="sk-flag", api_keys=KEYS)
    with frontend(config=config, front_end=front_end) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: Frontend, key: str, prompt: str, path: str = TEXT, **more: Any) -> httpx.Response:
    body = chat_body(prompt) if path == CHAT else {"prompt": prompt}
    with server.http() as http:
        return http.post(path, json={**body, **more}, headers=bearer(key))


# ---------------------------------------------------------------------------------------------------------- whose it is


def test_request_has_the_index_of_its_key(server: Frontend) -> None:
    for number, key in enumerate(["sk-flag", "sk-plain", "sk-queue"]):
        for path in (CHAT, TEXT, GENERATE):
            marker = f"number{number}{path}"
            assert ask(server, key, f"{marker} say:a", path).status_code == 200
            assert server.engine.wait_for_request(marker).key == number
        marker = f"passed{number}"
        assert ask(server, key, f"{marker} say:a", **PASSED_ON).status_code == 200
        assert server.engine.wait_for_request(marker).key == number


@pytest.mark.parametrize("key", ["sk", "sk-plain2", "sk-plai", "SK-PLAIN", "plain", "default"])
def test_other_keys_are_refused(server: Frontend, key: str) -> None:
    assert check_error(ask(server, key, "refused say:a"), 401)["code"] == "invalid_api_key"
    with server.http() as http:
        assert check_error(http.get("/v1/models"), 401)
        assert http.get("/v1/models", headers=bearer("sk-slow")).status_code == 200
        assert http.get("/livez").status_code == 200


def test_key_file_without_api_key_flag_is_enforced(front_end: str) -> None:
    with frontend(config=msgspec.structs.replace(CONFIG, api_keys=KEYS[:1]), front_end=front_end) as server:
        assert ask(server, "sk-plain", "say:a").status_code == 200
        check_error(ask(server, "x", "say:a"), 401)


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("there", [{}, PASSED_ON])
@pytest.mark.parametrize("here", [{}, PASSED_ON])
def test_each_key_has_its_own_queue_limit(server: Frontend, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Whichever side waits, and whichever is asked."""
    marker = f"queue{len(there)}{len(here)}"
    with hanging(server, f"a{marker} ", QUEUE, **there):
        server.wait_until(lambda: server.waiting[0] == 1)
        assert ask(server, "sk-queue", "say:ok", **here).status_code == 200
        error = check_error(ask(server, "sk-queue", "say:ok", n=2, **here), 429)
        assert error["code"] == "key_limit" and "API key queue: 1 of its requests are queued" in error["message"]
        with hanging(server, f"b{marker} ", QUEUE, **there):
            server.wait_until(lambda: server.waiting[0] == 2)
            for path in (CHAT, TEXT, GENERATE):
                answer = ask(server, "sk-queue", "full say:ok", path, **(here if path == TEXT else {}))
                assert "2 of its requests are queued, its limit is 2 (max_queued_requests)" in answer.text
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert ask(server, "sk-plain", "say:ok").status_code == 200, "another key is not concerned"
    server.wait_until(lambda: server.waiting[0] == 0)
    assert ask(server, "sk-queue", "say:ok", n=3, **here).status_code == 200, "alone it may be larger"
    assert not server.engine.requests("full ")


@pytest.mark.parametrize(("key", "used"), [("sk-slow", {}), ("sk-other-slow", PASSED_ON)])
def test_tokens_of_a_minute_are_used_up(server: Frontend, key: str, used: dict[str, Any]) -> None:
    """Prompt and answer of both sides count; then neither takes more. Of 60, a prompt of 200 uses more than three."""
    name = key.removeprefix("sk-").replace("-", ".")
    assert ask(server, key, "x" * 200 + "say:ok", **used).status_code == 200
    for more in ({}, PASSED_ON):
        answer = ask(server, key, "poor say:ok", **more)
        error = check_error(answer, 429)
        assert f"API key {name}: its 60 tokens per minute are used up (tokens_per_minute)" in error["message"]
        assert 100 < int(answer.headers["retry-after"]) <= 300 and error["code"] == "key_limit"
        assert not any(one.key in answer.text for one in KEYS)
    assert not server.engine.requests("poor ")


@pytest.mark.parametrize(("key", "most"), [("sk-flag", 4), ("sk-plain", 4), ("sk-urgent", 20), ("sk-calm", 0)])
def test_a_priority_lies_in_the_range_of_its_key(server: Frontend, key: str, most: int) -> None:
    for path in (CHAT, TEXT, GENERATE):
        for priority in (-most, most):
            marker = f"range{key}{path}{priority}"
            assert ask(server, key, f"{marker} say:ok", path, priority=priority).status_code == 200
            assert server.engine.wait_for_request(marker).priority == priority
        for priority in (-most - 1, most + 1, -(2**31) + 1, 2**62):
            error = check_error(ask(server, key, "beyond say:ok", path, priority=priority), 400)
            assert error["message"] == f"priority: must be from {-most} to {most} (got {priority})"
            assert error["param"] == "priority"
    assert not server.engine.requests("beyond ")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache/prefixes"),
        ("POST", "/v1/cache/prefixes"),
        ("GET", "/v1/cache/prefixes/prefix-1"),
        ("DELETE", "/v1/cache/prefixes/prefix-1"),
        ("DELETE", "/v1/cache"),
    ],
)
def test_cache_endpoints_need_permission_of_the_key(server: Frontend, method: str, path: str) -> None:
    body = {"text": "kept"} if method == "POST" else None
    with server.http() as http:
        error = check_error(http.request(method, path, json=body, headers=bearer("sk-plain")), 403)
        assert error["message"].startswith(f"{path}: API key plain: needs `cache: true`")
        if method == "GET":
            assert http.get(path, headers=bearer("sk-keeper")).status_code == (404 if "prefix-1" in path else 200)


# -------------------------------------------------------------------------------------------------------------- counts


def test_what_a_key_uses_is_counted_by_its_name(
    server: Frontend, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def of(name: str) -> dict[str, Any]:
        with server.http() as http:
            found: dict[str, Any] = http.get("/stats", headers=bearer("sk-flag")).json()["http"]["keys"][name]
            text = http.get("/metrics", headers=bearer("sk-flag")).text
        for field in ("requests", "prompt_tokens", "generated_tokens"):
            assert f'minisgl:key_{field}_total{{key="{name}"}} {float(found[field])}' in text
        for limit, count in found["refused"].items():
            assert f'minisgl:key_refused_total{{key="{name}",limit="{limit}"}} {float(count)}' in text
        assert not any(one.key in text for one in KEYS)
        return found

    before = {name: of(name) for name in ("default", "plain", "queue")}
    caplog.set_level("INFO", "minisgl.access")
    for more in ({}, PASSED_ON):
        assert ask(server, "sk-plain", "say:ok", n=2, **more).status_code == 200
    after = of("plain")
    assert after["requests"] - before["plain"]["requests"] == 4
    assert after["prompt_tokens"] - before["plain"]["prompt_tokens"] == 2 * len("say:ok")
    assert after["generated_tokens"] - before["plain"]["generated_tokens"] == 4 * len("ok.")
    assert {name: of(name) for name in ("default", "queue")} == {name: before[name] for name in ("default", "queue")}
    with hanging(server, "c1 ", QUEUE), hanging(server, "c2 ", QUEUE):
        server.wait_until(lambda: server.waiting[0] == 2)
        assert ask(server, "sk-queue", "say:ok").status_code == 429
    refused = of("queue")["refused"]["max_queued_requests"]
    assert refused == before["queue"]["refused"].get("max_queued_requests", 0) + 1
    shown = capfd.readouterr().err + " ".join(str(getattr(one, "fields", "")) for one in caplog.records)
    assert "plain" in shown and not any(one.key in shown for one in KEYS)


def test_without_a_file_there_are_no_names(front_end: str) -> None:
    with frontend(config=msgspec.structs.replace(CONFIG, api_key="sk-flag"), front_end=front_end) as server:
        assert ask(server, "sk-flag", "say:a").status_code == 200
        with server.http() as http:
            assert "keys" not in http.get("/stats", headers=bearer("sk-flag")).json()["http"]
            assert "key=" not in http.get("/metrics", headers=bearer("sk-flag")).text


# ----------------------------------------------------------------------------------------------------- the parts alone


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(0, 3_000), st.floats(0, 100)), max_size=30))
def test_a_bucket_gives_no_more_than_its_rate_and_what_it_holds(most: int, uses: list[tuple[int, float]]) -> None:
    bucket, now, used = Bucket(most, 0.0), 0.0, 0
    for size, pause_s in uses:
        now += pause_s
        wait_s = bucket.wait_s(used, now)
        if wait_s:
            assert bucket.wait_s(used, now + wait_s + 0.001) == 0.0, "after that long there is some"
            now += wait_s + 0.001
        before = used
        used += size
        assert before <= most + now * most / 60 + 1e-3


def test_key_below_its_rate_has_no_wait() -> None:
    clock, there = [0.0], list[KeyReading]()
    use = KeyUse(KEYS, gateway=lambda number: there[number] if there else None, clock=lambda: clock[0])
    use.check(3)
    there[:] = [KeyReading(num_waiting=0, num_waiting_tokens=0, num_requests=0, num_prompt=40, num_generated=19)] * 5
    use.check(3)
    use.generated(3, 1)
    with pytest.raises(ApiError, match="API key slow: its 60 tokens") as error:
        use.check(3)
    assert error.value.headers["retry-after"] == "1"
    clock[0] = 1.0
    use.check(3)
    assert [one.num_tokens for one in use.counts] == [0, 0, 0, 1, 0, 0, 0, 0]
