"""The command `minisgl bench offline`: flags of the offline throughput benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisgl.bench.asked import asked
from minisgl.bench.offline import SIZES, Offline, run_offline
from minisgl.bench.report import public_command
from minisgl.cli.flags import ENGINE, Commands, add_settings, command, engine_config
from minisgl.scheduler.policies import BACKENDS


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(
        commands,
        "offline",
        run,
        help="throughput of the step loop without a server",
        description="Throughput of the step loop in one process: all sequences are there at the start. Both control "
        "planes in turns, each run in a process of its own; text and sockets are not part of it.",
    )
    parser.set_defaults(command="bench")
    job = parser.add_argument_group("workload")
    job.add_argument(
        "--size",
        choices=("auto", *SIZES),
        default="auto",
        help="full: 256 sequences, 100 to 1,024 tokens in and out; small: 16 short ones; auto: small on a CPU",
    )
    job.add_argument("--num-sequences", type=int, help="number of sequences (default: by --size)")
    job.add_argument("--input-len", type=int, nargs=2, metavar=("MIN", "MAX"), help="prompt tokens (default by --size)")
    job.add_argument(
        "--output-len", type=int, nargs=2, metavar=("MIN", "MAX"), help="answer tokens (default by --size)"
    )
    job.add_argument("--workload-seed", type=int, default=0, help="seed of lengths and prompts")
    job.add_argument(
        "--control-planes",
        nargs="+",
        choices=BACKENDS,
        help="schedulers to compare (default: both, or the one of --cpu-backend)",
    )
    job.add_argument("--repeats", type=int, default=3, help="runs of each scheduler, in turns")
    job.add_argument("--out", type=Path, metavar="DIR", help="folder for raw.json and a report (default: none)")
    add_settings(parser, ENGINE)
    return parser


def run(args: argparse.Namespace) -> int:
    settings = asked(
        Offline,
        args,
        engine=engine_config(args),
        seed=args.workload_seed,
        control_planes=tuple(args.control_planes or ([args.cpu_backend] if args.cpu_backend else BACKENDS)),
    )
    return run_offline(settings, args.out, command=public_command(args.arguments))
