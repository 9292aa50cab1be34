"""What Ray Serve costs, and what its routing by prefix is worth. Needs the extra `ray`; all runs on this machine.

    python -m benchmark.ray overhead --out benchmark/runs/DATE-ray/overhead     # several minutes
    python -m benchmark.ray routing --out benchmark/runs/DATE-ray/routing       # about half an hour; MINISGL_DATA
    python -m benchmark.ray overhead --again --out DIR                          # its report again, from raw.json

The client and all servers share the machine's cores: read ratios, not speeds. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from benchmark.ray import overhead, routing
from benchmark.ray.tables import overhead_report, routing_report
from minisgl.bench.report import Report, print_result, public_command, read_raw
from minisgl.config import ConfigError

TITLES = {"overhead": "What Ray Serve costs", "routing": "Routing by prefix behind Ray Serve"}
REPORTS = {"overhead": overhead_report, "routing": routing_report}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    cost = commands.add_parser("overhead", help="Serve beside the bare server, per request and per token")
    cost.add_argument("--rounds", type=int, default=6)
    cost.add_argument("--streams", type=int, nargs="+", default=list(overhead.STREAMS), metavar="N")
    worth = commands.add_parser("routing", help="hit rate and TTFT by prefix and by Serve's own choice")
    worth.add_argument("--rounds", type=int, default=3)
    worth.add_argument("--sizes", type=int, nargs="+", default=list(routing.SIZES), metavar="N", help="replicas")
    worth.add_argument("--requests", type=int, default=40, help="of shared prefixes, for each replica")
    for one in (cost, worth):
        one.add_argument("--out", type=Path, required=True, metavar="DIR")
        one.add_argument("--again", action="store_true", help="measure nothing: the report of DIR once more")
    return parser.parse_args(argv)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.what == "overhead":
        found = overhead.measure(args.rounds, args.streams, say)
    else:
        found = routing.measure(args.rounds, args.sizes, args.requests, say)
    return {"ray": importlib.metadata.version("ray"), **found}


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    command = public_command(arguments, "python -m benchmark.ray")
    if args.again:
        raw = read_raw(args.out)
        report = Report(args.out, raw["title"], command=raw["command"])
        report.environment = raw["environment"]
        REPORTS[args.what](report, raw)
        report.write(raw)
        return 0
    try:
        report = Report(args.out, TITLES[args.what], command=command)
        raw = json.loads(json.dumps(measured(args)))  # numbers of replicas are texts, as in the file
    except ConfigError as error:
        print(f"benchmark.ray: {error}", file=sys.stderr)
        return 1
    REPORTS[args.what](report, raw)
    report.write(raw)
    print_result({"what": args.what, "samples": len(raw["samples"]), "ray": raw["ray"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
