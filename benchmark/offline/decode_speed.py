"""Decode speed of the torch engine on a CPU beside transformers' `generate`, in one run.

    python -m benchmark.offline.decode_speed --out FOLDER [--batch 1 8 32] [--repeats 3] [--models qwen3-0.6b smollm2]
        [--dtype bfloat16] [--load equal|mixed] [--clock wall|cpu]

Both decode greedily with the same type and threads, 64 tokens out, in turns, median of the repeats. `equal`: 128 tokens
in; the figure is tokens per second after the first token of every sequence is there. `mixed`: 16 to 240 tokens in, and
tokens per second of the whole, prompts included; `generate` pads them on the left. minisgl runs its real path: step
loop, scheduler, torch engine. transformers runs `generate` with its default SDPA attention and dynamic cache. Models of
`THEIRS` are random, and minisgl runs them with transformers' layers, too. `--clock cpu`: seconds in which a variant's
threads compute, for a machine that is busy. The last line of stdout is JSON.

Each variant has a process of its own, which sleeps while the other one runs: in one process their OpenMP teams
outnumber the cores, which slows both (measured: transformers 67 instead of 85 tok/s at batch 32).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from minisgl.config import EngineConfig
from minisgl.message import AddRequest, FromEngine, StepTokens, ToEngine
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.weights.sources import resolve_model

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_MEDIUM: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
THEIRS: dict[str, dict[str, Any]] = {  # 0.1 billion parameters
    "phi3": {**_MEDIUM, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gemma2": {**_MEDIUM, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
}
BARS = {"qwen3-0.6b": {1: 1.0, 8: 1.3, 32: 1.6}, "smollm2": {1: 1.15, 8: 1.15, 32: 1.15}}
BARS |= {name: {1: 1.0, 8: 1.0, 32: 1.3} for name in THEIRS}
NUM_IN, NUM_OUT = 128, 64
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_now = time.perf_counter
MIXED = (16, 240)  # tokens in, evenly between


def prompts(batch: int, vocab_size: int, seed: int, load: str) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    generator = np.random.default_rng(seed)
    lengths = [NUM_IN] * batch if load == "equal" else np.linspace(*MIXED, batch).astype(int).tolist()
    generator.shuffle(lengths)
    return [generator.integers(5, vocab_size, length, dtype=np.int32) for length in lengths]


class Minisgl:
    def __init__(self, folder: Path, load_format: str, threads: int, dtype: str) -> None:
        config = EngineConfig(
            model=str(folder),
            engine="torch",
            load_format=load_format,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            max_prefill_length=32 * NUM_IN,
            num_pages=32 * (NUM_IN + NUM_OUT) // 16 * 2,
            max_seq_len=1024,
            num_threads=threads,
        )
        self._engine = build_engine(config, lambda text, done=0, total=0: None)
        self._loop = StepLoop(build_control_plane(config, self._engine.info), self._engine, self._take)
        self._next_id = 0
        self._counts: dict[int, int] = {}
        self._first_at = 0.0
        self._first_total = 0

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, StepTokens):
                for req_id in np.frombuffer(message.req_ids, np.int64).tolist():
                    self._counts[req_id] = self._counts.get(req_id, 0) + 1

    def run(self, batch: Sequence[np.ndarray[Any, np.dtype[np.int32]]], load: str) -> float:
        """Tokens per second; of `equal` after the first tokens."""
        self._counts.clear()
        came = _now()
        sampling = SamplingParams(temperature=0, max_tokens=NUM_OUT, seed=0, ignore_eos=True)
        adds: list[ToEngine] = []
        for prompt in batch:
            adds.append(AddRequest(self._next_id, prompt.tobytes(), sampling))
            self._next_id += 1
        self._loop.step(adds)
        while len(self._counts) < len(batch):
            self._loop.step([])
        began, done = _now(), sum(self._counts.values())
        while not self._loop.idle:
            self._loop.step([])
        if load == "mixed":
            began, done = came, 0
        return (len(batch) * NUM_OUT - done) / (_now() - began)

    def close(self) -> None:
        self._engine.close()


class Transformers:
    def __init__(self, folder: Path, load_format: str, dtype: str) -> None:
        kind, chosen = transformers.AutoModelForCausalLM, getattr(torch, dtype)
        if load_format == "dummy":
            self._model = kind.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=chosen)
        else:
            self._model = kind.from_pretrained(folder, dtype=chosen)
        self._model.eval()

    def run(self, batch: Sequence[np.ndarray[Any, np.dtype[np.int32]]], load: str) -> float:
        came = _now()
        times: list[float] = []

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(_now())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        longest = max(map(len, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NUM_OUT,
                min_new_tokens=NUM_OUT,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([note]),
            )
        assert len(times) == NUM_OUT
        if load == "mixed":
            return len(batch) * NUM_OUT / (times[-1] - came)
        return len(batch) * (NUM_OUT - 1) / (times[-1] - times[0])


def serve_variant(
    variant: str,
    folder: Path,
    load_format: str,
    vocab_size: int,
    threads: int,
    dtype: str,
    clock: str,
    pipe: Connection,
) -> None:
    """Answer (batch, seed, load) with tokens per second, until the other end closes."""
    global _now  # noqa: PLW0603 (of this process, which measures one way)
    _now = CLOCKS[clock]
    torch.set_num_threads(threads)
    model: Minisgl | Transformers
    if variant == "minisgl":
        model = Minisgl(folder, load_format, threads, dtype)
    else:
        model = Transformers(folder, load_format, dtype)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        batch, seed, load = job
        pipe.send(model.run(prompts(batch, vocab_size, seed, load), load))
    if isinstance(model, Minisgl):
        model.close()


class Variant:
    def __init__(
        self, variant: str, folder: Path, load_format: str, vocab_size: int, threads: int, dtype: str, clock: str
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=serve_variant,
            args=(variant, folder, load_format, vocab_size, threads, dtype, clock, other),
            daemon=True,
        )
        self._process.start()
        other.close()  # so that the end of the process is an EOFError here
        self._pipe.recv()

    def run(self, batch: int, seed: int, load: str) -> float:
        self._pipe.send((batch, seed, load))
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def measure(
    name: str, batches: Sequence[int], repeats: int, threads: int, dtype: str, load: str, clock: str
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, load_format = Path(temporary), "dummy"
        if name == "smollm2":
            folder, load_format = resolve_model("smollm2", print), "auto"
        else:
            (folder / "config.json").write_text(json.dumps(THEIRS.get(name, QWEN3_06B)))
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        variants = {
            variant: Variant(variant, folder, load_format, vocab_size, threads, dtype, clock)
            for variant in ("minisgl", "transformers")
        }
        results = [compare(name, variants, batch, repeats, load) for batch in batches]
        for variant in variants.values():
            variant.close()
    return results


def compare(name: str, variants: dict[str, Variant], batch: int, repeats: int, load: str) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {variant: [] for variant in variants}
    for repeat in range(-1, repeats):  # the first is warm-up
        for variant in list(variants) if repeat % 2 else list(reversed(variants)):
            speed = variants[variant].run(batch, 1000 * batch + repeat, load)
            if repeat >= 0:
                speeds[variant].append(speed)
    median = {variant: statistics.median(values) for variant, values in speeds.items()}
    ours, theirs = median["minisgl"], median["transformers"]
    bar = BARS[name][batch]
    print(f"{name} x{batch} {load}: {ours:.1f} / {theirs:.1f} tok/s, {ours / theirs:.2f} (bar {bar})", flush=True)
    return {
        "model": name,
        "batch": batch,
        "load": load,
        "tok_s": speeds,
        "median_tok_s": median,
        "ratio": ours / theirs,
        "bar": bar,
    }


def environment(threads: int) -> dict[str, Any]:
    flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": threads,
        "cpu_features": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
    }


def plot(results: Sequence[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({result["model"] for result in results})
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        rows = [result for result in results if result["model"] == name]
        at = np.arange(len(rows))
        for offset, variant in ((-0.2, "transformers"), (0.2, "minisgl")):
            axis.bar(at + offset, [row["median_tok_s"][variant] for row in rows], 0.4, label=variant)
        axis.set_xticks(at, [f"batch {row['batch']}" for row in rows])
        axis.set_ylabel("tok/s")
        axis.set_title(name)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for raw.json, summary.md and plot.png")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], choices=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "smollm2"], choices=list(BARS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--load", default="equal", choices=["equal", "mixed"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = [
        row
        for name in args.models
        for row in measure(name, args.batch, args.repeats, args.threads, args.dtype, args.load, args.clock)
    ]
    num_in = NUM_IN if args.load == "equal" else MIXED
    report = {
        "environment": environment(args.threads),
        "num_in": num_in,
        "num_out": NUM_OUT,
        "dtype": args.dtype,
        "clock": args.clock,
    }
    report["results"] = results
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "raw.json").write_text(json.dumps(report, indent=1) + "\n")
        lines = ["| model | batch | minisgl tok/s | transformers tok/s | ratio | bar |", "|---|---|---|---|---|---|"]
        for row in results:
            ours, theirs = row["median_tok_s"]["minisgl"], row["median_tok_s"]["transformers"]
            lines.append(
                f"| {row['model']} | {row['batch']} | {ours:.1f} | {theirs:.1f} | {row['ratio']:.2f} | {row['bar']} |"
            )
        (args.out / "summary.md").write_text("\n".join(lines) + "\n")
        plot(results, args.out / "plot.png")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
