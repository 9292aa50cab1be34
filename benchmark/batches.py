"""What a batch in the background costs those who wait for their answers, and what it gets: rounds on one server.

    python -m benchmark.batches --rounds 4 -- --engine sim --sim-profile FILE --max-running-requests 32
    python -m benchmark.batches --rounds 4 -- --model smollm2

Each round has three parts, in turns there and back: the clients alone, the clients beside a batch, the batch alone.
Lines and clients' requests are alike: so many tokens in, so many out. The machine's throughput is what clients and
lines were answered in the seconds of a part, in tokens. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import httpx

from minisgl.bench.point import PointLoad, measure_point, point_from
from minisgl.bench.render import WORDS
from minisgl.bench.report import table
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.stats import paired_figures, turns
from minisgl.config import ConfigError

SHOWN = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "longest_pause_ms")
ALONE, BESIDE, BATCH = "clients alone", "beside a batch", "the batch alone"
WAIT_S = 120.0


class Batch:
    """Lines of a server, with names of their own in each batch so that no cache has them. `tok_s`: of what was answered
    while it was entered."""

    tok_s = 0.0

    def __init__(self, server: ServerProcess, lines: int, tokens: tuple[int, int], seed: int) -> None:
        self._http = httpx.Client(base_url=f"{server.url}/v1", timeout=WAIT_S)
        draw, (num_in, num_out) = random.Random(seed), tokens
        body = {"max_tokens": num_out, "ignore_eos": True, "model": server.model}
        texts = (" ".join(draw.choices(WORDS, k=num_in)) for _ in range(lines))
        asked = [{**body, "messages": [{"role": "user", "content": text}]} for text in texts]
        rows = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": one}
            for i, one in enumerate(asked)
        ]
        data = "\n".join(map(json.dumps, rows)).encode()
        file = self._json("POST", "/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
        made = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        self.batch_id = self._json("POST", "/batches", json=made)["id"]
        self._until(lambda: self.look()["request_counts"]["completed"] > 0, "no line is answered")

    def __enter__(self) -> None:
        self._before, self._began = self.tokens(), time.monotonic()

    def __exit__(self, *error: object) -> None:
        if not any(error):
            self.tok_s = (self.tokens() - self._before) / (time.monotonic() - self._began)

    def look(self) -> dict[str, Any]:
        return self._json("GET", f"/batches/{self.batch_id}")

    def tokens(self) -> int:
        """Made for answers so far. Raises `ConfigError`: it is over, and there was nothing to share with."""
        found = self.look()
        if found["status"] != "in_progress":
            raise ConfigError(f"--lines: the batch was {found['status']} before its part was over")
        return int(found["usage"]["output_tokens"])

    def end(self) -> None:
        self._json("POST", f"/batches/{self.batch_id}/cancel")
        self._until(lambda: self.look()["status"] == "cancelled", "it is not cancelled")

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = self._http.request(method, path, **more)
        if answer.status_code != 200:
            raise ConfigError(f"{method} {path}: {answer.status_code}: {answer.text}")
        return dict(answer.json())

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.batch_id}: {what}")
            time.sleep(0.1)


def part(name: str, server: ServerProcess, load: PointLoad, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Figures of one part of a round; `machine_tok_s` of clients and lines."""
    if name == ALONE:
        return measure_point(server, load)
    batch = Batch(server, args.lines, (args.line_words, args.line_tokens), seed)
    if name == BATCH:
        with batch:
            time.sleep(args.seconds)
        found: dict[str, float] = {}
    else:
        found = measure_point(server, load, batch)
    lines = batch.tok_s
    batch.end()
    return {**found, "line_tok_s": lines, "machine_tok_s": lines + found.get("output_tok_s", 0.0)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=96, help="of all clients, a part (default: 96)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(64, 64), metavar=("IN", "OUT"), help="of a request")
    parser.add_argument("--lines", type=int, default=2000, help="of a batch (default: 2000)")
    parser.add_argument("--line-words", type=int, default=50)
    parser.add_argument("--line-tokens", type=int, default=64, help="of an answer (default: 64)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the batch alone, a part (default: 8)")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS")
    args = parser.parse_args(arguments)
    num_in, num_out = (str(count) for count in args.tokens)
    runs: dict[str, list[dict[str, float]]] = {ALONE: [], BESIDE: [], BATCH: []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(ServerProcess(Launch(flags=(*args.server_flags, "--state-dir", folder))))
        for number, name in turns(list(runs), args.rounds):
            seed = 3 * number + list(runs).index(name)
            flags = ["--concurrency", str(args.clients), "--num-requests", str(args.requests), "--seed", str(seed)]
            flags += ["--input-len", num_in, num_in, "--output-len", num_out, num_out]
            found = part(name, server, point_from(flags), args, seed)
            runs[name].append(found)
            print(name, json.dumps({key: round(value, 2) for key, value in found.items()}), file=sys.stderr)
    latencies = paired_figures(runs[ALONE], runs[BESIDE])
    throughput = paired_figures(runs[BATCH], runs[BESIDE])["machine_tok_s"]
    shown = [(name, latencies[name]) for name in SHOWN if name in latencies]
    rows = [(name, found.median_a, found.median_b, str(found)) for name, found in shown]
    rows.append(("machine, tok/s (batch alone, beside)", throughput.median_a, throughput.median_b, str(throughput)))
    print(table(("median of rounds", ALONE, BESIDE, "difference"), rows))
    print(json.dumps({"rounds": args.rounds, "flags": args.server_flags, "runs": runs}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"benchmark.batches: {error}", file=sys.stderr)
        sys.exit(2)
