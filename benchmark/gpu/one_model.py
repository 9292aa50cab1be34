"""Run all variants of one model in one process: reads a job as JSON, prints a JSON line after each run.

The engine is loaded once; each run has a scheduler and a step loop of its own, with an empty prefix cache. A warm-up
with all sequences comes first, so that kernels are compiled and memory allocated before anything is timed.

Variants differ by the scheduler and by overlap only, and take turns (A B C D, D C B A, ...); a run begins only if one
as long as the longest so far would end before the deadline; a line is written whole or not at all.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import msgspec  # noqa: E402
import torch  # noqa: E402

from benchmark.gpu import watch  # noqa: E402
from benchmark.gpu.watch import Watched  # noqa: E402
from minisgl.attention.api import LayerAttention  # noqa: E402
from minisgl.attention.kv_pool import page_bytes  # noqa: E402
from minisgl.bench.offline_run import Collector, OfflineJob, breakdown  # noqa: E402
from minisgl.config import EngineConfig  # noqa: E402
from minisgl.engine.dtypes import DTYPES  # noqa: E402
from minisgl.engine.loading import load_engine  # noqa: E402
from minisgl.engine.torch_engine import TorchEngine  # noqa: E402
from minisgl.models import load_config  # noqa: E402
from minisgl.models.decoder import build_model  # noqa: E402
from minisgl.runner.build import build_control_plane  # noqa: E402
from minisgl.runner.intake import LoopSettings  # noqa: E402
from minisgl.runner.loop import StepLoop  # noqa: E402

TRACED_STEPS = 20
MAX_TRACE_BYTES = 10 * 2**20


class ModelJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of one model. `variants`: pairs of scheduler and overlap. `deadline`: a Unix time in seconds."""

    work: OfflineJob
    variants: tuple[tuple[str, bool], ...]
    repeats: int
    deadline: float
    trace: str = ""  # folder for a trace


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelJob)
    put = Printer()
    on_gpu = job.work.engine.device.startswith("cuda")
    bytes_per_s = watch.copy_speed() if on_gpu else watch.BYTES_PER_S  # measured before the engine allocates the memory
    began = time.perf_counter()
    loaded = load_engine(
        job.work.engine, lambda text, done=0, total=0: _say(f"{text} {f'{done}/{total}' * bool(total)}")
    )
    if not isinstance(loaded, TorchEngine):
        raise SystemExit("the engine is not on a CUDA device")
    bench = Bench(job, Watched(loaded), bytes_per_s)
    load_s = time.perf_counter() - began
    bench.run(*job.variants[-1], warm_up=True)
    ready = {"load_s": load_s, "ready_s": time.perf_counter() - began, **bench.engine_figures()}
    put("engine", ready)
    for repeat in range(job.repeats):
        for plane, overlap in job.variants if repeat % 2 == 0 else job.variants[::-1]:
            if not bench.time_left():
                break
            put("run", {"control_plane": plane, "overlap": overlap, "repeat": repeat, **bench.run(plane, overlap)})
            if overlap and not bench.points:  # without it a step's time has the host's in it
                bench.points = watch.points(bench.watched.steps)
                put("points", {"points": bench.points})
        if repeat == 0 and job.trace and bench.time_left():
            put("trace", bench.trace(*job.variants[-1], Path(job.trace)))
    loaded.close()
    return 0


class Bench:
    def __init__(self, job: ModelJob, watched: Watched, bytes_per_s: float) -> None:
        self.job = job
        self.watched = watched
        self.bytes_per_s = bytes_per_s
        self.points: list[list[float]] = []
        self._longest_s = 0.0
        config = load_config(Path(job.work.engine.model))
        dtype = DTYPES[watched.info.dtype]
        self._weight_bytes = weight_bytes(job.work.engine, dtype)
        layer = LayerAttention(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)
        self._token_bytes = page_bytes([layer] * config.num_layers, 1, dtype)

    def time_left(self) -> bool:
        return time.time() + 1.2 * self._longest_s < self.job.deadline

    def engine_figures(self) -> dict[str, Any]:
        info = self.watched.info
        on_gpu = info.device.startswith("cuda")
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "the CPU: a rehearsal",
            "torch": torch.__version__,
            "copy_bytes_per_s": self.bytes_per_s if on_gpu else None,
            "graphs": list(info.graph_sizes),
            "attention": type(self.watched.engine.attention).__name__,
            "num_pages": info.num_pages,
            "weight_bytes": self._weight_bytes,
            "kv_bytes_per_token": self._token_bytes,
            "memory_taken": torch.cuda.max_memory_reserved() if on_gpu else None,
        }

    def run(self, plane: str, overlap: bool, *, warm_up: bool = False) -> dict[str, Any]:
        began = time.perf_counter()
        figures = self._run(plane, overlap, warm_up)
        if not warm_up:  # which compiles, too
            self._longest_s = max(self._longest_s, time.perf_counter() - began)
        return figures

    def _run(self, plane: str, overlap: bool, warm_up: bool) -> dict[str, Any]:
        work = self.job.work
        if warm_up:  # all rows at once, prefill steps as long, and few tokens out
            work = msgspec.structs.replace(work, output_len=(8, 16), seed=work.seed + 1)
        engine_config = msgspec.structs.replace(work.engine, cpu_backend=plane, overlap=overlap)
        collector = Collector()
        control_plane = build_control_plane(engine_config, self.watched.info)
        loop = StepLoop(control_plane, self.watched, collector, settings=LoopSettings(overlap=overlap))
        requests = work.requests(self.watched.info.vocab_size)
        self.watched.steps.clear()
        gc.collect()
        gc.freeze()
        cpu, began = time.process_time(), time.perf_counter()
        loop.timers.begin()
        collector.drive(loop, requests)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        gc.unfreeze()
        answers = collector.tokens(work.num_sequences)
        input_lens, output_lens = work.lengths()
        if [len(tokens) for tokens in answers] != output_lens.tolist():
            raise SystemExit("a sequence was cut short")
        steps = self.watched.steps
        return {
            "output_tok_s": int(output_lens.sum()) / wall,
            "total_tok_s": int(output_lens.sum() + input_lens.sum()) / wall,
            "wall_s": wall,
            "host_cpu_s": cpu,
            "steps": len(steps),
            "retracted": control_plane.stats().num_retracted_total,
            "host_s": breakdown(loop.timers, wall)["seconds"],
            "kinds": watch.by_kind(steps),
            **watch.decode_figures(steps, self._weight_bytes, self._token_bytes, self.bytes_per_s),
        }

    def trace(self, plane: str, overlap: bool, folder: Path) -> dict[str, Any]:
        """Run `TRACED_STEPS` decode steps of all rows under torch's profiler: write a Chrome trace, return kernel
        times."""
        work = msgspec.structs.replace(self.job.work, output_len=(TRACED_STEPS * 4, TRACED_STEPS * 4))
        config = msgspec.structs.replace(work.engine, cpu_backend=plane, overlap=overlap)
        collector = Collector()
        loop = StepLoop(
            build_control_plane(config, self.watched.info),
            self.watched,
            collector,
            settings=LoopSettings(overlap=overlap),
        )
        self.watched.steps.clear()
        loop.step(work.requests(self.watched.info.vocab_size))
        steps = self.watched.steps
        while len(steps) < 3 or any(step.kind != watch.DECODE for step in steps[-3:]):
            if loop.idle:
                return {"error": "no three decode steps in a row"}
            loop.step([])
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.watched.info.device.startswith("cuda"):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(TRACED_STEPS):
                loop.step([])
            loop.drain()
        while not loop.idle:
            loop.step([])
        return {**kernel_figures(profile.events()), **_export(profile, folder)}


def kernel_figures(events: Any) -> dict[str, Any]:
    """Return the share of the time from the first to the last kernel in which none ran, and the longest kernels."""
    spans, by_name = [], dict[str, float]()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith(("Memcpy", "Memset")):
            continue
        spans.append((event.time_range.start, event.time_range.end))
        by_name[event.name[:60]] = by_name.get(event.name[:60], 0.0) + event.time_range.end - event.time_range.start
    if not spans:
        return {"kernels": 0}
    spans.sort()
    busy, upto = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, upto))
        upto = max(upto, end)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "kernels": len(spans),
        "idle_share": 1 - busy / (upto - spans[0][0]),
        "longest_us_per_step": {name: us / TRACED_STEPS for name, us in longest},
    }


def _export(profile: Any, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain, packed = Path(scratch) / "trace.json", Path(scratch) / "trace.json.gz"
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb") as to:
            shutil.copyfileobj(source, to)
        size = packed.stat().st_size
        if size <= MAX_TRACE_BYTES:
            shutil.copy(packed, folder / "trace.json.gz")
    return {"trace_bytes": size, "trace_kept": size <= MAX_TRACE_BYTES}


def weight_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the bytes of weights that a decode step reads: all but an embedding that is not also the output matrix."""
    model_config = load_config(Path(config.model))
    model = build_model(model_config, dtype=dtype, device=torch.device("meta"), max_position=8)
    total = sum(tensor.nbytes for tensor in model.checkpoint().values())
    if not model_config.tie_word_embeddings:
        total -= model_config.vocab_size * model_config.hidden_size * dtype.itemsize
    return total


class Printer:
    """Printer with sole use of stdout: output of compilers and libraries is redirected to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def __call__(self, kind: str, figures: dict[str, Any]) -> None:
        self._out.write(json.dumps({"kind": kind, **figures}) + "\n")
        self._out.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
