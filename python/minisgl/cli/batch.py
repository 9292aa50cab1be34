"""The command `minisgl batch IN.jsonl -o OUT.jsonl`, which answers a file of requests without a running server.

It starts a server of its own, as `minisgl chat` does. Answers are stored in `OUT.jsonl.state` until OUT.jsonl is
written, so an interrupted command continues when it is run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minisgl.cli.flags import Commands, command


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(
        commands,
        "batch",
        run,
        help="answer a file of requests, without a server",
        epilog="Further flags are those of minisgl serve, such as --model. The same command goes on after a stop.",
    )
    parser.add_argument("input", metavar="IN.jsonl", help="requests, one per line: {custom_id, method, url, body}")
    parser.add_argument(
        "-o", "--output", metavar="OUT.jsonl", required=True, help="responses, one per line, in the input's order"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    import asyncio

    from minisgl.chat.own_server import ServerFailed, own_server
    from minisgl.cli.batch_run import Failed, Job
    from minisgl.server.batches.store import Store

    job = Job(Path(args.input), Path(args.output))
    if job.is_done():
        return 0
    job.state.mkdir(mode=0o700, exist_ok=True)
    Store.open(str(job.state), wait_s=20.0).close()  # the server of a killed run may still be ending

    async def work() -> int:
        flags = ["--host", "127.0.0.1", "--port", "0", "--state-dir", str(job.state), *args.rest]
        try:
            async with own_server(flags) as server:
                return await job.run(server.url, server.key, server.ended)
        except ServerFailed as failure:
            return failure.code or 1
        except Failed as failure:
            print(f"minisgl batch: {failure}", file=sys.stderr)
            return 1

    code = asyncio.run(work())
    if code == 0:
        job.clean_up()
    return code
