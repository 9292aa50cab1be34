"""What each idea gains: the claims that engines of this kind are known for, in the server's own loop and cache.

    python -m benchmark.ideas            # a minute; with MINISGL_DATA also published traces
    python -m benchmark.ideas --page     # writes docs/ideas.md and its plots

Steps take the time of a simulated device's profile, in virtual time, or nothing is timed and tokens are counted. So
every figure is exact: whoever runs this gets the same, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.bench.plots import grouped_bars
from minisgl.bench.report import number, print_result, table
from minisgl.bench.simulate import PROMPTS, Simulation, simulate
from minisgl.bench.stats import Interval
from minisgl.bench.traces import BLOCK, TraceRequest, prompt_tokens, read_trace
from minisgl.bench.virtual_run import VirtualRun, VirtualServer
from minisgl.config import ConfigError, EngineConfig
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.policies import CachePolicy, SchedulePolicy
from minisgl.step import Arrival, Events

DOCS = Path(__file__).resolve().parents[1] / "docs"
HOST_S = 100e-6  # of the loop for each step, in virtual time
VOCABULARY = 100_000
DEVICE = "qwen3-8b-h200"
SHORT, _, LONGEST = PROMPTS
NUM_PREFIXES, PREFIX_BLOCKS, NUM_SHARED = 256, 4, 4000
PRESSED_PAGES = 4096  # of 16 tokens: an eighth of the prefixes
LABELS = {
    "output_tok_s": "tokens per second",
    "ttft_p50_ms": "TTFT p50, ms",
    "long_ttft_ms": "TTFT of the long prompts, ms",
    "longest_itl_ms": "longest ITL of the others, ms",
    "cached_share": "prompt tokens found",
    "short_p99_s": "TTFT p99 of prompts below 1,000, s",
    "longest_p99_s": "TTFT p99 of prompts from 4,000, s",
}
ABOUT = {
    "overlap": "The next step is scheduled while the device computes this one. It gains what the host takes for a "
    "step, so it shows where steps are short; who comes while a step is under way waits for one more.",
    "prefix cache": "Prompts that begin alike are computed once. It gains in the time to the first token, by as much "
    "as they have in common.",
    "chunk size": "A long prompt is computed in pieces between the steps of others (`--max-prefill-length`). Small "
    "pieces keep the others' tokens coming, and take longer for the prompt itself.",
    "page size": "Tokens of a page are kept and shared together (`--page-size`, 16 by default): large pages find less, "
    "and leave more of their last one empty.",
    "LFU for LRU": "What is evicted when the cache is full: what was used least recently (the default), or least often "
    "(`--cache lfu`).",
    "schedule policy": "Which waiting request starts next (`--schedule-policy`): the first that came, that with the "
    "longest cached prefix, that with the least left to compute. Nobody starves with any. All loads, traces and "
    "claims: [record](../benchmark/runs/2026-11-27-policies/README.md), "
    "[others](../benchmark/runs/2026-11-27-policies-more/README.md).",
}
SOURCES = "## Where the ideas come from\n"
"""The heading of the section that is written by hand, the last one of the page."""
INTRODUCTION = """# What each idea gains

Claims that engines of this kind are known for; the figures are written by one command,
[the sources](#where-the-ideas-come-from) by hand.

```sh
python -m benchmark.ideas --page     # a minute; MINISGL_DATA has the published traces
```

*Simulated*: the server's own loop, scheduler and cache in virtual time on a profile's step times. No GPU was there, and
no clock: whoever runs the command gets these figures. Bars are multiples of the first variant's figure. What the
scheduler in Rust gains is a matter of the clock: [performance.md](performance.md#scheduler-by-scheduler).
"""
LABELS_WIDTH = 90  # characters below a plot, of all its groups
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """`figures`: those that are shown, the plotted one first. `run` gives them by variant; the first variant is what
    the others are held against."""

    idea: str
    where: str
    load: str
    figures: tuple[str, ...]
    run: Callable[[], dict[str, Figures]]


def virtual(variants: Mapping[str, Mapping[str, Any]], trace: Callable[[], list[TraceRequest]], **fixed: Any) -> Any:
    """A simulated device in virtual time; with `concurrency` in `fixed` a closed loop."""
    concurrency = fixed.pop("concurrency", None)

    def run() -> dict[str, Figures]:
        requests = trace()
        arrivals = np.array([one.arrival_s for one in requests])
        found = {}
        for name, changes in variants.items():
            config = EngineConfig(**{"engine": "sim", "max_running_requests": 64, **fixed, **changes})
            server = VirtualServer(config, len(requests), HOST_S)
            found[name] = virtual_figures(server.run(requests, arrivals.copy(), 0, concurrency))
        return found

    return run


def virtual_figures(run: VirtualRun) -> Figures:
    """Long prompts are those of more than four times the median length."""
    if run.refused.any():
        raise ConfigError(f"{int(run.refused.sum())} requests of an experiment do not fit")
    ttft_ms = 1e3 * (run.first_token_s - run.arrival_s)
    long = run.num_prompt > 4 * np.median(run.num_prompt)
    (one,) = run.engines
    return {
        "output_tok_s": float(run.num_tokens.sum() / run.end_s),
        "ttft_p50_ms": float(np.median(ttft_ms)),
        "long_ttft_ms": float(np.median(ttft_ms[long])) if long.any() else float("nan"),
        "longest_itl_ms": 1e3 * float(run.longest_gap_s[~long].max()),
        "cached_share": one.stats.num_cached_tokens_total / max(1, one.stats.num_prompt_tokens_total),
    }


def equal_requests(count: int, num_in: int, num_out: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, num_in, num_out)] * count


def shared_prompts(count: int = 400, num_prefixes: int = 8, prefix_len: int = 1000) -> list[TraceRequest]:
    """A system prompt of a few, then a question of its own; ids stand for single tokens, so any page can be shared."""
    rng, found = np.random.default_rng(1), []
    for i in range(count):
        which, question = int(rng.integers(num_prefixes)), int(rng.integers(32, 128))
        ids = (*_ids(which, prefix_len), *_ids(num_prefixes + i, question))
        found.append(TraceRequest(0.0, len(ids), int(rng.integers(32, 128)), ids, 1))
    return found


def chats(count: int = 64, turns: int = 6) -> list[TraceRequest]:
    """Each turn carries all turns before; the chats' turns come by turns."""
    rng, found = np.random.default_rng(2), []
    said: list[tuple[int, ...]] = [()] * count
    for turn in range(turns):
        for chat in range(count):
            question = _ids(1000 * (chat + 1) + turn, int(rng.integers(50, 300)))
            said[chat] = (*said[chat], *question)
            found.append(TraceRequest(0.0, len(said[chat]), 100, said[chat], 1))
    return found


def _ids(which: int, length: int) -> tuple[int, ...]:
    return tuple(range(which << 20, (which << 20) + length))


def decodes_and_long_prompts() -> list[TraceRequest]:
    """32 answers under way, into which four long prompts come."""
    running = [TraceRequest(0.0, 200, 600)] * 32
    return [*running, *(TraceRequest(1.0 + i, 16_000, 8) for i in range(4))]


def in_virtual_time() -> Iterator[Experiment]:
    switch = {"off": {"overlap": False}, "on": {"overlap": True}}
    for profile in ("qwen3-0.6b-h200", DEVICE):
        yield Experiment(
            idea="overlap",
            where=f"simulated {profile}",
            load=f"64 clients, 200 in, 128 out, {1e6 * HOST_S:.0f} us of the host a step",
            figures=("output_tok_s", "ttft_p50_ms"),
            run=virtual(switch, lambda: equal_requests(256, 200, 128), sim_profile=profile, concurrency=64),
        )
    device: dict[str, Any] = {"sim_profile": DEVICE, "concurrency": 16}
    cache = {"off": {"cache": "naive"}, "on": {"cache": "lru"}}
    for name, trace in (("shared system prompts", shared_prompts), ("chats of 6 turns", chats)):
        yield Experiment(
            idea="prefix cache",
            where=f"simulated {DEVICE}",
            load=f"{name}, 16 clients",
            figures=("ttft_p50_ms", "output_tok_s", "cached_share"),
            run=virtual(cache, trace, **device),
        )
    sizes = {str(size): {"max_prefill_length": size} for size in (16_384, 4096, 2048, 512)}
    yield Experiment(
        idea="chunk size",
        where=f"simulated {DEVICE}",
        load="4 prompts of 16,000 among 32 answers",
        figures=("longest_itl_ms", "long_ttft_ms", "output_tok_s"),
        run=virtual(sizes, decodes_and_long_prompts, sim_profile=DEVICE),
    )
    pages = {str(size): {"page_size": size, "num_pages": 24_576 // size} for size in (16, 1, 64, 256)}
    yield Experiment(
        idea="page size",
        where=f"simulated {DEVICE}",
        load="shared system prompts, 16 clients, a pool of 24,576 tokens",
        figures=("cached_share", "ttft_p50_ms", "output_tok_s"),
        run=virtual(pages, shared_prompts, **device),
    )


def radix(requests: list[TraceRequest], num_pages: int, cache: CachePolicy) -> int:
    """Prompt tokens that the scheduler's cache finds. A request that runs holds its pages out of `num_pages`."""
    config = ControlPlaneConfig(
        num_pages=num_pages,
        page_size=BLOCK,
        max_running_requests=1,
        max_prefill_length=10**6,
        context_len=10**6,
        cache=cache,
    )
    plane = make_control_plane("rust_hotpath", config)
    step, token = 0, np.array([VOCABULARY], np.int32)
    for place, request in enumerate(requests):
        tokens = prompt_tokens(request, place, VOCABULARY)
        events = Events([Arrival(place, tokens, len(tokens), 1)])
        while plane.stats().num_live or len(events):
            plan = plane.schedule(step, events)
            plane.commit(step, token[: plan.num_rows])
            events, step = Events(), step + 1
    assert plane.stats().num_prompt_tokens_total == sum(one.input_len for one in requests), "a prompt was refused"
    return plane.stats().num_cached_tokens_total


def popular_among_others(count: int = 3000) -> list[TraceRequest]:
    """Prompts whose popularity falls with their rank, and as many that come once; four blocks each."""
    rng = np.random.default_rng(3)
    ranks = np.minimum(rng.zipf(1.3, count), 500)
    found = []
    for i, rank in enumerate(ranks.tolist()):
        which = int(rank) if rng.random() < 0.5 else 1000 + i
        ids = tuple(4 * which + k for k in range(4))
        found.append(TraceRequest(0.0, 4 * BLOCK + 8, 1, (*ids, 10**8 + i)))
    return found


def evictions() -> Iterator[Experiment]:
    """Prompt tokens that the cache finds, one request at a time."""

    def run_on(trace: Callable[[], list[TraceRequest]], num_pages: int) -> Any:
        def run() -> dict[str, Figures]:
            requests = trace()
            total = sum(one.input_len for one in requests)
            return {name: {"cached_share": radix(requests, num_pages, name) / total} for name in ("lru", "lfu")}

        return run

    traces: dict[str, Callable[[], list[TraceRequest]]] = {
        "popular prompts among others": popular_among_others,
        "Mooncake conversation": lambda: read_trace("mooncake-conversation")[:3000],
        "Mooncake synthetic": lambda: read_trace("mooncake-synthetic")[:3000],
    }
    for name, trace in traces.items():
        for num_pages in (400, 2000):
            yield Experiment(
                idea="LFU for LRU",
                where="the scheduler alone",
                load=f"{name}, {num_pages * BLOCK:,} tokens kept",
                figures=("cached_share",),
                run=run_on(trace, num_pages),
            )


def write_prefixes(file: Path) -> None:
    """A trace of prompts that begin with one of `NUM_PREFIXES` beginnings of 2,048 tokens and go on with their own; as
    Poisson has it."""
    draw, now = random.Random(11), 0.0
    with file.open("w") as lines:
        for i in range(NUM_SHARED):
            now += draw.expovariate(1.0)
            prefix, own = draw.randrange(NUM_PREFIXES), draw.randrange(64, 257)
            line = {
                "timestamp": 1000 * now,
                "input_length": PREFIX_BLOCKS * BLOCK + own,
                "output_length": draw.randrange(32, 129),
                "hash_ids": [*range(100 * prefix, 100 * prefix + PREFIX_BLOCKS), 10**6 + i],
            }
            lines.write(json.dumps(line) + "\n")


def in_line() -> Iterator[Experiment]:
    """Who of the waiting goes first."""

    def run_on(trace: str | None, policies: tuple[SchedulePolicy, ...], load: float, pages: int | None = None) -> Any:
        def run() -> dict[str, Figures]:
            engine = EngineConfig(
                engine="sim",
                sim_profile=DEVICE,
                max_running_requests=256,
                max_prefill_length=8192,
                max_seq_len=131_072,
                num_pages=pages,
            )
            with tempfile.TemporaryDirectory() as folder:
                prefixes = Path(folder) / "shared.jsonl"
                write_prefixes(prefixes)
                job = Simulation(engine=engine, trace=trace or str(prefixes), loads=(load,), policies=policies)
                return {row["policy"]: policy_figures(row) for row in simulate(job)["runs"]}

        return run

    for trace in ("azure-code", "azure-conversation"):
        yield Experiment(
            idea="schedule policy",
            where=f"simulated {DEVICE}",
            load=f"{trace.replace('azure-', 'Azure ')} at 0.9 of what it can do",
            figures=("short_p99_s", "longest_p99_s"),
            run=run_on(trace, ("fcfs", "srpf"), 0.9),
        )
    yield Experiment(
        idea="schedule policy",
        where=f"simulated {DEVICE}",
        load="256 shared prefixes, an eighth of them kept, at 1.2 of what it can do",
        figures=("cached_share", "ttft_p50_ms"),
        run=run_on(None, ("fcfs", "lpm"), 1.2, PRESSED_PAGES),
    )


def policy_figures(row: Mapping[str, Any]) -> Figures:
    """`nan` where no prompt is of a class."""
    of_class = row["ttft_by_prompt_s"]
    short, longest = (of_class[which]["p99"] if which in of_class else float("nan") for which in (SHORT, LONGEST))
    return {
        "short_p99_s": short,
        "longest_p99_s": longest,
        "cached_share": row["hit_rate"],
        "ttft_p50_ms": 1e3 * row["ttft_s"]["p50"],
    }


def experiments() -> list[Experiment]:
    """In the order of the ideas."""
    return [*in_virtual_time(), *evictions(), *in_line()]


# ------------------------------------------------------------------------------------------------------------- showing


@dataclass(frozen=True, slots=True)
class Found:
    """An experiment and what it gave."""

    of: Experiment
    by_variant: dict[str, Figures]

    def rows(self) -> Iterator[tuple[str, ...]]:
        first, *others = self.by_variant
        for figure in self.of.figures:
            for name in others:
                before, after = self.by_variant[first][figure], self.by_variant[name][figure]
                change = f"{100 * (after / before - 1):+.1f} %" if before else ""
                cells = (LABELS[figure], f"{first}: {number(before)}", f"{name}: {number(after)}", change)
                yield (f"{self.of.where}: {self.of.load}", *cells)


HEAD = ("measured on", "figure", "from", "to", "change")


def measured(chosen: Sequence[Experiment]) -> tuple[list[Found], dict[str, str]]:
    """What was found, and why the rest could not run."""
    found, missing = list[Found](), dict[str, str]()
    for one in tqdm(chosen, unit="experiment", disable=None):
        try:
            found.append(Found(one, one.run()))
        except ConfigError as error:
            missing[f"{one.idea}, {one.where}, {one.load}"] = str(error)
    return found, missing


def plot(path: Path, idea: str, of_idea: Sequence[Found]) -> str:
    """The first figure of each experiment, as a multiple of its first variant's."""
    names = list(dict.fromkeys(name for one in of_idea for name in one.by_variant))
    series: dict[str, list[Interval | None]] = {name: [] for name in names}
    for one in of_idea:
        figure, (first, *_) = one.of.figures[0], one.by_variant
        for name in names:
            ratio = one.by_variant[name][figure] / one.by_variant[first][figure] if name in one.by_variant else None
            series[name].append(None if ratio is None else Interval(ratio, ratio, ratio))
    width = LABELS_WIDTH // len(of_idea)
    groups = [_wrapped(f"{one.of.where}, {one.of.load}: {LABELS[one.of.figures[0]]}", width) for one in of_idea]
    first = next(iter(of_idea[0].by_variant))
    return grouped_bars(path, groups, series, title=_heading(idea), y_label=f"against {first} (= 1)")


def _heading(idea: str) -> str:
    return idea[0].upper() + idea[1:]


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def write_page(found: Sequence[Found], docs: Path) -> Path:
    """Write `ideas.md` in `docs`, with its plots beside the other pictures."""
    parts = [INTRODUCTION.rstrip()]
    for idea, about in ABOUT.items():
        if of_idea := [one for one in found if one.of.idea == idea]:
            file = docs / "img" / f"ideas-{idea.replace(' ', '-').lower()}.svg"
            picture = plot(file, idea, of_idea).replace("](", "](img/")
            rows = [row for one in of_idea for row in one.rows()]
            parts += [f"## {_heading(idea)}", about, picture, table(HEAD, rows)]
    path = docs / "ideas.md"
    parts.append(SOURCES + (DOCS / "ideas.md").read_text(encoding="utf-8").partition(SOURCES)[2].rstrip())
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark.ideas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(ABOUT), default=list(ABOUT), metavar="IDEA")
    parser.add_argument("--page", action="store_true", help="write docs/ideas.md, which needs all of it")
    args = parser.parse_args(arguments)
    found, missing = measured([one for one in experiments() if one.idea in args.only])
    print(table(HEAD, [row for one in found for row in one.rows()]))
    if args.page:
        if missing or len(args.only) < len(ABOUT):
            print(f"benchmark.ideas: --page: not all was measured: {missing}", file=sys.stderr)
            return 1
        write_page(found, DOCS)
    print_result({"bench": "ideas", "experiments": len(found), "missing": missing})
    return 0


if __name__ == "__main__":
    sys.exit(main())
