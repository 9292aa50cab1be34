"""Measure offline throughput on a GPU, in one command: `python benchmark/gpu/offline.py --out FOLDER`.

Dummy Qwen3-0.6B and Qwen3-8B, 256 sequences of 100 to 1,024 tokens in and out, all queued at the start: both
schedulers, overlap on and off, in turns. For each run: output tokens per second, the host's time by part, the device's
idle time between steps, and the ratio to the time of reading the weights and the KV once a step.

    python benchmark/gpu/offline.py --out FOLDER --seconds 540     # stops in time; writes what it has after each run
    python benchmark/gpu/offline.py --out FOLDER --trace           # 20 decode steps under torch's profiler, too
    python benchmark/gpu/offline.py --rehearse                     # a tiny shape on the CPU: does it run?

Each model has a process of its own; raw figures and the report are rewritten after each run, so that a killed benchmark
keeps what it had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import msgspec  # noqa: E402
import torch  # noqa: E402

from benchmark.gpu.one_model import ModelJob  # noqa: E402
from benchmark.gpu.results import line, write  # noqa: E402
from benchmark.gpu.shapes import SHAPES, TINY, write_shape  # noqa: E402
from minisgl.bench.offline_run import OfflineJob  # noqa: E402
from minisgl.bench.report import Report, public_command  # noqa: E402
from minisgl.config import EngineConfig  # noqa: E402

VARIANTS = tuple((plane, overlap) for plane in ("python", "rust_hotpath") for overlap in (False, True))
NAMES = {f"{plane}:{'overlap' if overlap else 'one-by-one'}": (plane, overlap) for plane, overlap in VARIANTS}
GRACE_S = 30.0  # to end after the budget, before the process is killed


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write README.md, raw.json and points.json into this folder")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--num-sequences", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="turns through the variants of a model (default: 3)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=NAMES,
        default=list(NAMES),
        help="schedulers, with overlap on or off (default: all four)",
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit, shared evenly by the models")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--cuda-graph-max-bs", type=int)
    parser.add_argument("--trace", action="store_true", help="write a Chrome trace of the first model's decode steps")
    parser.add_argument("--rehearse", action="store_true", help="run a tiny shape on the CPU, for a test")
    return parser


def work_of(args: argparse.Namespace, model: Path) -> OfflineJob:
    settings: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "max_running_requests": args.num_sequences,
        "attention_backend": args.attention_backend,
        "cuda_graph_max_bs": args.cuda_graph_max_bs,
    }
    if args.rehearse:
        engine = EngineConfig(device="inline", max_prefill_length=48, num_pages=200, **settings)
        return OfflineJob(engine=engine, num_sequences=args.num_sequences, input_len=(10, 40), output_len=(10, 30))
    engine = EngineConfig(device="cuda", max_prefill_length=8192, max_seq_len=2560, **settings)
    return OfflineJob(engine=engine, num_sequences=args.num_sequences, input_len=(100, 1024), output_len=(100, 1024))


def lines_of(job: ModelJob) -> Iterator[dict[str, Any]]:
    """Yield the records that a model's process prints, as they arrive; the last is an `error` if it failed."""
    command = [sys.executable, str(Path(__file__).with_name("one_model.py"))]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output)
        killer = threading.Timer(max(0.0, job.deadline - time.time()) + GRACE_S, process.kill)
        killer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for text in process.stdout:
                yield json.loads(text)
            code = process.wait()
        finally:
            killer.cancel()
            process.kill()
            process.wait()
        if code:
            output.seek(0)
            yield {"kind": "error", "code": code, "error": output.read()[-4000:]}


def main() -> int:
    args = parser().parse_args()
    if args.rehearse:
        args.models, args.num_sequences, args.repeats = ["tiny"], min(args.num_sequences, 6), min(args.repeats, 2)
    elif not torch.cuda.is_available():
        print("benchmark/gpu/offline.py: torch finds no CUDA device", file=sys.stderr)
        return 1
    ends = time.time() + args.seconds
    report = None
    if args.out is not None:
        title = "Rehearsal of the GPU benchmark: no figure means anything" if args.rehearse else "Offline on a GPU"
        report = Report(args.out, title, command=public_command(sys.argv[1:], "python benchmark/gpu/offline.py"))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for at, model in enumerate(args.models):
            now = time.time()
            folder = write_shape(model, Path(scratch) / model, {**SHAPES, "tiny": TINY})
            job = ModelJob(
                work=work_of(args, folder),
                variants=tuple(NAMES[name] for name in args.variants),
                repeats=args.repeats,
                deadline=now + max(0.0, ends - now) / (len(args.models) - at),
                trace=str(args.out) if args.trace and args.out is not None and at == 0 else "",
            )
            for record in lines_of(job):
                found.append({"model": model, **record})
                print(line(found[-1]), flush=True)
                if report is not None:
                    write(report, found)
    return 1 if any(record["kind"] == "error" for record in found) else 0


if __name__ == "__main__":
    sys.exit(main())
