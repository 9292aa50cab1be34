"""Offline throughput on a GPU, in one command: `python benchmark/gpu/offline.py --out FOLDER`.

Dummy Qwen3-0.6B and Qwen3-8B, 256 sequences of 100 to 1,024 tokens in and out, all there at the start: both control
planes, overlap on and off. For each run: output tokens per second, where the host's time goes, how long the device
waited for the host between decode steps, and the ratio to what reading the weights and the KV once a step would take.

Keeps true: every run is a process of its own; runs alternate; raw figures are written beside the table.
Doesn't know: text, sockets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import torch  # noqa: E402

from benchmark.gpu.shapes import SHAPES, write_shape  # noqa: E402
from minisgl.attention.kv_pool import page_bytes  # noqa: E402
from minisgl.bench.offline_arm import OfflineJob  # noqa: E402
from minisgl.config import EngineConfig  # noqa: E402
from minisgl.engine.api import SlotBinding, StepHandle  # noqa: E402
from minisgl.engine.cuda_engine import CudaEngine  # noqa: E402
from minisgl.engine.loading import DTYPES, load_engine  # noqa: E402
from minisgl.message import FromEngine  # noqa: E402
from minisgl.models import load_config  # noqa: E402
from minisgl.runner.build import build_control_plane  # noqa: E402
from minisgl.runner.loop import StepLoop  # noqa: E402
from minisgl.step import StepBuffers, StepPlan  # noqa: E402

BYTES_PER_S = 4.3e12  # of an H200's memory, as reached by copies
GOAL_IDLE = 0.03


class Watched:
    """The engine, and for each step what it was and when the device computed it."""

    def __init__(self, engine: CudaEngine) -> None:
        self.info = engine.info
        self._engine = engine
        self.steps: list[tuple[Any, bool, int, int]] = []  # handle, decode only, rows, tokens of KV that are read
        self.launch_s: list[float] = []

    def launch(self, plan: StepPlan, buffers: StepBuffers, bindings: Sequence[SlotBinding]) -> StepHandle:
        entry = buffers.ring[plan.ring_index]
        kv_tokens = int(entry.seq_lens[: plan.num_rows].sum())
        began = time.perf_counter()
        handle = self._engine.launch(plan, buffers, bindings)
        self.launch_s.append(time.perf_counter() - began)
        if plan.num_rows:
            self.steps.append((handle, plan.num_tokens == plan.num_rows, plan.num_rows, kv_tokens))
        return handle

    def close(self) -> None:
        self._engine.close()


def device_figures(engine: Watched, weight_bytes: int, token_bytes: int) -> dict[str, Any]:
    """Over pairs of decode steps that follow each other: device time, time between them, and the roofline."""
    busy, idle, least, full_busy, full_idle = 0.0, 0.0, 0.0, 0.0, 0.0
    most = max(rows for _, _, rows, _ in engine.steps)
    step_ms = []
    for (before, decode_before, *_), (after, decode, rows, kv_tokens) in zip(
        engine.steps, engine.steps[1:], strict=False
    ):
        if not (decode_before and decode):
            continue
        computing = after.computed.seconds_after(after.start)
        between = max(0.0, after.start.seconds_after(before.computed))
        busy, idle = busy + computing, idle + between
        least += (weight_bytes + kv_tokens * token_bytes) / BYTES_PER_S
        step_ms.append(computing * 1e3)
        if rows == most:
            full_busy, full_idle = full_busy + computing, full_idle + between
    return {
        "decode_steps": len(step_ms),
        "decode_step_ms_median": statistics.median(step_ms) if step_ms else None,
        "idle_share": idle / (busy + idle) if busy else None,
        "idle_share_at_full_batch": full_idle / (full_busy + full_idle) if full_busy else None,
        "roofline_ratio": least / (busy + idle) if busy else None,
    }


def one_run(job: dict[str, Any]) -> dict[str, Any]:
    """In this process."""
    config = EngineConfig(**job["engine"])
    work = OfflineJob(
        engine=config,
        num_sequences=job["num_sequences"],
        input_len=tuple(job["input_len"]),
        output_len=tuple(job["output_len"]),
    )
    loaded = load_engine(config, lambda text, done=0, total=0: print(text, done or "", file=sys.stderr))
    if not isinstance(loaded, CudaEngine):
        raise SystemExit("the engine is not on a CUDA device")
    engine = Watched(loaded)
    sent: list[FromEngine] = []
    loop = StepLoop(build_control_plane(config, engine.info), engine, sent.extend, overlap=config.overlap)
    requests = work.requests(engine.info.vocab_size)
    output_tokens = int(work.lengths()[1].sum())
    loop.step(work.requests(engine.info.vocab_size)[:0])
    began = time.perf_counter()
    host_busy = 0.0
    loop.step(requests)
    while not loop.idle:
        loop.step([])
    wall = time.perf_counter() - began
    host_busy = sum(engine.launch_s)
    model_config = load_config(Path(config.model))
    dtype = DTYPES[engine.info.dtype]
    token_bytes = page_bytes(model_config.num_layers, 1, model_config.num_kv_heads, model_config.head_dim, dtype)
    result = {
        "output_tok_s": output_tokens / wall,
        "wall_s": wall,
        "steps": len(engine.steps),
        "launch_ms_median": statistics.median(engine.launch_s) * 1e3,
        "launch_s_total": host_busy,
        "graphs": list(engine.info.graph_sizes),
        **device_figures(engine, weight_bytes(config, dtype), token_bytes),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    engine.close()
    return result


def weight_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """What a decode step reads of the weights: all but an embedding table that is not the head, too."""
    from minisgl.models import build_model

    model_config = load_config(Path(config.model))
    model = build_model(model_config, dtype=dtype, device=torch.device("meta"), max_position=8)
    total = sum(tensor.nbytes for tensor in model.checkpoint().values())
    if not model_config.tie_word_embeddings:
        total -= model_config.vocab_size * model_config.hidden_size * dtype.itemsize
    return total


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write raw.json there")
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--num-sequences", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--cuda-graph-max-bs", type=int)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = parser().parse_args()
    if args.one:
        print(json.dumps(one_run(json.loads(args.one))))
        return 0
    if not torch.cuda.is_available():
        print("benchmark/gpu/offline.py: torch finds no CUDA device", file=sys.stderr)
        return 1
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            folder = write_shape(model, Path(scratch) / model)
            arms = [(plane, overlap) for plane in ("python", "rust_hotpath") for overlap in (True, False)]
            for repeat in range(args.repeats):
                for plane, overlap in arms if repeat % 2 == 0 else reversed(arms):
                    engine = {
                        "model": str(folder),
                        "load_format": "dummy",
                        "device": "cuda",
                        "cpu_backend": plane,
                        "overlap": overlap,
                        "max_running_requests": args.num_sequences,
                        "max_prefill_length": 8192,
                        "max_seq_len": 2560,
                        "attention_backend": args.attention_backend,
                        "cuda_graph_max_bs": args.cuda_graph_max_bs,
                    }
                    job = {
                        "engine": engine,
                        "num_sequences": args.num_sequences,
                        "input_len": (100, 1024),
                        "output_len": (100, 1024),
                    }
                    found = run_apart(job)
                    runs.append({"model": model, "control_plane": plane, "overlap": overlap, "repeat": repeat, **found})
                    print(line(runs[-1]), flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "raw.json").write_text(json.dumps(runs, indent=1))
    return 1 if any("error" in run for run in runs) else 0


def run_apart(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(run: dict[str, Any]) -> str:
    head = f"{run['model']:12} {run['control_plane']:13} overlap {'on ' if run['overlap'] else 'off'}"
    if "error" in run:
        return f"{head} failed: {run['error'].splitlines()[-1]}"
    idle = run["idle_share_at_full_batch"]
    verdict = "" if idle is None else f" idle at full batch {idle:.1%} (goal under {GOAL_IDLE:.0%})"
    step, roofline = run["decode_step_ms_median"] or 0.0, run["roofline_ratio"] or 0.0
    return (
        f"{head} {run['output_tok_s']:9.0f} tok/s, decode step {step:.2f} ms, launch {run['launch_ms_median']:.2f} ms, "
        f"roofline {roofline:.0%},{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
