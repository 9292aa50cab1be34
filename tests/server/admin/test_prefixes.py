"""/v1/cache under both front ends: what is asked of the engine, and what is said of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from minisgl.config import Limits
from minisgl.message import AddPrefix, CacheCleared, ClearCache, PrefixChanged, PrefixState, RemovePrefix, ToEngine
from minisgl.server.admin import body as admin_body
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, STATS, VOCAB_SIZE, Frontend, check_error, frontend

CACHE, PREFIXES = "/v1/cache", "/v1/cache/prefixes"
TEXT = "a text of more than sixteen tokens"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Asking:
    """A POST of a prefix in a thread; `prefix_id` is the engine's for it."""

    def __init__(self, server: Frontend, threads: ThreadPoolExecutor, body: dict[str, Any]) -> None:
        self._server = server
        before = sum(isinstance(one, AddPrefix) for one in server.engine.received)
        with server.http() as http:
            self._url = str(http.base_url)
        self._answer = threads.submit(lambda: httpx.post(self._url + PREFIXES, json=body, timeout=WAIT_S))

        def new(received: list[ToEngine]) -> AddPrefix | None:
            all_ = [one for one in received if isinstance(one, AddPrefix)]
            return all_[before] if len(all_) > before else None

        self.message = server.engine.wait_for(new)
        self.prefix_id = self.message.prefix_id

    @property
    def is_answered(self) -> bool:
        return self._answer.done()

    def engine_says(self, state: str, reason: str = "", is_full: bool = False) -> None:
        self._server.engine.send(PrefixChanged(self.prefix_id, state, reason, is_full))

    def answer(self) -> httpx.Response:
        return self._answer.result(WAIT_S)


def remove(server: Frontend, threads: ThreadPoolExecutor, prefix_id: int) -> httpx.Response:
    with server.http() as http:
        url = str(http.base_url)
    answer = threads.submit(lambda: httpx.delete(f"{url}{PREFIXES}/prefix-{prefix_id}", timeout=WAIT_S))
    server.engine.wait_for(lambda all_: RemovePrefix(prefix_id) in all_)
    server.engine.send(PrefixChanged(prefix_id, "removed"))
    return answer.result(WAIT_S)


def test_prefix_is_inserted_hit_listed_and_removed(
    server: Frontend, http: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    asking = Asking(server, threads, {"text": TEXT})
    assert bytes(np.frombuffer(asking.message.tokens, np.int32).tolist()).decode() == TEXT and asking.message.pin
    asking.engine_says("warming")
    server.wait_until(lambda: server.client.prefixes.prefixes[asking.prefix_id].state(0) == "warming")
    name = f"prefix-{asking.prefix_id}"
    shown = http.get(f"{PREFIXES}/{name}").json()
    assert shown["state"] == "warming" and not asking.is_answered
    asking.engine_says("ready")
    answer = asking.answer()
    admin_body.PrefixAnswer.model_validate_json(answer.content, strict=True)
    card = {
        "id": name,
        "object": "cache.prefix",
        "tokens": len(TEXT),
        "pages": 2,
        "pinned": True,
        "state": "ready",
        "hits": 0,
        "engines": [{"engine": 0, "state": "ready", "hits": 0}],
    }
    assert (answer.status_code, answer.json()) == (200, card)
    prefixes = (PrefixState(asking.prefix_id, len(TEXT), True, True, 7),)
    server.engine.send(msgspec.structs.replace(STATS, prefixes=prefixes))
    server.wait_until(lambda: server.client.stats is not None and bool(server.client.stats.prefixes))
    listed = http.get(PREFIXES)
    admin_body.PrefixList.model_validate_json(listed.content, strict=True)
    found = {one["id"]: one for one in listed.json()["data"]}[name]
    assert found == {**card, "hits": 7, "engines": [{"engine": 0, "state": "ready", "hits": 7}]}
    gone = remove(server, threads, asking.prefix_id)
    admin_body.PrefixDeleted.model_validate_json(gone.content, strict=True)
    assert gone.json() == {"id": name, "object": "cache.prefix", "deleted": True}
    for answer in (http.get(f"{PREFIXES}/{name}"), http.delete(f"{PREFIXES}/{name}")):
        assert check_error(answer, 404)["code"] == "prefix_not_found"
    assert http.get(PREFIXES).json()["data"] == []


def test_insert_without_wait_returns_202_when_accepted(
    server: Frontend, http: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    asking = Asking(server, threads, {"token_ids": [*range(40)], "pin": False, "wait": False})
    assert not asking.message.pin
    asking.engine_says("warming")
    answer = asking.answer()
    assert answer.status_code == 202 and answer.json()["state"] == "warming" and answer.json()["pinned"] is False
    asking.engine_says("failed", "computing it failed 3 times")
    server.wait_until(lambda: server.client.prefixes.prefixes[asking.prefix_id].state(0) == "failed")
    shown = http.get(PREFIXES).json()["data"][0]
    assert (shown["state"], shown["reason"]) == ("failed", "computing it failed 3 times")
    assert remove(server, threads, asking.prefix_id).status_code == 200


@pytest.mark.parametrize(
    ("state", "reason", "is_full", "status", "code"),
    [
        ("refused", "pin: 9 pages: 4 are left", True, 409, "cache_full"),
        ("refused", "there are 1024 prefixes already", True, 409, "cache_full"),
        ("refused", "tokens: 3: at least 16", False, 400, "invalid_value"),
        ("failed", "computing it failed 3 times", False, 500, "engine_error"),
    ],
)
@pytest.mark.parametrize("waits", [True, False])
def test_refused_prefix_is_removed_from_all_engines(
    server: Frontend,
    http: httpx.Client,
    threads: ThreadPoolExecutor,
    waits: bool,
    state: str,
    reason: str,
    is_full: bool,
    status: int,
    code: str,
) -> None:
    asking = Asking(server, threads, {"text": TEXT, "wait": waits})
    asking.engine_says(state, reason, is_full)
    error = check_error(asking.answer(), status)
    assert error["code"] == code and reason in error["message"]
    assert ("--max-pinned-ratio" in error["message"]) == reason.startswith("pin:")
    server.engine.wait_for(lambda all_: RemovePrefix(asking.prefix_id) in all_)
    assert http.get(PREFIXES).json()["data"] == []
    server.engine.send(PrefixChanged(asking.prefix_id, "unknown"))


def test_a_conversation_is_rendered_without_what_would_follow(server: Frontend, threads: ThreadPoolExecutor) -> None:
    messages = [{"role": "system", "content": "Answer in one word, and say nothing else."}]
    for more, ends in (({}, "</system>\n"), ({"add_generation_prompt": True}, "<assistant>")):
        asking = Asking(server, threads, {"messages": messages, **more})
        text = bytes(np.frombuffer(asking.message.tokens, np.int32).tolist()).decode()
        assert text.startswith("<system>Answer") and text.endswith(ends), text
        asking.engine_says("ready")
        assert asking.answer().status_code == 200
        assert remove(server, threads, asking.prefix_id).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "token_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"text": "x" * MAX_SEQ_LEN}, "text"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, "token_ids"),
        ({"messages": []}, "messages"),
        ({"text": "a", "pin": "yes"}, "pin"),
        ({"text": "a", "wait": 1}, "wait"),
    ],
)
def test_a_bad_field_is_named(server: Frontend, http: httpx.Client, body: dict[str, Any], param: str) -> None:
    before = sum(isinstance(one, AddPrefix) for one in server.engine.received)
    assert check_error(http.post(PREFIXES, json=body), 400)["param"] == param
    assert sum(isinstance(one, AddPrefix) for one in server.engine.received) == before
    check_error(http.post(PREFIXES, json={"text": TEXT, "model": "other"}), 404)


@pytest.mark.parametrize("name", ["prefix-0", "prefix-01", "prefix-99999", "x", "prefix-²", "prefix-" + "9" * 40])
def test_unknown_prefix_is_404(http: httpx.Client, name: str) -> None:
    for method in ("GET", "DELETE"):
        assert check_error(http.request(method, f"{PREFIXES}/{name}"), 404)["code"] == "prefix_not_found"


def test_the_cache_is_emptied(server: Frontend, http: httpx.Client, threads: ThreadPoolExecutor) -> None:
    url = str(http.base_url)
    before = server.engine.received.count(ClearCache())
    both = [threads.submit(lambda: httpx.delete(url + CACHE, timeout=WAIT_S)) for _ in range(2)]
    server.engine.wait_for(lambda all_: all_.count(ClearCache()) == before + 2)
    server.engine.send(CacheCleared(12))
    server.engine.send(CacheCleared(0))
    found = [one.result(WAIT_S) for one in both]
    admin_body.CacheAnswer.model_validate_json(found[0].content, strict=True)
    assert sorted(one.json()["freed_pages"] for one in found) == [0, 12]
    assert found[0].json()["engines"][0]["engine"] == 0
    check_error(http.get(CACHE), 405)
    check_error(http.put(PREFIXES), 405)


def test_a_wait_ends_with_the_request_timeout(front_end: str) -> None:
    """The prefix stays; it is computed when there is time."""
    limits = Limits(request_timeout=0.2)
    with (
        frontend(config=msgspec.structs.replace(CONFIG, limits=limits), front_end=front_end) as server,
        server.http() as http,
    ):
        assert check_error(http.post(PREFIXES, json={"text": TEXT}), 504)["code"] == "request_timeout"
        assert check_error(http.delete(CACHE), 504)["code"] == "request_timeout"
        assert http.get(PREFIXES).json()["data"][0]["state"] == "warming"


def test_engine_exit_ends_waiting_requests(front_end: str, threads: ThreadPoolExecutor) -> None:
    with frontend(front_end=front_end) as server:
        asking = Asking(server, threads, {"text": TEXT})
        server.on_loop(lambda: server.client.fail("it is gone"))
        error = check_error(asking.answer(), 503)
        assert error["code"] == "engine_unavailable" and "it is gone" in error["message"]
        with server.http() as http:
            check_error(http.get(PREFIXES), 503)
            check_error(http.delete(CACHE), 503)


def test_cache_endpoints_without_key_return_401(front_end: str) -> None:
    with (
        frontend(config=msgspec.structs.replace(CONFIG, api_key="k"), front_end=front_end) as server,
        server.http() as http,
    ):
        for method, path in (("DELETE", CACHE), ("GET", PREFIXES), ("POST", PREFIXES), ("DELETE", PREFIXES + "/x")):
            check_error(http.request(method, path), 401)
        assert http.get(PREFIXES, headers={"authorization": "Bearer k"}).json() == {"object": "list", "data": []}
