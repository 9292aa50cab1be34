"""`python -m benchmark.cpu quality`: how far the CPU engine's logits are from float32's, over MINISGL_DATA's prompts.

The reference is transformers in float32 on the dequantized weights; the torch engine in float32 stands beside. Each
variant's logits after every token of a prompt are compared with the reference's after the same tokens: KL of its own
distribution from the reference's (nats), the share of positions with the same likeliest token, differences of log
probabilities (of the prompt's own next tokens; of the reference's likeliest; of any token of the vocabulary), and the
perplexity of the prompts over the reference's. `max_dlogprob` is the largest of the first two kinds.

All variants see the same tokens; sums in float64.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmark.cpu import bars
from benchmark.cpu.sidebyside import missing_table
from benchmark.cpu.variants import ENGINES, Setup
from benchmark.offline.agreement import Ours, Sums, texts
from minisgl.bench.compare_variants import Missing
from minisgl.bench.report import Report, print_result, table
from minisgl.config import ConfigError
from minisgl.runner.build import build_engine
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model

ROUNDED = "reference, f16 KV"
VARIANTS = (
    "exact",
    "exact-f32",
    "exact-q8",
    "bf16",
    "int8",
    "from-f32-q8",
    "from-f32-q4",
    ROUNDED,
    "torch",
    "torch-bf16",
)
LONGEST = 1024
HEAD = ("mean KL", "max KL", "top-1", "mean dlogprob", "max", "max of likeliest", "of any token", "perplexity ratio")
Logits = Callable[[Sequence[int]], Tensor]


class Compared(Sums):
    """Beside the sums: log probabilities of single tokens, and the prompts' own likelihood under both."""

    def __init__(self) -> None:
        super().__init__()
        self._dlogprob_top = self._dlogprob_own = self._dlogprob_any = self._off_own = 0.0
        self._nll = self._nll_expected = 0.0
        self._scored = 0

    def compare(self, expected: Tensor, found: Tensor, ids: Sequence[int]) -> None:
        self.add(expected, found)
        ours, theirs = found.double().log_softmax(-1), expected.double().log_softmax(-1)
        off = (ours - theirs).abs()
        self._dlogprob_any = max(self._dlogprob_any, float(off.max()))
        top = theirs.argmax(-1, keepdim=True)
        self._dlogprob_top = max(self._dlogprob_top, float(off.gather(1, top).max()))
        if len(ids) > 1:
            following = torch.tensor(ids[1:]).unsqueeze(1)
            own = off[:-1].gather(1, following)
            self._dlogprob_own = max(self._dlogprob_own, float(own.max()))
            self._off_own += float(own.sum())
            self._nll -= float(ours[:-1].gather(1, following).sum())
            self._nll_expected -= float(theirs[:-1].gather(1, following).sum())
            self._scored += len(ids) - 1

    def figures(self) -> dict[str, float]:
        ratio = math.exp((self._nll - self._nll_expected) / max(self._scored, 1))
        return {
            **super().figures(),
            "max_dlogprob": max(self._dlogprob_own, self._dlogprob_top),
            "max_dlogprob_top": self._dlogprob_top,
            "max_dlogprob_any": self._dlogprob_any,
            "mean_dlogprob": self._off_own / max(self._scored, 1),
            "perplexity": math.exp(self._nll / max(self._scored, 1)),
            "perplexity_ratio": ratio,
        }


def prompts(num_tokens: int) -> list[list[int]]:
    """Of `num_tokens` in all; ids of the embedded model's tokenizer."""
    tokenizer = Tokenizer.load(resolve_model("smollm2", lambda text, done=0, total=0: None))
    found, left = [], num_tokens
    for text in texts():
        if ids := [int(i) for i in tokenizer.encode(text)][: min(left, LONGEST)]:
            found.append(ids)
            left -= len(ids)
    return found


def load_reference(threads: int) -> Any:
    torch.set_num_threads(threads)
    folder = resolve_model("smollm2", lambda text, done=0, total=0: None)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class CpuLogits:
    """The CPU engine's logits after each token of a prompt. Raises `Missing` where there is no such engine."""

    def __init__(self, name: str, threads: int) -> None:
        # `--quantization` wants full weights: the embedded model's as float32
        full = "quantization" in ENGINES[name]
        model = str(resolve_model("smollm2", lambda text, done=0, total=0: None)) if full else "smollm2"
        setup = Setup(model=model, threads=threads, extra={"num_pages": 256, "max_seq_len": 2048})
        try:
            self._engine: Any = build_engine(setup.config(name), lambda text, done=0, total=0: None)
        except ConfigError as error:
            raise Missing(str(error)) from error
        self._vocab = self._engine.info.vocab_size

    def __call__(self, ids: Sequence[int]) -> Tensor:
        raw = self._engine.rust.prompt_logits(np.array(ids, np.int32))
        return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(len(ids), self._vocab).copy())

    def close(self) -> None:
        self._engine.close()


class TorchLogits:
    """The torch engine's, through its real step loop."""

    def __init__(self, dtype: str, threads: int) -> None:
        self._ours = Ours(resolve_model("smollm2", lambda text, done=0, total=0: None), dtype, threads)
        self._number = 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        self._number += 1
        return self._ours.logits(self._number, list(ids))

    def close(self) -> None:
        self._ours.close()


class RoundedCache(DynamicCache):
    """Keys and values as float16 holds them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)


class RoundedLogits:
    """The reference with its keys and values rounded to float16: what that alone costs, whoever computes."""

    def __init__(self, threads: int) -> None:
        self._model = load_reference(threads)

    def __call__(self, ids: Sequence[int]) -> Tensor:
        found: Tensor = self._model(torch.tensor([list(ids)]), past_key_values=RoundedCache(), use_cache=True).logits[0]
        return found

    def close(self) -> None:
        del self._model


def make(name: str, threads: int) -> CpuLogits | TorchLogits | RoundedLogits:
    if name == ROUNDED:
        return RoundedLogits(threads)
    if name == "torch":
        return TorchLogits("float32", threads)
    return TorchLogits("bfloat16", threads) if name == "torch-bf16" else CpuLogits(name, threads)


@torch.inference_mode()
def measure(names: Sequence[str], num_tokens: int, threads: int) -> tuple[dict[str, Any], dict[str, str]]:
    given = prompts(num_tokens)
    model = load_reference(threads)
    expected = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in given]
    del model
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in names:
        sums, began = Compared(), time.monotonic()
        try:
            variant = make(name, threads)
        except (Missing, ConfigError, AttributeError) as error:
            missing[name] = str(error)
            continue
        for ids, logits in zip(given, expected, strict=True):
            sums.compare(logits, variant(ids), ids)
        variant.close()
        found[name] = {**sums.figures(), "seconds": time.monotonic() - began}
        print(f"quality: {name}: {found[name]}", file=sys.stderr, flush=True)
    return found, missing


def records(found: dict[str, Any]) -> list[dict[str, Any]]:
    def value(name: str, of: Callable[[dict[str, float]], float]) -> float | None:
        return of(found[name]) if name in found else None

    values = {
        "exact mean_dlogprob": value("exact", lambda one: one["mean_dlogprob"]),
        "exact max_dlogprob": value("exact", lambda one: one["max_dlogprob"]),
        "exact top1": value("exact", lambda one: 100 * one["top1"]),
        "int8 mean_kl": value("int8", lambda one: one["mean_kl"]),
        "int8 top1": value("int8", lambda one: 100 * one["top1"]),
        "int8 perplexity": value("int8", lambda one: 100 * abs(one["perplexity_ratio"] - 1)),
    }
    beside = {
        "exact mean_dlogprob": value(ROUNDED, lambda one: one["mean_dlogprob"]),
        "exact max_dlogprob": value(ROUNDED, lambda one: one["max_dlogprob"]),
        "exact top1": value(ROUNDED, lambda one: 100 * one["top1"]),
        "int8 mean_kl": value("torch-bf16", lambda one: one["mean_kl"]),
        "int8 top1": value("torch-bf16", lambda one: 100 * one["top1"]),
        "int8 perplexity": value("torch-bf16", lambda one: 100 * abs(one["perplexity_ratio"] - 1)),
    }
    return [limit.record(values[key], beside[key]) for key, limit in bars.QUALITY.items()]


def run(names: Sequence[str], num_tokens: int, threads: int, out: Path | None, command: str) -> dict[str, Any]:
    report = None if out is None else Report(out, "The CPU engine's logits", command=command)
    found, missing = measure(names, num_tokens, threads)
    judged = records(found)
    off = ("mean_dlogprob", "max_dlogprob", "max_dlogprob_top", "max_dlogprob_any")
    keys = ("mean_kl", "max_kl", "top1", *off, "perplexity_ratio")
    rows = [(name, *(f"{one[key]:.3g}" if key != "top1" else f"{one[key]:.2%}" for key in keys))
            for name, one in found.items()]  # fmt: skip
    shown = [
        bars.limit_table(judged, "reference with f16 KV; torch bfloat16 beside int8"),
        table(("variant", *HEAD), rows),
        missing_table(missing),
    ]
    print("\n\n".join(text for text in shown if text))
    raw = {"tokens": num_tokens, "variants": found, "records": judged, "missing": missing}
    if report is not None:
        report.section(f"{num_tokens} tokens of prompts, against transformers in float32", *shown)
        report.write(raw)
    print_result({"bench": "cpu quality", "bars": bars.score(judged), **raw})
    return raw
