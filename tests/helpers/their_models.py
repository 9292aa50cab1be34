"""Logits of an engine on transformers' layers for the tiny checkpoints `CASES` of tests/helpers/variants.py: of every
token that it computes, compared with transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionRows
from minisgl.engine.torch_engine import TorchEngine
from tests.helpers.engines import Collector, assert_greedy, greedy, load
from tests.helpers.variants import TINY

WITHIN = 1e-4


class Watched:
    """Engine that records the logits of each token of its steps, by request and position."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.engine, config = load("auto", folder, model_impl="transformers", **settings)
        assert isinstance(self.engine, TorchEngine)
        self.seen: dict[int, dict[int, Tensor]] = {}
        self._slots: dict[int, int] = {}
        self._rows: AttentionRows | None = None
        self.step_shapes: list[tuple[int, int]] = []  # numbers of decode rows and of other rows
        self._watch(self.engine)
        self.collector = Collector(self.engine, config)

    def _watch(self, engine: TorchEngine) -> None:
        launch, prepare, forward = engine.launch, engine.attention.prepare, engine.model.forward

        def watched_launch(plan: Any, buffers: Any, assignments: Any) -> Any:
            self._slots |= {one.slot: one.req_id for one in assignments}
            return launch(plan, buffers, assignments)

        def watched_prepare(rows: AttentionRows, table: Tensor) -> None:
            self._rows = rows
            prepare(rows, table)

        def watched_forward(ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
            hidden = forward(ids, positions, attend)
            logits, start, rows = engine.model.logits(hidden), 0, self._rows
            assert rows is not None
            self.step_shapes.append((rows.num_decode, len(rows.slots) - rows.num_decode))
            for slot, length in zip(rows.slots.tolist(), rows.extend_lens.tolist(), strict=True):
                at = self.seen.setdefault(self._slots[slot], {})
                at |= zip(positions[start : start + length].tolist(), logits[start : start + length], strict=True)
                start += length
            return hidden

        engine.launch = watched_launch  # type: ignore[method-assign]
        engine.attention.prepare = watched_prepare  # type: ignore[method-assign]
        engine.forward_model = watched_forward

    def run(self, prompts: dict[int, Sequence[int]], count: int) -> None:
        """Generate `count` greedy tokens for each prompt."""
        self.collector.run({i: (list(prompt), greedy(count)) for i, prompt in prompts.items()})


def compare(model: Any, folder: Path, **settings: object) -> float:
    """Run batches through an engine in every kind of step; return the largest difference of a logit from transformers'.
    Asserts the kinds of steps, and that every token that was not cached was computed."""
    random = np.random.default_rng(3)
    prompts = {i: random.integers(3, TINY["vocab_size"], length).tolist() for i, length in enumerate((41, 5, 23))}
    again = {3: [*prompts[0][:32], *random.integers(3, TINY["vocab_size"], 9).tolist()], 4: [7], 5: prompts[2]}
    count = 12
    watched = Watched(folder, num_pages=64, page_size=4, max_prefill_length=16, **settings)
    watched.run(prompts, count)
    watched.run(again, count)
    watched.engine.close()
    assert watched.collector.cached[3] == 32 and watched.collector.cached[5] >= 20, "prefix hits"
    assert any(decode and others for decode, others in watched.step_shapes), "steps of both kinds of rows"
    worst = 0.0
    for req_id, prompt in {**prompts, **again}.items():
        tokens, seen = watched.collector.tokens[req_id], watched.seen[req_id]
        assert len(tokens) == count
        whole = [*prompt, *tokens]
        assert sorted(seen) == list(range(watched.collector.cached[req_id], len(whole) - 1))
        with torch.inference_mode():
            expected = model(torch.tensor([whole]), use_cache=False).logits[0]
        worst = max(worst, *(float((logits - expected[at]).abs().max()) for at, logits in seen.items()))
        assert_greedy(model, list(prompt), tokens)
    return worst
