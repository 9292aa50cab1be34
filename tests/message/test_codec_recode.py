"""What Python writes, the Rust of the pool reads and writes again: with the same meaning, and a step byte for byte."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from minisgl import _rust
from minisgl.message import (
    ID_LIMIT,
    SCHEMA_VERSION,
    AbortRequest,
    AddPrefix,
    AddRequest,
    ClearCache,
    Embedding,
    EngineFailed,
    EngineReady,
    EngineState,
    FinishRequest,
    FromEngine,
    Heartbeat,
    Hello,
    LoadAdapter,
    LoadProgress,
    PromptLogprobs,
    RemovePrefix,
    Shutdown,
    StepTokens,
    ToEngine,
    TokenLogprobs,
    UnloadAdapter,
)
from minisgl.message.codec import LENGTH_BYTES, decode_to_engine, encode, framed
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams
from tests.message.golden_frames import FROM_ENGINE, TO_ENGINE, int32, int64

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63 - 1)
# Rust needs no more of these, which a pool passes on as they came.
READ_IN_PART = {"stats", "stats_every_field", "heartbeat", "loading_to_ready"} | {
    *("prefix_changed", "adapter_changed", "cleared", "watched")
}
TOKENS = st.integers(0, 2**31 - 1)
REQ_IDS = st.integers(0, ID_LIMIT - 1)
TEXTS = st.text(max_size=50)
FLOATS = st.floats(width=64, allow_nan=False)
ARRAYS = st.lists(I32, max_size=80).map(lambda values: int32(*values))


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1000, 2**62) | st.none(),
    min_tokens=st.integers(0, 1000),
    temperature=between(0, 2) | st.just(1.0),
    top_k=st.just(-1) | st.integers(1, 2**40),
    top_p=between(0, 1),
    min_p=between(0, 1),
    frequency_penalty=between(-2, 2),
    presence_penalty=between(-2, 2),
    repetition_penalty=st.floats(0.001, 10),
    logit_bias=st.dictionaries(TOKENS, between(-100, 100), max_size=40),
    allowed_token_ids=st.lists(COUNTS, max_size=40).map(tuple),
    bad_words=st.lists(st.text(min_size=1, max_size=256), max_size=20).map(tuple),
    bad_token_ids=st.lists(st.lists(COUNTS, min_size=1, max_size=5).map(tuple), max_size=20).map(tuple),
    seed=I64 | st.none(),
    n=st.integers(1, 128),
    stop=st.lists(st.text(min_size=1, max_size=50), max_size=4).map(tuple),
    stop_token_ids=st.lists(COUNTS, max_size=20).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.integers(0, 20) | st.none(),
    prompt_logprobs=st.integers(0, 20) | st.none(),
    embedding=st.sampled_from([None, "mean", "last"]),
    adapter=st.sampled_from([0, 0, 1, 2**31 - 1]),
)
# only what ends by itself can have one
WITH_GRAMMAR = st.builds(SamplingParams, grammar=st.text(max_size=300), temperature=between(0, 2), seed=I64)
# few, so that requests of one frame share some
IMAGES = st.lists(
    st.builds(
        lambda kind, start, grid: PromptImage(bytes([kind]) * 32, start, kind, grid, bytes([kind]) * kind),
        st.sampled_from([1, 2, 255]),
        COUNTS,
        st.tuples(COUNTS, COUNTS),
    ),
    max_size=3,
).map(tuple)
TO: st.SearchStrategy[ToEngine] = st.one_of(
    st.builds(Hello, TEXTS),
    st.builds(AddRequest, REQ_IDS, ARRAYS, SAMPLING | WITH_GRAMMAR, I64, I64, I64, st.booleans(), IMAGES),
    st.builds(AbortRequest, REQ_IDS),
    st.builds(FinishRequest, REQ_IDS),
    st.builds(AddPrefix, I64, ARRAYS, st.booleans()),
    st.builds(RemovePrefix, I64),
    st.builds(LoadAdapter, I64, TEXTS, TEXTS),
    st.builds(UnloadAdapter, I64),
    st.just(ClearCache()),
    st.just(Shutdown()),
)


@st.composite
def steps(draw: st.DrawFn) -> StepTokens:
    rows, admitted = draw(st.integers(0, 40)), draw(st.integers(0, 5))
    ids = st.lists(TOKENS, max_size=5).map(tuple)

    def array(values: st.SearchStrategy[int], length: int) -> list[int]:
        return draw(st.lists(values, min_size=length, max_size=length))

    def logprobs(index: int) -> TokenLogprobs:
        top = draw(ids)
        return TokenLogprobs(index, draw(FLOATS), top, tuple(draw(FLOATS) for _ in top))

    prompts = st.builds(
        PromptLogprobs,
        I64,
        I64,
        st.lists(FLOATS, max_size=5).map(tuple),
        st.lists(ids, max_size=3).map(tuple),
        st.lists(st.lists(FLOATS, max_size=3).map(tuple), max_size=3).map(tuple),
    )
    return StepTokens(
        step=draw(I64),
        req_ids=int64(*array(I64, rows)),
        tokens=int32(*array(I32, rows)),
        reasons=int32(*array(st.integers(0, 4), rows)),
        admitted_ids=int64(*array(I64, admitted)),
        cached_lens=int32(*array(TOKENS, admitted)),
        errors=draw(st.dictionaries(I64, TEXTS, max_size=3)),
        logprobs=tuple(logprobs(index) for index in range(rows) if draw(st.booleans())),
        prompt_logprobs=tuple(draw(st.lists(prompts, max_size=2))),
        embeddings=tuple(draw(st.lists(st.builds(Embedding, I64, st.binary(max_size=40)), max_size=2))),
    )


READY = st.builds(
    EngineReady,
    TEXTS,
    TEXTS | st.none(),
    I64,
    I64,
    st.lists(I32, max_size=3).map(tuple),
    I64,
    I64,
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    TEXTS,
    st.booleans(),
)
FROM: st.SearchStrategy[FromEngine] = st.one_of(
    steps(),
    READY,
    st.builds(Heartbeat, st.sampled_from(["idle", "working", "forward"]), FLOATS, I64),
    st.builds(LoadProgress, TEXTS, I64, I64),
    st.builds(EngineState, I64, TEXTS, TEXTS),
    st.builds(EngineFailed, TEXTS),
)


@given(st.lists(TO, max_size=4))
def test_what_front_ends_send_is_passed_on_unchanged(messages: list[ToEngine]) -> None:
    """Python leaves out only those defaults that are the very object, Rust all that are equal."""
    recoded = _rust.recode_to_engine(encode(messages))
    assert decode_to_engine(recoded[LENGTH_BYTES:]) == messages
    assert _rust.recode_to_engine(recoded[LENGTH_BYTES:]) == recoded


@given(st.lists(FROM, max_size=4))
def test_what_a_pool_says_is_what_python_would_say(messages: list[FromEngine]) -> None:
    frame = encode(messages)
    assert _rust.recode_from_engine(frame) == framed(frame)


def test_recorded_frames_are_passed_on_unchanged() -> None:
    for messages in TO_ENGINE.values():
        assert _rust.recode_to_engine(encode(messages)) == framed(encode(messages))
    for name in FROM_ENGINE.keys() - READ_IN_PART:
        assert _rust.recode_from_engine(encode(FROM_ENGINE[name])) == framed(encode(FROM_ENGINE[name])), name


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (AddRequest(ID_LIMIT, b"", SamplingParams()), "is out of range"),
        (AbortRequest(-1), "is out of range"),
        (AddRequest(3, b"abc", SamplingParams()), "the tokens of request 3: 3 bytes are no multiple of 4 bytes"),
        (
            AddRequest(3, b"", SamplingParams(), images=(PromptImage(b"a", 0, 1, (1, 1), b""),)),
            "request 3: an image has no pixels",
        ),
        (AddRequest(3, b"", SamplingParams(), 2**63), "`9223372036854775808`, expected i64"),
        (AddRequest(3, b"", SamplingParams(seed=2**63)), "`9223372036854775808`, expected i64"),
        (AddPrefix(3, b"abc"), "no multiple of 4 bytes"),
        (LoadProgress("x"), "unknown message"),
    ],
)
def test_nonsense_is_refused_by_name(message: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _rust.recode_to_engine(encode([message]))


def test_another_version_is_refused_with_both_named() -> None:
    foreign = (SCHEMA_VERSION + 1).to_bytes(2, "little") + encode([Shutdown()])[2:]
    with pytest.raises(ValueError, match=f"schema version {SCHEMA_VERSION + 1}, this side speaks {SCHEMA_VERSION}"):
        _rust.recode_to_engine(foreign)
