"""What is measured of each idea: the same work with and without it, or at several sizes.

An experiment gives figures by variant, a sample a round; variants take turns, there and back. Those in virtual time are
exact: one round says all. The first variant is what the others are told against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from benchmark.ab.__main__ import compare
from benchmark.ab.point import measure_point, point_from
from benchmark.ab.variants import Variant
from benchmark.scheduler.hit_rates import radix
from minisgl.bench.compare_variants import BODY
from minisgl.bench.load import Load, Server, send
from minisgl.bench.offline import run_in_a_process
from minisgl.bench.offline_run import OfflineJob
from minisgl.bench.render import words
from minisgl.bench.server_process import ServerProcess
from minisgl.bench.traces import BLOCK, TraceRequest, read_trace
from minisgl.bench.virtual_run import VirtualRun, VirtualServer
from minisgl.config import ConfigError, EngineConfig

Figures = dict[str, float]
Samples = dict[str, list[Figures]]
HOST_S = 100e-6  # of the loop for each step, in virtual time
QUICK = 8  # what sizes are divided by to try the command
ON_CPU = "CPU engine, SmolLM2, one thread"  # two wait for each other, which on a busy machine is all that is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """`figures`: those that are told, the plotted one first. `run` takes the rounds and whether it is but a try."""

    idea: str
    where: str
    load: str
    figures: tuple[str, ...]
    run: Callable[[int, bool], Samples]
    exact: bool = False


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], Figures]) -> Samples:
    found: Samples = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found[name].append(measure(name))
    return found


# ------------------------------------------------------------------------------------------------------- the step loop


def offline(variants: Mapping[str, Mapping[str, Any]], sequences: int, lens: tuple[int, int]) -> Any:
    """The step loop alone on the embedded model: `sequences` at once, `lens` in and out."""

    def run(rounds: int, quick: bool) -> Samples:
        out = max(2, lens[1] // QUICK) if quick else lens[1]

        def measure(name: str) -> Figures:
            engine = EngineConfig(engine="cpu", num_threads=1, max_running_requests=sequences, **variants[name])
            job = OfflineJob(engine=engine, num_sequences=sequences, input_len=(lens[0],) * 2, output_len=(out,) * 2)
            found = run_in_a_process(job, engine.cpu_backend)
            kept = ("output_tok_s", "scheduler_step_us", "max_rss_mib")
            return {name: float(found[name]) for name in kept}

        return in_turns(list(variants), rounds, measure)

    return run


def schedulers() -> Iterator[Experiment]:
    variants = {"python": {"cpu_backend": "python"}, "rust": {"cpu_backend": "rust_hotpath"}}
    for rows in (1, 16, 64, 256):
        lens = (4, max(8, 64 // rows))
        yield Experiment(
            idea="the scheduler in Rust",
            where=ON_CPU,
            load=f"{rows} rows",
            figures=("output_tok_s", "scheduler_step_us"),
            run=offline(variants, rows, lens),
        )


# -------------------------------------------------------------------------------------------------------- virtual time


def virtual(variants: Mapping[str, Mapping[str, Any]], trace: Callable[[], list[TraceRequest]], **fixed: Any) -> Any:
    """A simulated device in virtual time; with `concurrency` in `fixed` a closed loop."""
    concurrency = fixed.pop("concurrency", None)

    def run(rounds: int, quick: bool) -> Samples:
        requests = trace()
        arrivals = np.array([one.arrival_s for one in requests])
        found = {}
        for name, changes in variants.items():
            config = EngineConfig(**{"engine": "sim", "max_running_requests": 64, **fixed, **changes})
            server = VirtualServer(config, len(requests), HOST_S)
            found[name] = [virtual_figures(server.run(requests, arrivals.copy(), 0, concurrency))]
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
        "retractions": float(one.stats.num_retracted_total),
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
    for profile in ("qwen3-0.6b-h200", "qwen3-8b-h200"):
        yield Experiment(
            idea="overlap",
            where=f"simulated {profile}",
            load=f"64 clients, 200 in, 128 out, {1e6 * HOST_S:.0f} us of the host a step",
            figures=("output_tok_s", "ttft_p50_ms"),
            run=virtual(switch, lambda: equal_requests(256, 200, 128), sim_profile=profile, concurrency=64),
            exact=True,
        )
    device: dict[str, Any] = {"sim_profile": "qwen3-8b-h200", "concurrency": 16}
    cache = {"off": {"cache": "naive"}, "on": {"cache": "lru"}}
    for name, trace in (("shared system prompts", shared_prompts), ("chats of 6 turns", chats)):
        yield Experiment(
            idea="prefix cache",
            where="simulated qwen3-8b-h200",
            load=f"{name}, 16 clients",
            figures=("ttft_p50_ms", "output_tok_s", "cached_share"),
            run=virtual(cache, trace, **device),
            exact=True,
        )
    sizes = {str(size): {"max_prefill_length": size} for size in (16_384, 4096, 2048, 512)}
    yield Experiment(
        idea="chunk size",
        where="simulated qwen3-8b-h200",
        load="4 prompts of 16,000 among 32 answers",
        figures=("longest_itl_ms", "long_ttft_ms", "output_tok_s"),
        run=virtual(sizes, decodes_and_long_prompts, sim_profile="qwen3-8b-h200"),
        exact=True,
    )
    pages = {str(size): {"page_size": size, "num_pages": 24_576 // size} for size in (16, 1, 64, 256)}
    yield Experiment(
        idea="page size",
        where="simulated qwen3-8b-h200",
        load="shared system prompts, 16 clients, a pool of 24,576 tokens",
        figures=("cached_share", "ttft_p50_ms", "output_tok_s"),
        run=virtual(pages, shared_prompts, **device),
        exact=True,
    )


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
        def run(rounds: int, quick: bool) -> Samples:
            requests = trace()[: len(trace()) // QUICK if quick else None]
            total = sum(one.input_len for one in requests)
            return {name: [{"cached_share": radix(requests, num_pages, name) / total}] for name in ("lru", "lfu")}

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
                exact=True,
            )


# ------------------------------------------------------------------------------------------------------- whole servers


def servers(variants: Mapping[str, str], measure: Callable[[ServerProcess, bool], Figures], *shared: str) -> Any:
    """A fresh server for each sample."""

    def run(rounds: int, quick: bool) -> Samples:
        sides = tuple(Variant(name, tuple(flags.split())) for name, flags in variants.items())
        return compare(
            sides, ("--engine", "cpu", "--num-threads", "1", *shared), rounds, lambda server: measure(server, quick)
        )

    return run


def load(flags: str) -> Callable[[ServerProcess, bool], Figures]:
    def measure(server: ServerProcess, quick: bool) -> Figures:
        point = point_from(flags.split())
        if quick:
            point = replace(point, settings=replace(point.settings, warmup_requests=1))
        return measure_point(server, point)

    return measure


def long_prompt_among_answers(server: ServerProcess, quick: bool) -> Figures:
    """Three answers under way; half a second later a long prompt comes."""
    lens = [(16, 64)] * 3 + [(600, 1)]
    fixed = {**BODY, "model": server.model}
    bodies = [
        msgspec.json.encode(
            {**fixed, "prompt": words((i,), num_in), "max_tokens": max(1, num_out // (8 if quick else 1))}
        )
        for i, (num_in, num_out) in enumerate(lens)
    ]
    target = Server(server.url, server.model, None, server)
    sent = Load(bodies=bodies, chains=[1] * 4, endpoint="completions", arrivals=[0.0, 0.0, 0.0, 0.5])
    found = send(target, sent, "chunks")
    if found.result["failure"].any():
        raise ConfigError(f"a request failed: {found.result['errors']}")
    ends = np.cumsum(found.result["num_gaps"])
    last = int(np.flatnonzero(found.result["index"] == 3)[0])
    others = np.delete(found.result["gaps"], slice(int(ends[last] - found.result["num_gaps"][last]), int(ends[last])))
    return {
        "longest_itl_ms": 1e3 * float(others.max()),
        "long_ttft_ms": 1e3 * float((found.result["first"] - found.result["scheduled"])[last]),
        "engine_rss_mib": found.rss_bytes["engine"] / 2**20,
    }


def on_the_cpu() -> Iterator[Experiment]:
    yield Experiment(
        idea="overlap",
        where=ON_CPU,
        load="8 rows, 16 in, 32 out",
        figures=("output_tok_s",),
        run=offline({"off": {"overlap": False}, "on": {"overlap": True}}, 8, (16, 32)),
    )
    cache = {"off": "--cache naive", "on": "--cache lru"}
    for name, flags in (
        ("shared system prompts", "--workload shared-prefix --num-prefixes 2 --prefix-len 200 --input-len 8 16"),
        ("chats of 4 turns", "--workload multi-turn --turns 4 --input-len 40 60"),
    ):
        line = f"{flags} --output-len 8 8 --concurrency 2 --num-requests 12 --warmup-requests 2"
        yield Experiment(
            idea="prefix cache",
            where=ON_CPU,
            load=f"{name}, 2 clients",
            figures=("ttft_p50_ms", "output_tok_s", "cached_share"),
            run=servers(cache, load(line)),
        )
    yield Experiment(
        idea="chunk size",
        where=ON_CPU,
        load="a prompt of 600 among 3 answers",
        figures=("longest_itl_ms", "long_ttft_ms", "engine_rss_mib"),
        run=servers({str(n): f"--max-prefill-length {n}" for n in (1024, 256, 64)}, long_prompt_among_answers),
    )
    yield Experiment(
        idea="page size",
        where=ON_CPU,
        load="8 rows, 16 in, 32 out",
        figures=("output_tok_s", "scheduler_step_us"),
        run=offline({str(size): {"page_size": size} for size in (16, 1, 256)}, 8, (16, 32)),
    )


def experiments() -> list[Experiment]:
    """Exact ones first within an idea; ideas in the order in which they are told."""
    found = [*in_virtual_time(), *on_the_cpu(), *evictions(), *schedulers()]
    ideas = ("overlap", "prefix cache", "chunk size", "page size", "LFU for LRU", "the scheduler in Rust")
    return sorted(found, key=lambda one: ideas.index(one.idea))
