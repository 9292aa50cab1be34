"""`minisgl bench simulate`: what a trace would see on hardware that is not there, in virtual time.

The result depends on the settings alone: same seed, same report. It says that it is simulated.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minisgl.bench.plots import cdf_plot
from minisgl.bench.report import Report, print_result, table
from minisgl.bench.stats import SUMMARY, jain, summary
from minisgl.bench.traces import TraceRequest, read_trace
from minisgl.bench.virtual_fleet import VirtualFleet
from minisgl.bench.virtual_run import Floats, VirtualRun, VirtualServer
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.sim.profile import load_profile
from minisgl.routing.api import Policy
from minisgl.scheduler.policies import SchedulePolicy

PROMPTS = {"prompts below 1,000": (0, 1000), "prompts to 4,000": (1000, 4000), "prompts from 4,000": (4000, 2**63)}
"""Classes of requests by the tokens of their prompts: from, to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """`time_scales`: a run for each; at 2 the trace's requests come twice as fast. `loads`: instead, shares of the
    capacity, the rate at which the trace is served when all of it waits from the beginning, first come first. Times in
    seconds. `concurrency`: a
    closed loop of so many clients instead of the trace's times. `lengths`: of prompt and answer of every request,
    instead of a trace; no prompt is like another.
    `num_engines` behind a router that chooses by `routing`. `policies`: a run for each of these schedule policies;
    without any, with that of `engine`."""

    engine: EngineConfig
    trace: str
    lengths: tuple[int, int] | None = None
    concurrency: int | None = None
    max_requests: int | None = None
    time_scales: tuple[float, ...] = (1.0,)
    loads: tuple[float, ...] = ()
    seed: int = 0
    host_s: float = 0.0
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    num_engines: int = 1
    routing: Policy = "cache_aware"
    policies: tuple[SchedulePolicy, ...] = ()

    def check(self) -> Simulation:
        """Raise `ConfigError` for what cannot be, else return self."""
        if self.engine.engine != "sim":
            raise ConfigError(f"--engine {self.engine.engine}: only the simulated engine runs in virtual time")
        if self.engine.sim_profile == "null":
            raise ConfigError("--sim-profile null: takes no time: name a profile or a file")
        if any(not 0 < scale < float("inf") for scale in self.time_scales):
            raise ConfigError(f"--time-scale {' '.join(map(str, self.time_scales))}: must be above 0")
        if any(not 0 < load < float("inf") for load in self.loads):
            raise ConfigError(f"--load {' '.join(map(str, self.loads))}: must be above 0")
        if self.loads and (self.concurrency is not None or self.time_scales != (1.0,)):
            raise ConfigError("--load: gives the rate: not with --time-scale or --concurrency")
        for name, count in (
            ("--requests", self.max_requests),
            ("--concurrency", self.concurrency),
            ("--dp", self.num_engines),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"{name} {count}: must be at least 1")
        if self.lengths is not None and (min(self.lengths) < 1 or not self.max_requests or not self.concurrency):
            lengths = " ".join(map(str, self.lengths))
            raise ConfigError(f"--lengths {lengths}: must be at least 1, with --requests and --concurrency")
        for name, value in (("--host-us", self.host_s), ("--slo", self.slo_ttft_s), ("--slo", self.slo_tpot_s)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} {value}: must be 0 or more")
        return self

    @property
    def name(self) -> str:
        """What the requests are called."""
        return Path(self.trace).name if self.lengths is None else "{} tokens in, {} out".format(*self.lengths)


def simulate(settings: Simulation) -> dict[str, Any]:
    """Run every time scale; raises `ConfigError`. What comes back depends on `settings` alone."""
    return _simulate(settings.check())[0]


def run_simulation(settings: Simulation, out: Path | None, *, command: str) -> int:
    report = None if out is None else Report(out, f"Simulated: {settings.name}", command=command)
    began = time.perf_counter()
    result, runs = _simulate(settings.check())
    took = time.perf_counter() - began
    virtual = sum(run.end_s for run in runs.values())
    print(f"simulated {virtual:,.0f} s in {took:.1f} s", file=sys.stderr)
    shown = f"{_table(result)}\n\n{_latencies(result)}"
    print(shown)
    if report is not None:
        ttft = {f"x{scale:g} {policy}": _ttft(run)[~run.refused].tolist() for (scale, policy), run in runs.items()}
        plot = cdf_plot(report.folder / "ttft.png", ttft, title="Simulated TTFT", x_label="s", log_x=True)
        report.section("Simulated", _about(settings), shown)
        report.section("TTFT", plot)
        report.write({"result": result})
    print_result(result)
    return 0


def _simulate(settings: Simulation) -> tuple[dict[str, Any], dict[tuple[float, SchedulePolicy], VirtualRun]]:
    trace = _requests(settings)
    policies = settings.policies or (settings.engine.schedule_policy,)
    capacity = _capacity(settings, trace) if settings.loads else None
    scales = settings.time_scales
    if capacity is not None:
        scales = tuple(load * capacity * trace[-1].arrival_s / len(trace) for load in settings.loads)
    runs = {which: _run(settings, trace, *which) for which in itertools.product(scales, policies)}
    loads = dict(zip(scales, settings.loads, strict=False))
    result = {
        "bench": "simulate",
        "simulated": load_profile(settings.engine.sim_profile).name,
        "trace": settings.name,
        "concurrency": settings.concurrency,
        "engines": settings.num_engines,
        "routing": settings.routing if settings.num_engines > 1 else None,
        "requests": len(trace),
        "seed": settings.seed,
        "host_us": settings.host_s * 1e6,
        "slo_ttft_s": settings.slo_ttft_s,
        "slo_tpot_s": settings.slo_tpot_s,
        "capacity_req_s": capacity,
        "runs": [
            {"load": loads.get(scale), **_figures(settings, scale, policy, run)}
            for (scale, policy), run in runs.items()
        ],
    }
    return result, runs


def _requests(settings: Simulation) -> list[TraceRequest]:
    if settings.lengths is not None:
        return [TraceRequest(0.0, *settings.lengths)] * (settings.max_requests or 0)
    return read_trace(settings.trace)[: settings.max_requests]


def _run(settings: Simulation, trace: Sequence[TraceRequest], scale: float, policy: SchedulePolicy) -> VirtualRun:
    arrivals = np.array([one.arrival_s for one in trace]) / scale
    config = msgspec.structs.replace(settings.engine, schedule_policy=policy)
    number, host_s = settings.num_engines, settings.host_s
    if number == 1:
        return VirtualServer(config, len(trace), host_s).run(trace, arrivals, settings.seed, settings.concurrency)
    fleet = VirtualFleet(config, number, settings.routing, len(trace), host_s, settings.seed)
    return fleet.run(trace, arrivals, settings.seed, settings.concurrency)


def _capacity(settings: Simulation, trace: Sequence[TraceRequest]) -> float:
    """Requests per second when all wait from the beginning. Raises `ConfigError` for those that came at once."""
    if not trace[-1].arrival_s:
        raise ConfigError("--load: all requests of the trace come at once: there is no rate to change")
    run = _run(settings, trace, float("inf"), "fcfs")
    return float((~run.refused).sum() / run.end_s)


def _speeds(settings: Simulation, run: VirtualRun) -> Floats:
    """By request, how long its prompt takes alone, with nothing cached, over its time to the first token."""
    profile, most = load_profile(settings.engine.sim_profile), settings.engine.prefill_on("sim")
    alone = {length: profile.alone_s(length, most) for length in np.unique(run.num_prompt).tolist()}
    found: Floats = np.array([alone[length] for length in run.num_prompt.tolist()]) / _ttft(run)
    return found


def _ttft(run: VirtualRun) -> Floats:
    found: Floats = run.first_token_s - run.arrival_s
    return found


def _figures(settings: Simulation, scale: float, policy: SchedulePolicy, run: VirtualRun) -> dict[str, Any]:
    done = ~run.refused
    of_class = {name: done & (run.num_prompt >= low) & (run.num_prompt < high) for name, (low, high) in PROMPTS.items()}
    ttft, e2e = _ttft(run)[done], (run.last_token_s - run.arrival_s)[done]
    several = done & (run.num_tokens > 1)
    tpot = np.full(len(done), 0.0)
    tpot[several] = (run.last_token_s - run.first_token_s)[several] / (run.num_tokens[several] - 1)
    good = (ttft <= settings.slo_ttft_s) & (tpot[done] <= settings.slo_tpot_s)
    generated = int(run.num_tokens.sum())
    prompts = int(run.num_prompt[done].sum())
    engines = run.engines
    num_steps, num_rows = sum(one.num_steps for one in engines), sum(one.num_rows for one in engines)
    cached = sum(one.stats.num_cached_tokens_total for one in engines)
    looked_up = sum(one.stats.num_prompt_tokens_total for one in engines)
    return {
        "time_scale": scale,
        "policy": policy,
        "completed": int(done.sum()),
        "refused": int(run.refused.sum()),
        "virtual_s": run.end_s,
        "steps": num_steps,
        "mean_rows": num_rows / num_steps,
        "device_busy": sum(one.busy_s for one in engines) / len(engines) / run.end_s,
        "output_tok_s": generated / run.end_s,
        "total_tok_s": (generated + prompts) / run.end_s,
        "goodput_req_s": int(good.sum()) / run.end_s,
        "within_slo": float(good.mean()) if len(good) else 0.0,
        "hit_rate": cached / max(1, looked_up),
        "balance": _balance(run),
        "requests_by_engine": [one.num_requests for one in engines],
        "retractions": sum(one.stats.num_retracted_total for one in engines),
        "ttft_s": summary(ttft.tolist()),
        "ttft_by_prompt_s": {name: summary(_ttft(run)[of].tolist()) for name, of in of_class.items() if of.any()},
        "fairness": jain(_speeds(settings, run)[done].tolist()),
        "tpot_s": summary(tpot[several].tolist()),
        "longest_gap_s": summary(run.longest_gap_s[several].tolist()),
        "e2e_s": summary(e2e.tolist()),
    }


def _balance(run: VirtualRun) -> float:
    """Tokens that the engine with the most of them computed, over the mean."""
    computed = [one.num_computed for one in run.engines]
    return max(computed) * len(computed) / max(1, sum(computed))


COLUMNS = {
    "policy": "policy",
    "completed": "completed",
    "refused": "refused",
    "output tok/s": "output_tok_s",
    "hit rate": "hit_rate",
    "balance": "balance",
    "busy": "device_busy",
    "rows": "mean_rows",
    "within SLO": "within_slo",
    "fairness": "fairness",
}


def _table(result: dict[str, Any]) -> str:
    head = ("load" if result["capacity_req_s"] else "time scale", *COLUMNS)
    rows = [(run["load"] or run["time_scale"], *(run[key] for key in COLUMNS.values())) for run in result["runs"]]
    return table(head, rows)


def _latencies(result: dict[str, Any]) -> str:
    rows = [
        (run["load"] or run["time_scale"], run["policy"], name, *(factor * found[which] for which in SUMMARY))
        for run in result["runs"]
        for name, found, factor in (
            ("TTFT s", run["ttft_s"], 1.0),
            *((f"TTFT s, {of}", found, 1.0) for of, found in run["ttft_by_prompt_s"].items()),
            ("TPOT ms", run["tpot_s"], 1e3),
            ("longest ITL ms", run["longest_gap_s"], 1e3),
            ("E2E s", run["e2e_s"], 1.0),
        )
    ]
    head = "load" if result["capacity_req_s"] else "time scale"
    return table((head, "policy", "latency", *SUMMARY), rows)


def _about(settings: Simulation) -> str:
    name = load_profile(settings.engine.sim_profile).name
    several = f" {settings.num_engines} engines, routing {settings.routing}." if settings.num_engines > 1 else ""
    return (
        f"Nothing of this ran on the hardware it speaks of: step times are those of the profile `{name}`, prompts are "
        "made up from the trace's lengths and prefixes. Scheduling, paging and the prefix cache are the server's own. "
        f"Without text, HTTP and network.{several}"
    )
