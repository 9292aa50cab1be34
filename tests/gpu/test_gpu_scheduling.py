"""What the schedulers ask of the torch engine in all its forms gives what each request gets alone on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from minisgl.engine.building import open_device
from minisgl.message import AbortRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.engine.test_torch_engine import requests
from tests.helpers.device_fuzz import make_scenario, run_on
from tests.helpers.gpu import FLOAT32_WITHIN, PLACE, Run, Wanted, assert_alike, checkpoint, greedily, run
from tests.helpers.property import draw_from

PLANES = ("python", "rust_hotpath")
TIGHT: dict[str, Any] = {"num_pages": 45, "page_size": 4, "max_prefill_length": 12, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("qwen3-tied", tmp_path_factory.mktemp("scheduling"))[0]


def on_the_cpu(folder: Path, wanted: Wanted) -> Run:
    """Plenty of pages, whole prompts, nothing shared, one after the other."""
    settings: dict[str, Any] = {"num_pages": 400, "max_prefill_length": 2048, "max_running_requests": 1}
    return run(folder, wanted, device="inline", dtype="float32", cpu_backend="python", overlap=False, **settings)


def mixed(seed: int) -> Wanted:
    """Sampled, greedy, narrowed, penalized, biased, with log probabilities of tokens and of a prompt."""
    wanted = requests(seed)
    prompt, params = wanted[2]
    wanted[2] = prompt, replace(params, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 4.0, 7: -100.0})
    return wanted


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one-by-one"])
@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("seed", range(3))
def test_all_parameters_as_on_the_cpu(folder: Path, seed: int, plane: str, overlap: bool) -> None:
    """Draws from equal seeds, penalties, biases, log probabilities; chunks, prefixes and a small pool."""
    wanted = mixed(seed)
    expected = on_the_cpu(folder, wanted)
    got = run(folder, wanted, cpu_backend=plane, overlap=overlap, **TIGHT)
    assert got.reasons == expected.reasons
    assert_alike(got, expected, FLOAT32_WITHIN, at_least=0.95)
    assert got.prompt_logprobs.keys() == expected.prompt_logprobs.keys() == {5}
    assert got.prompt_logprobs[5] == pytest.approx(expected.prompt_logprobs[5], abs=FLOAT32_WITHIN)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one-by-one"])
@pytest.mark.parametrize("plane", PLANES)
def test_prefixes_chunks_and_retraction(folder: Path, plane: str, overlap: bool) -> None:
    expected = on_the_cpu(folder, greedily(40))
    got = run(folder, greedily(40), cpu_backend=plane, overlap=overlap, **TIGHT)
    assert_alike(got, expected, FLOAT32_WITHIN, at_least=0.95)
    assert set(got.reasons.values()) == {FinishReason.LENGTH}
    assert sum(got.cached.values()) > 0
    assert got.plane.stats().num_retracted_total > 0


@pytest.mark.parametrize("plane", PLANES)
def test_aborts_take_nothing_from_others(folder: Path, plane: str) -> None:
    wanted = greedily(30)
    expected = on_the_cpu(folder, wanted)
    aborts = {3: 0, 9: 3, 14: 5}  # step -> request

    def drive(collector: Run) -> None:
        collector.start(wanted)
        for step in range(1000):
            if collector.loop.idle:
                break
            collector.loop.step([AbortRequest(aborts[step])] if step in aborts else [])
            collector.plane.check()

    got = run(folder, wanted, drive, cpu_backend=plane, **TIGHT)
    for req_id in aborts.values():
        assert got.reasons[req_id] is FinishReason.ABORT
        assert len(got.tokens.get(req_id, [])) < 30
    for req_id in wanted.keys() - aborts.values():
        assert got.reasons[req_id] is FinishReason.LENGTH
        assert got.tokens[req_id] == expected.tokens[req_id]


def test_seeds_decide_and_others_do_not(folder: Path) -> None:
    """The same request twice in one crowd and alone; another seed gives other tokens."""
    prompt = list(range(20))
    params = SamplingParams(temperature=1.2, seed=9, max_tokens=30)
    wanted = {0: (prompt, params), 1: (prompt, params), 2: (prompt, replace(params, seed=10))}
    together = run(folder, wanted, dtype="float32")
    alone = run(folder, {0: (prompt, params)}, dtype="float32")
    assert together.tokens[0] == together.tokens[1] == alone.tokens[0]
    assert together.tokens[2] != together.tokens[0]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_requests_as_on_the_cpu(first: int) -> None:
    """Arrivals, aborts, retractions, steps whose numbers are none: those of tests/engine/test_torch_engine_fuzz.py."""
    for seed in range(first, first + 10):
        device, _ = open_device(PLACE)
        try:
            run_on(make_scenario(draw_from(seed)), device, PLACE, FLOAT32_WITHIN)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
