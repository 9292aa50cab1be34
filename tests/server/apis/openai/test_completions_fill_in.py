"""`suffix` of POST /v1/completions, against an engine of scripted replies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from minisgl.step import FinishReason
from minisgl.tokenizer import FillIn
from tests.helpers.fill_in import MARKERS, with_markers
from tests.helpers.server import VOCAB_SIZE, WAIT_S, Frontend, check_error, events, frontend, one_token

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server_of_gaps(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end, tokenizer=with_markers()) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


@pytest.fixture(scope="module")
def filling(server_of_gaps: Frontend) -> Iterator[httpx.Client]:
    with server_of_gaps.http() as client:
        yield client


def prompt_ids(http: httpx.Client, **fields: Any) -> list[list[int]]:
    answer = http.post(PATH, json={"return_token_ids": True, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return [choice["prompt_token_ids"] for choice in answer.json()["choices"]]


def test_prompt_has_prefix_and_suffix_around_the_gap(filling: httpx.Client) -> None:
    prefix, suffix, middle = (with_markers().token_id(text) for text in MARKERS[:3])
    for prompt, befores in (("ab", ["ab"]), (["a", "<fim_middle>"], ["a", "<fim_middle>"])):
        expected = [[prefix, *before.encode(), suffix, *b"yz", middle] for before in befores]
        assert prompt_ids(filling, prompt=prompt, suffix="yz") == expected


@pytest.mark.parametrize("suffix", ["", None])
def test_empty_suffix_has_no_effect(filling: httpx.Client, http: httpx.Client, suffix: str | None) -> None:
    assert prompt_ids(filling, prompt="ab", suffix=suffix) == prompt_ids(filling, prompt="ab")
    assert prompt_ids(http, prompt="ab", suffix=suffix, echo=True) == prompt_ids(http, prompt="ab")


def test_suffix_without_fim_tokens_is_refused(http: httpx.Client) -> None:
    error = check_error(http.post(PATH, json={"prompt": "refused", "suffix": "x"}), 400)
    assert error["param"] == "suffix"
    assert "this model has no fill-in-the-middle tokens" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": [[1, 2]]}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"prompt": "a", "suffix": 5}, "suffix"),
    ],
)
def test_fields_that_exclude_suffix_are_refused(filling: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert check_error(filling.post(PATH, json={"suffix": "x", **fields}), 400)["param"] == param


def test_the_suffix_counts_for_the_context(filling: httpx.Client) -> None:
    error = check_error(filling.post(PATH, json={"prompt": "a", "suffix": "x" * 100_000}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_fim_end_tokens_end_the_completion(server_of_gaps: Frontend, filling: httpx.Client, stream: bool) -> None:
    """Beside those that the client names. Without a gap they don't."""
    end = with_markers().token_id(MARKERS[-1])
    assert end is not None
    asked = {"prompt": f"hang:mid {stream}", "suffix": "</user>", "stop_token_ids": [end - 1], "stream": stream}
    engine = server_of_gaps.engine
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(filling.post, PATH, json=asked)
        request = engine.wait_for_request(f"mid {stream}")
        assert set(request.sampling.stop_token_ids) == {end - 1, end}
        engine.send(one_token(request.req_id, end, FinishReason.STOP))
        found = answer.result(WAIT_S)
    choices = [event["choices"][0] for event in events(found.text)[:-1]] if stream else found.json()["choices"]
    assert MARKERS[-1] not in "".join(choice["text"] for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
    filling.post(PATH, json={"prompt": f"without a gap {stream}", "max_tokens": 1})
    assert end not in engine.wait_for_request(f"without a gap {stream}").sampling.stop_token_ids


def test_fim_tokens_are_computed_once(filling: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt_ids(filling, prompt="ab", suffix="x")
    monkeypatch.delattr(FillIn, "__init__")
    prompt_ids(filling, prompt="ab", suffix="x")


def test_fim_tokens_beyond_the_vocabulary_are_refused(front_end: str) -> None:
    tokenizer = with_markers()
    with (
        frontend(front_end=front_end, tokenizer=tokenizer, vocab_size=VOCAB_SIZE + 2) as running,
        running.http() as http,
    ):
        error = check_error(http.post(PATH, json={"prompt": "a", "suffix": "x"}), 400)
        assert error["param"] == "suffix" and "this model has no fill-in-the-middle tokens" in error["message"]
