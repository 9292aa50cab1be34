"""The engine that runs real models with torch, on the CPU: paged KV, variable-length batches, sampling, one forward
thread. On an Apple GPU (`--device mps`, never seen) the model is there and sampling stays on the CPU.

Invariants: a plan's assignments, page-table updates and rows take effect in the forward thread, in launch order; a
token that the host does not know yet comes from `last_token`, which the forward before wrote; a row with NaN or
infinities has no token, and no other row reads what it stored; after an error the KV pool is wiped.

With several ranks each does all of this on its shard, except sampling: rank 0 has the logits and broadcasts the tokens.
The model's output is bit for bit the same on all ranks, because collectives are, so all ranks fail the same rows. An
error on one of several ranks leaves the others waiting: then the engine is dead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttentionRows, KVPool
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import (
    NOT_FINITE_TEXT,
    EngineInfo,
    EngineStepError,
    SlotAssignment,
    StepHandle,
    StepResult,
)
from minisgl.engine.sampler import EmbeddingSlots, LogitsProcessors, LogprobSlots, Mask, SamplingRows, sample
from minisgl.engine.torch_adapters import Pairs, TorchAdapters
from minisgl.engine.worker import ForwardThread
from minisgl.grammar.slots import GrammarSlots, TokenMasks
from minisgl.kernels.ops import mask_tokens
from minisgl.models.api import Model
from minisgl.step import NOT_FINITE, Int32Array, RingEntry, StepBuffers, StepPlan


class _Slots:
    """Sampling parameters by request slot, on the host; the last one belongs to padding rows."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = torch.zeros(num_slots, dtype=torch.float32)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64)
        self.top_p = torch.ones(num_slots, dtype=torch.float32)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32)
        self.seed = torch.zeros(num_slots, dtype=torch.int64)

    def assign(self, assignment: SlotAssignment) -> None:
        slot, sampling = assignment.slot, assignment.sampling
        assert sampling.seed is not None
        self.temperature[slot] = 0.0 if sampling.is_greedy else sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed

    def rows(self, slots: Tensor, position: Tensor) -> SamplingRows:
        return SamplingRows(
            self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots], self.seed[slots], position
        )


class TorchEngine:
    def __init__(
        self,
        model: Model,
        info: EngineInfo,
        pool: KVPool,
        attention: AttentionBackend,
        *,
        max_rows: int,
        max_seq_len: int,
        thread: ForwardThread | None = None,
        group: Group = ALONE,
    ) -> None:
        self.model = model
        self._info = info
        self.pool = pool
        self.attention = attention
        self._device = torch.device(info.device)
        # Apple's GPUs have no float64, in which probabilities are added up
        self._sampling_device = torch.device("cpu") if self._device.type == "mps" else self._device
        self._page_table = torch.full(
            (max_rows + 1, -(-max_seq_len // info.page_size)), info.num_pages, dtype=torch.int64, device=self._device
        )
        self._last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=self._device)
        self._slots = _Slots(max_rows + 1)
        self._grammars = GrammarSlots(info.vocab_size, info.eos_ids)
        self._logits_processors = LogitsProcessors(info.vocab_size, info.eos_ids, self._sampling_device)
        self._logprobs = LogprobSlots(max_rows + 1)
        self._embeddings = EmbeddingSlots()
        self._adapters = TorchAdapters(model, max_rows + 1)
        self._group = group
        self._thread = thread or ForwardThread("torch-forward")

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        return self._thread.submit(lambda: self._run(plan, entry, assigned))

    def read_adapter(self, folder: str) -> Pairs:
        return self._adapters.read(folder)

    def add_adapter(self, number: int, adapter: Pairs) -> None:
        self._thread.submit(lambda: self._adapters.add(number, adapter))

    def remove_adapter(self, number: int) -> None:
        self._thread.submit(lambda: self._adapters.remove(number))

    def close(self) -> None:
        self._thread.close()

    # ----------------------------------------------------------------------------------------------------- forward

    def _run(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> StepResult:
        self._apply(plan, entry, assignments)
        if not plan.num_rows:
            return StepResult(np.empty(0, np.int32))
        try:
            with torch.inference_mode():
                return self._forward(plan, entry)
        except (RuntimeError, MemoryError) as error:  # torch's errors on a CPU leave it usable
            with torch.inference_mode():
                self.pool.clear()
            if self._group.size > 1:
                raise
            raise EngineStepError(f"{type(error).__name__}: {error}") from error

    def _apply(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> None:
        self._grammars.free(entry.freed[: plan.num_freed])
        for assignment in assignments:
            self._page_table[assignment.slot] = self._info.num_pages  # masked positions are read: no page of another
            self._slots.assign(assignment)
            self._logits_processors.assign(assignment)
            self._grammars.assign(assignment.slot, assignment.grammar, assignment.generated())
            self._logprobs.assign(assignment)
            self._embeddings.assign(assignment)
            self._adapters.assign(assignment)
        at = 0
        pages = torch.from_numpy(entry.page_ids[: plan.num_page_ids].astype(np.int64)).to(self._device)
        for slot, column, count in entry.page_table_updates[: plan.num_page_table_updates].tolist():
            self._page_table[slot, column : column + count] = pages[at : at + count]
            at += count

    def _forward(self, plan: StepPlan, entry: RingEntry) -> StepResult:
        rows = plan.padded_rows
        num_tokens = int(entry.qo_indptr[rows])
        self.attention.prepare(_attention_rows(plan, entry, num_tokens), self._page_table)
        ids = torch.from_numpy(entry.input_ids[:num_tokens].astype(np.int64)).to(self._device)
        ids = torch.where(ids < 0, self._last_token[(-1 - ids).clamp_(min=0)], ids)
        positions = torch.from_numpy(entry.positions[:num_tokens].astype(np.int64)).to(self._device)
        adapters = self._adapters.of_tokens(entry.req_slots[:rows], entry.extend_lens[:rows])
        self._adapters.prepare(adapters, self._device)
        if pages := self.pool.begin(entry.out_loc[:num_tokens]):
            self.pool.clear_pages(pages)
        row_slots, seq_lens = entry.req_slots[: plan.num_rows], entry.seq_lens[: plan.num_rows]
        readers = self.pool.readers(self._page_table, row_slots, seq_lens)
        hidden = self.model.forward(ids, positions, self.attention.attend)
        failed = self._failed_rows(plan, entry, hidden, readers)
        failures = dict.fromkeys(failed.tolist(), NOT_FINITE_TEXT)

        tokens = np.full(plan.num_rows, -1, np.int32)
        tokens[failed] = NOT_FINITE
        prompts = self._logprobs.of_prompts(plan, entry, hidden, self._logits)
        embeddings = self._embeddings.of_prompts(plan, entry, hidden)
        sampled = entry.sample_rows[: plan.num_samples].astype(np.int64)
        if not len(sampled):
            return StepResult(tokens, None, prompts, failures)
        last = torch.from_numpy(entry.qo_indptr[sampled + 1].astype(np.int64) - 1).to(self._device)
        logits = self._logits(hidden[last])
        slots, next_position = entry.req_slots[sampled].astype(np.int64), entry.seq_lens[sampled].astype(np.int64)
        if self._group.rank:
            chosen = torch.empty(len(sampled), dtype=torch.int64, device=self._device)
        else:
            chosen, of_grammars = self._sample(logits, slots, next_position)
            failures = {int(sampled[i]): text for i, text in of_grammars.items()} | failures
        self._last_token[torch.from_numpy(slots).to(self._device)] = self._group.broadcast(chosen).to(self._device)
        tokens[sampled] = np.where(tokens[sampled] == NOT_FINITE, NOT_FINITE, chosen.cpu().numpy())
        if self._group.rank:
            return StepResult(tokens)
        logprobs = self._logprobs.of_sampled(sampled, slots, logits, chosen)
        return StepResult(tokens, logprobs, prompts, failures, embeddings)

    def _failed_rows(
        self, plan: StepPlan, entry: RingEntry, hidden: Tensor, readers: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The rows of which some hidden number is not finite, or was computed from such, as those of `readers` are.
        Zeros stand in there from now on."""
        row_of_token = np.repeat(np.arange(plan.num_rows), entry.extend_lens[: plan.num_rows])
        finite: npt.NDArray[np.bool_] = hidden[: len(row_of_token)].isfinite().all(1).cpu().numpy()
        if finite.all() and not len(readers):
            return np.empty(0, np.int64)
        failed = np.flatnonzero(~finite | np.isin(row_of_token, readers))
        hidden[torch.from_numpy(failed).to(hidden.device)] = 0
        self.pool.spoil(entry.out_loc[failed])
        return np.unique(row_of_token[failed])

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden).to(self._sampling_device)

    def _sample(
        self, logits: Tensor, slots: npt.NDArray[np.int64], next_position: npt.NDArray[np.int64]
    ) -> tuple[Tensor, dict[int, str]]:
        """The next tokens [m] of the requests in `slots`, and which of them are ends for lack of another."""
        slot_list = slots.tolist()
        masks = self._grammars.masks(slot_list)
        mask = None if masks is None else _mask(masks)
        changed = self._logits_processors.apply(logits, slot_list, next_position.tolist(), mask)
        rows = self._slots.rows(torch.from_numpy(slots), torch.from_numpy(next_position))
        chosen = sample(changed, rows)
        failures: dict[int, str] = {}
        if masks is not None:
            tokens = chosen.to("cpu", torch.int32).numpy()
            if failures := self._grammars.record(slot_list, tokens):
                chosen = torch.from_numpy(tokens).to(chosen)
        self._logits_processors.record(chosen, slot_list)
        return chosen, failures


def _mask(masks: TokenMasks) -> Mask:
    rows, bits = torch.from_numpy(masks.rows), torch.from_numpy(masks.bits)
    return lambda logits: mask_tokens(logits, rows, bits)


def _attention_rows(plan: StepPlan, entry: RingEntry, num_tokens: int) -> AttentionRows:
    """Padding rows exist only in steps whose rows all have one token: then all of them go as decode rows."""
    rows = plan.padded_rows
    extend_lens: Int32Array = entry.extend_lens[:rows]
    one_each = num_tokens == rows
    return AttentionRows(
        num_decode=rows if one_each else plan.num_decode_rows,
        slots=entry.req_slots[:rows],
        seq_lens=entry.seq_lens[:rows],
        extend_lens=extend_lens,
        out_loc=entry.out_loc[:num_tokens],
    )
