"""Speculative decoding with a small draft model (`--speculative model:FILE`).

The draft model has its own engine and scheduler. Each draft is a request there: its prompt is the sequence so far, and
the draft is its greedy output. Earlier work on a sequence is in its prefix cache, in pages of one or a few tokens. So
nothing has to be undone: pages of rejected drafts, and of sequences that ended or were retracted, stay cached until
others need the space.

Invariants: no request is live and nothing is in flight between two calls; a call computes at most one chunk of new
tokens for all sequences together, and then one forward for each further token; any failure only means fewer drafts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import Engine, EngineInfo, EngineStepError, SlotAssignment
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneError
from minisgl.step import Abort, Arrival, Draft, Event, Events, ForwardFailed, Int32Array, StepPlan
from minisgl.tokenizer import Tokenizer

CHUNK = 256  # new tokens that a call computes at most, besides draft tokens
MEMORY_RATIO = 1 / 8  # fraction of the free memory for the KV pool
PAGE_SIZE = 4  # tokens; at most these are recomputed
NUM_VERDICTS = 16  # recent drafts, of which at least `NUM_RIGHT` must have a right first token
NUM_RIGHT = 2  # for a draft model
NUM_PENDING = 64  # drafts stored for comparison, at most: sequences end
NUM_NEW = 4  # verdicts that are renewed after a rest
REST = (64, 1024)  # skipped calls of the first and of the longest rest; each rest doubles
GREEDY = SamplingParams(temperature=0, seed=0)

_log = logging.getLogger("minisgl.runner")


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that needs up to `count` draft tokens. Cached pages are shared within a `namespace` only."""

    req_id: int
    tokens: Int32Array
    count: int
    namespace: int = 0


class Proposer(Protocol):
    """Proposes draft tokens for running sequences (speculative decoding). It rests if fewer than `min_right` of the
    last `NUM_VERDICTS` first draft tokens were right."""

    min_right: int

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return drafts for those sequences for which it has any."""

    def close(self) -> None: ...


class MtpDrafts:
    """Drafts of the model's own MTP layer, which the CPU engine runs at the end of each step. `draft_tokens` returns
    the token after each sequence, given as (request id, length), or -1."""

    min_right = NUM_VERDICTS // 2  # a draft has one token, and the layer runs for it in each step

    def __init__(self, draft_tokens: Callable[[Sequence[tuple[int, int]]], list[int]]) -> None:
        self._draft_tokens = draft_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        sequences = [(request.req_id, len(request.tokens)) for request in requests]
        found = zip(sequences, self._draft_tokens(sequences), strict=True)
        return [Draft(*sequence, (token,)) for sequence, token in found if token >= 0]

    def close(self) -> None:
        """Do nothing: the layer belongs to the engine."""


class DraftGate:
    """Decides by the recent acceptance of first draft tokens, over all sequences, whether the draft model is used. Each
    sequence also pauses after rejected drafts, but every new one starts afresh, and the model must compute its prompt
    first: so a model that helps no sequence rests as a whole."""

    def __init__(self, min_right: int = NUM_RIGHT) -> None:
        self._min_right = min_right
        self._verdicts: deque[bool] = deque(maxlen=NUM_VERDICTS)
        self._pending: dict[int, Draft] = {}  # drafts not compared yet, by request id
        self._rest = 0  # length of the last rest
        self._left = 0  # calls left of it

    def should_propose(self) -> bool:
        """Return whether to request drafts now. Counts the rest down: call it once per step that can use drafts."""
        self._left = max(0, self._left - 1)
        return self._left == 0

    def record_results(self, requests: Sequence[DraftRequest]) -> None:
        """Compare the drafts of the last call with the current sequences, and start a rest if too few were right."""
        for request in requests:
            draft = self._pending.pop(request.req_id, None)
            if draft is not None and draft.length < len(request.tokens):
                self._verdicts.append(int(request.tokens[draft.length]) == draft.tokens[0])
        if len(self._verdicts) < NUM_VERDICTS:
            return
        if sum(self._verdicts) >= self._min_right:
            self._rest = 0
            return
        self._rest = min(max(2 * self._rest, REST[0]), REST[1])
        self._left = self._rest
        for _ in range(NUM_NEW):
            self._verdicts.popleft()

    def remember(self, drafts: Sequence[Draft]) -> None:
        self._pending |= {draft.req_id: draft for draft in drafts}
        while len(self._pending) > NUM_PENDING:
            del self._pending[next(iter(self._pending))]


@dataclass(slots=True)
class _Sequence:
    request: DraftRequest
    draft: list[int] = field(default_factory=list)


class DraftModel:
    """Draft model with its own engine and scheduler. Drafts end before ids beyond the large model's `vocab_size`."""

    min_right = NUM_RIGHT

    def __init__(self, engine: Engine, control_plane: ControlPlane, vocab_size: int) -> None:
        self.engine = engine
        self.control_plane = control_plane
        self._vocab_size = vocab_size
        self._step = 0
        self._next_id = 0
        self._owners: dict[int, _Sequence] = {}  # live sequences by request id
        self._failed: list[Event] = []  # for the next step
        self._known_lens: dict[int, int] = {}  # computed lengths of the last call's sequences, by request id
        self._broken = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        sequences = [_Sequence(request) for request in requests if self._fits(request)]
        known_lens = self._known_lens
        # fewest new tokens first
        sequences.sort(key=lambda one: len(one.request.tokens) - known_lens.get(one.request.req_id, 0))
        if self._broken or not sequences:
            return []
        try:
            self._run(sequences)
        except ControlPlaneError as error:
            self._broken = True
            _log.warning("--speculative: the draft model is switched off: its scheduler failed: %s", error)
            return []
        except EngineStepError as error:
            self._failed = [ForwardFailed(self._step - 1), *map(Abort, self._owners)]
            _log.warning("--speculative: a forward of the draft model failed: %s", error)
        self._known_lens = {
            request.req_id: len(request.tokens) if sequence.draft else known_lens.get(request.req_id, 0)
            for sequence in sequences
            for request in (sequence.request,)
        }
        drafts = [(sequence.request, self._within_vocabulary(sequence.draft)) for sequence in sequences]
        return [Draft(request.req_id, len(request.tokens), tokens) for request, tokens in drafts if tokens]

    def close(self) -> None:
        self.engine.close()

    def _fits(self, request: DraftRequest) -> bool:
        """Return true if the draft model can compute the sequence. It cannot with images, whose ids are virtual."""
        fits = len(request.tokens) + request.count <= self.control_plane.buffers.limits.max_seq_len
        return fits and int(request.tokens.max()) < self.engine.info.vocab_size

    def _within_vocabulary(self, tokens: Sequence[int]) -> tuple[int, ...]:
        beyond = (i for i, token in enumerate(tokens) if token >= self._vocab_size)
        return tuple(tokens[: next(beyond, len(tokens))])

    def _run(self, sequences: Sequence[_Sequence]) -> None:
        """Compute until every sequence has its draft. A sequence without a token after the first step has too many new
        tokens: what was computed is cached, and the next call continues from there."""
        events = Events(self._failed)
        self._failed = []
        self._owners.clear()
        for sequence in sequences:
            self._owners[self._next_id] = sequence
            tokens, request = sequence.request.tokens, sequence.request
            events.add(Arrival(self._next_id, tokens, len(tokens), request.count, namespace=request.namespace))
            self._next_id += 1
        while self._owners:
            self._compute(events)
            events = Events([Abort(number) for number, sequence in self._owners.items() if not sequence.draft])

    def _compute(self, events: Events) -> None:
        plane = self.control_plane
        self._step += 1
        plan = plane.schedule(self._step - 1, events)
        result = self.engine.launch(plan, plane.buffers, self._assignments(plan)).wait()
        output = plane.commit(plan.step, result.tokens)
        columns = output.req_ids.tolist(), output.tokens.tolist(), output.reasons.tolist()
        for number, token, reason in zip(*columns, strict=True):
            sequence = self._owners.pop(number, None) if reason else self._owners[number]
            if token >= 0 and sequence is not None:  # a failed step has none
                sequence.draft.append(token)

    def _assignments(self, plan: StepPlan) -> list[SlotAssignment]:
        entry = self.control_plane.buffers.ring[plan.ring_index]
        slots = entry.assigned[: plan.num_assigned, 0].tolist()
        numbers = entry.assigned_ids[: plan.num_assigned].tolist()
        sequences = [self._owners[number].request.tokens for number in numbers]
        return [
            SlotAssignment(slot, number, GREEDY, tokens, len(tokens))
            for slot, number, tokens in zip(slots, numbers, sequences, strict=True)
        ]


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of the draft model. Its KV pool holds all sequences that can be drafted at once, at full
    length, but takes at most an eighth of the free memory."""
    return EngineConfig(
        model=config.draft_model or "",
        model_source=config.model_source,
        engine="cpu",
        activations=config.activations,
        page_size=PAGE_SIZE,
        memory=config.memory,
        memory_ratio=MEMORY_RATIO,
        max_running_requests=max(1, config.rows_on("cpu") // (1 + config.max_draft_len)),
        max_prefill_length=CHUNK,
        num_threads=config.num_threads,
        cpu_backend=config.cpu_backend,
    )


def check_vocabulary(config: EngineConfig, large: EngineInfo, small: EngineInfo) -> None:
    """Raise `ConfigError` if the two vocabularies differ in an id that both have. One may have further ids at the end:
    sequences with such ids get no drafts, and drafts with them are truncated."""
    flag = f"--speculative {config.speculative}"
    if large.model_dir is None or small.model_dir is None:
        raise ConfigError(f"{flag}: not supported with --engine {large.name}, which has no model vocabulary")
    ours, theirs = Tokenizer.load(large.model_dir), Tokenizer.load(small.model_dir)
    for i in range(min(ours.num_ids, theirs.num_ids)):
        if ours.token_bytes(i) != theirs.token_bytes(i):
            raise ConfigError(
                f"{flag}: the draft model's vocabulary differs from that of --model {config.shown_model}: id {i} is "
                f"{theirs.token_bytes(i)!r}, not {ours.token_bytes(i)!r}"
            )
