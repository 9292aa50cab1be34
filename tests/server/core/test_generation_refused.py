"""A grammar that only the engine process found out about is still the client's mistake."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minisgl.message import GRAMMAR_REFUSED
from tests.helpers.server import Frontend, chat_body, check_error, failed_step


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_refused_by_the_engine_is_400(http: httpx.Client, server: Frontend, stream: bool) -> None:
    prompt = f"refused {stream} hang:"
    with ThreadPoolExecutor() as threads:
        body = chat_body(prompt, stream=stream, response_format={"type": "json_object"})
        answer = threads.submit(http.post, "/v1/chat/completions", json=body)
        req_id = server.engine.wait_for_request(prompt).req_id
        server.engine.send(failed_step(req_id, f"{GRAMMAR_REFUSED}lexer: too large"))
        error = check_error(answer.result(), 400)
    assert error["param"] == "response_format" and error["message"] == "grammar: lexer: too large"
