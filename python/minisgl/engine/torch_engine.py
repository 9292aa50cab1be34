"""The torch engine: each step is one copy in, one forward and one copy out, queued on a device without waiting.

All work is ordered through `device.py` alone. On a CPU the device is an `InlineDevice`, and each step is launched and
resolved in one forward thread.

A step with a row that has a grammar is launched like any other except for its sampling: that is queued when the step
before it is resolved, because only then its tokens, and so the masks, are known. The forward runs meanwhile.

With several ranks each does all of this on its shard, except sampling. Collectives are jobs of the forward stream:
ranks that get the same steps call the same ones in the same order. Rank 0 has the logits; one broadcast a step sends
the tokens, and which rows are finite, to the others. (Rank 0's own hidden states show that: a NaN of any rank is in the
next all-reduce.) So all ranks fail the same rows.

Invariants: a launch waits for the device only if the step of two launches before has not ended; a plan's slots,
page-table updates and rows take effect in the forward stream, in launch order; a token that the host does not know yet
comes from `last_token`, which the previous forward wrote; a row with NaN or infinities has no token, and its pages are
zeroed before they are reused. After an error that a device may not survive the engine is dead, and its process must
end. If one of several ranks fails, the others wait in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttentionRows, KVPool
from minisgl.attention.api import DeviceRows
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import EngineInfo, EngineStepError, ImageCounts, ImageRun, SlotAssignment, StepHandle
from minisgl.engine.device import (
    Device,
    DeviceMasks,
    DeviceSampler,
    Layout,
    Needs,
    Renormalise,
    StagingBuffer,
    StepInputs,
    copy,
)
from minisgl.engine.graphs import Capture, Graph, Outputs, capture_all
from minisgl.engine.launched_step import Failure, LaunchedStep, step_failure
from minisgl.engine.sampler import EmbeddingSlots, LogitsProcessors, LogprobSlots, Mask
from minisgl.engine.torch_adapters import Pairs, TorchAdapters
from minisgl.engine.torch_sight import TorchSight, TorchTower
from minisgl.engine.worker import ForwardThread, Pending
from minisgl.grammar.slots import GrammarSlots
from minisgl.kernels.ops import UPDATE_FIELDS, apply_updates, mask_tokens
from minisgl.models.api import Attend, Model, Seen
from minisgl.models.decoder import Decoder
from minisgl.prompt_image import PromptImage
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepLimits, StepPlan
from minisgl.utils.progress import Report

NUM_BUFFERS = 2  # overlap depth 1: a step is resolved before the second launch after it
ModelForward = Callable[[Tensor, Tensor, Attend], Tensor]


class TorchEngine:
    def __init__(
        self,
        model: Model,
        info: EngineInfo,
        pool: KVPool,
        attention: AttentionBackend,
        device: Device,
        limits: StepLimits,
        *,
        thread: ForwardThread | None = None,
        group: Group = ALONE,
        capture: Capture | None = None,
        renormalise: Renormalise | None = None,
        forward: ModelForward | None = None,
        tower: TorchTower | None = None,
        say: Report = lambda text, done=0, total=0: None,
        free_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the engine; `warm_up` makes it ready. `thread` launches and resolves each step; None: the caller
        launches, and the thread that waits resolves. Graphs of `info.graph_sizes` are captured with `capture`;
        `forward` is the model's, or a compiled one. With a `tower` the model is a `Decoder`, and sees."""
        self.model = model
        self._info = info
        self.pool = pool
        self.attention = attention
        self._device = device
        self.thread = thread
        self._group = group
        self._dead = False
        self.forward_model = forward or model.forward
        torch_device = torch.device(info.device)
        slots = limits.max_rows + 1
        self._page_table = torch.full(
            (slots, limits.max_pages_per_request), limits.scratch_page, dtype=torch.int32, device=torch_device
        )
        self._last_token = torch.zeros(slots, dtype=torch.int64, device=torch_device)
        self.sampler = DeviceSampler(slots, torch_device, renormalise)
        self._logits_processors = LogitsProcessors(info.vocab_size, info.eos_ids, torch_device)
        self._logprobs = LogprobSlots(slots)
        max_padded = max(limits.max_rows, *info.graph_sizes, 1)
        size = Layout.largest(limits, max_padded).size
        # inputs of the step that the forward stream runs
        self._block = torch.zeros(size, dtype=torch.int32, device=torch_device)
        self._staging = [StagingBuffer(device, torch_device, size, max_padded) for _ in range(NUM_BUFFERS)]
        device.synchronize()
        self._steps: list[LaunchedStep | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._limits = limits
        self._grammars = GrammarSlots(info.vocab_size, info.eos_ids)  # as of the last resolved step
        self._grammar_slots: set[int] = set()  # as of the last launched step
        self._adapters = TorchAdapters(model, slots)
        self._masks = DeviceMasks(device, torch_device, info.vocab_size, limits.max_rows, NUM_BUFFERS)
        self._embeddings = EmbeddingSlots()
        self._sight = None if tower is None else TorchSight(tower, slots, torch_device)
        self._prompt_slots: set[int] = set()  # slots whose requests need hidden states of their prompts
        self.graphs: dict[int, Graph] = {}
        if capture is not None and info.graph_sizes:
            with torch.inference_mode():
                self.graphs = capture_all(info.graph_sizes, self._capturable, capture, say, free_bytes)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        """Queue a step and return its handle. Raises `EngineDeadError` or `GroupError` if the engine cannot go on."""
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        if self.thread is None:
            return self._launch(plan, entry, assigned)
        return self.thread.submit(lambda: self._launch(plan, entry, assigned).wait())

    def _launch(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> LaunchedStep:
        turn = self._turn = (self._turn + 1) % NUM_BUFFERS
        if (same_buffer := self._steps[turn]) is not None:
            same_buffer.resolve()
        before = self._steps[turn - 1]
        step = self._steps[turn] = LaunchedStep(self, plan, entry, self._staging[turn])
        try:
            with torch.inference_mode():
                self._queue(step, assignments)
        except (RuntimeError, MemoryError) as error:
            failure = self.failure(plan.step, error)
            if not isinstance(failure, EngineStepError):
                raise failure from error
            self.wipe()
            step.fail(failure, self._device.forward.record_event())
        if step.tail is not None or step.assignments or len(step.freed):
            step.follow(before)
        return step

    def begin(self, step: LaunchedStep) -> None:
        """Update the grammars for `step` and queue its sampling if that waits. Steps begin in launch order."""
        self._grammars.free(step.freed)
        for assignment in step.assignments:
            self._grammars.assign(assignment.slot, assignment.grammar, assignment.generated())
        if step.tail is not None:
            with torch.inference_mode():
                step.tail()

    def record(self, step: LaunchedStep, tokens: Int32Array) -> dict[int, str]:
        return self._grammars.record(step.slots, tokens)

    def read_adapter(self, folder: str) -> Pairs:
        return self._adapters.read(folder)

    def add_adapter(self, number: int, adapter: Pairs) -> None:
        self._change("adapter", lambda: self._adapters.add(number, adapter))

    def remove_adapter(self, number: int) -> None:
        self._change("adapter", lambda: self._adapters.remove(number))

    def image_counts(self) -> ImageCounts:
        return ImageCounts() if self._sight is None else self._sight.counts()

    def see_ahead(self, image: PromptImage, begins: bool, slice_s: float, wake: Callable[[], None] | None) -> ImageRun:
        """Run the tower over the whole image: it is one slice."""
        sight = self._sight
        assert sight is not None, "the server sends images only to an engine that sees"

        def see() -> tuple[bool, object]:
            try:
                if begins and sight.is_full():
                    return False, None
                found: list[Tensor] = []
                self._device.forward.run("tower", lambda: found.append(sight.features_of(image)))
                return True, found[0]
            finally:
                if wake is not None:
                    wake()

        if self.thread is not None:
            return self.thread.submit(see)
        run = Pending(see)
        run.run()
        return run

    def give_up_image(self) -> None:
        """Do nothing: no run is in progress between two calls."""

    def _change(self, name: str, job: Callable[[], None]) -> None:
        """Queue `job` after the launched steps."""
        if self.thread is None:
            self._device.forward.run(name, job)
        else:
            self.thread.submit(job)

    def mark_invalid(self, slots: Int32Array) -> None:
        """Mark the pages of `slots` as invalid, in the forward stream, where the page table is up to date."""
        self._device.forward.run("mark invalid", lambda: self.pool.mark_invalid_rows(self._page_table, slots))

    def wipe(self) -> None:
        """Zero the KV pool, in the forward stream."""

        def clear() -> None:
            with torch.inference_mode():
                self.pool.clear()

        self._device.forward.run("wipe", clear)

    def close(self) -> None:
        """Wait for the launched steps, unless the engine is dead, and free the graphs: they hold communicators."""
        if self.thread is not None:
            self.thread.close()
        for step in self._steps:
            if step is not None and not self._dead:
                step.resolve()
        self.graphs.clear()

    def failure(self, step: int, error: BaseException) -> Failure:
        """Return the exception to raise for `error` in step `step`, and mark the engine as dead if it cannot go on."""
        failure = step_failure(step, error, self._group.size, survives=self._device.survives_errors)
        self._dead |= not isinstance(failure, EngineStepError)
        return failure

    # ---------------------------------------------------------------------------------------------------- one step

    def _queue(self, step: LaunchedStep, assignments: list[SlotAssignment]) -> None:
        plan, entry, staging = step.plan, step.entry, step.buffer
        device, layout = self._device, Layout.of(plan, len(assignments))
        staging.copy_in(device, layout, entry, assignments)
        step.start = device.forward.record_event()
        size, block = layout.size, self._block
        device.forward.run("take in", lambda: copy(block[:size], staging.inputs_device[:size]))
        inputs = StepInputs(block, layout)
        if self._sight is not None:
            self._sight.change(entry.freed[: plan.num_freed].tolist(), assignments)
        device.forward.run("apply", lambda: self._apply(inputs, assignments))
        self._remember(step, assignments)
        if not plan.num_rows:
            step.computed = step.end = device.forward.record_event()
            return
        if pages := self.pool.take_invalid_pages(entry.out_loc[: layout.tokens]):
            device.forward.run("clear pages", lambda: self.pool.clear_pages(pages))
        sampled_slots = entry.req_slots[step.sampled]
        needs = self.sampler.needs(sampled_slots)
        if self._grammar_slots and not self._grammar_slots.isdisjoint(slots := sampled_slots.tolist()):
            step.slots = slots
        step.adapters = self._adapters.of_tokens(entry.req_slots[: layout.rows], entry.extend_lens[: layout.rows])
        if step.adapters is None and (graph := self._graph_for(plan, entry)) is not None:
            rows = self._rows(entry, inputs, layout.rows)
            device.forward.run("prepare", lambda: self.attention.prepare(rows, self._page_table))
            device.forward.run("graph", graph.replay)
            step.outputs = graph.outputs
            if not step.slots:
                device.forward.run("sample", lambda: self._finish(step, inputs, needs))
        else:
            device.forward.run("forward", lambda: self._eager(step, inputs, needs))
        if step.slots:
            step.tail = lambda: self._queue_tail(step, inputs, needs)
        else:
            self._queue_end(step)

    def _queue_end(self, step: LaunchedStep) -> None:
        step.computed = self._device.forward.record_event()
        step.end = step.buffer.copy_out(self._device, step.computed, step.plan.num_samples + step.plan.num_rows)

    def _queue_tail(self, step: LaunchedStep, inputs: StepInputs, needs: Needs) -> None:
        """Queue the masks and the sampling of a step with grammars, after its forward, which was queued at launch."""
        masks = self._grammars.masks(step.slots)
        assert masks is not None
        mask = self._masks.copy_in(self._staging.index(step.buffer), masks)
        self._device.forward.run("sample", lambda: self._finish(step, inputs, needs, mask))
        self._queue_end(step)

    def _remember(self, step: LaunchedStep, assignments: list[SlotAssignment]) -> None:
        """Record facts of the assignments on the host for launches before the forward stream has applied them."""
        if self._grammar_slots and step.plan.num_freed:
            step.freed = step.entry.freed[: step.plan.num_freed].copy()
            self._grammar_slots.difference_update(step.freed.tolist())
        if not assignments:
            return
        self.sampler.remember(assignments)
        new = {assignment.slot for assignment in assignments if assignment.grammar is not None}
        if new or self._grammar_slots:
            step.assignments = assignments
            self._grammar_slots.difference_update(assignment.slot for assignment in assignments)
            self._grammar_slots |= new
        for assignment in assignments:
            self._adapters.assign(assignment)
            self._prompt_slots.discard(assignment.slot)
            if assignment.sampling.prompt_logprobs is not None or assignment.sampling.embedding is not None:
                self._prompt_slots.add(assignment.slot)

    def _graph_for(self, plan: StepPlan, entry: RingEntry) -> Graph | None:
        """Return the graph that runs a step; None to run eagerly, as for prompts that need hidden states, and for those
        whose images are not computed: a chunk of a prompt may have one token."""
        rows = plan.num_rows
        if plan.num_tokens != rows:
            return None
        if self._prompt_slots and not self._prompt_slots.isdisjoint(entry.req_slots[:rows].tolist()):
            return None
        if self._sight is not None and not self._sight.are_behind(entry.req_slots[:rows], entry.seq_lens[:rows]):
            return None
        return self.graphs.get(plan.padded_rows)

    def _apply(self, inputs: StepInputs, assignments: list[SlotAssignment]) -> None:
        for assignment in assignments:
            self._logprobs.assign(assignment)  # on all ranks, since the head runs on all
        if self._group.rank == 0:
            self.sampler.assign(inputs.assigned)
            for assignment in assignments:
                self._logits_processors.assign(assignment)
                self._embeddings.assign(assignment)
        if assignments:  # masked positions are read, too, and must not be pages of the slot's previous request
            self._page_table.index_fill_(0, inputs.assigned[:, 0].long(), self._limits.scratch_page)
            if self._sight is not None:
                self._sight.apply(inputs.assigned[:, 0].long(), assignments)
        apply_updates(self._page_table, inputs.page_table_updates, inputs.page_ids)

    def _rows(self, entry: RingEntry, inputs: StepInputs, num_decode: int) -> AttentionRows:
        rows, tokens = inputs.layout.rows, inputs.layout.tokens
        return AttentionRows(
            num_decode=num_decode,
            slots=entry.req_slots[:rows],
            seq_lens=entry.seq_lens[:rows],
            extend_lens=entry.extend_lens[:rows],
            out_loc=entry.out_loc[:tokens],
            device=DeviceRows(inputs.req_slots, inputs.seq_lens, inputs.kv_indptr, inputs.out_loc),
        )

    def _hidden(self, inputs: StepInputs, forward: ModelForward) -> Tensor:
        ids, positions = inputs.input_ids.long(), inputs.positions.long()
        ids = torch.where(ids < 0, self._last_token[(-1 - ids).clamp_(min=0)], ids)
        if self._sight is not None and inputs.layout.tokens == inputs.layout.rows:
            positions = positions - self._sight.shifts[inputs.req_slots.long()]
        return forward(ids, positions, self.attention.attend)

    def _eager(self, step: LaunchedStep, inputs: StepInputs, needs: Needs) -> None:
        layout = inputs.layout
        num_decode = layout.rows if layout.tokens == layout.rows else step.plan.num_decode_rows
        self.attention.prepare(self._rows(step.entry, inputs, num_decode), self._page_table)
        self._adapters.prepare(step.adapters, torch.device(self._info.device))
        hidden = self._hidden(inputs, self._forward_of(step, layout))
        last = inputs.qo_indptr[1:][inputs.sample_rows.long()].long() - 1
        hidden, finite = _finite(hidden)
        bad = torch.nn.functional.pad((~finite).int().cumsum(0), (1, 0))[inputs.qo_indptr.long()]
        step.outputs = Outputs(self.model.logits(hidden[last]), bad[1:] == bad[:-1])
        step.hidden = hidden
        if not step.slots:
            self._finish(step, inputs, needs)

    def _forward_of(self, step: LaunchedStep, layout: Layout) -> ModelForward:
        """Return the model's forward for a step. The compiled one supports neither adapters nor images."""
        entry, rows, model = step.entry, layout.rows, self.model
        seen: Seen | None = None
        if self._sight is not None:
            of_rows = entry.req_slots[:rows], entry.seq_lens[:rows], entry.extend_lens[:rows]
            seen = self._sight.for_step(*of_rows, entry.positions[: layout.tokens])
        if seen is None:
            return self.forward_model if step.adapters is None else model.forward
        assert isinstance(model, Decoder)
        return partial(model.forward, seen=seen)

    def _capturable(self, size: int) -> Callable[[], Outputs]:
        """Return the forward of a step of `size` rows with one token each, to be captured; its inputs are padding."""
        inputs = self._scratch_step([1] * size, num_decode=size)

        def forward() -> Outputs:
            hidden, finite = _finite(self._hidden(inputs, self.model.forward))
            return Outputs(self.model.logits(hidden), finite)

        return forward

    def _scratch_step(self, extend_lens: Sequence[int], num_decode: int) -> StepInputs:
        """Prepare a step of padding rows of these lengths. Its KV goes to the scratch page."""
        limits, rows = self._limits, len(extend_lens)
        lens = np.array(extend_lens, np.int32)
        pages = -(-lens // limits.page_size)
        inputs = StepInputs(self._block, Layout(rows, int(lens.sum())))
        host = AttentionRows(
            num_decode=num_decode,
            slots=np.full(rows, limits.scratch_slot, np.int32),
            seq_lens=lens,
            extend_lens=lens,
            out_loc=np.full(int(lens.sum()), limits.scratch_page * limits.page_size, np.int32),
            device=DeviceRows(inputs.req_slots, inputs.seq_lens, inputs.kv_indptr, inputs.out_loc),
        )

        def prepare() -> None:
            self._block.zero_()
            inputs.req_slots.fill_(limits.scratch_slot)
            inputs.seq_lens.copy_(torch.from_numpy(lens))
            inputs.out_loc.fill_(limits.scratch_page * limits.page_size)
            inputs.kv_indptr.copy_(torch.from_numpy(np.concatenate([[0], np.cumsum(pages)])))
            self.attention.prepare(host, self._page_table)

        self._device.forward.run("prepare", prepare)
        self._device.forward.record_event().synchronize()
        return inputs

    def warm_up(self) -> None:
        """Run decode, prefill and a mixed step, so that kernels are loaded (or compiled: minutes) in advance."""
        longest = min(2, self._limits.max_seq_len)
        with torch.inference_mode():
            self._device.forward.run("warm up", self.model.warm_up)
            self._device.forward.run("warm up", self._warm_up_table)
            for lens, num_decode in (([1], 1), ([longest], 0), ([1, longest], 1)):
                inputs = self._scratch_step(lens, num_decode)

                def forward(inputs: StepInputs = inputs) -> None:
                    logits = self.model.logits(self._hidden(inputs, self.forward_model))
                    slots = inputs.req_slots[:1].long()
                    if self._group.rank == 0:
                        everything = Needs(sampled=True, min_p=True, truncated=True)
                        for one in (logits[:1], _any_may_come(logits[:1])):
                            self.sampler.sample(one, slots, slots, everything)
                    self._group.broadcast(self._staging[0].outputs_device[:1])

                self._device.forward.run("warm up", forward)
                self._device.forward.record_event().synchronize()

    def _warm_up_table(self) -> None:
        """Run a page-table update that changes nothing, to load its kernel."""
        device, limits = self._page_table.device, self._limits
        updates = torch.zeros(1, UPDATE_FIELDS, dtype=torch.int32, device=device)
        updates[0, 0], updates[0, 2] = limits.scratch_slot, 1
        page = torch.full((1,), limits.scratch_page, dtype=torch.int32, device=device)
        apply_updates(self._page_table, updates, page)

    def _finish(self, step: LaunchedStep, inputs: StepInputs, needs: Needs, mask: Mask | None = None) -> None:
        """Sample, broadcast the tokens, write them to `last_token` and to the output buffer. After a graph, the logits
        are those of all rows, padding included, and there are no hidden states."""
        count = step.plan.num_samples
        outputs, hidden = step.outputs, step.hidden
        assert outputs is not None
        step.outputs = step.hidden = None
        if hidden is not None:
            prompts = self._logprobs.prompts(step.plan, step.entry, hidden, self.model.logits)
            step.deferred.prompts = prompts if self._group.rank == 0 else []
            step.deferred.embeddings = self._embeddings.deferred(step.plan, step.entry, hidden)
        out = step.buffer.outputs_device[: count + step.plan.num_rows]
        rows = inputs.sample_rows.long()
        slots = inputs.req_slots[rows].long()
        chosen: Tensor | None = None
        if self._group.rank == 0:
            out[count:] = outputs.finite[: step.plan.num_rows]
            if count:
                logits = outputs.logits
                if hidden is None:
                    logits = logits[:count] if count == step.plan.num_rows else logits[rows]
                chosen = self._sample(step, logits, slots, inputs.seq_lens[rows].long(), needs, mask)
                out[:count] = chosen
        self._group.broadcast(out)
        if count:
            self._last_token[slots] = chosen if chosen is not None else out[:count].long()

    def _sample(
        self,
        step: LaunchedStep,
        logits: Tensor,
        slots: Tensor,
        position: Tensor,
        needs: Needs,
        mask: Mask | None,
    ) -> Tensor:
        entry, sampled = step.entry, step.sampled
        host_slots = entry.req_slots[sampled].astype(np.int64)
        processed = self._logits_processors.apply(logits, host_slots.tolist(), entry.seq_lens[sampled].tolist(), mask)
        chosen = self.sampler.sample(processed, slots, position, needs)
        self._logits_processors.record(chosen, host_slots.tolist())
        step.deferred.sampled = self._logprobs.sampled(sampled, host_slots, logits, chosen)
        return chosen


def _any_may_come(logits: Tensor) -> Tensor:
    """Return a copy of the logits after a grammar mask that allows every id (for warm-up)."""
    logits = logits.to(torch.float32, copy=True)
    row = torch.zeros(1, dtype=torch.int32, device=logits.device)
    bits = torch.full((1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=logits.device)
    mask_tokens(logits, row, bits)
    return logits


def _finite(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return `hidden` [tokens, size] with zeros in tokens that are not finite, and [tokens] bool: which are finite."""
    finite = hidden.isfinite().all(1)
    return hidden.masked_fill(~finite[:, None], 0), finite
