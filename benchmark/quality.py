"""Measure the distance of each engine's logits from transformers' in float32, over the prompts of MINISGL_DATA.

    python -m benchmark.quality [--tokens 2000] [--variants exact int8 torch-bf16] [--out DIR]

First turns of MT-Bench and questions of GSM8K, alternating, go through the embedded model; each variant's logits after
every token are compared with the reference's after the same tokens. KL is the divergence of the variant's distribution
from the reference's, in nats; top-1 the share of positions with the same likeliest token; ties the share where the two
likeliest are equal; dlogprob the difference of log probabilities of the prompt's own next tokens (its mean), and of
these and the reference's likeliest (its largest). `reference, f16 KV` shows the cost of rounding keys and values alone.
The last line of stdout is JSON.

Invariants: all variants see the same tokens; sums are float64.
"""

from __future__ import annotations

import argparse
import itertools
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

from minisgl.bench.prompts import gsm8k, mt_bench
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.config import ConfigError, EngineConfig
from minisgl.message import AddRequest
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model

ROUNDED = "reference, f16 KV"
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"engine": "cpu"},
    "exact-f32": {"engine": "cpu", "kv_dtype": "f32"},
    "exact-q8": {"engine": "cpu", "kv_dtype": "q8"},
    "exact-q4": {"engine": "cpu", "kv_dtype": "q4"},
    "bf16": {"engine": "cpu", "activations": "bf16"},
    "int8": {"engine": "cpu", "activations": "int8"},
    "from-f32-q8": {"engine": "cpu", "quantization": "q8"},
    "from-f32-q4": {"engine": "cpu", "quantization": "q4"},
    ROUNDED: {},
    "torch": {"engine": "torch", "dtype": "float32", "device": "cpu"},
    "torch-bf16": {"engine": "torch", "dtype": "bfloat16", "device": "cpu"},
}
LONGEST = 1024
FIGURES = ("mean_kl", "max_kl", "top1", "ties", "mean_dlogprob", "max_dlogprob", "perplexity_ratio")
Logits = Callable[[Sequence[int]], Tensor]


class Compared:
    """Accumulated differences over the positions compared so far."""

    def __init__(self) -> None:
        self._count = self._same = self._ties = self._scored = 0
        self._kl = self._max_kl = self._off_own = self._max_off = self._nll = self._nll_expected = 0.0

    def add(self, expected: Tensor, logits: Tensor, ids: Sequence[int]) -> None:
        ours, theirs = logits.double().log_softmax(-1), expected.double().log_softmax(-1)
        kl, off = (theirs.exp() * (theirs - ours)).sum(-1), (ours - theirs).abs()
        likeliest, two = theirs.argmax(-1, keepdim=True), logits.topk(2).values
        self._count += len(logits)
        self._same += int((likeliest.squeeze(-1) == logits.argmax(-1)).sum())
        self._ties += int((two[:, 0] == two[:, 1]).sum())
        self._kl += float(kl.sum())
        self._max_kl = max(self._max_kl, float(kl.max()))
        self._max_off = max(self._max_off, float(off.gather(1, likeliest).max()))
        if len(ids) > 1:
            following = torch.tensor(ids[1:]).unsqueeze(1)
            own = off[:-1].gather(1, following)
            self._max_off = max(self._max_off, float(own.max()))
            self._off_own += float(own.sum())
            self._nll -= float(ours[:-1].gather(1, following).sum())
            self._nll_expected -= float(theirs[:-1].gather(1, following).sum())
            self._scored += len(ids) - 1

    def figures(self) -> dict[str, float]:
        scored = max(self._scored, 1)
        rates = (self._kl / self._count, self._max_kl, self._same / self._count, self._ties / self._count)
        perplexity_ratio = math.exp((self._nll - self._nll_expected) / scored)
        values = (*rates, self._off_own / scored, self._max_off, perplexity_ratio)
        return dict(zip(FIGURES, values, strict=True))


def prompts(num_tokens: int) -> list[list[int]]:
    """Return prompts with `num_tokens` tokens in total. Raises `ConfigError` without the data."""
    tokenizer = Tokenizer.load(_model_folder())
    texts = itertools.chain.from_iterable(
        zip(*([first for first, _ in of] for of in (mt_bench(), gsm8k())), strict=False)
    )
    prompts, left = [], num_tokens
    for text in texts:
        if ids := [int(i) for i in tokenizer.encode(text)][: min(left, LONGEST)]:
            prompts.append(ids)
            left -= len(ids)
    return prompts


def _model_folder() -> Path:
    return resolve_model("smollm2", lambda text, done=0, total=0: None)


class RoundedCache(DynamicCache):
    """Cache that rounds keys and values to float16."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)


def reference(threads: int, cache: type[DynamicCache] = DynamicCache) -> Logits:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(_model_folder(), dtype=torch.float32).eval()

    def logits(ids: Sequence[int]) -> Tensor:
        found: Tensor = model(torch.tensor([list(ids)]), past_key_values=cache(), use_cache=True).logits[0]
        return found

    return logits


def logits_of(name: str, threads: int) -> Logits:
    """Return a function that computes the variant's logits after each token of a prompt. Raises `ConfigError`."""
    if name == ROUNDED:
        return reference(threads, RoundedCache)
    settings = VARIANTS[name]
    # `quantization` wants full weights: the embedded model's as float32
    full = "quantization" in settings or settings["engine"] == "torch"
    model = str(_model_folder()) if full else "smollm2"
    sizes: dict[str, Any] = {
        "num_pages": 256,
        "max_seq_len": 2048,
        "max_prefill_length": 2048,
        "max_running_requests": 1,
    }
    config = EngineConfig(model=model, num_threads=threads, **sizes, **settings).check()
    engine: Any = build_engine(config, lambda text, done=0, total=0: None)
    if settings["engine"] == "torch":
        return _through_the_loop(engine, config)
    vocab = engine.info.vocab_size

    def logits(ids: Sequence[int]) -> Tensor:
        raw = engine.rust.prompt_logits(np.array(ids, np.int32))
        return torch.from_numpy(np.frombuffer(raw, np.float32).reshape(len(ids), vocab).copy())

    return logits


def _through_the_loop(engine: Any, config: EngineConfig) -> Logits:
    """Return the logits function of the torch engine in its real step loop: at prompt positions by requesting log
    probabilities, and at the last position by sampling."""
    pieces: list[Tensor] = []
    head = engine.model.logits

    def kept(hidden: Tensor) -> Tensor:
        pieces.append(head(hidden))
        return pieces[-1]

    engine.model.logits = kept
    loop = StepLoop(build_control_plane(config, engine.info), engine, lambda messages: None)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, seed=0)
    numbers = itertools.count()

    def logits(ids: Sequence[int]) -> Tensor:
        pieces.clear()
        loop.step([AddRequest(next(numbers), np.array(ids, np.int32).tobytes(), params)])
        while not loop.idle:
            loop.step([])
        return torch.cat(pieces).float()

    return logits


@torch.inference_mode()
def measure(names: Sequence[str], num_tokens: int, threads: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures by variant, and the reasons for variants that have none."""
    given, exact = prompts(num_tokens), reference(threads)
    expected = [exact(ids) for ids in given]
    figures, missing = dict[str, Any](), dict[str, str]()
    for name in names:
        sums, began = Compared(), time.monotonic()
        try:
            logits = logits_of(name, threads)
        except ConfigError as error:
            missing[name] = str(error)
            continue
        for ids, wanted in zip(given, expected, strict=True):
            sums.add(wanted, logits(ids), ids)
        figures[name] = {**sums.figures(), "seconds": round(time.monotonic() - began, 1)}
        print(f"quality: {name}: {figures[name]}", file=sys.stderr, flush=True)
    return figures, missing


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="benchmark.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens to compare (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="NAME",
        help=f"in quotes each, of: {'; '.join(VARIANTS)} (default: all)",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    command = public_command(arguments, "python -m benchmark.quality")
    report = None if args.out is None else Report(args.out, "Logits beside transformers in float32", command=command)
    try:
        found, missing = measure(args.variants, args.tokens, args.threads)
    except ConfigError as error:
        parser.error(str(error))
    rows = [(name, *(f"{one[key]:.3g}" for key in FIGURES)) for name, one in found.items()]
    shown = [table(("variant", *FIGURES), rows)]
    if missing:
        shown.append(table(("not measured", "why"), missing.items()))
    print("\n\n".join(shown))
    if report is not None:
        report.section(f"{args.tokens} tokens of prompts", *shown)
        report.write({"tokens": args.tokens, "variants": found, "missing": missing})
    print_result({"bench": "quality", "tokens": args.tokens, "variants": found, "missing": missing})
    return 0


if __name__ == "__main__":
    sys.exit(main())
