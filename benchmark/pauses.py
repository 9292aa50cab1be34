"""The longest pause of any of 256 streams through the HTTP path, beside the machine's own.

    python -m benchmark.pauses [--seconds 300] [--clients 256] [SERVER FLAGS...]

An engine that returns at once; a process that does nothing but look at the clock says how long the machine itself stood
still. Every pause beyond 30 ms is told with what the kernel's TCP counted in it (segments sent again, timers that ran
out), so that one stream's pause is told from one of all streams. The last line of stdout is JSON. Exit code 0 if the
longest pause is at most `BAR_MS` beyond the machine's longest gap.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from minisgl._rust import run_load
from tests.helpers.e2e import serving

BAR_MS = 50.0
SHOWN_MS = 30.0
COUNTERS = ("TCPTimeouts", "TCPLossProbes", "TCPBacklogDrop", "RcvPruned", "TCPToZeroWindowAdv", "DelayedACKs")
SERVER = ("--engine", "sim", "--sim-profile", "null", "--max-running-requests", "512", "--served-model-name", "m")


def spin(stop: Event, gaps: Any) -> None:
    """Sends the gaps beyond a millisecond between two looks at the clock: (monotonic s, s)."""
    last, found, looks = time.monotonic(), [], 0
    while looks % 10_000 or not stop.is_set():
        now = time.monotonic()
        if now - last > 1e-3:
            found.append((last, now - last))
        last, looks = now, looks + 1
    gaps.send(found)


def count_tcp(stop: Event, rows: Any) -> None:
    """Sends (monotonic s, counters) of every 20 ms."""
    found = []
    while not stop.is_set():
        lines = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines()]
        values = {
            name: int(one)
            for head, row in zip(lines[::2], lines[1::2], strict=True)
            for name, one in zip(head[1:], row[1:], strict=True)
        }
        found.append((time.monotonic(), [values.get(name, 0) for name in COUNTERS]))
        time.sleep(0.02)
    rows.send(found)


def load(url: str, seconds: float, clients: int) -> Any:
    """Streams of 128 tokens, one after the other by every client."""
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "run", "the", "of"]
    asked = {"model": "m", "stream": True, "max_tokens": 128, "ignore_eos": True}
    bodies = [
        json.dumps({**asked, "messages": [{"role": "user", "content": " ".join(draw.choices(words, k=150))}]}).encode()
        for _ in range(512)
    ]
    return run_load(
        f"{url}/v1/chat/completions",
        bodies,
        chains=[1] * int(20_000 * seconds),
        arrivals=None,
        concurrency=clients,
        ramp_s=0.5,
        stop_after_s=seconds,
        headers=[("content-type", "application/json")],
        keep_alive=True,
        timeout_s=600.0,
        threads=1,
        progress=lambda *_: None,
    )


def pauses(result: Any) -> list[tuple[float, float, int]]:
    """(ms, monotonic s, request) of every pause beyond `SHOWN_MS`, the longest first."""
    ends = np.cumsum(result["num_gaps"])
    found = []
    for at in np.flatnonzero(result["gaps"] > SHOWN_MS / 1e3):
        request = int(np.searchsorted(ends, at, side="right"))
        first = ends[request] - result["num_gaps"][request]
        begins = result["started"] + result["first"][request] + float(result["gaps"][first:at].sum())
        found.append((1e3 * float(result["gaps"][at]), begins, request))
    return sorted(found, reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=256)
    args, flags = parser.parse_known_args()
    stop = multiprocessing.Event()
    gaps, to_gaps = multiprocessing.Pipe(duplex=False)
    rows, to_rows = multiprocessing.Pipe(duplex=False)
    with serving(*SERVER, *flags) as server:
        beside = [
            multiprocessing.Process(target=spin, args=(stop, to_gaps)),
            multiprocessing.Process(target=count_tcp, args=(stop, to_rows)),
        ]
        for process in beside:
            process.start()
        result = load(server.url, args.seconds, args.clients)
        stop.set()
        own, counted = gaps.recv(), rows.recv()
        for process in beside:
            process.join()
    found = pauses(result)
    for ms, begins, request in found[:20]:
        before = max((row for row in counted if row[0] <= begins), default=counted[0])[1]
        after = min((row for row in counted if row[0] >= begins + ms / 1e3), default=counted[-1])[1]
        changed = {name: b - a for name, a, b in zip(COUNTERS, before, after, strict=True) if b > a}
        machine = max((gap for at, gap in own if at < begins + ms / 1e3 and at + gap > begins), default=0.0)
        where = f"request {request} at {begins - result['started']:.2f} s"
        print(f"{ms:.1f} ms, {where}; the machine stood still for {1e3 * machine:.1f} ms; {changed}")
    longest, machine_ms = 1e3 * float(result["gaps"].max()), 1e3 * max((gap for _, gap in own), default=0.0)
    report = {
        "requests": len(result["failure"]),
        "failed": int((result["failure"] != 0).sum()),
        "longest_pause_ms": round(longest, 1),
        "machine_ms": round(machine_ms, 1),
        "pauses_beyond_30_ms": len(found),
        "seconds": round(result["duration_s"], 1),
    }
    print(json.dumps(report))
    return int(longest - machine_ms > BAR_MS)


if __name__ == "__main__":
    raise SystemExit(main())
