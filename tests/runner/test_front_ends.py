"""Several front ends of one engine process: each gets exactly its own, whatever becomes of the others."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.engine.echo import EchoEngine
from minisgl.message import (
    ID_LIMIT,
    SCHEMA_VERSION,
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineReady,
    FinishRequest,
    FromEngine,
    Hello,
    LoadProgress,
    PromptLogprobs,
    Shutdown,
    StepTokens,
    TokenLogprobs,
)
from minisgl.message.codec import MAX_FRAME_BYTES, Codec, encode, framed
from minisgl.message.heartbeat import Activity
from minisgl.prompt_image import PromptImage
from minisgl.runner import front_end
from minisgl.runner.front_end_ids import MAX_CONNECTIONS, owner, split, within
from minisgl.runner.front_ends import FrontEnds, ParentGone
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import BOUNDS, SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.step import FinishReason
from tests.helpers.hub import LENGTH, Stream, add, streams
from tests.helpers.long_fuzz import for_long
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import READY, STATS

MAX_SEQ_LEN = 20_000
NUM_PAGES = 4096
PLANE = ControlPlaneConfig(NUM_PAGES, 16, 64, 2048, MAX_SEQ_LEN, ())


def engine() -> EchoEngine:
    return EchoEngine(
        num_pages=NUM_PAGES, page_size=16, max_rows=64, max_seq_len=MAX_SEQ_LEN, context_len=MAX_SEQ_LEN, eos_ids=()
    )


def alone(plane: ControlPlane, requests: Iterable[AddRequest]) -> dict[int, Stream]:
    """What each request gets in a loop without sockets."""
    sent: list[FromEngine] = []
    driven = engine()
    loop = StepLoop(plane, driven, sent.extend)
    requests = list(requests)
    loop.step(requests)
    while not loop.idle:
        loop.step([])
    driven.close()
    return streams(sent)


class Hub:
    """Use in a `with`; the end checks that nothing lives any more. `steps` are scheduled so far."""

    def __init__(self, plane: ControlPlane) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "engine"
        self.address = f"ipc://{path}"
        self._engine = engine()
        self.plane = plane
        self._lifeline, self.parent = os.pipe()
        self.activity = Activity()
        self.front_ends = FrontEnds(path, Codec(), self._lifeline, self.activity)
        self.loop = StepLoop(plane, self._engine, self.front_ends.send)
        self.error: BaseException | None = None
        self.peers: list[FrontEndPeer] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.front_ends.send([READY])
            while not self.loop.shutdown:
                messages = self.front_ends.receive(block=self.loop.idle)
                self.activity.enter("working")
                self.loop.step(messages)
            self.loop.drain()
        except ParentGone as error:
            self.error = error
        except BaseException as error:
            self.error = error
            raise

    def peer(self, name: str = "test") -> FrontEndPeer:
        found = FrontEndPeer(self.address, name)
        self.peers.append(found)
        found.next(EngineReady)
        return found

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline and self._thread.is_alive(), "never came"
            time.sleep(0.001)

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for one in self.peers:
            one.close()
        if self._thread.is_alive():
            with FrontEndPeer(self.address, "end") as peer:
                if kind is None:
                    self.wait_until(lambda: self.loop.idle)
                    self.plane.check()
                    stats = self.plane.stats()
                    assert stats.num_free_pages + stats.num_evictable_pages == NUM_PAGES
                peer.send(Shutdown())
                self.join()
        self.front_ends.close()
        self._engine.close()
        os.close(self._lifeline)
        if self.parent >= 0:
            os.close(self.parent)
        self._folder.cleanup()


MakePlane = Callable[[ControlPlaneConfig], ControlPlane]
LONG = 1_000  # tokens of a request that goes on
ENDLESS = 15_000  # as many are never waited for


@pytest.fixture
def hub(control_plane: MakePlane) -> Iterator[Hub]:
    with Hub(control_plane(PLANE)) as found:
        yield found


@pytest.fixture
def expected(control_plane: MakePlane) -> Callable[[list[AddRequest]], dict[int, tuple[list[int], int]]]:
    return lambda requests: alone(control_plane(PLANE), requests)


Expected = Callable[[list[AddRequest]], dict[int, tuple[list[int], int]]]


def some(peer: int, number: int, max_tokens: int = 40) -> list[AddRequest]:
    """Requests of one front end: ids from 0 on, prompts of its own and some in common."""
    return [
        add(i, ([7] * 20 if i % 3 == 0 else [peer, *range(i, i + 30)]), 1 + (i * 7 + peer) % max_tokens)
        for i in range(number)
    ]


def exact(peer: FrontEndPeer, requests: list[AddRequest], expected: Expected) -> None:
    """All requests come to their ends, and are what they are alone."""
    peer.until(lambda _: peer.num_ended >= len(requests))
    assert streams(peer.received) == expected(requests)


@pytest.mark.parametrize("number", [2, 3])
def test_each_front_end_gets_its_own_output_whatever_ids_others_use(hub: Hub, expected: Expected, number: int) -> None:
    asked = [some(peer, 50) for peer in range(number)]
    peers = [hub.peer() for _ in range(number)]
    for turn in range(0, 50, 10):
        for peer, requests in zip(peers, asked, strict=True):
            peer.send(*requests[turn : turn + 10])
    for peer, requests in zip(peers, asked, strict=True):
        exact(peer, requests, expected)
        admitted = [one.admitted_ids for one in peer.received if isinstance(one, StepTokens)]
        assert sorted(np.frombuffer(b"".join(admitted), np.int64).tolist()) == list(range(50))


def test_the_largest_request_id_is_valid(hub: Hub, expected: Expected) -> None:
    hub.peer().send(add(3, [1, 2], 5))
    second = hub.peer()
    request = add(ID_LIMIT - 1, [1, 2], 5)
    second.send(request)
    exact(second, [request], expected)


def test_images_end_only_their_request_if_the_model_does_not_see(hub: Hub, expected: Expected) -> None:
    """The pixels are as many as a request may have: they come in many reads."""
    images = tuple(PromptImage(bytes([i]) * 32, 0, 1, (2, 2), bytes(3 << 20)) for i in range(16))
    peer, plain = hub.peer(), add(1, [1, 2], 5)
    peer.send(msgspec.structs.replace(add(0, [1, 2], 5), images=images), plain)
    peer.until(lambda _: peer.num_ended >= 2)
    found = streams(peer.received)
    assert found[0] == ([], FinishReason.ERROR) and found[1] == expected([plain])[1]
    errors = [one.errors for one in peer.received if isinstance(one, StepTokens) and one.errors]
    assert errors == [{0: "images: the model does not see"}]


def test_finish_and_abort_end_only_requests_of_their_front_end(hub: Hub, expected: Expected) -> None:
    first, second = hub.peer(), hub.peer()
    for peer in (first, second):
        peer.send(*(add(i, [5, i], LONG if peer is first else 400) for i in range(3)))
        peer.until(lambda got: len(streams(got)) == 3)
    first.send(FinishRequest(0), AbortRequest(1), AbortRequest(2), AbortRequest(77))
    first.until(lambda _: first.num_ended == 3)
    first.send(AbortRequest(0))  # too late: nothing
    exact(second, [add(i, [5, i], 400) for i in range(3)], expected)
    assert [streams(first.received)[i][1] for i in range(3)] == [1, 3, 3]
    assert not hub.loop._ending, "an end that comes too late leaves nothing"


def test_a_dead_front_end_s_requests_are_aborted_and_others_continue(hub: Hub, expected: Expected) -> None:
    dying, other = hub.peer("dying"), hub.peer()
    dying.send(*(add(i, [9, i], ENDLESS) for i in range(5)))
    requests = some(1, 20, 200)
    other.send(*requests)
    dying.until(lambda got: len(streams(got)) == 5)
    dying.close()
    exact(other, requests, expected)
    other.until(lambda got: any(isinstance(one, LoadProgress) for one in got))
    lines = [one.text for one in other.received if isinstance(one, LoadProgress)]
    assert lines == ["dying has disconnected; 5 of its requests are aborted"]
    hub.wait_until(lambda: hub.loop.idle)
    assert hub.loop.num_steps < ENDLESS / 2


def test_a_request_whose_front_end_is_gone_at_once_is_aborted_too(hub: Hub) -> None:
    with FrontEndPeer(hub.address) as peer:
        peer.send(*(add(i, [9, i], ENDLESS) for i in range(30)))
    hub.wait_until(lambda: hub.loop.num_steps > 0 and hub.loop.idle)
    assert hub.loop.num_steps < ENDLESS / 2


# ------------------------------------------------------------------------------------------------------------ nonsense

BAD: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"min_tokens": -1},
    {"max_tokens": 3, "min_tokens": 4},
    {"temperature": 2.5},
    {"temperature": float("nan")},
    {"top_k": 0},
    {"top_p": 1.5},
    {"min_p": -0.5},
    {"frequency_penalty": 3.0},
    {"presence_penalty": -3.0},
    {"repetition_penalty": 0.0},
    {"n": 129},
    {"stop": ("a",) * (BOUNDS.max_stop_strings + 1)},
    {"stop": ("",)},
    {"stop_token_ids": (-1,)},
    {"logprobs": 21},
    {"prompt_logprobs": -1},
    {"embedding": "max"},
    {"grammar": "start: /a/", "ignore_eos": True},
    {"grammar": "start: /a/", "min_tokens": 1},
    {"grammar": "start: /a/", "allowed_token_ids": (1,)},
    {"logit_bias": {-1: 0.0}},
    {"logit_bias": {1: 101.0}},
    {"logit_bias": dict.fromkeys(range(1025), 0.0)},
    {"allowed_token_ids": (-1,)},
    {"bad_words": ("",)},
    {"bad_words": ("x" * 257,)},
    {"bad_words": ("x",) * 257},
    {"bad_token_ids": ((),)},
    {"bad_token_ids": ((-1,),)},
    {"seed": 2**63},
]

VALID = add(200, [1, 2], 3)
NONSENSE = {
    "version": (
        framed((SCHEMA_VERSION + 1).to_bytes(2, "little") + encode([VALID])[2:]),
        f"schema version {SCHEMA_VERSION + 1}, this side speaks {SCHEMA_VERSION}",
    ),
    "empty": (framed(b""), "schema version 0"),
    "cut": (framed(encode([VALID])[:-1]), "Input data was truncated"),
    "unknown": (framed(encode([])[:2] + b"\x91\x92\xa3foo\x01"), "foo"),
    "of the engine": (framed(encode([STATS])), "stats"),
    "long": ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "too long"),
    "negative": (framed(encode([AbortRequest(-1)])), "request id -1 is out of range"),
    "large": (framed(encode([msgspec.structs.replace(VALID, req_id=ID_LIMIT)])), "is out of range"),
    "twice": (framed(encode([VALID])), "request id 200 is not above the last one, 200"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_front_end_with_invalid_messages_is_told_and_disconnected(control_plane: MakePlane, name: str) -> None:
    data, reason = NONSENSE[name]
    with Hub(control_plane(PLANE)) as hub:
        bad, other = hub.peer("bad"), hub.peer()
        bad.send(add(100, [1], ENDLESS), add(101, [2], ENDLESS))
        requests = some(1, 5)
        other.send(*requests)
        if name == "twice":
            bad.send(VALID)
            bad.until(lambda _: bad.num_ended)
        bad.send_bytes(data)
        last = bad.to_the_end()[-1]
        assert isinstance(last, EngineFailed) and reason in last.text, last
        exact(other, requests, lambda asked: alone(control_plane(PLANE), asked))
        other.until(lambda got: any(isinstance(one, LoadProgress) for one in got))
        (line,) = [one.text for one in other.received if isinstance(one, LoadProgress)]
        assert line.startswith("bad was disconnected: ") and reason in line
        hub.wait_until(lambda: hub.loop.idle)
        assert hub.loop.num_steps < ENDLESS / 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": b"123"}, "tokens: 3 bytes: no multiple of 4"),
        ({"tokens": b""}, "must leave a prompt"),
        ({"tokens": b"\xff" * 4}, "ids must be at least 0 and below"),
        ({"tokens": (2**31 - 1).to_bytes(4, "little")}, "ids must be at least 0 and below"),
        ({"priority": 2**64 - 1}, "more than 64 bits"),
        ({"num_generated": 2}, "must leave a prompt"),
        *(({"sampling": {"max_tokens": 1, "seed": 1, **one}}, next(reversed(one))) for one in BAD),
    ],
    ids=str,
)
def test_a_bad_request_ends_that_request_alone(
    hub: Hub, expected: Expected, fields: dict[str, Any], reason: str
) -> None:
    """Not its front_ends, and not the engine."""
    peer, requests = hub.peer(), some(1, 5)
    if "sampling" in fields:
        fields = {"sampling": SamplingParams(**fields["sampling"])}
    peer.send(*requests, msgspec.structs.replace(VALID, **fields), add(201, [1, 2], 3))
    peer.until(lambda _: peer.num_ended >= len(requests) + 2)
    found = streams(peer.received)
    assert found.pop(200) == ([], FinishReason.ERROR)
    assert found == expected([*requests, add(201, [1, 2], 3)])
    [error] = [text for one in peer.received if isinstance(one, StepTokens) for text in one.errors.values()]
    assert reason in error


def test_a_front_end_without_hello_is_disconnected(hub: Hub) -> None:
    with FrontEndPeer(hub.address, greet=False) as peer:
        peer.send(VALID)
        last = peer.to_the_end()[-1]
        assert isinstance(last, EngineFailed) and "the first message of a connection must be hello" in last.text
    with FrontEndPeer(hub.address, greet=False) as peer:
        peer.send(Hello("x" * 1000), VALID)
        peer.until(lambda _: peer.num_ended)


def test_frames_may_come_in_any_pieces(hub: Hub, expected: Expected) -> None:
    peer = hub.peer()
    requests = some(2, 3)
    for byte in b"".join(framed(encode([one])) for one in requests):
        peer.send_bytes(bytes([byte]))
    exact(peer, requests, expected)


def test_a_large_frame_is_read_in_turns(hub: Hub) -> None:
    peer = hub.peer()
    peer.send(*(add(i, [1] * 10_000, 1) for i in range(600)))  # 24 MB
    peer.until(lambda _: peer.num_ended == 600)


# ------------------------------------------------------------------------------------------------------ who stalls


def test_the_engine_waits_for_the_only_one_that_cannot_follow_until_another_comes(hub: Hub, expected: Expected) -> None:
    slow = hub.peer("slow")
    long = [add(i, [3, i], LONG) for i in range(8)]
    slow.send(*long)
    hub.wait_until(lambda: hub.activity.heartbeat().phase == "idle" and hub.loop.num_steps > 0)
    (connected,) = (one for one in hub.front_ends.connections.values() if one.live)
    hub.wait_until(lambda: not connected.has_room)
    waited_at = hub.loop.num_steps
    assert waited_at < LONG / 2, "it waits long before the end"
    other = hub.peer("other")
    requests = some(4, 10, 300)
    other.send(*requests)
    exact(other, requests, expected)
    hub.wait_until(lambda: hub.activity.heartbeat().phase == "idle")
    assert waited_at + 30 < hub.loop.num_steps < LONG / 2, "it waits again"
    exact(slow, long, expected)
    assert {end for _, end in streams(slow.received).values()} == {LENGTH}


def test_a_stalling_front_end_is_disconnected(hub: Hub, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "RULES", front_end.FrontEndRules(max_queued_bytes=50_000))
    stalled, other = hub.peer("stalled"), hub.peer()
    stalled.send(*(add(i, [3, i], LONG) for i in range(8)))
    requests = [add(0, [1], 1000)]
    other.send(*requests)
    exact(other, requests, expected)
    other.until(lambda got: any(isinstance(one, LoadProgress) for one in got))
    (line,) = [one.text for one in other.received if isinstance(one, LoadProgress)]
    assert line == "stalled was disconnected: it does not read its messages; 8 of its requests are aborted"
    stalled.to_the_end()
    assert stalled.num_ended == 0


def test_a_stalled_engine_can_be_shut_down(hub: Hub) -> None:
    hub.peer("slow").send(*(add(i, [3, i], LONG) for i in range(8)))
    hub.wait_until(lambda: hub.activity.heartbeat().phase == "idle" and hub.loop.num_steps > 0)
    hub.peer("other").send(Shutdown())
    hub.join()


Row = tuple[int, int, int]


def step_of(
    rows: Sequence[Row],
    admitted: Sequence[tuple[int, int]] = (),
    errors: dict[int, str] | None = None,
    logprobs: Sequence[TokenLogprobs] = (),
    prompts: Sequence[PromptLogprobs] = (),
) -> StepTokens:
    return StepTokens(
        step=9,
        req_ids=np.array([row[0] for row in rows], np.int64).tobytes(),
        tokens=np.array([row[1] for row in rows], np.int32).tobytes(),
        reasons=np.array([row[2] for row in rows], np.int32).tobytes(),
        admitted_ids=np.array([one[0] for one in admitted], np.int64).tobytes(),
        cached_lens=np.array([one[1] for one in admitted], np.int32).tobytes(),
        errors=errors or {},
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompts),
    )


numbers = st.sampled_from([0, 1, 2, 3, MAX_CONNECTIONS - 1])
own_ids = st.integers(0, 50) | st.sampled_from([ID_LIMIT - 1, ID_LIMIT - 2])
ids = st.builds(within, numbers, own_ids)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepTokens, dict[int, StepTokens]]:
    """A step, and what each front end should get of it: row by row."""
    among = draw(st.sets(numbers, min_size=1))
    mine = ids.filter(lambda req_id: owner(req_id) in among)
    found = draw(st.lists(mine, unique=True, max_size=40))
    rows = [(req_id, draw(st.integers(-1, 2**31 - 1)), draw(st.integers(0, 4))) for req_id in found]
    admitted = [(req_id, draw(st.integers(0, 9))) for req_id in draw(st.lists(mine, unique=True, max_size=5))]
    errors = {req_id: f"error of {req_id}" for req_id, _, reason in rows if reason == 4}
    logprobs = [TokenLogprobs(i, -i / 2, (i, 1), (-0.5, -1.0)) for i in range(len(rows)) if draw(st.booleans())]
    prompts = [PromptLogprobs(one, 1, (-1.0,), ((one & 7,),), ((-2.0,),)) for one in draw(st.lists(mine, max_size=3))]

    def own(req_id: int) -> int:
        return req_id % ID_LIMIT

    expected = {}
    for number in {owner(one) for one in [*found, *(a for a, _ in admitted), *(p.req_id for p in prompts)]}:
        places = [i for i, row in enumerate(rows) if row[0] // ID_LIMIT == number]
        expected[number] = step_of(
            [(own(rows[i][0]), rows[i][1], rows[i][2]) for i in places],
            [(own(req_id), cached) for req_id, cached in admitted if req_id // ID_LIMIT == number],
            {own(req_id): text for req_id, text in errors.items() if req_id // ID_LIMIT == number},
            [
                TokenLogprobs(places.index(one.index), one.logprob, one.top_ids, one.top_logprobs)
                for one in logprobs
                if one.index in places
            ],
            [
                PromptLogprobs(own(one.req_id), one.first, one.logprobs, one.top_ids, one.top_logprobs)
                for one in prompts
                if one.req_id // ID_LIMIT == number
            ],
        )
    return step_of(rows, admitted, errors, logprobs, prompts), expected


def check(case: tuple[StepTokens, dict[int, StepTokens]]) -> None:
    message, expected = case
    assert split(message) == expected


@given(steps())
@settings(max_examples=300)
def test_each_gets_its_own_rows(case: tuple[StepTokens, dict[int, StepTokens]]) -> None:
    check(case)


@pytest.mark.slow
def test_each_gets_its_own_rows_in_many_steps(times: int) -> None:
    for_long(check, given(steps()), settings(deadline=None), 4_000 * times)


def test_a_step_of_the_first_alone_is_passed_on_as_it_is() -> None:
    message = step_of([(1, 2, 0), (3, 4, 1)], [(1, 0)])
    assert split(message)[0] is message


def test_an_empty_step_is_sent_to_no_front_end() -> None:
    assert split(step_of([])) == {}
