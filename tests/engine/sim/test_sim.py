"""The simulated engine: whose tokens, how many, and when."""

from __future__ import annotations

import time

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.engine.sim import RealClock, VirtualClock, build_sim
from minisgl.engine.sim.profile import StepLoad
from minisgl.message import AbortRequest
from minisgl.runner.build import build_engine
from minisgl.step import FinishReason, StepBuffers, StepLimits, StepPlan
from tests.helpers.sim import ALPHABET, EOS, Sim, constant, request


@pytest.mark.parametrize("plane", ["python", "rust_hotpath"])
def test_tokens_depend_on_seed_and_position_alone(plane: str) -> None:
    """Many at once and in chunks: the same as alone."""
    asked = [request(i, 5 + 17 * i, 40, seed=i % 3) for i in range(20)]
    together = Sim(plane=plane, max_rows=6, budget=16).run(asked).tokens
    for one in asked:
        assert Sim().run([one]).tokens[one.req_id] == together[one.req_id]


def test_seeds_and_positions_matter() -> None:
    found = Sim().run([request(i, 8, 200, seed=i) for i in range(4)]).tokens
    assert all(set(tokens) <= set(ALPHABET) and len(set(tokens)) > 30 for tokens in found.values())
    for i in range(3):
        same = sum(a == b for a, b in zip(found[i], found[i + 1], strict=True))
        shifted = sum(a == b for a, b in zip(found[i][1:], found[i + 1], strict=False))
        assert same < 20 and shifted < 20
    assert Sim().run([request(9, 8, 200, seed=0)]).tokens[9] == found[0]
    assert Sim().run([request(9, 9, 199, seed=0)]).tokens[9] == found[0][1:]


def test_output_lengths_equal_max_tokens() -> None:
    done = Sim().run([request(i, 3, n) for i, n in enumerate((1, 2, 77))])
    assert [len(done.tokens[i]) for i in range(3)] == [1, 2, 77]
    assert set(done.reasons.values()) == {FinishReason.LENGTH}


def test_a_stop_token_ends_a_text() -> None:
    free = Sim().run([request(0, 3, 50)]).tokens[0]
    done = Sim().run([request(0, 3, 50, stop_token_ids=(free[20],))])
    assert done.tokens[0] == free[: free.index(free[20]) + 1]
    assert done.reasons[0] is FinishReason.STOP


def test_eos_comes_as_often_as_asked() -> None:
    asked = [request(i, 3, 4000, seed=i) for i in range(200)]
    done = Sim(constant(1.0, eos_one_in=20)).run(asked)
    lengths = [len(tokens) for tokens in done.tokens.values()]
    assert set(done.reasons.values()) == {FinishReason.STOP}
    assert all(tokens.index(EOS) == len(tokens) - 1 for tokens in done.tokens.values())
    assert 14 < sum(lengths) / len(lengths) < 27
    ignoring = Sim(constant(1.0, eos_one_in=20)).run([request(0, 3, 100, ignore_eos=True)])
    assert len(ignoring.tokens[0]) == 100


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_run_one_after_the_other(overlap: bool) -> None:
    """With overlap too: step n + 1 is launched while n runs and begins when n ends."""
    done = Sim(constant(10.0), overlap=overlap).run([request(0, 3, 6)])
    assert done.times[0] == pytest.approx([0.01 * (i + 1) for i in range(6)])


def test_a_step_begins_when_it_is_launched_if_the_device_is_free() -> None:
    sim = Sim(constant(10.0)).run([request(0, 3, 1)])
    sim.clock.sleep_until(5.0)
    assert sim.run([request(1, 3, 2)]).times[1] == pytest.approx([5.01, 5.02])


def test_a_prompt_in_chunks_costs_a_step_each() -> None:
    assert Sim(constant(10.0), budget=16).run([request(0, 60, 1)]).times[0] == pytest.approx([0.04])


def test_step_load_counts_rows_tokens_and_pairs() -> None:
    """Two decode rows, a chunk in the middle of a prompt, the end of another: by hand, and tokens where they belong."""
    sim = Sim(constant(1.0))
    seen: list[StepLoad] = []
    sim.engine._profile = _Watched(seen)  # type: ignore[assignment]
    buffers = StepBuffers(StepLimits(max_rows=8, max_tokens=64, page_size=4, num_pages=512, max_seq_len=4096))
    entry = buffers.ring[0]
    entry.extend_lens[:4], entry.seq_lens[:4], entry.sample_rows[:3] = (1, 1, 4, 3), (10, 20, 12, 3), (0, 1, 3)
    plan = StepPlan(0, 0, num_rows=4, num_decode_rows=2, num_tokens=9, num_samples=3)
    tokens = sim.engine.launch(plan, buffers, ()).wait().tokens.tolist()
    pairs = 10 + 20 + (9 + 10 + 11 + 12) + (1 + 2 + 3)
    assert seen == [StepLoad(rows=4, tokens=9, samples=3, kv_tokens=45, pairs=pairs)]
    assert tokens[2] == -1 and all(tokens[row] in ALPHABET for row in (0, 1, 3))
    plan = StepPlan(1, 0, num_rows=2, num_decode_rows=2, num_tokens=2, num_samples=2)
    sim.engine.launch(plan, buffers, ()).wait()
    assert seen[1] == StepLoad(rows=2, tokens=2, samples=2, kv_tokens=30, pairs=30)


class _Watched:
    takes_time, eos_one_in = True, 0

    def __init__(self, seen: list[StepLoad]) -> None:
        self._seen = seen

    def seconds(self, load: StepLoad) -> float:
        self._seen.append(load)
        return 0.0


def test_launch_returns_before_the_step_ends() -> None:
    sim = Sim(constant(10.0))
    limits = StepLimits(max_rows=8, max_tokens=64, page_size=4, num_pages=512, max_seq_len=4096)
    buffers = StepBuffers(limits)
    for entry in buffers.ring:
        entry.seq_lens[0] = entry.extend_lens[0] = 1
    first, second = (
        sim.engine.launch(StepPlan(i, i, num_rows=1, num_tokens=1, num_samples=1), buffers, ()) for i in (0, 1)
    )
    assert sim.clock.now() == 0 and not first.done() and not second.done()
    first.wait()
    assert sim.clock.now() == pytest.approx(0.01) and first.done() and not second.done()
    second.wait()
    assert sim.clock.now() == pytest.approx(0.02) and second.done()


def test_a_step_without_rows_takes_no_time() -> None:
    sim = Sim(constant(10.0))
    sim.loop.step([AbortRequest(3)])
    sim.loop.drain()
    assert sim.clock.now() == 0


def test_clocks_are_never_early() -> None:
    clock = RealClock()
    for wait in (0.0, 1e-5, 2e-3):
        until = clock.now() + wait
        clock.sleep_until(until)
        assert time.perf_counter() >= until
    virtual = VirtualClock(3.0)
    virtual.sleep_until(2.0)
    assert virtual.now() == 3.0


def test_engine_info_names_the_profile() -> None:
    said: list[str] = []
    config = EngineConfig(engine="sim", sim_profile="qwen3-8b-h200")
    engine = build_engine(config, lambda text, *_: said.append(text))
    info = engine.info
    assert info.name == "sim" and info.simulated == "qwen3-8b-h200" and "simulated" in info.device
    assert any("simulated" in line and "qwen3-8b-h200" in line for line in said)
    assert info.eos_ids == () and info.context_len == 40960
    assert 700_000 < info.num_pages * info.page_size < 800_000


def test_texts_are_words() -> None:
    from minisgl.tokenizer import Tokenizer

    engine = build_sim(EngineConfig(engine="sim"), lambda *_: None)
    tokenizer = Tokenizer.load(engine.info.model_dir or "")
    alphabet = engine._alphabet
    words = [tokenizer.decode([token]) for token in alphabet.tolist()]
    assert len(words) > 200 and " the" in words and "." in words
    assert all(word in ".," or (word[0] == " " and word[1:].isalpha() and word.islower()) for word in words)
    assert int(np.max(alphabet)) < engine.info.vocab_size
