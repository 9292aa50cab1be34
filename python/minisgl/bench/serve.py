"""The command `minisgl bench serve`: flags of the serving benchmark."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from minisgl import envs
from minisgl.bench.asked import asked
from minisgl.bench.report import public_command
from minisgl.bench.serve_metrics import Slo
from minisgl.bench.serve_run import run_serve
from minisgl.bench.serve_settings import Serve
from minisgl.bench.workloads import WORKLOADS, WorkloadSettings
from minisgl.config import ConfigError

DEFAULT_CONCURRENCY = [1, 16, 64]
EPILOG = """examples:
  minisgl bench serve -- --model Qwen/Qwen3-0.6B                   a server of its own, with these flags
  minisgl bench serve --base-url http://127.0.0.1:8000             any OpenAI-compatible server
  minisgl bench serve --workload chat --rate 2 4 8 --out report    open loop, three rates
  minisgl bench serve --trace FILE --time-scale 2 --num-requests 500   a trace at its times, twice as fast
  minisgl bench serve --concurrency 256 -- --engine sim --sim-profile null   what the HTTP path costs"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="latency and throughput of a server under load",
        description="Load on a server over HTTP: closed loop (--concurrency: so many clients, each sends its next "
        "request when its last one has ended) or open loop (--rate, or the arrivals of a trace; latencies count from "
        "the moment in which a request was due).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="a running server (default: start one, with flags after --)")
    server.add_argument("--model", dest="served_model", help="model name in requests (default: the server's first)")
    server.add_argument("--api-key", help="API key of the server (default: MINISGL_API_KEY)")
    server.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    server.add_argument("--extra-body", metavar="JSON", help="fields of every request; ignore_eos is true by default")
    server.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of minisgl serve")
    _add_load(parser)
    _add_workload(parser)
    out = parser.add_argument_group("result")
    out.add_argument("--slo-ttft-ms", type=float, help="goodput: milliseconds of a good answer's TTFT at most")
    out.add_argument("--slo-tpot-ms", type=float, help="goodput: milliseconds per output token at most")
    out.add_argument("--slo-e2e-ms", type=float, help="goodput: milliseconds of the whole answer at most")
    out.add_argument("--out", type=Path, metavar="DIR", help="folder for raw.json and a report")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="closed loop, by number of clients")
    load.add_argument("--rate", type=float, nargs="+", metavar="R", help="open loop, Poisson, requests per second")
    load.add_argument("--trace-arrivals", action="store_true", help="open loop with the arrivals of a trace workload")
    load.add_argument("--num-requests", type=int, default=256, help="requests per point (default: 256)")
    load.add_argument("--duration", type=float, default=math.inf, metavar="S", help="closed loop: seconds to send")
    load.add_argument("--warmup-requests", type=int, help="uncounted requests before each point (default: a quarter)")
    load.add_argument("--repeat", type=int, default=1, help="measurements of each point (default: 1)")
    load.add_argument("--no-keep-alive", action="store_true", help="use a new connection for each request")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds per request (default: 600)")
    load.add_argument("--ramp", type=float, default=0.0, metavar="S", help="seconds over which the clients begin")
    load.add_argument("--client-threads", type=int, default=1, help="threads of the load generator (default: 1)")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--workload",
        metavar="NAME|FILE",
        help=f"{', '.join(WORKLOADS)}, or a file: a trace or ShareGPT's conversations (default: random)",
    )
    work.add_argument(
        "--trace",
        metavar="NAME|FILE",
        help="trace to send at its own times, unless --rate or --concurrency: Mooncake, Qwen or Azure format",
    )
    work.add_argument("--input-len", type=int, nargs=2, metavar=("MIN", "MAX"), help="tokens (traces: MAX is a limit)")
    work.add_argument("--output-len", type=int, nargs=2, metavar=("MIN", "MAX"), help="tokens (traces: MAX is a limit)")
    work.add_argument("--seed", type=int, default=0, help="seed of lengths, texts and arrivals (default: 0)")
    work.add_argument("--num-prefixes", type=int, default=8, help="shared-prefix: number of prefixes (default: 8)")
    work.add_argument("--prefix-len", type=int, default=1024, help="shared-prefix: tokens of each (default: 1024)")
    work.add_argument("--turns", type=int, default=4, help="multi-turn and conversations: turns of a chat (default: 4)")
    work.add_argument("--time-scale", type=float, default=1.0, help="traces: 2 sends them twice as fast (default: 1)")


def run(args: argparse.Namespace) -> int:
    return run_serve(settings_of(args), args.out, command=public_command(args.arguments))


def settings_of(args: argparse.Namespace) -> Serve:
    """Build the settings from flags. Raises `ConfigError`."""
    if args.base_url is not None and args.flags:
        raise ConfigError(f"{args.flags[0]}: cannot be used with --base-url, which starts no server")
    if args.trace is not None and args.workload is not None:
        raise ConfigError(f"--trace {args.trace}: is the workload: leave out --workload {args.workload}")
    by_trace = args.trace_arrivals or (args.trace is not None and not args.rate and not args.concurrency)
    return asked(
        Serve,
        args,
        model=args.served_model,
        api_key=args.api_key or envs.api_key(),
        extra=_extra(args.extra_body),
        workload=args.trace or args.workload or "random",
        workload_settings=asked(WorkloadSettings, args, run=0),
        concurrency=tuple(args.concurrency or (() if args.rate or by_trace else DEFAULT_CONCURRENCY)),
        rates=tuple(args.rate or ()),
        trace_arrivals=by_trace,
        duration_s=args.duration,
        keep_alive=not args.no_keep_alive,
        timeout_s=args.timeout,
        ramp_s=args.ramp,
        threads=args.client_threads,
        slo=Slo(args.slo_ttft_ms, args.slo_tpot_ms, args.slo_e2e_ms),
    )


def _extra(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body: must be a JSON object")
    return {"ignore_eos": True, **extra}
