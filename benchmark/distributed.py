"""What the collectives of a step cost between ranks, each a process: all-reduce, broadcast, gather at a step's sizes.

    python -m benchmark.distributed [--ranks 2 4] [--device cpu|cuda] [--rounds 50] [--out FOLDER]

gloo on the CPU, NCCL on CUDA with a device for each rank. Each figure is the median of the rounds on rank 0; a round
begins when all ranks have come together. On CUDA each all-reduce is also timed as one of a graph of them, as decode
steps have it. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minisgl.bench.report import Report, print_result, table
from minisgl.distributed.torch_group import TorchGroup

HIDDEN, VOCAB, LAYERS = 1024, 151_936, 28  # Qwen3-0.6B
TIMEOUT_S = 300
IN_A_GRAPH = 50
WARM_UP = 5
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def cases(group: TorchGroup, device: torch.device) -> dict[str, Callable[[], object]]:
    """By name: one collective as a step has it. A layer has two of the first kind, a step one of the others."""
    dtype = _DTYPES[device.type]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    found: dict[str, Callable[[], object]] = {}
    for tokens in (1, 64, 512):
        hidden = zeros(tokens, HIDDEN)
        found[f"all-reduce of {tokens} x {HIDDEN}"] = lambda hidden=hidden: group.all_reduce(hidden)  # type: ignore[misc]
    for rows in (1, 64):
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        part = zeros(rows, VOCAB // group.size)
        found[f"broadcast of {rows} tokens"] = lambda ids=ids: group.broadcast(ids)  # type: ignore[misc]
        found[f"gather of {rows} x {VOCAB} logits"] = lambda part=part: group.gather(part)  # type: ignore[misc]
    return found


def measure(group: TorchGroup, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each round."""
    found: dict[str, list[float]] = {}
    for name, work in cases(group, device).items():
        found[name] = []
        for turn in range(rounds + WARM_UP):
            group.least(0)
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= WARM_UP:
                found[name].append((time.perf_counter() - began) * 1e6)
    return found


def measure_graphs(group: TorchGroup, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Microseconds of one all-reduce, by the device's clock, of graphs that hold `IN_A_GRAPH` one behind the other."""
    found: dict[str, list[float]] = {}
    stream = torch.cuda.Stream(device)
    for tokens in (1, 64, 512):
        hidden = torch.zeros(tokens, HIDDEN, dtype=_DTYPES["cuda"], device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            group.all_reduce(hidden)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(IN_A_GRAPH):
                group.all_reduce(hidden)
        times = found[f"all-reduce of {tokens} x {HIDDEN} in a graph"] = []
        for turn in range(rounds + WARM_UP):
            group.least(0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record()
                graph.replay()
                end.record()
            end.synchronize()
            if turn >= WARM_UP:
                times.append(start.elapsed_time(end) * 1e3 / IN_A_GRAPH)
        graph.reset()  # the communicator could not end before it
    return found


def one_rank(rank: int, size: int, rendezvous: str, device_name: str, rounds: int) -> int:
    torch.set_num_threads(1)
    device = torch.device(device_name, rank) if device_name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = TorchGroup(Path(rendezvous), rank, size, device)
    found = measure(group, device, rounds)
    if device.type == "cuda":
        found |= measure_graphs(group, device, rounds)
    group.close()
    if rank == 0:
        print(json.dumps(found))
    return 0


def run_ranks(size: int, device: str, rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="minisgl-") as folder:
        command = [sys.executable, "-m", "benchmark.distributed", "--rounds", str(rounds), "--device", device]
        command += ["--ranks", str(size), "--rendezvous", str(Path(folder) / "ranks"), "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL)
            for rank in range(size)
        ]
        try:
            out, _ = processes[0].communicate(timeout=TIMEOUT_S)
            if any(process.wait(TIMEOUT_S) for process in processes):
                raise RuntimeError("a rank failed")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    found: dict[str, list[float]] = json.loads(out.splitlines()[-1])
    return found


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmark.distributed", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, help="folder for raw.json and README.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of the processes that this one starts
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args(args)
    if options.rank is not None:
        return one_rank(options.rank, options.ranks[0], options.rendezvous, options.device, options.rounds)
    if options.device == "cuda" and (count := torch.cuda.device_count()) < max(options.ranks):
        parser.error(f"--ranks {max(options.ranks)}: there are {count} CUDA devices")
    by_size = {size: run_ranks(size, options.device, options.rounds) for size in options.ranks}
    medians = {size: {name: statistics.median(us) for name, us in found.items()} for size, found in by_size.items()}
    names = list(medians[options.ranks[0]])
    figures = table(
        ["collective", *(f"{size} ranks, us" for size in medians)],
        [[name, *(found[name] for found in medians.values())] for name in names],
    )
    print(figures)
    if options.out is not None:
        ranks = " ".join(map(str, options.ranks))
        command = f"python -m benchmark.distributed --ranks {ranks} --device {options.device} --rounds {options.rounds}"
        report = Report(options.out, "Collectives of a step", command=command)
        report.section("Time of one", f"Medians. A step of {LAYERS} layers has {2 * LAYERS + 1} all-reduces.", figures)
        report.write({"us": by_size})
    print_result({"benchmark": "distributed", "device": options.device, "us": medians})
    return 0


if __name__ == "__main__":
    sys.exit(main())
