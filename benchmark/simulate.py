"""Serve a trace on simulated hardware in virtual time: an hour in seconds, with the server's own loop and scheduler.

    MINISGL_DATA=FOLDER python -m benchmark.simulate --trace mooncake-conversation --max-seq-len 131072
    python -m benchmark.simulate --lengths 512 128 --requests 500 --concurrency 64
    python -m benchmark.simulate --trace FILE --load 0.9 --compare-policies

The virtual clock advances when a simulated step ends and when the loop is idle. A request arrives at its time in the
trace, and is admitted at the next step, as in the server. Tokenization, HTTP and network are omitted.

Invariants: the same settings give the same result, with both schedulers; a request that does not fit counts as refused.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.bench.asked import asked
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import SUMMARY, summary
from minisgl.bench.traces import NAMES, TraceRequest, prompt_tokens, read_trace
from minisgl.cli.flags import ENGINE, add_settings, engine_config
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.sim import VirtualClock, build_sim
from minisgl.engine.sim.profile import load_profile
from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.runner.build import build_control_plane, build_step_time
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop, Timing
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.step import FinishReason

COMMAND = "python -m benchmark.simulate"
PROMPTS = {"prompts below 1,000": (0, 1000), "prompts to 4,000": (1000, 4000), "prompts from 4,000": (4000, 2**63)}
"""Classes of requests by prompt tokens: lower bound, upper bound (exclusive)."""
Floats = npt.NDArray[np.float64]


class VirtualServer:
    """Step loop with a simulated engine on a virtual clock, for the requests of `trace`.

    The arrays have an entry for each request; times are virtual seconds since the first arrival, NaN if there was none.
    `host_s` is the loop's own time for a step.
    """

    def __init__(self, config: EngineConfig, trace: Sequence[TraceRequest], host_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.sim = build_sim(config, lambda *report: None, self.clock)
        self.plane = build_control_plane(config, self.sim.info)
        timing = Timing(step_time=build_step_time(config, self.sim.info))
        settings = LoopSettings(overlap=config.overlap)
        self.loop = StepLoop(self.plane, self.sim, self._take, settings=settings, timing=timing)
        self.num_live = 0
        self.arrival_s: Floats = np.array([one.arrival_s for one in trace])
        self.first_token_s, self.last_token_s = np.full((2, len(trace)), np.nan)
        self.longest_gap_s: Floats = np.zeros(len(trace))
        self.num_tokens = np.zeros(len(trace), np.int64)
        self.refused = np.zeros(len(trace), np.bool_)
        self.num_prompt = np.array([one.input_len for one in trace], np.int64)
        self._trace = trace
        self._host_s = host_s

    def run(self, seed: int = 0, time_scale: float = 1.0, concurrency: int | None = None) -> VirtualServer:
        """Serve all requests at their times, `time_scale` times as fast. With `concurrency`, send a request as soon as
        fewer than that many run; `arrival_s` becomes the time when it was sent."""
        self.arrival_s = self.arrival_s / time_scale
        at = 0
        while at < len(self._trace) or self.num_live:
            if not self.num_live:
                self._drain()
                self.clock.sleep_until(0.0 if concurrency else float(self.arrival_s[at]))
            if concurrency:
                due = min(at + concurrency - self.num_live, len(self._trace))
                self.arrival_s[at:due] = self.clock.now()
            else:
                due = max(at, int(np.searchsorted(self.arrival_s, self.clock.now(), "right")))
            messages = [self._request(i, seed) for i in range(at, due)]
            at = due
            self.num_live += len(messages)
            self.clock.sleep_until(self.clock.now() + self._host_s)
            self.loop.step(messages)
        self._drain()
        return self

    def _drain(self) -> None:
        while not self.loop.idle:
            self.loop.step(())

    def _request(self, index: int, seed: int) -> AddRequest:
        request = self._trace[index]
        sampling = SamplingParams(max_tokens=request.output_len, seed=index, ignore_eos=True)
        return AddRequest(index, prompt_tokens(request, index, self.sim.info.vocab_size, seed).tobytes(), sampling)

    def _take(self, messages: Sequence[FromEngine]) -> None:
        now = self.clock.now()
        for message in messages:
            if not isinstance(message, StepTokens) or not message.req_ids:
                continue
            ids = np.frombuffer(message.req_ids, np.int64)
            reasons = np.frombuffer(message.reasons, np.int32)
            self.num_live -= int(np.count_nonzero(reasons))
            self.refused[ids[reasons == FinishReason.ERROR]] = True
            ids = ids[np.frombuffer(message.tokens, np.int32) >= 0]
            self.first_token_s[ids[self.num_tokens[ids] == 0]] = now
            # the last token's time is NaN before the first, which fmax leaves out
            self.longest_gap_s[ids] = np.fmax(self.longest_gap_s[ids], now - self.last_token_s[ids])
            self.last_token_s[ids] = now
            self.num_tokens[ids] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Settings of simulated runs: one run for each of `policies` (none: the engine's) and of `time_scales` or `loads`.

    A time scale of 2 makes the trace's requests arrive twice as fast. A load is a fraction of the capacity, the rate at
    which the trace is served when all of it is queued from the start, first come first served. `concurrency` is a
    closed loop in place of the trace's times, `lengths` (prompt, output) equal requests in place of a trace.
    """

    engine: EngineConfig
    trace: str = ""
    lengths: tuple[int, int] | None = None
    concurrency: int | None = None
    max_requests: int | None = None
    time_scales: tuple[float, ...] = (1.0,)
    loads: tuple[float, ...] = ()
    seed: int = 0
    host_s: float = 0.0
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    policies: tuple[SchedulePolicy, ...] = ()

    def check(self) -> None:
        """Check the settings. Raises `ConfigError` that names the flag and the value."""
        if self.engine.engine != "sim":
            raise ConfigError(f"--engine {self.engine.engine}: only the simulated engine runs in virtual time")
        if self.engine.sim_profile == "null":
            raise ConfigError("--sim-profile is null, which takes no time; it must be a profile or a file")
        for flag, values in (
            ("--time-scale", self.time_scales),
            ("--load", self.loads),
            ("--requests", [] if self.max_requests is None else [self.max_requests]),
            ("--concurrency", [] if self.concurrency is None else [self.concurrency]),
            ("--lengths", self.lengths or ()),
        ):
            if wrong := [value for value in values if not 0 < value < float("inf")]:
                raise ConfigError(f"{flag} {wrong[0]}: must be above 0")
        if self.loads and (self.concurrency is not None or self.time_scales != (1.0,)):
            raise ConfigError("--load sets the rate; it cannot be used with --time-scale or --concurrency")
        if self.lengths is not None and not (self.max_requests and self.concurrency):
            raise ConfigError("--lengths: needs --requests and --concurrency")
        if not 0 <= self.host_s < float("inf"):
            raise ConfigError(f"--host-us {1e6 * self.host_s:g}: must be 0 or more")

    @property
    def name(self) -> str:
        return Path(self.trace).name if self.lengths is None else "{} tokens in, {} out".format(*self.lengths)

    def requests(self) -> list[TraceRequest]:
        if self.lengths is not None:
            return [TraceRequest(0.0, *self.lengths)] * (self.max_requests or 0)
        return read_trace(self.trace)[: self.max_requests]


def simulate(settings: Simulation) -> dict[str, Any]:
    """Return the figures of every run, which depend on `settings` alone. Raises `ConfigError` if they are invalid."""
    settings.check()
    trace = settings.requests()
    scales: Sequence[float] = settings.time_scales
    capacity = None
    if settings.loads:
        if not trace[-1].arrival_s:
            raise ConfigError("--load needs a trace with arrival times; in this one all requests come at once")
        at_once = _run(settings, trace, float("inf"), "fcfs")
        capacity = float((~at_once.refused).sum() / at_once.clock.now())
        scales = [load * capacity * trace[-1].arrival_s / len(trace) for load in settings.loads]
    loads = settings.loads or [None] * len(scales)
    policies = settings.policies or (settings.engine.schedule_policy,)
    return {
        "bench": "simulate",
        "simulated": load_profile(settings.engine.sim_profile).name,
        "trace": settings.name,
        "concurrency": settings.concurrency,
        "requests": len(trace),
        "seed": settings.seed,
        "host_us": settings.host_s * 1e6,
        "slo_ttft_s": settings.slo_ttft_s,
        "slo_tpot_s": settings.slo_tpot_s,
        "capacity_req_s": capacity,
        "runs": [
            {"load": load, "time_scale": scale, "policy": policy}
            | _figures(settings, _run(settings, trace, scale, policy))
            for (load, scale), policy in itertools.product(zip(loads, scales, strict=True), policies)
        ],
    }


def _run(settings: Simulation, trace: Sequence[TraceRequest], scale: float, policy: SchedulePolicy) -> VirtualServer:
    config = msgspec.structs.replace(settings.engine, schedule_policy=policy)
    return VirtualServer(config, trace, settings.host_s).run(settings.seed, scale, settings.concurrency)


def _figures(settings: Simulation, run: VirtualServer) -> dict[str, Any]:
    done = ~run.refused
    several = done & (run.num_tokens > 1)
    ttft, e2e, took = run.first_token_s - run.arrival_s, run.last_token_s - run.arrival_s, run.clock.now()
    tpot = np.zeros(len(done))
    tpot[several] = (run.last_token_s - run.first_token_s)[several] / (run.num_tokens[several] - 1)
    good = (ttft[done] <= settings.slo_ttft_s) & (tpot[done] <= settings.slo_tpot_s)
    of_class = {name: done & (run.num_prompt >= low) & (run.num_prompt < high) for name, (low, high) in PROMPTS.items()}
    stats, generated = run.plane.stats(), int(run.num_tokens.sum())
    return {
        "completed": int(done.sum()),
        "refused": int(run.refused.sum()),
        "virtual_s": took,
        "steps": run.loop.num_steps,
        "mean_rows": run.loop.timers.num_rows / run.loop.num_steps,
        "device_busy": run.sim.busy_s / took,
        "output_tok_s": generated / took,
        "total_tok_s": (generated + int(run.num_prompt[done].sum())) / took,
        "goodput_req_s": int(good.sum()) / took,
        "within_slo": float(good.mean()) if len(good) else 0.0,
        "hit_rate": stats.num_cached_tokens_total / max(1, stats.num_prompt_tokens_total),
        "retractions": stats.num_retracted_total,
        "ttft_s": summary(ttft[done]),
        "ttft_by_prompt_s": {name: summary(ttft[of]) for name, of in of_class.items() if of.any()},
        "tpot_s": summary(tpot[several]),
        "longest_gap_s": summary(run.longest_gap_s[several]),
        "e2e_s": summary(e2e[done]),
    }


COLUMNS = {
    "policy": "policy",
    "completed": "completed",
    "refused": "refused",
    "output tok/s": "output_tok_s",
    "hit rate": "hit_rate",
    "busy": "device_busy",
    "rows": "mean_rows",
    "within SLO": "within_slo",
}


def shown(result: dict[str, Any]) -> str:
    """Return the result as tables: a line for each run, and a line for each of its latencies."""
    key = "load" if result["capacity_req_s"] else "time_scale"
    runs = [(run[key], *(run[name] for name in COLUMNS.values())) for run in result["runs"]]
    latencies = [
        (run[key], run["policy"], name, *(factor * found[which] for which in SUMMARY))
        for run in result["runs"]
        for name, found, factor in (
            ("TTFT s", run["ttft_s"], 1.0),
            *((f"TTFT s, {of}", found, 1.0) for of, found in run["ttft_by_prompt_s"].items()),
            ("TPOT ms", run["tpot_s"], 1e3),
            ("longest ITL ms", run["longest_gap_s"], 1e3),
            ("E2E s", run["e2e_s"], 1.0),
        )
    ]
    head = key.replace("_", " ")
    return f"{table((head, *COLUMNS), runs)}\n\n{table((head, 'policy', 'latency', *SUMMARY), latencies)}"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    job = parser.add_argument_group("workload")
    job.add_argument("--trace", default="mooncake-conversation", help=f"{', '.join(NAMES)} (MINISGL_DATA), or a file")
    job.add_argument("--requests", type=int, help="number of requests from the start of the trace (default: all)")
    job.add_argument("--time-scale", type=float, nargs="+", default=[1.0], help="speed-up of the times; a run for each")
    job.add_argument("--load", type=float, nargs="+", default=[], help="fraction of the capacity; a run for each")
    job.add_argument("--concurrency", type=int, help="number of clients in a closed loop, instead of the trace's times")
    job.add_argument("--lengths", type=int, nargs=2, metavar=("IN", "OUT"), help="tokens in and out, without a trace")
    job.add_argument("--workload-seed", type=int, default=0, help="seed of the prompts' tokens (default: 0)")
    job.add_argument("--host-us", type=float, default=0.0, help="time of the step loop per step (default: 0)")
    job.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="TTFT limit of a good request (default: 1000)")
    job.add_argument("--slo-tpot-ms", type=float, default=50.0, help="TPOT limit of a good request (default: 50)")
    job.add_argument("--compare-policies", action="store_true", help="one run with each --schedule-policy")
    job.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    add_settings(parser, ENGINE, show=("sim_profile",))
    parser.set_defaults(engine="sim", sim_profile="qwen3-8b-h200", max_running_requests=256, max_prefill_length=8192)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = make_parser().parse_args(arguments)
    try:
        settings = asked(
            Simulation,
            args,
            engine=engine_config(args),
            max_requests=args.requests,
            time_scales=tuple(args.time_scale),
            loads=tuple(args.load),
            seed=args.workload_seed,
            host_s=args.host_us / 1e6,
            slo_ttft_s=args.slo_ttft_ms / 1e3,
            slo_tpot_s=args.slo_tpot_ms / 1e3,
            policies=get_args(SchedulePolicy) if args.compare_policies else (),
        )
        began = time.perf_counter()
        result = simulate(settings)
    except ConfigError as error:
        print(f"benchmark.simulate: {error}", file=sys.stderr)
        return 2
    virtual_s = sum(run["virtual_s"] for run in result["runs"])
    print(f"simulated {virtual_s:,.0f} s in {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(shown(result))
    if args.out is not None:
        report = Report(args.out, f"Simulated: {settings.name}", command=public_command(arguments, COMMAND))
        note = (
            "Nothing of this ran on the hardware it speaks of: step times are those of the profile "
            f"`{result['simulated']}`, prompts are made up from the trace's lengths and prefixes. Scheduling, paging "
            "and the prefix cache are the server's own. Without text, HTTP and network."
        )
        report.section("Simulated", note, shown(result))
        report.write({"result": result})
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
