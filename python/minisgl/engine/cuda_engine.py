"""The engine for CUDA devices: one copy in, one forward, one copy out a step, each queued without waiting.

It orders them through `device.py` alone; on `InlineDevice` the same engine runs on the CPU.

A step with a row that has a grammar is launched as any other, but for its sampling: that is queued when the step before
is resolved, because only then its tokens, and so the masks, are known. The device computes the forward meanwhile.

With several ranks each does all of this on its shard, except sampling. Collectives are jobs of the forward stream:
ranks that get the same steps call the same ones in the same order. Rank 0 has the logits; one broadcast a step gives
the others the tokens and which rows are finite. (Its own hidden states show that: a NaN of any rank is in the next sum,
which all ranks get.) So all ranks fail the same rows.

Which errors of a step leave a CUDA engine usable.

CUDA graphs of steps whose rows all have one token: which sizes, and captured forwards by size.

A step that a CUDA engine has launched: its outputs, once they are on the host.

Invariants: a launch waits for the device only where a step of two launches ago has not ended; a plan's slots,
page-table updates and rows take effect in the forward stream, in launch order; a token that the host doesn't know yet
comes from `last_token`, which the forward before wrote; a row with NaN or infinities has no token, and its pages are
zeroed before others write there. Only an error that is known to leave the CUDA context whole ends one step alone;
after any other the engine is dead, and its process must end. If one of several ranks fails, the others wait in a
collective. A step runs as a graph only at exactly its
padded size; a captured forward reads and writes the same places each time. Graphs share memory, so the largest is
captured first. Its outputs leave the staging buffer once, when it is resolved, whoever asks first; what of it waits for
the step before it is queued when that is resolved, before anything of a later step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttentionRows, KVPool
from minisgl.attention.api import DeviceRows
from minisgl.config import ConfigError
from minisgl.distributed import ALONE, Group, GroupError
from minisgl.engine.api import (
    NOT_FINITE_TEXT,
    EngineInfo,
    EngineStepError,
    PromptLogprobs,
    SlotAssignment,
    StepHandle,
    StepLogprobs,
    StepResult,
)
from minisgl.engine.device import (
    Device,
    DeviceEvent,
    DeviceMasks,
    DeviceSampler,
    Layout,
    Needs,
    Renormalise,
    StagingBuffer,
    StepInputs,
    copy,
)
from minisgl.engine.sampler import LogitsProcessors, LogprobSlots, Mask
from minisgl.engine.torch_adapters import Pairs, TorchAdapters
from minisgl.grammar.slots import GrammarSlots
from minisgl.kernels.ops import UPDATE_FIELDS, apply_updates, mask_tokens
from minisgl.models.api import Attend, Model
from minisgl.step import NOT_FINITE, Int32Array, Int64Array, RingEntry, StepBuffers, StepLimits, StepPlan
from minisgl.utils.progress import Report


class EngineDeadError(RuntimeError):
    """The device's context is broken, or may be: no later step can be trusted."""


def step_failure(step: int, error: BaseException, ranks: int = 1) -> EngineStepError | EngineDeadError | GroupError:
    """What `error`, raised by the launch of `step` or by waiting for it, means for an engine that is one of `ranks`."""
    if isinstance(error, EngineStepError | EngineDeadError | GroupError):
        return error
    if isinstance(error, torch.OutOfMemoryError):  # the allocator refused; nothing was launched
        text = f"{str(error).splitlines()[0]} (lower --memory-ratio or --max-prefill-length)"
        return EngineStepError(text) if ranks == 1 else EngineDeadError(f"step {step}: {text}")
    return EngineDeadError(f"step {step}: {type(error).__name__}: {error}: the CUDA engine cannot go on")


DEFAULT_MAX_BS = 256
_STEP = 16


def graph_sizes(max_bs: int | None, max_rows: int) -> tuple[int, ...]:
    """Padded sizes, ascending: 1, 2, 4, 8, then every 16 up to the largest, `max_bs` or what `max_rows` rows need.
    0: none. Raises `ConfigError`."""
    if max_bs is not None and max_bs < 0:
        raise ConfigError(f"--cuda-graph-max-bs {max_bs}: must be at least 0 (0: no graphs)")
    top = min(DEFAULT_MAX_BS if max_bs is None else max_bs, max_rows)
    if top == 0:
        return ()
    return tuple(sorted({size for size in (1, 2, 4, 8, *range(_STEP, top, _STEP)) if size < top} | {top}))


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a forward leaves: logits [rows, vocab], and which rows are finite, [rows] bool."""

    logits: Tensor
    finite: Tensor


class Graph(Protocol):
    outputs: Outputs

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Outputs]], Graph]


class CudaCapture:
    """Captures with torch; all graphs share one memory pool, whose size the largest decides."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Outputs]) -> Graph:
        with torch.cuda.stream(self._stream):
            forward()  # libraries choose and load their kernels now
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # another thread may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = forward()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class RunAgain:
    """Stands in for a graph where there are none: runs the forward again, and copies into the first outputs."""

    def __init__(self, forward: Callable[[], Outputs]) -> None:
        self._forward = forward
        self.outputs = forward()
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        with torch.inference_mode():
            again = self._forward()
            if all(self.outputs.logits.stride()):  # ranks without logits have a view of one number
                self.outputs.logits.copy_(again.logits)
            self.outputs.finite.copy_(again.finite)


def capture_all(
    sizes: tuple[int, ...],
    forward_of: Callable[[int], Callable[[], Outputs]],
    capture: Capture,
    say: Report,
    free_bytes: Callable[[], int] = lambda: 0,
) -> dict[int, Graph]:
    """Capture the forward of each size, the largest first; reports the progress and the memory that it took."""
    began, before = time.monotonic(), free_bytes()
    graphs: dict[int, Graph] = {}
    for done, size in enumerate(sorted(sizes, reverse=True), 1):
        graphs[size] = capture(forward_of(size))
        say("capturing CUDA graphs", done, len(sizes))
    if sizes:
        taken = max(0, before - free_bytes()) / 2**20
        say(f"CUDA graphs: {len(sizes)} sizes up to {max(sizes)}, {taken:.0f} MiB, {time.monotonic() - began:.1f} s")
    return graphs


class DeferredLogprobs:
    """Log probabilities that a forward computes; each call copies some to the host, once the forward is done."""

    def __init__(self) -> None:
        self.sampled: Callable[[], StepLogprobs] | None = None
        self.prompts: list[Callable[[], PromptLogprobs]] = []


class LaunchedStep:
    """A `StepHandle`."""

    def __init__(self, engine: CudaEngine, plan: StepPlan, entry: RingEntry, buffer: StagingBuffer) -> None:
        self._engine = engine
        self.plan = plan  # it and the entry are read by the forward only: a later step may have them
        self.entry = entry
        self.buffer = buffer
        self.freed: Int32Array = entry.freed[:0]  # slots that grammars must hear of
        self.assignments: Sequence[SlotAssignment] = ()  # the same
        self.slots: list[int] = []  # of the sampled rows, if one of them has a grammar
        self.outputs: Outputs | None = None  # of its forward, until it is sampled
        self.hidden: Tensor | None = None
        self.adapters: Int64Array | None = None  # by token, if any has one
        self.tail: Callable[[], None] | None = None  # queues its sampling, which a grammar makes wait
        self._before: LaunchedStep | None = None
        self._after: LaunchedStep | None = None
        self.sampled = entry.sample_rows[: plan.num_samples].astype(np.int64)
        self._row_slots = entry.req_slots[: plan.num_rows].copy()
        self._step = plan.step
        self._num_rows = plan.num_rows
        self.logprobs = DeferredLogprobs()
        self.start: DeviceEvent | None = None
        self.computed: DeviceEvent | None = None  # the forward has ended
        self.end: DeviceEvent | None = None  # the outputs are on the host
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._failure: EngineStepError | None = None
        self._span = (0.0, 0.0)

    @property
    def is_resolved(self) -> bool:
        return self._result is not None or self._error is not None

    def follow(self, before: LaunchedStep | None) -> None:
        """Begin when `before` is resolved, or now."""
        if before is None or before.is_resolved:
            self._begin()
        else:
            self._before, before._after = before, self

    def _begin(self) -> None:
        try:
            self._engine.begin(self)
        except (RuntimeError, MemoryError, GroupError) as error:
            self._error = self._engine.failure(self._step, error)

    def fail(self, failure: EngineStepError, queued: DeviceEvent) -> None:
        """The launch stopped half way; what it had queued has ended at `queued`."""
        self._failure = failure
        self.computed = self.end = queued

    def resolve(self) -> None:
        """Wait for its end and keep its result or error, so that its staging buffer can be used again."""
        if self._before is not None:
            self._before.resolve()
        if self.is_resolved:
            return
        self._resolve()
        if (after := self._after) is not None:
            self._after = after._before = None
            after._begin()

    def _resolve(self) -> None:
        if self.end is None:
            self._error = EngineDeadError(f"step {self._step} was not launched to its end")
            return
        try:
            self.end.synchronize()
            if self._failure is not None:
                raise self._failure
            assert self.start is not None and self.computed is not None
            now = time.perf_counter()
            self._span = (now - self.computed.seconds_since(self.start), now)
            self._result = self._read()
        except (RuntimeError, MemoryError, GroupError) as error:
            self._error = self._engine.failure(self._step, error)

    def _read(self) -> StepResult:
        tokens = np.full(self._num_rows, -1, np.int32)
        if not self._num_rows:
            return StepResult(tokens)
        count = len(self.sampled)
        outputs = self.buffer.outputs_host[: count + self._num_rows].numpy()
        not_finite = np.flatnonzero(outputs[count:] == 0)
        failures: dict[int, str] = {}
        if self.slots:
            outputs = outputs.copy()
            failed = self._engine.record(self, outputs)
            failures = {int(self.sampled[i]): text for i, text in failed.items()}
        tokens[self.sampled] = outputs[:count]
        if len(not_finite):
            self._engine.spoil(self._row_slots[not_finite])
            tokens[not_finite] = NOT_FINITE
            failures |= dict.fromkeys(not_finite.tolist(), NOT_FINITE_TEXT)
        logprobs = None if self.logprobs.sampled is None else self.logprobs.sampled()
        return StepResult(tokens, logprobs, [fetch() for fetch in self.logprobs.prompts], failures)

    def wait(self) -> StepResult:
        self.resolve()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        if self.is_resolved:
            return True
        try:
            return self.end is not None and self.end.query()
        except RuntimeError:  # the device has failed: `wait` says how
            return True

    def span(self) -> tuple[float, float]:
        return self._span


NUM_BUFFERS = 2  # overlap depth one: a step is waited for before the second launch after it
ModelForward = Callable[[Tensor, Tensor, Attend], Tensor]


class CudaEngine:
    def __init__(
        self,
        model: Model,
        info: EngineInfo,
        pool: KVPool,
        attention: AttentionBackend,
        device: Device,
        limits: StepLimits,
        *,
        group: Group = ALONE,
        capture: Capture | None = None,
        renormalise: Renormalise | None = None,
        forward: ModelForward | None = None,
        say: Report = lambda text, done=0, total=0: None,
        free_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`info.graph_sizes` are captured with `capture`; `forward` is the model's, or a compiled one."""
        self.model = model
        self._info = info
        self.pool = pool
        self.attention = attention
        self._device = device
        self._group = group
        self._dead = False
        self.forward_model = forward or model.forward
        place = torch.device(info.device)
        slots = limits.max_rows + 1
        self._page_table = torch.full(
            (slots, limits.max_pages_per_request), limits.scratch_page, dtype=torch.int32, device=place
        )
        self._last_token = torch.zeros(slots, dtype=torch.int64, device=place)
        self.sampler = DeviceSampler(slots, place, renormalise)
        self._logits_processors = LogitsProcessors(info.vocab_size, info.eos_ids, place)
        self._logprobs = LogprobSlots(slots)
        max_padded = max(limits.max_rows, *info.graph_sizes, 1)
        size = Layout.largest(limits, max_padded).size
        # inputs of the step that the forward stream is at
        self._block = torch.zeros(size, dtype=torch.int32, device=place)
        self._staging = [StagingBuffer(device, place, size, max_padded) for _ in range(NUM_BUFFERS)]
        device.synchronize()
        self._steps: list[LaunchedStep | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._limits = limits
        self._grammars = GrammarSlots(info.vocab_size, info.eos_ids)  # as of the last step that was resolved
        self._grammar_slots: set[int] = set()  # as of the last step that was launched
        self._adapters = TorchAdapters(model, slots)
        self._masks = DeviceMasks(device, place, info.vocab_size, limits.max_rows, NUM_BUFFERS)
        self._prompt_slots: set[int] = set()  # whose requests want log probabilities of their prompts
        self.graphs: dict[int, Graph] = {}
        if capture is not None and info.graph_sizes:
            with torch.inference_mode():
                self.graphs = capture_all(info.graph_sizes, self._capturable, capture, say, free_bytes)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        """Raises `EngineDeadError`, `GroupError`."""
        turn = self._turn = (self._turn + 1) % NUM_BUFFERS
        if (same_buffer := self._steps[turn]) is not None:
            same_buffer.resolve()
        before = self._steps[turn - 1]
        step = self._steps[turn] = LaunchedStep(self, plan, buffers.ring[plan.ring_index], self._staging[turn])
        try:
            with torch.inference_mode():
                self._queue(step, list(assignments))
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
        """In the order of steps: what grammars allow after the step before is known now."""
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
        self._device.forward.run("adapter", lambda: self._adapters.add(number, adapter))

    def remove_adapter(self, number: int) -> None:
        self._device.forward.run("adapter", lambda: self._adapters.remove(number))

    def spoil(self, slots: Int32Array) -> None:
        """In the forward stream, where all launched steps have their pages in the table."""
        self._device.forward.run("spoil", lambda: self.pool.spoil_rows(self._page_table, slots))

    def wipe(self) -> None:
        """Zero the KV pool, in the forward stream."""

        def clear() -> None:
            with torch.inference_mode():
                self.pool.clear()

        self._device.forward.run("wipe", clear)

    def close(self) -> None:
        """Frees the graphs, too: a communicator in one of them could not end. A dead engine's steps may never end: they
        are not waited for."""
        for step in self._steps:
            if step is not None and not self._dead:
                step.resolve()
        self.graphs.clear()

    def failure(self, step: int, error: BaseException) -> EngineStepError | EngineDeadError | GroupError:
        """What `error` in `step` means."""
        found = step_failure(step, error, self._group.size)
        self._dead |= not isinstance(found, EngineStepError)
        return found

    # ---------------------------------------------------------------------------------------------------- one step

    def _queue(self, step: LaunchedStep, assignments: list[SlotAssignment]) -> None:
        plan, entry, staging = step.plan, step.entry, step.buffer
        device, layout = self._device, Layout.of(plan, len(assignments))
        staging.copy_in(device, layout, entry, assignments)
        step.start = device.forward.record_event()
        size, block = layout.size, self._block
        device.forward.run("take in", lambda: copy(block[:size], staging.inputs_device[:size]))
        inputs = StepInputs(block, layout)
        device.forward.run("apply", lambda: self._apply(inputs, assignments))
        self._remember(step, assignments)
        if not plan.num_rows:
            step.computed = step.end = device.forward.record_event()
            return
        if pages := self.pool.begin(entry.out_loc[: layout.tokens]):
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
        """The sampling of a step with grammars, which its forward did not wait for."""
        masks = self._grammars.masks(step.slots)
        assert masks is not None
        mask = self._masks.copy_in(self._staging.index(step.buffer), masks)
        self._device.forward.run("sample", lambda: self._finish(step, inputs, needs, mask))
        self._queue_end(step)

    def _remember(self, step: LaunchedStep, assignments: list[SlotAssignment]) -> None:
        """The host's part of an assignment, for launches before the forward stream has applied it."""
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
            if assignment.sampling.prompt_logprobs is not None:
                self._prompt_slots.add(assignment.slot)

    def _graph_for(self, plan: StepPlan, entry: RingEntry) -> Graph | None:
        """None: eager. A graph leaves no hidden states, which log probabilities of prompts need."""
        if plan.num_tokens != plan.num_rows:
            return None
        if self._prompt_slots and not self._prompt_slots.isdisjoint(entry.req_slots[: plan.num_rows].tolist()):
            return None
        return self.graphs.get(plan.padded_rows)

    def _apply(self, inputs: StepInputs, assignments: list[SlotAssignment]) -> None:
        for assignment in assignments:
            self._logprobs.assign(assignment)  # prompts go through the head on all ranks
        if self._group.rank == 0:
            self.sampler.assign(inputs.assigned)
            for assignment in assignments:
                self._logits_processors.assign(assignment)
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
        ids = inputs.input_ids.long()
        ids = torch.where(ids < 0, self._last_token[(-1 - ids).clamp_(min=0)], ids)
        return forward(ids, inputs.positions.long(), self.attention.attend)

    def _eager(self, step: LaunchedStep, inputs: StepInputs, needs: Needs) -> None:
        layout = inputs.layout
        num_decode = layout.rows if layout.tokens == layout.rows else step.plan.num_decode_rows
        self.attention.prepare(self._rows(step.entry, inputs, num_decode), self._page_table)
        self._adapters.prepare(step.adapters, torch.device(self._info.device))
        # what was compiled knows no adapters
        hidden = self._hidden(inputs, self.forward_model if step.adapters is None else self.model.forward)
        last = inputs.qo_indptr[1:][inputs.sample_rows.long()].long() - 1
        hidden, finite = _finite(hidden)
        bad = torch.nn.functional.pad((~finite).int().cumsum(0), (1, 0))[inputs.qo_indptr.long()]
        step.outputs = Outputs(self.model.logits(hidden[last]), bad[1:] == bad[:-1])
        step.hidden = hidden
        if not step.slots:
            self._finish(step, inputs, needs)

    def _capturable(self, size: int) -> Callable[[], Outputs]:
        """The forward of a step of `size` rows with one token each. Its own inputs are padding."""
        inputs = self._scratch_step([1] * size, num_decode=size)

        def forward() -> Outputs:
            hidden, finite = _finite(self._hidden(inputs, self.model.forward))
            return Outputs(self.model.logits(hidden), finite)

        return forward

    def _scratch_step(self, extend_lens: Sequence[int], num_decode: int) -> StepInputs:
        """Prepare a step of padding rows of these lengths; what they store goes to the scratch page."""
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
        """Run decode, prefill and both, so that kernels are loaded (or compiled: minutes) before requests come."""
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
        """Write what is there already."""
        place, limits = self._page_table.device, self._limits
        updates = torch.zeros(1, UPDATE_FIELDS, dtype=torch.int32, device=place)
        updates[0, 0], updates[0, 2] = limits.scratch_slot, 1
        page = torch.full((1,), limits.scratch_page, dtype=torch.int32, device=place)
        apply_updates(self._page_table, updates, page)

    def _finish(self, step: LaunchedStep, inputs: StepInputs, needs: Needs, mask: Mask | None = None) -> None:
        """Sample, broadcast the tokens, write them to `last_token` and for the copy out. After a graph, logits are of
        all rows, padding included, and there are no hidden states."""
        count = step.plan.num_samples
        outputs, hidden = step.outputs, step.hidden
        assert outputs is not None
        step.outputs = step.hidden = None
        if hidden is not None:
            prompts = self._logprobs.deferred_prompts(step.plan, step.entry, hidden, self.model.logits)
            step.logprobs.prompts = prompts if self._group.rank == 0 else []
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
        step.logprobs.sampled = self._logprobs.deferred_sampled(sampled, host_slots, logits, chosen)
        return chosen


def _any_may_come(logits: Tensor) -> Tensor:
    """A copy through the mask of a grammar that allows every id."""
    logits = logits.to(torch.float32, copy=True)
    row = torch.zeros(1, dtype=torch.int32, device=logits.device)
    bits = torch.full((1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=logits.device)
    mask_tokens(logits, row, bits)
    return logits


def _finite(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """With zeros for the tokens of which some number is not, and which those are not."""
    finite = hidden.isfinite().all(1)
    return hidden.masked_fill(~finite[:, None], 0), finite
