"""`minisgl bench simulate`: flags of the simulation in virtual time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from minisgl.bench.asked import asked
from minisgl.bench.report import public_command
from minisgl.bench.simulate import Simulation, run_simulation
from minisgl.bench.traces import NAMES
from minisgl.cli.flags import ENGINE, Commands, add_settings, command, engine_config
from minisgl.routing.api import POLICIES
from minisgl.scheduler.policies import SchedulePolicy
from minisgl.utils import spellings


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(
        commands,
        "simulate",
        run,
        help="a trace on simulated hardware, in virtual time",
        description="A production trace through the server's step loop and scheduler, with step times of a "
        "simulated device and a clock that is only counted: an hour in seconds. Same flags and seed, same result.",
    )
    parser.set_defaults(command="bench")
    job = parser.add_argument_group("workload")
    job.add_argument(
        "--trace",
        default="mooncake-conversation",
        metavar="NAME|FILE",
        help=f"{', '.join(NAMES)} (from MINISGL_DATA), or a .jsonl or .csv file in one of their formats",
    )
    job.add_argument("--requests", type=int, help="only the first so many (default: all)")
    job.add_argument(
        "--time-scale",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="X",
        help="X times as fast; a run each",
    )
    job.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[],
        metavar="X",
        help="X times what it can do with all requests waiting; a run each, instead of --time-scale",
    )
    job.add_argument("--concurrency", type=int, metavar="N", help="clients, instead of the trace's times")
    job.add_argument("--lengths", type=int, nargs=2, metavar=("IN", "OUT"), help="of every request, instead of a trace")
    job.add_argument("--workload-seed", type=int, default=0, help="of the prompts' tokens")
    job.add_argument("--host-us", type=float, default=0.0, help="what the step loop itself takes for a step")
    job.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="a request is good with a first token by then")
    job.add_argument("--slo-tpot-ms", type=float, default=50.0, help="and so much time between its tokens")
    job.add_argument("--dp", type=int, default=1, metavar="N", help="engines behind a router, each with its own pool")
    job.add_argument(
        "--routing",
        type=spellings.routing,
        choices=POLICIES,
        default="cache_aware",
        help="which engine gets a request (short: rr, fsfs)",
    )
    job.add_argument("--compare-policies", action="store_true", help="a run with each --schedule-policy")
    job.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report (default: nothing)")
    add_settings(parser, ENGINE, show=("sim_profile",))
    parser.set_defaults(engine="sim", sim_profile="qwen3-8b-h200", max_running_requests=256, max_prefill_length=8192)
    return parser


def run(args: argparse.Namespace) -> int:
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
        num_engines=args.dp,
        policies=get_args(SchedulePolicy) if args.compare_policies else (),
    )
    return run_simulation(settings, args.out, command=public_command(args.arguments))
