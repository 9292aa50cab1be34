"""An engine without a model whose output proves the scheduler right: each token depends on every KV entry before it.

Its KV has two layers. The first stores (token, position) at out_loc. The second stores a hash of the row's whole
first-layer history, read through the page table. The next token is a hash of the row's whole second-layer history, the
request's seed and the position. So a page with a wrong parent, read too early or overwritten too soon changes the
output.

An adapter has no weights either: its id is stored with each token, so a page of another adapter changes the output.

With `checkpoints` the engine also has recurrent states: the state of a sequence is a hash folded token by token, and
the next token depends on it. So a state that is copied too late, saved one token off, or into a wrong slot changes the
output.

With several ranks each rank holds all of that and contributes a partial sum of each history hash to an all-reduce, so
that a plan that is wrong on any rank changes the output; rank 0 samples the tokens and broadcasts them.

Temperature, top-k and the like have no effect: the output depends on the prompt and the seed alone. Log probabilities
are synthetic, so that their transport can be tested: the sampled token has probability 1/2, the ids that follow it in
the vocabulary (wrapping around) 1/4, 1/8, and so on.

Invariants: as in a real forward, all rows store a layer before any row reads it; slots, page-table updates and rows
take effect in launch order, in the worker thread; a slot's page-table row is poisoned when the slot is assigned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minisgl.distributed import ALONE, Group
from minisgl.engine.api import (
    NOT_FINITE_TEXT,
    EngineInfo,
    EngineStepError,
    PromptLogprobs,
    SlotAssignment,
    StepHandle,
    StepLogprobs,
    StepResult,
    StoredPages,
)
from minisgl.engine.worker import ForwardThread
from minisgl.grammar.slots import GrammarSlots, Matcher
from minisgl.step import FROM_STORE, NOT_FINITE, Int32Array, Int64Array, RingEntry, StepBuffers, StepPlan
from minisgl.weights.adapter import load_adapter_config

U64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1
MAX_INT32 = 2**31 - 1

VOCAB_SIZE = 258  # bytes, end and beginning of sequence: the ids of the echo tokenizer
EOS_ID = 256
ADAPTER_BITS = 32  # low bits of a stored token are its id, those above are the adapter
ALPHABET = tuple(b"etaoinshrdlucmfw      ")
EOS_ONE_IN = 64


def mix(value: int, salt: int) -> int:
    """Return a 64-bit hash of two integers: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (value + (salt + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _mix(value: U64, salt: U64) -> U64:
    """Return `mix` of each pair of elements; uint64 arithmetic wraps by itself."""
    x: U64 = value + (salt + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def synthetic_logprobs(
    tokens: Sequence[int], counts: Sequence[int], vocab_size: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return synthetic log probabilities: one for each token, and ids and values of `counts[i]` alternatives each."""
    ids = [[(token + i) % vocab_size for i in range(count)] for token, count in zip(tokens, counts, strict=True)]
    logprobs = [[(i + 1) * math.log(0.5) for i in range(count)] for count in counts]
    return [math.log(0.5)] * len(tokens), ids, logprobs


def allowed_token(bits: Int32Array, state: int) -> int:
    """Return one of the token ids whose bits are set in the mask `bits`, chosen by `state`."""
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(allowed[state % len(allowed)])


class EchoEngine:
    """The echo engine. It generates ids of `alphabet`; about one token in `EOS_ONE_IN` is an id of `eos_ids`. With
    empty `eos_ids` it never ends a sequence.

    For tests: the forwards of steps in `fail_steps` write garbage and raise `EngineStepError`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_seq_len: int,
        context_len: int,
        vocab_size: int = VOCAB_SIZE,
        eos_ids: tuple[int, ...] = (EOS_ID,),
        alphabet: Sequence[int] = ALPHABET,
        worker_thread: bool = True,
        group: Group = ALONE,
        checkpoints: int | None = None,
    ) -> None:
        self._info = EngineInfo(
            "echo",
            None,
            vocab_size,
            context_len,
            eos_ids,
            num_pages,
            page_size,
            "cpu",
            "none",
            num_checkpoints=checkpoints,
        )
        self._page_size = page_size
        self._alphabet = np.array(alphabet, np.int32)
        self._eos_ids = eos_ids
        self._group = group
        self.fail_steps: set[int] = set()
        self.broken_adapters: dict[int, int] = {}  # adapter id to the position from which on its output is not finite
        num_slots = (num_pages + 2) * page_size  # one page for padding rows, one that poisoned entries point to
        self._poison_page = num_pages + 1
        self._tokens = np.full(num_slots, 0xDEAD, np.uint64)
        self._positions = np.full(num_slots, 0xBEEF, np.uint64)
        self._hashes = np.full(num_slots, 0xDEADBEEF, np.uint64)
        self._page_table = np.full((max_rows + 1, -(-max_seq_len // page_size)), self._poison_page, np.int64)
        self._page_table[max_rows] = num_pages
        self._last_token = np.zeros(max_rows + 1, np.int32)
        self._seeds = np.zeros(max_rows + 1, np.uint64)
        self._adapters = np.zeros(max_rows + 1, np.uint64)
        self._states = None if checkpoints is None else States(max_rows, checkpoints)
        self._stored: dict[int, StoredPages | None] = {}  # by slot
        self._grammars = GrammarSlots(vocab_size, eos_ids)
        self._scored: dict[int, SlotAssignment] = {}  # assignments of requests with log probabilities, by slot
        self._thread = ForwardThread("echo-forward", threaded=worker_thread)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        return self._thread.submit(lambda: self._forward(plan, entry, assigned))

    def read_adapter(self, folder: str) -> None:
        """Check that `folder` holds an adapter; nothing is loaded. Raises `ConfigError` if it does not."""
        load_adapter_config(Path(folder))

    def add_adapter(self, number: int, adapter: None) -> None:
        """Accept the adapter; it has no weights, and only its id affects the output."""

    def remove_adapter(self, number: int) -> None:
        pass

    def close(self) -> None:
        self._thread.close()

    # ----------------------------------------------------------------------------------------------------- forward

    def _forward(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> StepResult:
        self._bind(plan, entry, assignments)
        rows = plan.padded_rows
        num_tokens = int(entry.qo_indptr[rows])
        out_loc = entry.out_loc[:num_tokens]
        if plan.step in self.fail_steps:
            self._tokens[out_loc] = self._hashes[out_loc] = np.uint64(0xBAD)
            raise EngineStepError(f"step {plan.step} fails on purpose")
        tokens = np.full(plan.num_rows, -1, np.int32)
        if not rows:
            return StepResult(tokens)

        ids = entry.input_ids[:num_tokens]
        ids = np.where(ids < 0, self._last_token[np.where(ids < 0, -1 - ids, 0)], ids)
        slots, seq_lens = entry.req_slots[:rows].astype(np.int64), entry.seq_lens[:rows].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(seq_lens)])
        index = np.arange(starts[-1]) - np.repeat(starts[:-1], seq_lens)
        pages = self._page_table[np.repeat(slots, seq_lens), index // self._page_size]
        history = pages * self._page_size + index % self._page_size
        salt = index.astype(np.uint64)

        adapters = np.repeat(self._adapters[slots], entry.extend_lens[:rows])
        self._tokens[out_loc] = ids.astype(np.uint64) + (adapters << np.uint64(ADAPTER_BITS))
        self._positions[out_loc] = entry.positions[:num_tokens].astype(np.uint64)
        seen = self._share(_mix(_mix(self._tokens[history], self._positions[history]), salt))
        first = np.cumsum(seen, dtype=np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), first])[starts[:-1]]
        row_of_token = np.repeat(np.arange(rows), entry.extend_lens[:rows])
        at = starts[:-1][row_of_token] + entry.positions[:num_tokens]
        sums = self._sum(first[at] - before[row_of_token])
        self._hashes[out_loc] = _mix(sums, entry.positions[:num_tokens].astype(np.uint64))
        broken = self._broken_rows(entry, row_of_token, out_loc)
        states = np.zeros(rows, np.uint64)
        if self._states is not None:
            adapted = ids.astype(np.uint64) + (adapters << np.uint64(ADAPTER_BITS))
            states = self._states.forward(plan, entry, adapted.tolist(), self._stored)
        broken = broken[broken < plan.num_rows]  # padding rows have slots of their own, and no request

        second = np.cumsum(self._share(_mix(self._hashes[history], salt)), dtype=np.uint64)
        before = np.concatenate([np.zeros(1, np.uint64), second])[starts[:-1]]
        sampled = entry.sample_rows[: plan.num_samples]
        failures: dict[int, str] = {}
        if len(sampled):
            sums = self._sum(second[starts[1:][sampled] - 1] - before[sampled]) + states[sampled]
            state = _mix(_mix(sums, self._seeds[slots[sampled]]), seq_lens[sampled].astype(np.uint64))
            mine, failed = self._sample(state, slots[sampled].tolist())
            failures = {int(sampled[i]): text for i, text in failed.items()}
            tokens[sampled] = self._last_token[slots[sampled]] = self._from_rank_0(mine)
        tokens[broken] = NOT_FINITE
        failures |= dict.fromkeys(broken.tolist(), NOT_FINITE_TEXT)
        return StepResult(tokens, self._logprobs(sampled, slots, tokens), self._prompt_logprobs(plan, entry), failures)

    def _bind(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> None:
        self._grammars.free(entry.freed[: plan.num_freed])
        for assignment in assignments:
            self._page_table[assignment.slot] = self._poison_page
            self._grammars.assign(assignment.slot, assignment.grammar, assignment.generated())
            self._scored.pop(assignment.slot, None)
            if assignment.sampling.logprobs is not None or assignment.sampling.prompt_logprobs is not None:
                self._scored[assignment.slot] = assignment
            self._seeds[assignment.slot] = (assignment.sampling.seed or 0) & MASK
            self._adapters[assignment.slot] = assignment.sampling.adapter
            self._stored[assignment.slot] = assignment.stored
        at = 0
        for slot, column, count in entry.page_table_updates[: plan.num_page_table_updates].tolist():
            self._page_table[slot, column : column + count] = entry.page_ids[at : at + count]
            at += count
        for slot, column, count in entry.page_loads[: plan.num_page_loads].tolist():
            if (stored := self._stored[slot]) is None:
                raise EngineStepError(f"slot {slot}: there are no staged pages to load")
            for index in range(column, column + count):
                self._load(int(self._page_table[slot, index]), stored.page(index))

    def _load(self, page: int, data: bytes) -> None:
        at = slice(page * self._page_size, (page + 1) * self._page_size)
        parts = np.frombuffer(data, np.uint64).reshape(3, self._page_size)
        self._tokens[at], self._positions[at], self._hashes[at] = parts

    def _broken_rows(self, entry: RingEntry, row_of_token: Int64Array, out_loc: Int32Array) -> Int64Array:
        if not self.broken_adapters:
            return np.empty(0, np.int64)
        adapters = self._adapters[entry.req_slots[row_of_token]].tolist()
        first = np.array([self.broken_adapters.get(adapter, MAX_INT32) for adapter in adapters], np.int64)
        broken = entry.positions[: len(out_loc)] >= first
        self._tokens[out_loc[broken]] = np.uint64(0xBAD)
        return np.unique(row_of_token[broken])

    def _share(self, values: U64) -> U64:
        """Return this rank's partial values; those of all ranks add up to `values`."""
        rank, size = self._group.rank, self._group.size
        if rank:
            return _mix(values, np.array([rank], np.uint64))
        others = [_mix(values, np.array([other], np.uint64)) for other in range(1, size)]
        return np.subtract(values, sum(others)) if others else values

    def _sum(self, shares: U64) -> U64:
        if self._group.size == 1:
            return shares
        import torch  # needed only with several ranks

        return self._group.all_reduce(torch.from_numpy(shares.astype(np.int64))).numpy().astype(np.uint64)

    def _from_rank_0(self, tokens: Int32Array) -> Int32Array:
        if self._group.size == 1:
            return tokens
        import torch

        sent = tokens if self._group.rank == 0 else np.zeros_like(tokens)
        shared: Int32Array = self._group.broadcast(torch.from_numpy(sent)).numpy()
        return shared

    def _sample(self, state: U64, slots: list[int]) -> tuple[Int32Array, dict[int, str]]:
        """Return the sampled tokens, and failure reasons by row for rows whose grammar allows nothing but an end."""
        tokens = self._token_of(state)
        if (masks := self._grammars.masks(slots)) is None:
            return tokens, {}
        for row, bits in zip(masks.rows.tolist(), masks.bits, strict=True):
            tokens[row] = allowed_token(bits, int(state[row]))
        return tokens, self._grammars.record(slots, tokens)

    def _token_of(self, state: U64) -> Int32Array:
        tokens = self._alphabet[(state % np.uint64(len(self._alphabet))).astype(np.int64)]
        if self._eos_ids:
            ends = (state >> np.uint64(32)) % np.uint64(EOS_ONE_IN) == 0
            tokens = np.where(ends, np.int32(self._eos_ids[0]), tokens)
        return tokens.astype(np.int32)

    def _logprobs(self, sampled: Int32Array, slots: npt.NDArray[np.int64], tokens: Int32Array) -> StepLogprobs | None:
        if not self._scored:
            return None
        assignments = [(row, self._scored.get(int(slots[row]))) for row in sampled.tolist()]
        wanted = {
            row: assignment.sampling.logprobs
            for row, assignment in assignments
            if assignment and assignment.sampling.logprobs is not None
        }
        if not wanted:
            return None
        rows, counts = list(wanted), list(wanted.values())
        token_logprobs, top_ids, top = synthetic_logprobs(tokens[rows].tolist(), counts, self._info.vocab_size)
        return StepLogprobs(np.array(rows, np.int32), token_logprobs, top_ids, top)

    def _prompt_logprobs(self, plan: StepPlan, entry: RingEntry) -> list[PromptLogprobs]:
        scored_prompts = []
        for row in range(plan.num_rows) if self._scored else ():
            assignment = self._scored.get(int(entry.req_slots[row]))
            if assignment is None:
                continue
            count = assignment.sampling.prompt_logprobs
            start, end = int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])
            first = int(entry.positions[start]) + 1
            tokens = assignment.tokens[first : min(first + end - start, assignment.num_prompt)].tolist()
            if count is not None and tokens:
                scored = synthetic_logprobs(tokens, [count] * len(tokens), self._info.vocab_size)
                scored_prompts.append(PromptLogprobs(assignment.req_id, first, *scored))
        return scored_prompts

    # ------------------------------------------------------------------------------------------------------- audit

    def checkpoint(self, slot: int) -> int:
        """Return the state that is saved in checkpoint `slot`; -1 without states. Call only with no step in flight."""
        return self._states.checkpoints[slot] if self._states is not None else -1

    def page_kv(self, page: int) -> list[tuple[int, int, int]]:
        """Return (token with its adapter, position, hash) of each slot of a page. Call only with no step in flight."""
        at = slice(page * self._page_size, (page + 1) * self._page_size)
        return list(
            zip(self._tokens[at].tolist(), self._positions[at].tolist(), self._hashes[at].tolist(), strict=True)
        )


class States:
    """Recurrent states by request slot, and their checkpoints: a hash of tokens and positions, folded in order."""

    def __init__(self, num_slots: int, num_checkpoints: int) -> None:
        self._running = [0xDEAD] * (num_slots + 1)
        self.checkpoints = [0xDEAD] * num_checkpoints

    def forward(
        self, plan: StepPlan, entry: RingEntry, tokens: list[int], stored: Mapping[int, StoredPages | None]
    ) -> U64:
        """Restore the states that the plan begins with, fold in each row's tokens, and save the checkpoints of the
        plan. Returns the states after all rows, [padded_rows]. `stored` has the staged pages by slot."""
        for slot, checkpoint in entry.state_begins[: plan.num_state_begins].tolist():
            if checkpoint == FROM_STORE:
                self._running[slot] = _state_of(slot, stored.get(slot))
            else:
                self._running[slot] = 0 if checkpoint < 0 else self.checkpoints[checkpoint]
        saves = dict[int, dict[int, int]]()
        for row, count, checkpoint in entry.state_saves[: plan.num_state_saves].tolist():
            saves.setdefault(row, {})[count] = checkpoint
        states = np.zeros(plan.padded_rows, np.uint64)
        for row in range(plan.num_rows):
            slot, row_saves = int(entry.req_slots[row]), saves.get(row, {})
            if 0 in row_saves:
                self.checkpoints[row_saves[0]] = self._running[slot]
            for count, at in enumerate(range(int(entry.qo_indptr[row]), int(entry.qo_indptr[row + 1])), 1):
                self._running[slot] = fold_state(self._running[slot], tokens[at], int(entry.positions[at]))
                if count in row_saves:
                    self.checkpoints[row_saves[count]] = self._running[slot]
            states[row] = self._running[slot]
        return states


def _state_of(slot: int, stored: StoredPages | None) -> int:
    if stored is None or stored.state is None:
        raise EngineStepError(f"slot {slot}: there is no staged state to begin with")
    return int.from_bytes(stored.state, "little")


def fold_state(state: int, token: int, position: int) -> int:
    """Return the state after one more token."""
    return mix(state ^ mix(token, position), position)


class EchoModel:
    """A reference for `EchoEngine`: one request's output from whole sequences, without pages, batches or chunks."""

    def __init__(
        self,
        *,
        eos_ids: tuple[int, ...] = (EOS_ID,),
        alphabet: Sequence[int] = ALPHABET,
        seed: int = 0,
        adapter: int = 0,
        states: bool = False,
    ) -> None:
        self._states = states
        self._eos_ids = eos_ids
        self._alphabet = tuple(alphabet)
        self._seed = seed & MASK
        self._adapter = adapter << ADAPTER_BITS

    @staticmethod
    def kv(tokens: Sequence[int], adapter: int = 0) -> list[tuple[int, int, int]]:
        """Return the KV (token with its adapter, position, hash) of every position."""
        total, entries = 0, []
        for i, token in enumerate(token + (adapter << ADAPTER_BITS) for token in tokens):
            total = (total + mix(mix(token, i), i)) & MASK
            entries.append((token, i, mix(total, i)))
        return entries

    @staticmethod
    def state(adapter: int, tokens: Sequence[int]) -> int:
        """Return the recurrent state after `tokens`."""
        state = 0
        for position, token in enumerate(tokens):
            state = fold_state(state, token + (adapter << ADAPTER_BITS), position)
        return state

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        min_tokens: int = 0,
        grammar: Matcher | None = None,
        vocab_size: int = VOCAB_SIZE,
    ) -> list[int]:
        """Return the generated ids, including the stop token. `grammar` must be a new matcher."""
        mask = np.zeros(-(-vocab_size // 32), np.int32)
        total, sums, length, out, folds = 0, 0, 0, list[int](), 0
        pending = list(prompt)
        while len(out) < max_tokens:
            for token in pending:
                total = (total + mix(mix(token + self._adapter, length), length)) & MASK
                sums = (sums + mix(mix(total, length), length)) & MASK
                folds = fold_state(folds, token + self._adapter, length) if self._states else 0
                length += 1
            state = mix(mix((sums + folds) & MASK, self._seed), length)
            token = self._alphabet[state % len(self._alphabet)]
            if self._eos_ids and (state >> 32) % EOS_ONE_IN == 0:
                token = self._eos_ids[0]
            if grammar is not None:
                grammar.fill(mask)
                token = allowed_token(mask, state)
                grammar.consume(token)
            out.append(token)
            pending = [token]
            stops = token in stop_ids or (token in self._eos_ids and not ignore_eos)
            if stops and len(out) >= min_tokens:
                break
        return out
