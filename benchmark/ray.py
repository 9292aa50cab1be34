"""Measure the cost of Ray Serve: the same load on one replica behind Serve, on the bare server that a replica is, and
on the default server, all running at once, in turns. Needs the extra `ray`; everything runs on this machine.

    python -m benchmark.ray --out benchmark/runs/DATE-ray     # several minutes

The client and all servers share the machine's cores: read ratios, not speeds. The last line of stdout is JSON.

Invariants: a run with a failed request is discarded; within a round all sides get the same prompts; every process
counts once, under one part.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from minisgl.bench.load import Load, Server, calibrate, first_model, send
from minisgl.bench.render import Renderer
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.serve_metrics import Slo, figures
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.stats import paired_figures, there_and_back
from minisgl.bench.workloads import WARMUP_RUN, WorkloadSettings, make_workload
from minisgl.config import ConfigError

SERVE, BARE, GATEWAY = "Ray Serve", "bare server", "bare, Rust gateway"
SIDES = (SERVE, BARE, GATEWAY)
FLAGS = ("--engine", "echo", "--page-size", "16", "--num-pages", "4096")
INPUT, OUTPUT = 100, 128
INGRESS = "minisgl"  # the deployment of the ingress (`minisgl.ray.application`); the others are replicas
PARTS = ("proxy", "ingress", "replica", "server", "engine", "controller", "ray")
Samples = Sequence[Mapping[str, Any]]


def part_of(command: Sequence[str]) -> str:
    """Return the part (one of `PARTS`) of a process by its command line; `ray` is every other process of Ray."""
    line = " ".join(command)
    if line.startswith("ray::ServeReplica:"):
        deployment = line.split()[0].split(":")[4].partition(".")[0] if line.count(":") >= 4 else ""
        return "ingress" if deployment == INGRESS else "replica"
    if line.startswith("ray::ProxyActor"):
        return "proxy"
    if line.startswith("ray::ServeController"):
        return "controller"
    if "minisgl.runner.process" in command:
        return "engine"
    return "server" if "minisgl" in command and "serve" in command else "ray"


def whole(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


class Cpu:
    """CPU seconds by part since its creation. Processes are assigned to parts once: a worker's title changes."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._parts: dict[psutil.Process, str] = {}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._parts[process] = part_of(process.cmdline())
        self._before = self._look()

    def _look(self) -> dict[psutil.Process, float]:
        seconds = {}
        for process in self._parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds[process] = float(sum(process.cpu_times()[:2]))
        return seconds

    def used(self) -> dict[str, float]:
        """Return the CPU seconds since the creation, by part."""
        seconds: dict[str, float] = collections.defaultdict(float)
        for process, now in self._look().items():
            seconds[self._parts[process]] += now - self._before.get(process, now)
        return {part: seconds[part] for part in PARTS if part in seconds}


@dataclass(frozen=True, slots=True)
class Side:
    server: Server
    renderer: Renderer
    processes: Callable[[], list[psutil.Process]]


@contextlib.contextmanager
def sides() -> Iterator[dict[str, Side]]:
    from tests.helpers.ray_cluster import ray_cluster

    with contextlib.ExitStack() as stack:
        bare = {
            name: stack.enter_context(ServerProcess(Launch(flags=(*FLAGS, *front))))
            for name, front in ((BARE, ("--frontend", "python")), (GATEWAY, ()))
        }
        cluster = stack.enter_context(ray_cluster())
        cluster.deploy(name="echo", flags=list(FLAGS), replicas=1)

        def of_ray() -> list[psutil.Process]:
            others = {process.pid for own in bare.values() for process in whole(own.pid)}
            return [one for one in whole(os.getpid())[1:] if one.pid not in others]

        yield {
            SERVE: _side(Server(cluster.url, first_model(cluster.url, None)), of_ray),
            **{name: _side(Server(own.url, own.model), partial(whole, own.pid)) for name, own in bare.items()},
        }


def _side(server: Server, processes: Callable[[], list[psutil.Process]]) -> Side:
    extra = {"ignore_eos": True}
    return Side(server, Renderer(server.model, "chat", calibrate(server, "chat", extra), extra), processes)


def measure(rounds: int, streams: Sequence[int]) -> list[dict[str, Any]]:
    """Return a sample for each number of streams, response length (1 and `OUTPUT` tokens), side and round."""
    points, samples = [(count, tokens) for count in streams for tokens in (1, OUTPUT)], list[dict[str, Any]]()
    with sides() as alive:
        for turn in range(rounds):
            for i, (count, tokens) in enumerate(points):
                for name in there_and_back(SIDES, turn):
                    sample = _measure_one(alive[name], count, tokens, turn * len(points) + i, is_first=turn == 0)
                    samples.append({"side": name, "round": turn, "streams": count, "tokens": tokens, **sample})
                    said = f"{count} x {tokens}: {name}: {sample['output_tok_s']:.0f} tok/s"
                    print(f"round {turn + 1} of {rounds}: {said}", file=sys.stderr, flush=True)
    return samples


def _measure_one(side: Side, streams: int, tokens: int, run: int, *, is_first: bool) -> dict[str, Any]:
    count = 12 * streams if tokens > 1 else max(48 * streams, 200)  # one token is quick, and the clock coarse

    def load(number: int, run: int) -> Load:
        settings = WorkloadSettings(num_requests=number, input_len=(INPUT, INPUT), output_len=(tokens, tokens), run=run)
        bodies = [side.renderer.body(one) for one in make_workload("random", settings).requests]
        return Load(bodies=bodies, chains=[1] * number, concurrency=streams)

    if is_first:
        send(side.server, load(2 * streams, WARMUP_RUN + run), "warm-up")
    asked = load(count, run)
    cpu = Cpu(side.processes())
    found = figures(send(side.server, asked, f"{streams} x {tokens}"), Slo())
    used = cpu.used()
    if found["failed"]:
        raise ConfigError(f"{streams} x {tokens}: {found['failed']} failed: {found['failures']} {found['errors']}")
    return sample_of(found, used)


def sample_of(measured: Mapping[str, Any], used: Mapping[str, float]) -> dict[str, Any]:
    """Return a sample from `serve_metrics.figures` and CPU seconds by part."""
    latencies = {f"{kind}_{at}_ms": measured[f"{kind}_ms"][at] for kind in ("ttft", "itl") for at in ("p50", "p99")}
    return {
        "requests": measured["requests"],
        "requests_s": measured["requests_s"],
        "output_tok_s": measured["output_tok_s"],
        **latencies,
        "cpu_s": dict(used),
        "cpu_ms_per_request": 1e3 * sum(used.values()) / measured["requests"],
        "cpu_s_per_1000_tokens": 1e3 * sum(used.values()) / measured["output_tokens"],
    }


FIGURES = {
    1: ("requests_s", "ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_request"),
    OUTPUT: ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "cpu_s_per_1000_tokens"),
}


def compared(samples: Samples, tokens: int) -> str:
    """Return the table of each side's medians, and of Serve against the others, paired by round."""
    rows = []
    for streams in sorted({one["streams"] for one in samples}):
        of_side = {
            side: [
                {name: one[name] for name in FIGURES[tokens]}
                for one in sorted(samples, key=lambda one: int(one["round"]))
                if (one["side"], one["streams"], one["tokens"]) == (side, streams, tokens)
            ]
            for side in SIDES
        }
        pairs = {side: paired_figures(of_side[side], of_side[SERVE]) for side in (BARE, GATEWAY)}
        for name in FIGURES[tokens]:
            medians = [statistics.median(one[name] for one in of_side[side]) for side in SIDES]
            rows.append((streams, name, *medians, str(pairs[BARE][name]), str(pairs[GATEWAY][name])))
    return table(("streams", "figure", *SIDES, f"{SERVE} against {BARE}", "against the gateway"), rows)


def cpu_table(samples: Samples) -> str:
    """Return the table of medians over the rounds, by part: CPU us of a one-token request, and per further token."""
    rows = []
    for streams, side in sorted({(one["streams"], one["side"]) for one in samples}):
        pairs: dict[int, dict[int, Mapping[str, Any]]] = {}
        for one in samples:
            if (one["streams"], one["side"]) == (streams, side):
                pairs.setdefault(one["round"], {})[one["tokens"]] = one
        for part in PARTS:
            first, more = list[float](), list[float]()
            for pair in pairs.values():
                short, long = (1e6 * one["cpu_s"].get(part, 0.0) / one["requests"] for one in (pair[1], pair[OUTPUT]))
                first.append(short)
                more.append((long - short) / (OUTPUT - 1))
            if any(first) or any(more):
                rows.append((streams, side, part, statistics.median(first), statistics.median(more)))
    return table(("streams", "side", "process", "us per request", "us per further token"), rows)


def write(report: Report, raw: Mapping[str, Any]) -> None:
    samples = raw["samples"]
    said = "Medians over the rounds; differences are geometric means of the ratios of each round, 95 % intervals."
    report.section("Requests of one token", said, compared(samples, 1))
    report.section(f"Answers of {OUTPUT} tokens", compared(samples, OUTPUT))
    report.section("CPU by process", cpu_table(samples))
    report.write(raw)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="benchmark.ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64], metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(arguments)
    command = public_command(arguments, "python -m benchmark.ray")
    report = Report(args.out, "What Ray Serve costs", command=command)
    try:
        samples = measure(args.rounds, args.streams)
    except ConfigError as error:
        print(f"benchmark.ray: {error}", file=sys.stderr)
        return 1
    write(report, {"ray": importlib.metadata.version("ray"), "samples": samples})
    print_result({"bench": "ray", "samples": len(samples)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
