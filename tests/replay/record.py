"""Makes the corpus: small traces by kind, and the digest of every decision in them.

`python -m tests.replay.record` writes `corpus/*.trace.gz` and `corpus/digests.json` anew. Commit that only with the
reason why decisions changed.

Invariants: events and tokens come from an integer generator that is written out here, so that every machine, Python
version and implementation sees the same ones.
"""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, Stats
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.trace import RecordingControlPlane, parse_trace, replay
from minisgl.step import Abort, Arrival, ClearCache, Draft, Event, Events, Finish, ForwardFailed, TokenBudget, Unpin

CORPUS = Path(__file__).with_name("corpus")
DIGESTS = CORPUS / "digests.json"
SUFFIX = ".trace.gz"
DIGITS = 8  # hexadecimal, of each call's digest: the file stays small
EOS = 99
MAX_STEPS = 2000
MAX_PINNED = 24  # tokens of a prompt: so that no pin is refused


class Numbers:
    """Knuth's 64-bit linear congruential generator (MMIX); the upper half of its state, reduced to a range."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, bound: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 32) % bound

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)


@dataclass(frozen=True)
class Scenario:
    """`num_requests` arrive, `burst` at a time, every `gap` steps; each prompt is `shared_len` common tokens, then own
    ones, some behind an earlier prompt (`follow_ups`, in percent). `told_every` n: at each n-th step one of the
    requests so far is told to end, ended or not: by `Finish` if its id is odd and `finishes` is set, else by `Abort`.
    One sampled token in `eos_every` ends a sequence. `background` and `pins`: so many of them (of those with a short
    prompt), in percent, are of that kind; `unpin_every` n: at each n-th step one of the requests so far is unpinned; at
    the steps `clear_at` the cache is emptied; `budget_every` n: at each n-th step steps get another budget,
    `bounded`: with a bound of what the background adds.
    `num_namespaces`: each request is of one of so many. `stored`: of so many of them, in percent, some pages can be
    loaded. `guessed`: drafts come from outside, a word right in one of `num_words`."""

    num_requests: int
    prompt_len: tuple[int, int]
    max_tokens: tuple[int, int]
    burst: int = 1
    gap: int = 1
    shared_len: int = 0
    follow_ups: int = 0
    told_every: int = 0
    finishes: bool = False
    fail_at: tuple[int, ...] = ()
    num_priorities: int = 1
    background: int = 0
    pins: int = 0
    unpin_every: int = 0
    num_namespaces: int = 1
    stored: int = 0
    guessed: bool = False
    clear_at: tuple[int, ...] = ()
    budget_every: int = 0
    bounded: bool = False
    stops: bool = False  # some have stop ids, a minimum length, or go on after an end of sequence
    eos_every: int = 40
    num_words: int = 50  # the fewer, the more a text repeats
    overlap: bool = True
    config: dict[str, object] = field(default_factory=dict)

    def control_plane_config(self) -> ControlPlaneConfig:
        values: dict[str, object] = {
            "num_pages": 256,
            "page_size": 4,
            "max_running_requests": 8,
            "max_prefill_length": 64,
            "context_len": 512,
            "eos_ids": (EOS,),
        }
        return ControlPlaneConfig(**(values | self.config))  # type: ignore[arg-type]


def sized(kind: str, tokens: int, scenario: Scenario) -> dict[str, Scenario]:
    """The scenario with a pool of about `tokens` tokens in pages of 1, 4 and 16, one of them with LFU."""
    found = {}
    for page_size, cache in ((1, "lru"), (4, "lfu"), (16, "lru")):
        config = {"page_size": page_size, "cache": cache, "num_pages": -(-tokens // page_size)} | scenario.config
        found[f"{kind}-page{page_size}-{cache}"] = Scenario(**(vars(scenario) | {"config": config}))
    return found


BURSTY = Scenario(
    50,
    (4, 60),
    (1, 24),
    burst=10,
    gap=15,
    num_priorities=3,
    config={"max_running_requests": 16, "graph_sizes": (4, 16)},
)
# The second burst comes when the estimate of outputs has fallen to its lowest: far too many are admitted.
RETRACTION = Scenario(48, (4, 20), (60, 120), burst=24, gap=600, eos_every=1000, config={"max_running_requests": 24})
SCENARIOS: dict[str, Scenario] = {
    **sized("short", 320, Scenario(40, (1, 12), (1, 16), gap=2, stops=True, config={"graph_sizes": (1, 2, 4, 8)})),
    **sized("long", 1600, Scenario(12, (100, 400), (4, 40), gap=5, follow_ups=40)),
    **sized("shared_prefix", 640, Scenario(40, (1, 30), (1, 16), burst=2, shared_len=70, follow_ups=30)),
    **sized("bursty", 800, BURSTY),
    **sized("retraction", 640, RETRACTION),
    **sized("aborts", 400, Scenario(60, (1, 50), (1, 40), burst=3, told_every=2, finishes=True, shared_len=9)),
    "seldom_retracted-page1-lru": Scenario(
        60,
        (4, 20),
        (60, 150),
        burst=4,
        gap=4,
        eos_every=1000,
        config={"page_size": 1, "num_pages": 640, "max_running_requests": 16},
    ),
    "failures-page4-lru": Scenario(30, (1, 40), (4, 20), burst=2, shared_len=12, fail_at=(3, 11, 30)),
    "no_overlap-page4-lfu": Scenario(
        30, (1, 40), (1, 20), overlap=False, stops=True, config={"cache": "lfu", "num_pages": 40}
    ),
    # more arrivals wait than a step of priority is worth
    "ageing-page4-lru": Scenario(
        160, (1, 12), (1, 6), burst=4, gap=2, num_priorities=3, config={"max_running_requests": 4}
    ),
    "background-page1-lru": Scenario(
        50, (4, 60), (1, 30), burst=5, gap=6, background=50, told_every=9, config={"page_size": 1, "num_pages": 200}
    ),
    "background-page4-lfu": Scenario(
        50, (4, 60), (1, 30), burst=5, gap=6, background=50, overlap=False, config={"cache": "lfu", "num_pages": 50}
    ),
    "pins-page4-lru": Scenario(
        50,
        (1, 40),
        (1, 20),
        burst=2,
        gap=3,
        follow_ups=30,
        background=30,
        pins=40,
        unpin_every=2,
        told_every=7,
        fail_at=(20, 41),
        clear_at=(30, 60),
        config={"num_pages": 96, "context_len": 160, "max_pinned_pages": 50},
    ),
    "limits-page4-lru": Scenario(
        50,
        (1, 60),
        (1, 20),
        follow_ups=50,
        num_priorities=2,
        config={"num_pages": 96, "cache_token_budget": 130, "cache_max_prompt": 40},
    ),
    "namespaces-page4-lru": Scenario(50, (1, 40), (1, 20), shared_len=40, follow_ups=40, num_namespaces=5),
    "drafts-page1-lfu": Scenario(
        40,
        (1, 30),
        (1, 40),
        burst=2,
        gap=3,
        num_words=2,
        follow_ups=30,
        background=20,
        config={"page_size": 1, "num_pages": 200, "cache": "lfu", "max_draft_len": 6},
    ),
    "drafts-page4-lru": Scenario(
        40,
        (1, 30),
        (1, 40),
        gap=2,
        num_words=2,
        follow_ups=50,
        told_every=9,
        fail_at=(25,),
        stops=True,
        config={"num_pages": 60, "max_draft_len": 4, "graph_sizes": (1, 2, 4, 8)},
    ),
    "drafts-page16-lru": Scenario(
        30, (1, 30), (1, 60), burst=3, gap=9, num_words=2, overlap=False, config={"page_size": 16, "max_draft_len": 7}
    ),
    "drafts-guessed-page4-lru": Scenario(
        40,
        (1, 30),
        (1, 40),
        gap=3,
        num_words=4,
        told_every=9,
        fail_at=(25,),
        background=20,
        guessed=True,
        config={"num_pages": 120, "max_draft_len": 4, "max_running_requests": 40},
    ),
    "budgets-page4-lru": Scenario(
        40, (1, 90), (1, 30), burst=2, gap=4, background=20, budget_every=3, config={"num_pages": 160}
    ),
    "bounded-page4-lru": Scenario(
        60,
        (1, 60),
        (1, 60),
        gap=5,
        follow_ups=20,
        told_every=9,
        fail_at=(60,),
        background=60,
        budget_every=7,
        bounded=True,
        config={"num_pages": 900, "max_running_requests": 40},
    ),
    "states-page1-lfu": Scenario(
        50,
        (1, 40),
        (1, 40),
        burst=3,
        gap=4,
        shared_len=30,
        follow_ups=40,
        background=20,
        config={"page_size": 1, "num_pages": 260, "cache": "lfu", "checkpoint_interval": 8, "num_checkpoints": 12},
    ),
    "states-page4-lru": Scenario(
        60,
        (1, 60),
        (1, 60),
        burst=2,
        gap=3,
        follow_ups=60,
        pins=20,
        unpin_every=5,
        told_every=9,
        fail_at=(25,),
        clear_at=(60,),
        num_namespaces=2,
        stops=True,
        config={"num_pages": 120, "max_pinned_pages": 40, "checkpoint_interval": 16, "num_checkpoints": 16}
        | {"context_len": 300},
    ),
    "stored-page4-lru": Scenario(
        50,
        (20, 200),
        (1, 30),
        burst=3,
        gap=5,
        follow_ups=30,
        background=20,
        told_every=9,
        budget_every=4,
        fail_at=(25,),
        clear_at=(40,),
        stored=60,
        config={"num_pages": 160},
    ),
    "stored-page16-lfu": Scenario(
        40,
        (20, 300),
        (1, 60),
        burst=4,
        gap=20,
        stored=70,
        overlap=False,
        config={"page_size": 16, "cache": "lfu", "num_pages": 60},
    ),
    "stored-page1-lru": Scenario(  # texts that are loaded in parts
        12,
        (1000, 4000),
        (1, 30),
        burst=4,
        gap=5,
        budget_every=1,
        stored=90,
        config={"page_size": 1, "num_pages": 12_000, "context_len": 4100},
    ),
    "stored-states-page4-lru": Scenario(
        60,
        (20, 200),
        (1, 60),
        burst=6,
        gap=6,
        follow_ups=50,
        background=20,
        told_every=9,
        budget_every=4,
        fail_at=(25,),
        clear_at=(40,),
        stored=60,
        config={"num_pages": 160, "checkpoint_interval": 16, "num_checkpoints": 24},
    ),
    **{
        f"{policy}-page{size}-{cache}": Scenario(
            90,
            (1, 60),
            (1, 80),
            burst=30,
            gap=40,
            shared_len=24,
            follow_ups=50,
            told_every=9,
            fail_at=(45,),
            num_priorities=2,
            background=15,
            stored=15 if states == 0 else 0,
            num_namespaces=2,
            config={"page_size": size, "cache": cache, "num_pages": 480 // size, "schedule_policy": policy}
            | {"max_running_requests": 16, "context_len": 160}
            | {"checkpoint_interval": states, "num_checkpoints": states},
        )
        for policy, size, cache, states in (
            ("lpm", 4, "lru", 0),
            ("lpm", 16, "lfu", 0),
            ("srpf", 1, "lru", 0),
            ("srpf", 4, "lfu", 0),
            ("srpf", 4, "lru", 16),
        )
    },
    "naive-page4": Scenario(30, (1, 40), (1, 20), shared_len=20, config={"cache": "naive", "num_pages": 64}),
}


def events_of(scenario: Scenario, step: int, prompts: list[list[int]], numbers: Numbers) -> Iterator[Event]:
    """The events of `step` but for failures; prompts that arrive are appended to `prompts`; their places are ids."""
    if step % scenario.gap == 0:
        for _ in range(min(scenario.burst, scenario.num_requests - len(prompts))):
            yield arrival(scenario, prompts, numbers)
    if prompts and scenario.told_every and step % scenario.told_every == 0:
        req_id = numbers.below(len(prompts))
        yield Finish(req_id) if scenario.finishes and req_id % 2 else Abort(req_id)
    if prompts and scenario.unpin_every and step % scenario.unpin_every == 0:
        yield Unpin(numbers.below(len(prompts)))
    if step in scenario.clear_at:
        yield ClearCache()
    if scenario.budget_every and step % scenario.budget_every == 0:
        budget = TokenBudget(numbers.between(1, 24), numbers.between(1, 64))
        yield replace(budget, background=numbers.between(1, 9000)) if scenario.bounded else budget


def arrival(scenario: Scenario, prompts: list[list[int]], numbers: Numbers) -> Arrival:
    start = list(range(scenario.shared_len))
    if prompts and numbers.below(100) < scenario.follow_ups:
        start = prompts[numbers.below(len(prompts))]
    tokens = start + [numbers.below(scenario.num_words) for _ in range(numbers.between(*scenario.prompt_len))]
    tokens = tokens[: scenario.control_plane_config().context_len - 1]
    prompts.append(tokens)
    num_pages = len(tokens) // scenario.control_plane_config().page_size
    stored_to = numbers.between(0, num_pages) if scenario.stored and numbers.below(100) < scenario.stored else 0
    return Arrival(
        len(prompts) - 1,
        np.array(tokens, np.int32),
        len(tokens),
        numbers.between(*scenario.max_tokens),
        stop_ids=(7, 8) if scenario.stops and numbers.below(3) == 0 else (),
        min_tokens=numbers.below(6) if scenario.stops else 0,
        ignore_eos=scenario.stops and numbers.below(3) == 0,
        priority=numbers.below(scenario.num_priorities),
        background=scenario.background > 0 and numbers.below(100) < scenario.background,
        pin=scenario.pins > 0 and len(tokens) <= MAX_PINNED and numbers.below(100) < scenario.pins,
        namespace=numbers.below(scenario.num_namespaces) if scenario.num_namespaces > 1 else 0,
        stored_from=numbers.between(0, stored_to) // 2 if stored_to else 0,
        stored_to=stored_to,
    )


def drive(scenario: Scenario, plane: ControlPlane) -> Stats:
    """Drive `plane` to the end of the scenario; its counts then."""
    numbers, sampled, prompts = Numbers(1), Numbers(2), list[list[int]]()
    in_flight: list[tuple[int, int]] = []  # step, rows
    guessed, num_generated = Numbers(3), Counter[int]()
    for step in range(MAX_STEPS):
        events = list(events_of(scenario, step, prompts, numbers))
        if step in scenario.fail_at and in_flight:
            events.insert(0, ForwardFailed(in_flight[0][0]))
            in_flight.clear()
        elif scenario.guessed:
            for req_id, count in plane.drafts_wanted():
                tokens = tuple(guessed.below(scenario.num_words) for _ in range(count))
                events.insert(0, Draft(req_id, len(prompts[req_id]) + num_generated[req_id], tokens))
        in_flight.append((step, plane.schedule(step, Events(events)).num_rows))
        idle = plane.stats().num_live == 0
        while len(in_flight) > scenario.overlap or (in_flight and idle):
            done, num_rows = in_flight.pop(0)
            sampled_tokens = [
                EOS if sampled.below(scenario.eos_every) == 0 else sampled.below(scenario.num_words)
                for _ in range(num_rows)
            ]
            output = plane.commit(done, np.array(sampled_tokens, np.int32))
            num_generated.update(output.req_ids[output.tokens >= 0].tolist())
        if idle and plane.stats().num_live == 0 and len(prompts) == scenario.num_requests:
            return plane.stats()
    raise AssertionError("the scenario did not come to an end")


def record(scenario: Scenario, backend: str = "python") -> bytes:
    """The trace of the scenario, in the format of `minisgl serve --record-trace`."""
    config = scenario.control_plane_config()
    file = io.BytesIO()
    drive(scenario, RecordingControlPlane(make_control_plane(backend, config), config, file))
    return file.getvalue()


def shortened(digest: int) -> str:
    return f"{digest:016x}"[:DIGITS]


def main() -> None:
    CORPUS.mkdir(exist_ok=True)
    for old in CORPUS.glob(f"*{SUFFIX}"):
        old.unlink()
    digests = {}
    for name, scenario in SCENARIOS.items():
        data = record(scenario)
        (CORPUS / (name + SUFFIX)).write_bytes(gzip.compress(data, mtime=0))
        trace = parse_trace(data, name)
        found = replay(trace, make_control_plane("python", trace.config)).digests
        digests[name] = "".join(shortened(one) for one in found)
    DIGESTS.write_text(json.dumps(digests, indent=0) + "\n")


if __name__ == "__main__":
    main()
