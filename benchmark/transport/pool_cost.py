"""What a pool costs: steps of 256 rows from an engine's socket to a front end's, with the pool between and without.

    python -m benchmark.transport.pool_cost --out FOLDER

The engine is a thread that writes one prepared step again and again; the front end reads bytes and counts. CPU is that
of the pool's thread alone. Latency is of one step at a time: from the engine's write to the front end's last byte.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from minisgl._rust import EnginePool
from minisgl.message import (
    AddRequest,
    EngineReady,
    FrameReader,
    Hello,
    StepTokens,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
    framed,
)
from minisgl.sampling_params import SamplingParams

READY = EngineReady("fake", None, 258, 10**6, (), 4096, 16, "cpu", "none", "none")


def frames(sock: socket.socket) -> Iterator[bytes]:
    reader = FrameReader()
    while True:
        while (frame := reader.next()) is not None:
            yield frame
        data = sock.recv(1 << 18)
        if not data:
            return
        reader.feed(data)


def thread_cpu_s(name: str) -> float:
    """Of the thread of this process with this name."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            fields = (task / "schedstat").read_text().split()
            return int(fields[0]) / 1e9
    raise LookupError(name)


@contextmanager
def through_pool(rows: int, num_engines: int) -> Iterator[tuple[socket.socket, socket.socket, Sequence[int]]]:
    """The engine's end, the front end's, and the ids of its requests there."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/engine-{number}" for number in range(num_engines)]
        listeners = []
        for path in paths:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            listeners.append(listener)
        config = {"listen": f"{folder}/pool", "engines": paths, "router": {"policy": "round_robin"}, "step_timeout": 60}
        pool = EnginePool(json.dumps(config))
        engines = [listener.accept()[0] for listener in listeners]
        for engine in engines:
            engine.sendall(framed(encode([READY])))
        front = socket.socket(socket.AF_UNIX)
        front.connect(f"{folder}/pool")
        sampling = SamplingParams(max_tokens=10**9, seed=1)
        # round robin: requests whose number is a multiple of that of engines go to the first one
        adds: list[ToEngine] = [
            AddRequest(number, np.zeros(8, np.int32).tobytes(), sampling) for number in range(rows * num_engines)
        ]
        front.sendall(framed(encode([Hello("cost"), *adds])))
        ids: list[int] = []
        incoming = frames(engines[0])
        while len(ids) < rows:
            ids += [one.req_id for one in decode_to_engine(next(incoming)) if isinstance(one, AddRequest)]
        outgoing = frames(front)
        while not any(isinstance(one, EngineReady) for one in decode_from_engine(next(outgoing))):
            pass
        yield engines[0], front, ids
        front.close()
        pool.stop()
        for sock in (*engines, *listeners):
            sock.close()


def step(ids: Sequence[int]) -> bytes:
    number = len(ids)
    arrays = np.array(ids, np.int64), np.full(number, 65, np.int32), np.zeros(number, np.int32)
    return framed(encode([StepTokens(1000, *(array.tobytes() for array in arrays))]))


def is_step(frame: bytes) -> bool:
    return frame[:10].find(b"step") > 0


def measure(engine: socket.socket, front: socket.socket, ids: Sequence[int], num_steps: int) -> dict[str, float]:
    frame = step(ids)
    got = filter(is_step, frames(front))
    latencies = []
    for _ in range(num_steps // 10):
        began = time.perf_counter_ns()
        engine.sendall(frame)
        next(got)
        latencies.append((time.perf_counter_ns() - began) / 1e3)
    sender = threading.Thread(target=lambda: [engine.sendall(frame) for _ in range(num_steps)], daemon=True)
    before = _pool_cpu_s()
    began = time.perf_counter_ns()
    sender.start()
    for _ in range(num_steps):
        next(got)
    wall_us = (time.perf_counter_ns() - began) / 1e3
    sender.join()
    return {
        "wall_us_per_step": wall_us / num_steps,
        "pool_cpu_us_per_step": 1e6 * (_pool_cpu_s() - before) / num_steps,
        "latency_us_median": statistics.median(latencies),
    }


def _pool_cpu_s() -> float:
    try:
        return thread_cpu_s("engine-pool")
    except LookupError:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    for run in range(args.runs):
        for rows in (1, 64, 256):
            engine, front = socket.socketpair(socket.AF_UNIX)
            with engine, front:
                found.append(
                    {"run": run, "rows": rows, "way": "direct", **measure(engine, front, range(rows), args.steps)}
                )
            for num_engines in (1, 4):
                with through_pool(rows, num_engines) as (engine, front, ids):
                    way = f"pool of {num_engines}"
                    found.append({"run": run, "rows": rows, "way": way, **measure(engine, front, ids, args.steps)})
    args.out.mkdir(parents=True, exist_ok=True)
    raw = {"command": f"python -m benchmark.transport.pool_cost --steps {args.steps} --runs {args.runs}", "runs": found}
    (args.out / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    for rows in (1, 64, 256):
        for way in ("direct", "pool of 1", "pool of 4"):
            mine = [one for one in found if one["rows"] == rows and one["way"] == way]
            least = {name: min(float(str(one[name])) for one in mine) for name in mine[0] if "_us_" in name}
            print(rows, way, {name: round(value, 2) for name, value in least.items()})


if __name__ == "__main__":
    main()
