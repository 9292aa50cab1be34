"""Parts that tests under tests/gpu share: the device, runs of the torch engine with all their logits, comparisons.

Logits are recorded where tokens are sampled, also in graphs; two runs are compared while their histories are the same.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import backend, flashinfer
from minisgl.attention.backend import Machine
from minisgl.config import EngineConfig
from minisgl.engine import building, sampler
from minisgl.engine.api import EngineInfo, SlotAssignment, StepHandle
from minisgl.engine.device import Needs
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.message import AddRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import StepBuffers, StepPlan
from tests.engine.test_torch_engine import VOCAB
from tests.helpers import flashinfer as helpers_flashinfer
from tests.helpers.device import LateDevice
from tests.helpers.engines import Collector, greedy
from tests.helpers.models import save, tiny_model

REHEARSAL = os.environ.get("MINISGL_GPU_REHEARSAL", "")
if REHEARSAL not in ("", "1", "late"):
    raise ValueError("MINISGL_GPU_REHEARSAL: must be 1 or late")
DEVICE = "inline" if REHEARSAL else "cuda"
PLACE = torch.device("cpu" if REHEARSAL else "cuda")

FLOAT32_WITHIN = 1e-3
"""Error bound for logits around 5: ten times that on the CPU, for sums in another order. TF32 errs ten times more."""
BFLOAT16_WITHIN = 0.25
"""Error bound for logits around 5 in bfloat16 (8 bits) after a few layers, between two ways to compute the same."""
SETTINGS: dict[str, Any] = {"num_pages": 200, "max_running_requests": 6, "max_prefill_length": 24}
# heads of sizes that FlashInfer knows; weights small enough that logits stay around 5
WIDE = {
    "head_dim": 64,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
WIDE_WINDOW = {"hidden_size": 256, "initializer_range": 0.075}
WITHIN = {"float32": FLOAT32_WITHIN, "bfloat16": BFLOAT16_WITHIN, "float16": BFLOAT16_WITHIN / 6}
Wanted = dict[int, tuple[list[int], SamplingParams]]


def rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a GPU: FlashInfer's stand-in, and in late rehearsals a device that is never early."""
    monkeypatch.setitem(sys.modules, "flashinfer", helpers_flashinfer.module())
    monkeypatch.setattr(flashinfer, "recorded_event", _Fence)
    monkeypatch.setattr(flashinfer, "renormalise", sampler.truncate)
    monkeypatch.setattr(building, "machine", lambda device: Machine("cuda", (9, 0), frozenset({"flashinfer"})))
    if REHEARSAL == "late":
        monkeypatch.setattr(building, "InlineDevice", lambda: LateDevice(0, eagerness=0.1))


class _Fence:
    def synchronize(self) -> None:
        return


def only_on_a_gpu(why: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(REHEARSAL), reason=f"rehearsal: {why}")


def need_backend(name: str) -> None:
    """Skip the test if the machine cannot run this attention backend."""
    package = name.partition(":")[0]
    if REHEARSAL:
        if package not in ("torch_sdpa", "flashinfer"):
            pytest.skip(f"rehearsal: no stand-in for {name}")
        return
    machine = backend.machine(PLACE)
    if package != "torch_sdpa" and package not in machine.installed:
        pytest.skip(f"{package} is not installed")
    if name.endswith(":fa3") and machine.capability[0] != 9:
        pytest.skip("fa3 needs compute capability 9.0")


# ------------------------------------------------------------------------------------------------------------- runs


class Recorded:
    """Torch engine that records the logits of everything that it samples."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._owner: dict[int, int] = {}
        self._kept: list[tuple[dict[int, int], Tensor, Tensor, Tensor]] = []
        self._sample = engine.sampler.sample
        engine.sampler.sample = self._record  # type: ignore[method-assign]

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        self._owner |= {assignment.slot: assignment.req_id for assignment in assignments}
        return self.engine.launch(plan, buffers, assignments)

    def close(self) -> None:
        self.engine.close()

    def _record(self, logits: Tensor, slots: Tensor, position: Tensor, needs: Needs) -> Tensor:
        self._kept.append((dict(self._owner), logits.clone(), slots, position))
        return self._sample(logits, slots, position, needs)

    def logits(self) -> dict[int, dict[int, Tensor]]:
        """Return logits by request and token position: [vocab] float32 on the host."""
        by_request: dict[int, dict[int, Tensor]] = {}
        for owner, logits, slots, position in self._kept:
            rows = logits.float().cpu()
            for row, slot, at in zip(rows, slots.tolist(), position.tolist(), strict=True):
                by_request.setdefault(owner[slot], {})[at] = row
        return by_request


class Run(Collector):
    """Run of the step loop on the torch engine, with all its outputs."""

    def __init__(self, engine: Any, config: EngineConfig) -> None:
        super().__init__(engine, config, overlap=config.overlap)
        self.logits: dict[int, dict[int, Tensor]] = {}
        self.prompt_lens: dict[int, int] = {}

    def start(self, requests: Wanted) -> None:
        """Submit the requests and run one step."""
        self._note(requests)
        self.loop.step([AddRequest(i, np.array(p, np.int32).tobytes(), params) for i, (p, params) in requests.items()])

    def run(self, requests: Wanted) -> None:
        self._note(requests)
        super().run(requests)

    def _note(self, requests: Wanted) -> None:
        self.prompt_lens |= {req_id: len(prompt) for req_id, (prompt, _) in requests.items()}


def checkpoint(variant: str, folder: Path, **changes: Any) -> tuple[Path, Any]:
    """Write a tiny model to disk; return its folder and the transformers model."""
    model = tiny_model(
        variant,
        **{"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": None, **changes},
    )
    if hasattr(
        model, "set_experts_implementation"
    ):  # transformers 5: other ways than a plain loop depend on the device
        model.set_experts_implementation("eager")
    return save(model, folder), model


def engine_of(folder: Path, **settings: Any) -> tuple[TorchEngine, EngineConfig]:
    config = EngineConfig(model=str(folder), **{"device": DEVICE, **SETTINGS, **settings})
    lines: list[str] = []
    engine = load_engine(config, lambda text, done=0, total=0: lines.append(text))
    assert isinstance(engine, TorchEngine)
    if config.device == "cuda":
        assert engine.info.device.startswith("cuda")
    return engine, config


def run(
    folder: Path, wanted: Wanted, drive: Callable[[Run], None] | None = None, *, record: bool = True, **settings: Any
) -> Run:
    """Load an engine and run `drive` on it, by default until all of `wanted` have ended; return the outputs."""
    engine, config = engine_of(folder, **settings)
    recorded = Recorded(engine) if record else None
    collector = Run(recorded or engine, config)
    try:
        if drive is not None:
            drive(collector)
        else:
            collector.run(wanted)
    finally:
        engine.close()
    if recorded is not None:
        collector.logits = recorded.logits()
    return collector


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """Make any torch operation that waits for the device raise during the `with`."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_without_waits(engine: Any, config: EngineConfig, **sampling: Any) -> Run:
    """Run two loads, the second while waiting for the device is an error; then close the engine."""
    collector = Run(engine, config)
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=20, **sampling)
    try:
        collector.run({i: (p, params) for i, p in enumerate(prompts())})
        with nothing_waits():
            collector.run({100 + i: (p, params) for i, p in enumerate(prompts(1))})
    finally:
        engine.close()
    return collector


def prompts(seed: int = 0) -> list[list[int]]:
    """Return eight prompts of 1 to 60 tokens and more; some share a prefix."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 40).tolist()
    return [shared[: 5 * i] + rng.integers(0, VOCAB, n).tolist() for i, n in enumerate((1, 3, 17, 60, 5, 31, 2, 9))]


def greedily(max_tokens: int = 24, seed: int = 0) -> Wanted:
    return {i: (prompt, greedy(max_tokens)) for i, prompt in enumerate(prompts(seed))}


# ------------------------------------------------------------------------------------------------------ comparisons


def assert_alike(got: Run, expected: Run, within: float, *, at_least: float = 0.8) -> None:
    """Assert that logits after the same tokens differ by at most `within`, and log probabilities by twice that. At
    least the share `at_least` of all tokens must be comparable; the others follow a different choice."""
    compared = total = 0
    for req_id, tokens in expected.tokens.items():
        mine, theirs = engine_logits(got, req_id), engine_logits(expected, req_id)
        assert len(mine) == len(theirs), f"request {req_id}: {len(mine)} tokens, not {len(theirs)}"
        same = np.cumsum(np.array(got.tokens[req_id]) != np.array(tokens)) == 0
        follows = 1 + int(same[:-1].sum())  # the first that differs is sampled from logits that are still alike
        mine, theirs = mine[:follows], theirs[:follows]
        off = (mine - theirs).abs().masked_fill(mine == theirs, 0).amax(-1)  # equal infinities are alike
        assert float(off.max()) <= within, (
            f"request {req_id}, token {int(off.argmax())}: logits {float(off.max()):.5f} off"
        )
        total, compared = total + len(tokens), compared + follows
        for a, b in zip(got.logprobs.get(req_id, [])[:follows], expected.logprobs.get(req_id, []), strict=False):
            assert b[2] == pytest.approx(a[2], abs=2 * within)
    assert compared >= at_least * total, f"only {compared} of {total} tokens follow the same history"
    assert got.logprobs.keys() == expected.logprobs.keys()


def assert_as_exact_as_transformers(got: Run, model: Any, wanted: Wanted, *, experts: bool = False) -> None:
    """Assert that the engine is not much further from transformers in float32 than transformers in bfloat16 is, on the
    same device and tokens: the cost of bfloat16 is measured, not assumed. The mean error has a margin for roundings in
    another order, the largest error for chance. `experts`: at near-ties bfloat16 picks other experts, each time with a
    large error, and not always at the same tokens; so the 90th percentile of the errors is compared instead."""
    exact = {i: reference_logits(model.to(PLACE, torch.float32), p, got.tokens[i]) for i, (p, _) in wanted.items()}
    model.to(torch.bfloat16)
    mine = torch.cat([engine_logits(got, i) - exact[i] for i in wanted])
    other = torch.cat([reference_logits(model, p, got.tokens[i]) - exact[i] for i, (p, _) in wanted.items()])
    rms, allowed = (float(errors.square().mean().sqrt()) for errors in (mine, other))
    most, largest = (float(errors.abs().max()) for errors in (mine, other))
    usual, usual_transformers = (
        float(errors.abs().flatten().sort().values[errors.numel() * 9 // 10]) for errors in (mine, other)
    )
    text = f"rms {rms:.4f} (transformers {allowed:.4f}), 90 % under {usual:.4f} ({usual_transformers:.4f}), "
    text += f"largest {most:.3f} ({largest:.3f})"
    print(text)
    assert rms > 0, "nothing was rounded"
    if experts:
        assert usual <= 2 * usual_transformers and rms <= 3 * allowed, text
    else:
        assert rms <= 1.5 * allowed and most <= 3 * largest, text


def reference_logits(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return transformers' logits [len(tokens), vocab] float32 on the host, after the prompt and after each token but
    the last, computed on the model's device and in its dtype."""
    ids = torch.tensor([[*prompt, *tokens]], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits: Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().cpu()


def engine_logits(got: Run, req_id: int) -> Tensor:
    """Return the logits that the engine sampled from: [tokens of the request, vocab] float32 on the host."""
    first, of = got.prompt_lens[req_id], got.logits[req_id]
    return torch.stack([of[first + i] for i in range(len(got.tokens[req_id]))])
