"""A small model beside a large one: what it guesses, what it computes for that, and texts that do not notice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import EngineInfo
from minisgl.engine.echo import EOS_ID, VOCAB_SIZE, EchoEngine, EchoModel
from minisgl.message import AbortRequest, AddRequest
from minisgl.prompt_image import virtual_ids
from minisgl.runner.drafting import (
    CHUNK,
    NUM_NEW,
    NUM_VERDICTS,
    REST,
    DraftGate,
    DraftModel,
    DraftRequest,
    check_vocabulary,
    draft_config,
)
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.shadow import ShadowControlPlane
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import Draft
from tests.helpers.received import Received

PAGES = 600
SMALL = ControlPlaneConfig(PAGES, 4, 8, CHUNK, 900, (EOS_ID,))


def echo(config: ControlPlaneConfig) -> EchoEngine:
    limits = config.limits()
    return EchoEngine(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_rows=limits.max_rows,
        max_seq_len=limits.max_seq_len,
        context_len=config.context_len,
        worker_thread=False,
    )


class Small(DraftModel):
    """An echo of seed 0, and what it computed."""

    def __init__(self, order: str = "", vocab_size: int = VOCAB_SIZE) -> None:
        self.plane: ControlPlane = make_control_plane("rust_hotpath", SMALL)
        if order:
            self.plane = make_faulty(self.plane, order)
        self.engine = echo(SMALL)
        self.num_asked = 0
        self.computed: list[int] = []  # tokens by forward
        launch = self.engine.launch

        def counted(plan: Any, *others: Any) -> Any:
            self.computed.append(plan.num_tokens)
            return launch(plan, *others)

        self.engine.launch = counted  # type: ignore[method-assign]
        super().__init__(self.engine, self.plane, vocab_size)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.num_asked += len(requests)
        return super().propose(requests)

    def check(self) -> None:
        """Nobody lives there, and no page is lost."""
        self.plane.check()
        stats = self.plane.stats()
        assert stats.num_live == stats.num_draining == stats.num_held_pages == 0
        assert stats.num_free_pages + stats.num_evictable_pages == PAGES


def ask(tokens: Sequence[int], count: int = 4, req_id: int = 1, namespace: int = 0) -> DraftRequest:
    return DraftRequest(req_id, np.array(tokens, np.int32), count, namespace)


def text(length: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(97, 123, length).tolist()  # type: ignore[no-any-return]


def goes_on(tokens: Sequence[int], count: int = 4) -> tuple[int, ...]:
    return tuple(EchoModel(seed=0).generate(list(tokens), count))


def test_all_sequences_are_drafted_in_the_same_forwards_and_only_new_tokens_computed() -> None:
    small = Small()
    texts = {1: text(30), 2: text(50, seed=4)}
    found = small.propose([ask(texts[1], 4, 1), ask(texts[2], 3, 2)])
    assert found == [Draft(1, 30, goes_on(texts[1])), Draft(2, 50, goes_on(texts[2], 3))]
    assert small.computed == [80, 2, 2, 1]
    small.check()
    small.computed.clear()
    texts = {1: [*texts[1], *goes_on(texts[1], 2), 97], 2: [*texts[2], 98]}
    found = small.propose([ask(texts[1], 2, 1), ask(texts[2], 2, 2)])
    assert found == [Draft(2, 51, goes_on(texts[2], 2)), Draft(1, 33, goes_on(texts[1], 2))]
    assert small.computed[0] <= 2 * 4 and small.computed[1:] == [2], "the rest is in its cache"
    small.check()


def test_a_long_text_is_computed_in_parts_and_holds_up_no_other() -> None:
    small, long, short = Small(), text(3 * CHUNK - 20), text(20, seed=4)
    seen = []
    for _ in range(4):
        found = small.propose([ask(long, 2, 1), ask(short, 2, 2)])
        seen.append([one.req_id for one in found])
        assert max(small.computed) <= CHUNK + 8
        small.check()
    assert seen == [[2], [2], [2], [2, 1]]
    assert found[1].tokens == goes_on(long, 2)


def test_sequences_and_ids_outside_a_vocabulary_get_no_drafts() -> None:
    small = Small(vocab_size=110)
    assert small.propose([ask(text(896), 5)]) == [] and not small.computed
    assert small.propose([ask([*text(9), VOCAB_SIZE])]) == [] and not small.computed, "the large one has more ids"
    images = [*text(9), *virtual_ids(b"of an image", 4).tolist(), *text(9)]
    assert small.propose([ask(images)]) == [] and not small.computed
    prompt = next(one for one in map(text, range(9, 99)) if goes_on(one)[0] < 110 <= goes_on(one)[1])
    assert small.propose([ask(prompt)]) == [Draft(1, len(prompt), goes_on(prompt)[:1])]


def test_texts_of_other_namespaces_share_nothing() -> None:
    small = Small()
    for namespace in (0, 1, 0):
        small.computed.clear()
        small.propose([ask(text(40), 1, namespace=namespace)])
    assert small.computed == [4]
    assert small.plane.stats().num_hits_total == 1


def test_a_failed_forward_and_a_broken_scheduler_cost_drafts_only() -> None:
    small = Small()
    small.engine.fail_steps.add(2)
    assert len(small.propose([ask(text(30), 2)])) == 1
    assert small.propose([ask(text(40, seed=5), 2), ask(text(40, seed=6), 2, 2)]) == []
    assert small.propose([ask(text(40, seed=5), 2)]) == [Draft(1, 40, goes_on(text(40, seed=5), 2))]
    small.check()
    small = Small(order="schedule:1:after")
    for _ in range(3):
        assert small.propose([ask(text(30), 2)]) == []


# -------------------------------------------------------------------------------------------------------- with a loop

LARGE = ControlPlaneConfig(200, 4, 16, 64, 200, (EOS_ID,), max_draft_len=5)
PROMPTS = {i: text(5 + 3 * (i % 6), seed=i) for i in range(120)}


class Clients(Received):
    """What requests got of a loop. Those with an odd id have a seed of their own: the small model never agrees."""

    def __init__(self, plane: ControlPlane, small: DraftModel | None, *, overlap: bool, pages: int = 200) -> None:
        super().__init__()
        self.plane = plane
        self.engine = echo(LARGE)
        self.loop = StepLoop(
            plane,
            self.engine,
            self.take,
            LoopSettings(overlap=overlap),
            beside=Beside(guesses=small),
            fallback=lambda: make_control_plane("python", LARGE),
        )

    def run(self, ids: Sequence[int], *, aborted: Sequence[int] = (), max_tokens: int = 100) -> int:
        """Steps that it took."""
        params = {i: SamplingParams(seed=i % 2, max_tokens=max_tokens, ignore_eos=True) for i in ids}
        self.loop.step([AddRequest(i, np.array(PROMPTS[i], np.int32).tobytes(), params[i]) for i in ids])
        for count in range(1, 5000):
            if self.loop.idle:
                return count
            self.loop.step([AbortRequest(i) for i in aborted] if count == 9 else [])
        raise AssertionError("it does not come to an end")


def alone(req_id: int, max_tokens: int = 100) -> list[int]:
    return EchoModel(seed=req_id % 2).generate(PROMPTS[req_id], max_tokens, ignore_eos=True)


@pytest.mark.parametrize("backend", ["python", "rust_hotpath"])
@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_the_same_in_fewer_steps(backend: str, overlap: bool) -> None:
    plain, small = Clients(make_control_plane(backend, LARGE), None, overlap=overlap), Small()
    guessed = Clients(make_control_plane(backend, LARGE), small, overlap=overlap)
    steps = plain.run([0, 2]), guessed.run([0, 2])
    assert guessed.tokens == plain.tokens == {i: alone(i) for i in (0, 2)}
    stats = guessed.plane.stats()
    assert stats.num_accepted_total == stats.num_drafted_total > 150
    assert steps[1] < steps[0] / 4
    small.check()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_model_that_never_agrees_is_seldom_asked(overlap: bool) -> None:
    small = Small()
    clients = Clients(make_control_plane("rust_hotpath", LARGE), small, overlap=overlap)
    assert clients.run([1]) < 105
    assert clients.tokens[1] == alone(1)
    stats = clients.plane.stats()
    assert stats.num_accepted_total == 0 and small.num_asked <= 8


def test_a_draft_model_that_is_never_right_rests() -> None:
    """It is not asked for each new text, nor does it read their prompts; while it agrees it is asked again."""
    small = Small()
    clients = Clients(make_control_plane("rust_hotpath", LARGE), small, overlap=True)
    asked = []
    for i in range(1, 41, 2):
        before = small.num_asked
        clients.run([i], max_tokens=60)
        assert clients.tokens[i] == alone(i, 60)
        asked.append(small.num_asked - before)
    assert asked[0] >= 5 and sum(asked[10:]) <= 2 * (NUM_NEW + 2), asked
    for i in range(42, 102, 2):
        clients.run([i], max_tokens=60)
        assert clients.tokens[i] == alone(i, 60)
    before = clients.plane.stats().num_accepted_total
    clients.run([102], max_tokens=60)
    assert clients.plane.stats().num_accepted_total - before > 40
    small.check()


def test_drafts_are_compared_at_the_next_request_for_their_sequence() -> None:
    trust = DraftGate()
    for at in range(NUM_VERDICTS):
        trust.record_results([ask(text(20), req_id=at)])
        trust.remember([Draft(at, 20, (1,))])
    assert trust.should_propose()
    trust.record_results([ask([*text(20), 2], req_id=at) for at in range(NUM_VERDICTS)])
    assert [trust.should_propose() for _ in range(REST[0])] == [False] * (REST[0] - 1) + [True]
    trust.remember([Draft(99, 20, (2,))])
    trust.record_results([ask([*text(20), 2], req_id=99)])
    assert trust.should_propose(), "a rest is followed by more than one guess"


def test_each_rest_is_twice_as_long_until_guesses_are_right_again() -> None:
    trust, req_ids = DraftGate(), iter(range(1000))

    def guess(count: int, *, right: bool) -> None:
        for req_id in itertools.islice(req_ids, count):
            trust.remember([Draft(req_id, 20, (2 if right else 1,))])
            trust.record_results([ask([*text(20), 2], req_id=req_id)])

    def rest() -> int:
        return next(i for i in itertools.count() if trust.should_propose())

    guess(NUM_VERDICTS, right=False)
    assert rest() == REST[0] - 1
    for times in (2, 4, 8, 16, 16):
        guess(NUM_NEW, right=False)
        assert rest() == times * REST[0] - 1
    assert times * REST[0] == REST[1]
    guess(NUM_NEW, right=True)
    assert rest() == 0
    guess(NUM_VERDICTS - 1, right=False)
    assert rest() == REST[0] - 1, "it begins anew"


def test_no_draft_is_wanted_where_not_all_drafts_fit() -> None:
    small = Small()
    clients = Clients(make_control_plane("rust_hotpath", LARGE), small, overlap=True)
    clients.run([0, 2, 4], max_tokens=60)
    assert small.num_asked == 0, "16 rows are too few for 3 requests with drafts of 5"


@pytest.mark.parametrize("overlap", [True, False])
def test_aborts_and_a_shadow_notice_nothing(overlap: bool) -> None:
    small = Small()
    planes = [make_control_plane(name, LARGE) for name in ("rust_hotpath", "python")]
    shadow = ShadowControlPlane(*planes)
    clients = Clients(shadow, small, overlap=overlap)
    clients.run([0, 1], aborted=[0])
    assert clients.tokens[1] == alone(1) and clients.tokens[0] == alone(0)[: len(clients.tokens[0])]
    assert shadow.stats().num_accepted_total > 5 and not shadow.summary.num_diffs and not shadow.summary.stopped
    for one in planes:
        one.check()
        assert one.stats().num_free_pages + one.stats().num_evictable_pages == 200
    small.check()


@pytest.mark.parametrize("call", ["schedule", "commit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_broken_scheduler_is_followed_by_one_that_drafts_on(call: str, when: str) -> None:
    for step in (5, 6, 7, 8):
        small = Small()
        plane = make_faulty(make_control_plane("rust_hotpath", LARGE), f"{call}:{step}:{when}")
        clients = Clients(plane, small, overlap=True)
        clients.run([0, 1])
        assert clients.loop.num_failovers == 1
        assert clients.tokens == {i: alone(i) for i in (0, 1)}
        assert clients.loop.control_plane.stats().num_accepted_total > 30
        small.check()


def test_a_forward_that_fails_while_drafts_are_in_flight() -> None:
    small = Small()
    clients = Clients(make_control_plane("rust_hotpath", LARGE), small, overlap=True)
    clients.engine.fail_steps.add(4)
    clients.run([0])
    assert clients.tokens[0] == alone(0)[: len(clients.tokens[0])]
    clients.run([2])
    assert clients.tokens[2] == alone(2)


def test_a_retracted_request_is_drafted_again() -> None:
    config = ControlPlaneConfig(20, 4, 16, 64, 200, (EOS_ID,), max_draft_len=5, cache="naive")
    small, plane = Small(), make_control_plane("rust_hotpath", config)
    plane.reserve_ratio = 0  # type: ignore[attr-defined]  # no output is expected: rows will be retracted
    clients = Clients(plane, small, overlap=True)
    clients.run([0, 2], max_tokens=60)
    assert clients.tokens == {i: alone(i, 60) for i in (0, 2)}
    stats = plane.stats()
    assert stats.num_retracted_total and stats.num_accepted_total > 60 and stats.num_free_pages == 20
    small.check()


# --------------------------------------------------------------------------------------------------------- settings


def test_the_draft_model_s_settings_come_from_the_large_model_s() -> None:
    config = EngineConfig(
        speculative="model:a/b.gguf:7", max_running_requests=20, activations="int8", num_threads=2, memory=10**9
    )
    small = draft_config(config)
    assert (small.model, small.engine, small.activations, small.num_threads) == ("a/b.gguf", "cpu", "int8", 2)
    assert (small.max_running_requests, small.memory, small.max_draft_len) == (2, 10**9, 0)
    found = [(EngineConfig(speculative=one).draft_model, EngineConfig(speculative=one).max_draft_len) for one in KINDS]
    assert found == list(KINDS.values())


KINDS = {
    None: (None, 0),
    "ngram:3": (None, 3),
    "model:smollm2": ("smollm2", 4),
    "model:org/name:12": ("org/name", 12),
    "model:c:/models/x.gguf": ("c:/models/x.gguf", 4),
}


def info(folder: Path | None) -> EngineInfo:
    return EngineInfo("cpu" if folder else "echo", folder and str(folder), 9, 9, (), 9, 9, "cpu", "f32")


def test_both_vocabularies_must_be_equal(tmp_path: Path) -> None:
    from minisgl.tokenizer.echo import echo_json

    plain = echo_json()
    assert '"!"' in plain
    folders = {}
    for name, source in {"one": plain, "same": plain, "other": plain.replace('"!"', '"~~"')}.items():
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "tokenizer.json").write_text(source)
    config = EngineConfig(model="large", speculative="model:small")
    check_vocabulary(config, info(folders["one"]), info(folders["same"]))
    wrong = "the draft model's vocabulary differs from that of --model large: id 33 is b'~~', not b'!'"
    with pytest.raises(ConfigError) as raised:
        check_vocabulary(config, info(folders["one"]), info(folders["other"]))
    assert str(raised.value) == f"--speculative model:small: {wrong}"
    with pytest.raises(ConfigError, match="not supported with --engine echo, which has no model vocabulary"):
        check_vocabulary(config, info(None), info(folders["one"]))
