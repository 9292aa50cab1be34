"""Default lengths: a margin of the context, and less of them while much is in flight; what a client named stays. Under
both front ends, and the rule itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config import AdaptiveMaxTokens, Limits
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.lengths import lengths
from tests.helpers.gateway import PASSED_ON
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, Frontend, chat_body, frontend, hanging

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MARGIN = 40
LIMITS = Limits(adaptive_max_tokens=AdaptiveMaxTokens(threshold=1, millionths=290_000), context_margin=MARGIN)
HEADER = "x-minisgl-max-tokens"


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(config=msgspec.structs.replace(CONFIG, limits=LIMITS), front_end=front_end) as running:
        yield running


@contextlib.contextmanager
def in_flight(server: Frontend, *markers: str, passed_on: bool = False) -> Iterator[None]:
    """As many requests in the engine, for the length of a `with`; `passed_on`: of the Python server in any case."""
    with contextlib.ExitStack() as stack:
        for marker in markers:
            stack.enter_context(hanging(server, marker, max_tokens=5, **(PASSED_ON if passed_on else {})))
        server.wait_until(lambda: server.num_live == len(markers))
        yield
    server.wait_until(lambda: server.num_live == 0)


def asked(server: Frontend, path: str, marker: str, **body: Any) -> tuple[list[int], str]:
    """The limits that reached the engine, and the header of the answer."""
    text = f"{marker} say:ok"
    prompt = chat_body(text) if path == CHAT else {"prompt": text}
    with server.http() as http:
        answer = http.post(path, json={**prompt, **body})
    assert answer.status_code == 200, answer.text
    found = [one.sampling.max_tokens or 0 for one in server.engine.requests(marker)]
    return found, answer.headers[HEADER]


def prompt_len(server: Frontend, marker: str) -> int:
    return len(server.engine.requests(marker)[0].tokens) // 4


def test_a_default_leaves_a_margin(server: Frontend) -> None:
    found, header = asked(server, CHAT, "margin")
    assert found == [MAX_SEQ_LEN - prompt_len(server, "margin") - MARGIN] and header == str(found[0])
    assert asked(server, TEXT, "short") == ([16], "16")
    assert asked(server, GENERATE, "plain") == ([128], "128")
    long = "x" * (MAX_SEQ_LEN - 20)
    assert asked(server, TEXT, "little" + long) == ([1], "1"), "at least one token"
    left = MAX_SEQ_LEN - len("named" + long + " say:ok")
    assert asked(server, TEXT, "named" + long, max_tokens=400) == ([left], str(left)), "that is the client's to choose"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_busy_server_shortens_default_lengths(server: Frontend, name: str, stream: bool) -> None:
    marker = f"{name}{stream}"
    with in_flight(server, f"a{marker}", f"b{marker}"):
        found, header = asked(server, CHAT, f"chat{marker}", stream=stream)
        whole = MAX_SEQ_LEN - prompt_len(server, f"chat{marker}") - MARGIN
        assert found == [whole * 29 // 100] and header == str(found[0])
        assert asked(server, TEXT, f"text{marker}", stream=stream) == ([4], "4")
        assert asked(server, TEXT, f"many{marker}", n=2, stream=stream) == ([4, 4], "4")
        assert asked(server, GENERATE, f"plain{marker}", stream=stream) == ([37], "37")
        assert asked(server, CHAT, f"named{marker}", stream=stream, **{name: 300}) == ([300], "300")
        named = {"sampling_params": {"max_new_tokens": 99}}
        assert asked(server, GENERATE, f"inner{marker}", stream=stream, **named) == ([99], "99")
        assert asked(server, TEXT, f"least{marker}", min_tokens=9) == ([9], "9"), "what was asked for at least"
    assert asked(server, TEXT, f"after{marker}") == ([16], "16")


def test_several_prompts_have_a_length_each(server: Frontend) -> None:
    prompts = ["each say:ok", "each" + "x" * (MAX_SEQ_LEN - 50)]
    with server.http() as http:
        answer = http.post(TEXT, json={"prompt": prompts, "n": 2})
    by_prompt = [one.sampling.max_tokens for one in server.engine.requests("each")]
    assert by_prompt == [16, 16, 6, 6] and answer.headers[HEADER] == "16,6"


@pytest.mark.parametrize("passed_on", [False, True])
def test_both_sides_are_in_flight(server: Frontend, passed_on: bool) -> None:
    """The threshold is one, and two are there, on the side that does not answer: above."""
    marker = f"sides{passed_on}"
    with in_flight(server, f"a{marker}", f"b{marker}", passed_on=passed_on):
        more = {} if passed_on else PASSED_ON
        assert asked(server, TEXT, f"c{marker}", **more) == ([4], "4")
    with in_flight(server, f"d{marker}", passed_on=passed_on):
        assert asked(server, TEXT, f"e{marker}") == ([16], "16"), "the threshold itself is not above it"


def test_shortened_requests_are_counted(server: Frontend) -> None:
    def count() -> int:
        with server.http() as http:
            found: int = http.get("/stats").json()["http"]["requests_shortened"]
            line = next(
                x for x in http.get("/metrics").text.splitlines() if x.startswith("minisgl:requests_shortened_")
            )
            assert float(line.split()[-1]) == found
            return found

    before = count()
    with in_flight(server, "count1", "count2"):
        asked(server, TEXT, "count3", n=3)
        asked(server, TEXT, "count4", max_tokens=9)
        asked(server, TEXT, "count5", logprobs=0)
    assert count() == before + 4


def test_early_failure_of_a_stream_has_no_length_header(server: Frontend) -> None:
    with server.http() as http:
        answer = http.post(TEXT, json={"prompt": "fail:", "stream": True})
    assert answer.status_code == 500 and HEADER not in answer.headers


@given(
    st.lists(st.integers(1, 5_000), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.integers(0, 50),
    st.integers(0, 6_000),
    st.integers(1, 1_000_000),
    st.integers(0, 4),
    st.booleans(),
)
def test_lengths_follow_the_documented_rule(
    room: list[int], most: int | None, least: int, margin: int, millionths: int, in_flight: int, named: bool
) -> None:
    limits = Limits(adaptive_max_tokens=AdaptiveMaxTokens(2, millionths), context_margin=margin)
    sampling = SamplingParams(max_tokens=most, min_tokens=least if most is None else min(least, most))
    found = lengths(room, sampling, limits, lambda: in_flight, named=named)
    assert found.are_shortened == (not named and in_flight > 2)
    for left, length in zip(room, found.by_prompt, strict=True):
        whole = left if most is None else min(most, left)
        assert 1 <= length <= whole
        if named:
            assert length == whole
        elif length > max(1, min(sampling.min_tokens, whole)):
            assert length <= max(1, left - margin)
            assert not found.are_shortened or length * 1_000_000 <= whole * millionths
        assert length >= min(sampling.min_tokens, whole)
