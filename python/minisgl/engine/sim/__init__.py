"""A simulated engine without a model: its tokens are a function of (request seed, position) with words of the served
tokenizer, its step times come from a profile, on the machine's clock or a virtual one. It proves nothing about the
scheduler (engine/echo.py does), and nothing about a GPU beyond what the profile assumes.

Invariants: tokens do not depend on the batch, the chunks or the cache; `launch` never blocks; steps run one after the
other on one simulated device, so a step that is launched while another runs begins at its end; nothing in a step costs
Python per row; no clock runs backwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import EngineInfo, SlotAssignment, StepHandle, StepResult
from minisgl.engine.sim.profile import Profile, StepLoad, load_profile
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepPlan
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.borrowed import text_folder
from minisgl.utils.progress import Report
from minisgl.weights.sources import resolve_model

SPIN_S = 150e-6
"""Busy-wait before a deadline: maximum delay of a sleep (timer slack of 50 us, the rest for waking a thread)."""


class Clock(Protocol):
    """A monotonic clock; its times are seconds since an arbitrary moment."""

    def now(self) -> float: ...

    def sleep_until(self, when: float) -> None: ...


class RealClock:
    """The clock of `time.perf_counter`. Sleeps until `SPIN_S` before the moment and busy-waits for the rest."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        left = when - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < when:
            pass


class VirtualClock:
    """A clock that advances only in `sleep_until`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)


U64 = npt.NDArray[np.uint64]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


class SimStep:
    """The handle of a simulated step that ends at the clock time `end`."""

    __slots__ = ("_clock", "_end", "_result", "_start")

    def __init__(self, result: StepResult, clock: Clock, start: float, end: float) -> None:
        self._result = result
        self._clock = clock
        self._start = start
        self._end = end

    def wait(self) -> StepResult:
        self._clock.sleep_until(self._end)
        return self._result

    def done(self) -> bool:
        return self._clock.now() >= self._end

    def span(self) -> tuple[float, float]:
        return self._start, self._end


class SimEngine:
    """The simulated engine. It generates ids of `alphabet` [m] int32; with `profile.eos_one_in` = n one token in n is
    the first of `info.eos_ids`, otherwise it never ends a sequence by itself."""

    def __init__(
        self, info: EngineInfo, alphabet: Int32Array, max_rows: int, profile: Profile, clock: Clock | None = None
    ) -> None:
        self._info = info
        self._alphabet = alphabet
        self._profile = profile
        self._clock = clock or RealClock()
        self._busy_until = 0.0
        self.busy_s = 0.0
        """Seconds of work that the device has been given so far."""
        self._seeds: U64 = np.zeros(max_rows + 1, np.uint64)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry = buffers.ring[plan.ring_index]
        for assignment in assignments:  # multiplied, so that neighbouring seeds give different outputs
            self._seeds[assignment.slot] = ((assignment.sampling.seed or 0) * GOLDEN) & MASK
        start = end = self._clock.now()
        if self._profile.takes_time and plan.num_rows:
            start = max(start, self._busy_until)
            seconds = self._profile.seconds(_load(plan, entry))
            end = self._busy_until = start + seconds
            self.busy_s += seconds
        return SimStep(StepResult(self._tokens(plan, entry)), self._clock, start, end)

    def close(self) -> None:
        pass

    def _tokens(self, plan: StepPlan, entry: RingEntry) -> Int32Array:
        """Return a step's tokens, [num_rows], by a hash of seed and length (after Stafford's splitmix64 variant)."""
        rows = entry.sample_rows[: plan.num_samples]
        state = self._seeds[entry.req_slots[rows]]
        state ^= entry.seq_lens[rows].astype(np.uint64)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state >>= np.uint64(33)
        picked = self._alphabet[(state % np.uint64(len(self._alphabet))).astype(np.intp)]
        if one_in := self._profile.eos_one_in:
            picked[(state >> np.uint64(12)) % np.uint64(one_in) == 0] = self._info.eos_ids[0]
        if plan.num_samples == plan.num_rows:
            return picked
        tokens = np.full(plan.num_rows, -1, np.int32)
        tokens[rows] = picked
        return tokens


def _load(plan: StepPlan, entry: RingEntry) -> StepLoad:
    rows = plan.num_rows
    if plan.num_tokens == rows:
        kv_tokens = int(entry.seq_lens[:rows].sum(dtype=np.int64))
        return StepLoad(rows, rows, plan.num_samples, kv_tokens, kv_tokens)
    lens = entry.seq_lens[:rows].astype(np.int64)
    new = entry.extend_lens[:rows].astype(np.int64)
    pairs = int(new @ lens) - int(new @ (new - 1)) // 2
    return StepLoad(rows, plan.num_tokens, plan.num_samples, int(lens.sum()), pairs)


WORDS = """
the the the the the of of of to to to and and and in in a a is is that it for was on with as be by at are this have
from or had not but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more two like him see time could no make than first been its who now
people my made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around another came
come work three word must because does part even place well such here take why things help put years different away
again off went old number great tell men say small every found still between name should home big give air line set
own under read last never us left end along while might next sound below saw something thought both few those always
looked show large often together asked house world going want school important until form food keep children feet land
side without boy once animals life enough took sometimes four head above kind began almost live page got earth need
far hand high year mother light parts country father let night following picture being study second eyes soon times
story boys since white days ever paper hard near sentence better best across during today others however sure means
knew it try told young miles sun ways thing whole hear example heard several change answer room sea against top turned
learn point city play toward five using himself usually
"""
MARKS = ". . . . , , , , , ,"


SIM_CONTEXT_LEN = 32_768
SIM_NUM_TOKENS = 1_048_576  # of the KV pool
SIM_WORDS = 1024


def build_sim(config: EngineConfig, report: Report, clock: Clock | None = None) -> SimEngine:
    """Build a simulated engine on `clock` (default: the machine's). Only the tokenizer of `--model` is read."""
    profile = load_profile(config.sim_profile)
    report(f"simulated engine, profile {profile.name}: {profile.about or 'no description'}; no model computes anything")
    model_dir = resolve_model(config.model, report, load_format="dummy", own_tokenizer=config.tokenizer is None)
    model_dir = text_folder(config, model_dir, None, report)
    tokenizer = Tokenizer.load(model_dir, report)
    info = EngineInfo(
        name="sim",
        model_dir=str(model_dir),
        vocab_size=tokenizer.num_ids,
        context_len=config.max_seq_len or profile.context_len or SIM_CONTEXT_LEN,
        eos_ids=_eos_ids(tokenizer) if profile.eos_one_in else (),
        num_pages=config.num_pages or max(1, (profile.pool_tokens or SIM_NUM_TOKENS) // config.page_size),
        page_size=config.page_size,
        device=f"simulated {profile.name}",
        dtype="none",
        simulated=profile.name,
    )
    return SimEngine(info, _alphabet(tokenizer), config.rows_on(info.device), profile, clock)


def _alphabet(tokenizer: Tokenizer) -> Int32Array:
    """Return ids [m] int32 whose concatenation looks like text: common words and marks if the tokenizer has them as
    single tokens, else the first words of its vocabulary."""
    texts = [f"to {word}" for word in WORDS.split()] + [f"to{mark}" for mark in MARKS.split()]
    first = tokenizer.encode("to", add_special_tokens=False).tolist()
    encoded = [ids.tolist() for ids in tokenizer.encode_batch(texts, add_special_tokens=False)]
    single = [ids[-1] for ids in encoded if len(ids) == 2 and ids[:1] == first]
    if len(single) < len(texts) // 2:
        return tokenizer.word_ids(SIM_WORDS)
    return np.array(single, np.int32)


def _eos_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.encode(tokenizer.special_tokens.get("eos_token", ""), add_special_tokens=False).tolist()
    if len(ids) != 1:
        raise ConfigError("--sim-profile: eos_one_in: needs a tokenizer with an eos_token of one id: set it to 0")
    return (ids[0],)
