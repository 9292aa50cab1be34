"""What every answer of the newer APIs gets: limits, request ids, counters, access lines, an abort for a client that
leaves, and a refusal while the server drains."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from minisgl.message import AbortRequest
from minisgl.step import FinishReason
from tests.helpers.server import EOS, WAIT_S, Frontend, frontend, hanging, one_token, until_in_time
from tests.server.core.test_context_limits import configured, lines

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = [RESPONSES, MESSAGES]
COUNT, INPUT_TOKENS, EMBEDDINGS = "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/embeddings"
MODEL_INFO = ["/get_model_info", "/model_info"]


def body_of(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": prompt, "max_output_tokens": 100, **more}
    if path in (EMBEDDINGS, INPUT_TOKENS):
        return {"input": prompt, **more}
    if path == COUNT:
        return {"messages": [{"role": "user", "content": prompt}], **more}
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 100, **more}


def error_of(path: str, answer: httpx.Response, status: int) -> tuple[str, str]:
    """What it says in the API's own form: its kind or code, and its message."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path in (RESPONSES, EMBEDDINGS, INPUT_TOKENS):
        assert list(body) == ["error"]
        return body["error"]["code"], body["error"]["message"]
    assert list(body) == ["type", "error", "request_id"] and body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"]
    return body["error"]["type"], body["error"]["message"]


def counted(http: httpx.Client, name: str) -> float:
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


@pytest.mark.parametrize("path", PATHS)
def test_full_queue_is_429_in_each_shape(front_end: str, path: str) -> None:
    with frontend(config=configured(max_queued_requests=1), front_end=front_end) as server, server.http() as http:
        with hanging(server, "first "):
            answer = http.post(path, json=body_of(path, "second"))
            kind, message = error_of(path, answer, 429)
            assert kind == ("queue_full" if path == RESPONSES else "rate_limit_error") and "1 requests are" in message
            assert int(answer.headers["retry-after"]) >= 1
        assert not server.engine.requests("second")


@pytest.mark.parametrize("path", PATHS)
def test_timeout_is_504_in_each_shape(front_end: str, path: str) -> None:
    with frontend(config=configured(request_timeout=1.0), front_end=front_end) as server, server.http() as http:
        kind, message = error_of(path, http.post(path, json=body_of(path, "late hang:")), 504)
        assert kind == ("request_timeout" if path == RESPONSES else "timeout_error") and "--request-timeout" in message
        late = body_of(path, "late hang:abc", stream=True)
        streamed = until_in_time(lambda: http.post(path, json=late), lambda one: one.status_code == 200)
        last = json.loads(streamed.text.strip().split("data: ")[-1])
        assert streamed.status_code == 200 and "--request-timeout" in json.dumps(last)
        assert last["type"] == ("response.failed" if path == RESPONSES else "error")
        server.engine.wait_for_end(AbortRequest, {one.req_id for one in server.engine.requests("late ")})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_response_has_request_id_and_counts_tokens(http: httpx.Client, path: str, stream: bool) -> None:
    names = ("minisgl:requests_accepted_total", "minisgl:generated_tokens_total")
    before = [counted(http, name) for name in names]
    answer = http.post(path, json=body_of(path, "say:five!", stream=stream), headers={"x-request-id": "mine"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
    assert [counted(http, name) - old for name, old in zip(names, before, strict=True)] == [1, 6]


def test_access_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One of each request, with what was counted, and no word of the prompt or the answer."""
    paths = [RESPONSES, MESSAGES, COUNT, INPUT_TOKENS, EMBEDDINGS]
    with (
        caplog.at_level(logging.INFO, "minisgl.access"),
        frontend(engine="cpu") as server,  # the gateway writes lines of its own
        server.http() as http,
    ):
        for path in paths:
            for kind, more in {"whole": {}, "wrong": {"model": "secret"}}.items():
                http.post(
                    path, json=body_of(path, "secret say:hush", **more), headers={"x-request-id": f"{kind}{path}"}
                )
        for path in PATHS:
            body = body_of(path, "secret say:hush", stream=True)
            http.post(path, json=body, headers={"x-request-id": f"stream{path}"})
        for path in MODEL_INFO:
            http.get(path, headers={"x-request-id": f"get{path}"})
        server.wait_until(lambda: len(lines(caplog)) == 2 * len(paths) + len(PATHS) + len(MODEL_INFO))
    found = {line["request_id"]: line for line in lines(caplog)}
    for path in paths:
        wrong, whole = found[f"wrong{path}"], found[f"whole{path}"]
        assert (wrong["method"], wrong["path"], wrong["status"]) == ("POST", path, 404)
        assert wrong["error"] == "model_not_found" and "prompt_tokens" not in wrong
        assert (whole["path"], whole["status"]) == (path, 200) and whole["e2e_s"] >= 0
        assert ("prompt_tokens" in whole) == (path not in (COUNT, INPUT_TOKENS))
    for path in PATHS:
        for kind in ("whole", "stream"):
            line = found[f"{kind}{path}"]
            assert (line["generated_tokens"], line["finish_reason"]) == (5, "stop") and line["ttft_s"] <= line["e2e_s"]
    for path in MODEL_INFO:
        assert (found[f"get{path}"]["method"], found[f"get{path}"]["status"]) == ("GET", 200)
    assert "secret" not in str(found) and "hush" not in str(found)


def test_draining_is_503_in_each_shape(front_end: str) -> None:
    """Streams end as they would have, new requests are sent away, and what takes no engine is answered."""
    with frontend(front_end=front_end) as server, server.http() as http, ThreadPoolExecutor(len(PATHS)) as pool:
        kept = http.post(RESPONSES, json=body_of(RESPONSES, "say:kept")).json()["id"]
        streams = {}
        for path in PATHS:
            body = body_of(path, f"open {path} hang:", stream=True)
            streams[path] = pool.submit(httpx.post, server.url + path, json=body, timeout=WAIT_S)
        requests = {path: server.engine.wait_for_request(f"open {path}") for path in PATHS}
        drain(server)
        for path in (*PATHS, COUNT, INPUT_TOKENS, EMBEDDINGS):
            answer = http.post(path, json=body_of(path, "late"))
            kind, message = error_of(path, answer, 503)
            assert kind == ("overloaded_error" if path in (MESSAGES, COUNT) else "draining"), path
            assert "shutting down" in message and int(answer.headers["retry-after"]) >= 1
        for path in (*MODEL_INFO, f"{RESPONSES}/{kept}"):
            assert http.get(path).status_code == 200
        assert not server.engine.requests("late")
        for path, request in requests.items():
            server.engine.send(one_token(request.req_id, ord("a")), one_token(request.req_id, EOS, FinishReason.STOP))
            found = [json.loads(one) for one in re.findall("^data: (.*)$", streams[path].result(WAIT_S).text, re.M)]
            deltas = [event["delta"] for event in found if event["type"].endswith(("text.delta", "block_delta"))]
            assert deltas == ["a" if path == RESPONSES else {"type": "text_delta", "text": "a"}]
            assert found[-1]["type"] in ("response.completed", "message_stop")


def drain(server: Frontend) -> None:
    """As a first SIGTERM does."""
    server.on_loop(lambda: setattr(server.app.context, "draining", True))
    if server.gateway is not None:
        server.gateway.drain()
