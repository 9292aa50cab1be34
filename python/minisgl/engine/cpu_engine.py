"""The engine that runs real models on the CPU without torch: tensors, kernels and sampling are in Rust
(rust/minisgl-cpu).

Invariants: a plan's assignments, page-table updates and rows take effect in one thread, in launch order; forwards run
without the GIL; a step with NaN or infinities is an error, and the KV pool is wiped; a row with a grammar samples what
its grammar allows, which is found on the forward's own threads, beside the logits of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl._rust import CpuAdapter
from minisgl._rust import CpuEngine as RustEngine
from minisgl.engine.adapters import find_adapter
from minisgl.engine.api import (
    Embedding,
    EngineInfo,
    EngineStepError,
    PromptLogprobs,
    SlotAssignment,
    StepHandle,
    StepLogprobs,
    StepResult,
)
from minisgl.engine.worker import ForwardThread
from minisgl.models.config import ModelConfig
from minisgl.step import RingEntry, StepBuffers, StepPlan


class CpuEngine:
    def __init__(
        self, rust: RustEngine, info: EngineInfo, model: ModelConfig, settings: str, *, threaded: bool = True
    ) -> None:
        """`settings`: those that `rust` was made of."""
        self._rust = rust
        self._info = info
        self._model = model
        self._settings = settings
        self._thread = ForwardThread("cpu-forward", threaded=threaded)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def rust(self) -> RustEngine:
        """For measurements."""
        return self._rust

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        return self._thread.submit(lambda: self._run(plan, entry, assigned))

    def read_adapter(self, folder: str) -> CpuAdapter:
        pairs = []
        for name, (a, b) in find_adapter(folder, self._model).read().items():
            layer, part = int(name.split(".")[2]), name.rpartition(".")[2]  # model.layers.N.self_attn.q_proj
            pairs.append((layer, part, a.tobytes(), b.tobytes()))
        return CpuAdapter(self._settings, pairs)

    def add_adapter(self, number: int, adapter: CpuAdapter) -> None:
        self._thread.submit(lambda: self._rust.add_adapter(number, adapter))

    def remove_adapter(self, number: int) -> None:
        self._thread.submit(lambda: self._rust.remove_adapter(number))

    def close(self) -> None:
        self._thread.close()
        self._rust.close()

    def _run(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> StepResult:
        rows, tokens = plan.num_rows, plan.num_tokens
        try:
            sampled, logprobs, prompts, embedded, failures = self._rust.step(
                entry.input_ids[:tokens],
                entry.positions[:tokens],
                entry.out_loc[:tokens],
                entry.req_slots[:rows],
                entry.seq_lens[:rows],
                entry.extend_lens[:rows],
                entry.sample_rows[: plan.num_samples],
                entry.page_table_updates[: plan.num_page_table_updates].reshape(-1),
                entry.page_ids[: plan.num_page_ids],
                plan.num_decode_rows,
                assignments,
                entry.freed[: plan.num_freed],
            )
        except RuntimeError as error:
            raise EngineStepError(str(error)) from error
        prompted = [PromptLogprobs(*one) for one in prompts]
        embeddings = [Embedding(req_id, np.frombuffer(numbers, np.float32)) for req_id, numbers in embedded]
        return StepResult(sampled, _step_logprobs(logprobs), prompted, failures, embeddings)


def _step_logprobs(
    found: tuple[list[int], list[float], list[list[int]], list[list[float]]] | None,
) -> StepLogprobs | None:
    if found is None:
        return None
    rows, own, top_ids, top = found
    return StepLogprobs(np.array(rows, np.int32), own, top_ids, top)
