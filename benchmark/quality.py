"""Measure the distance of each engine's logits from transformers' in float32, over the prompts of MINISGL_DATA.

    python -m benchmark.quality [--tokens 2048] [--variants exact int8 torch-bf16] [--out DIR]
    python -m benchmark.quality --model FILE.gguf --variants exact int8 --beside native=DIR

The text is MT-Bench's questions alternating with GSM8K's questions and answers. It goes through the model in chunks of
512 tokens, and each variant's logits in the second half of each chunk are compared with the reference's. KL is the
divergence of the variant's distribution from the reference's, in nats; top-1 the share of positions with the same
likeliest token; ties the share where the two likeliest are equal; dlogprob the difference of log probabilities of the
text's own next tokens (its mean), and of these and the reference's likeliest (its largest). `reference, f16 KV` shows
the cost of rounding keys and values alone. `--beside` adds llama.cpp: a folder with its `llama-perplexity`.
The last line of stdout is JSON.

Invariants: all variants see the same tokens; sums are float64.
"""

from __future__ import annotations

import argparse
import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from minisgl.bench.model import llama_folders
from minisgl.bench.prompts import gsm8k, mt_bench
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.config import ConfigError, EngineConfig
from minisgl.message import AddRequest
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.sources import find_model, resolve_model

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
PERPLEXITY = "llama-perplexity"
CHUNK = 512
HALF = CHUNK // 2
ROWS = 64  # compared at once, which bounds the memory of a large vocabulary
FIGURES = ("mean_kl", "max_kl", "top1", "ties", "mean_dlogprob", "max_dlogprob", "perplexity", "perplexity_ratio")
Logits = Callable[[Sequence[int]], Tensor]
"""Computes a chunk's log probabilities at positions HALF to CHUNK - 2, in float64."""


class Compared:
    """Accumulated differences over the positions compared so far."""

    def __init__(self) -> None:
        self._count = self._same = self._ties = 0
        self._kl = self._max_kl = self._off_own = self._max_off = self._nll = self._nll_expected = 0.0

    def add(self, theirs: Tensor, ours: Tensor, following: Tensor) -> None:
        """Add log probabilities of the reference and of a variant, [positions, vocabulary], and the tokens that follow.
        The variant's may be minus infinity, for a small unknown one. The KL leaves it out, elsewhere the least known
        one stands for it."""
        kl = (theirs.exp() * (theirs - ours)).where(ours.isfinite(), 0.0).sum(-1)
        ours = ours.maximum(ours.where(ours.isfinite(), 0.0).amin(-1, keepdim=True))
        off = (ours - theirs).abs()
        likeliest, own, two = theirs.argmax(-1, keepdim=True), following.unsqueeze(1), ours.topk(2).values
        self._count += len(ours)
        self._same += int((likeliest.squeeze(-1) == ours.argmax(-1)).sum())
        self._ties += int((two[:, 0] == two[:, 1]).sum())
        self._kl += float(kl.sum())
        self._max_kl = max(self._max_kl, float(kl.max()))
        self._max_off = max(self._max_off, float(off.gather(1, likeliest).max()), float(off.gather(1, own).max()))
        self._off_own += float(off.gather(1, own).sum())
        self._nll -= float(ours.gather(1, own).sum())
        self._nll_expected -= float(theirs.gather(1, own).sum())

    def figures(self) -> dict[str, float]:
        sums = (self._kl, self._same, self._ties, self._off_own, self._nll, self._nll - self._nll_expected)
        kl, same, ties, off_own, nll, more = (one / self._count for one in sums)
        values = (kl, self._max_kl, same, ties, off_own, self._max_off, math.exp(nll), math.exp(more))
        return dict(zip(FIGURES, values, strict=True))


def text() -> str:
    """Return the questions and answers as one text. Raises `ConfigError` without the data."""
    alternating = itertools.zip_longest(mt_bench(), gsm8k(), fillvalue=())
    return "\n\n".join(itertools.chain.from_iterable(itertools.chain.from_iterable(alternating)))


def chunks_of(tokenizer: Tokenizer, num_tokens: int) -> Int32Array:
    """Return the text's first tokens in chunks, [chunks, CHUNK]. As in llama.cpp each begins with the tokens that the
    model wants first, in place of its own. Raises `ConfigError` for less than one chunk and more than the text has."""
    ids = tokenizer.encode(text())
    if not CHUNK <= num_tokens <= len(ids):
        raise ConfigError(f"--tokens {num_tokens}: must be {CHUNK} to {len(ids)}")
    chunks = ids[: num_tokens // CHUNK * CHUNK].reshape(-1, CHUNK).copy()
    leading = tokenizer.leading_ids
    chunks[:, : len(leading)] = leading
    return chunks


def _folder(model: str) -> Path:
    return resolve_model(model, lambda text, done=0, total=0: None)


def _second_half(logits: Tensor) -> Tensor:
    return logits[HALF:-1].double().log_softmax(-1)


class RoundedCache(DynamicCache):
    """Cache that rounds keys and values to float16."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)


def reference(folder: Path, threads: int, cache: type[DynamicCache] = DynamicCache) -> Logits:
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(ids: Sequence[int]) -> Tensor:
        return _second_half(model(torch.tensor([list(ids)]), past_key_values=cache(), use_cache=True).logits[0])

    return logits


def logits_of(name: str, model: str, folder: Path, threads: int) -> Logits:
    """Return a function that computes the variant's log probabilities. Raises `ConfigError`."""
    if name == ROUNDED:
        return reference(folder, threads, RoundedCache)
    settings = VARIANTS[name]
    # `quantization` wants full weights: those of the folder are float32
    full = "quantization" in settings or settings["engine"] == "torch"
    sizes: dict[str, Any] = {
        "num_pages": 256,
        "max_seq_len": 2048,
        "max_prefill_length": 2048,
        "max_running_requests": 1,
    }
    config = EngineConfig(model=str(folder) if full else model, num_threads=threads, **sizes, **settings).check()
    engine: Any = build_engine(config, lambda text, done=0, total=0: None)
    if settings["engine"] == "torch":
        return _through_the_loop(engine, config)
    vocab = engine.info.vocab_size

    def logits(ids: Sequence[int]) -> Tensor:
        raw = engine.rust.prompt_logits(np.array(ids, np.int32))
        return _second_half(torch.from_numpy(np.frombuffer(raw, np.float32).reshape(len(ids), vocab).copy()))

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
        return _second_half(torch.cat(pieces).float())

    return logits


def written_by(program: Path, file: Path, chunks: Int32Array, threads: int, out: Path) -> Logits:
    """Let llama.cpp's `llama-perplexity` compute the chunks and write its log probabilities to `out`: 16 bits each, of
    16 nats below the likeliest. Raises `ConfigError` if it fails or has other tokens."""
    source = out.with_suffix(".txt")
    source.write_text(text(), encoding="utf-8")
    sizes = ("-c", str(CHUNK), "-b", str(CHUNK), "--chunks", str(len(chunks)), "-t", str(threads))
    command = [str(program), "-m", str(file), "-f", str(source), *sizes, "--kl-divergence-base", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise ConfigError(f"{PERPLEXITY}: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return _written(out, chunks)


def _written(file: Path, chunks: Int32Array) -> Logits:
    start, vocab = 20, int(np.fromfile(file, np.int32, 1, offset=12)[0])
    ids = np.fromfile(file, np.int32, chunks.size, offset=start).reshape(chunks.shape)
    if (ids[:, 1:] != chunks[:, 1:]).any():
        raise ConfigError(f"{PERPLEXITY} has other tokens for the same text")
    row = 4 + 2 * ((vocab + 1) // 2)  # two floats, then a number for each token
    rows = iter(np.memmap(file, np.uint16, "r", start + ids.nbytes, (len(chunks), CHUNK - 1 - HALF, row)))

    def logits(ids: Sequence[int]) -> Tensor:
        found = next(rows)
        scale, least = torch.from_numpy(found[:, :4].copy().view(np.float32)).double().unsqueeze(-1).unbind(1)
        steps = torch.from_numpy(found[:, 4 : 4 + vocab].astype(np.float64))
        return (steps * scale + least).where(steps > 0, -torch.inf)

    return logits


@torch.inference_mode()
def measure(
    model: str, names: Sequence[str], beside: Mapping[str, Path], num_tokens: int, threads: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures by variant, and the reasons for variants that have none."""
    folder = _folder(model)
    chunks, exact = chunks_of(Tokenizer.load(folder), num_tokens), reference(folder, threads)
    engines, missing = dict[str, Logits](), dict[str, str]()
    with tempfile.TemporaryDirectory() as scratch:
        for name in (*names, *beside):
            try:
                if program := beside.get(name):
                    out = Path(scratch) / f"{len(engines)}.logits"
                    engines[name] = written_by(
                        program / PERPLEXITY, find_model(model, lambda *_: None), chunks, threads, out
                    )
                else:
                    engines[name] = logits_of(name, model, folder, threads)
            except ConfigError as error:
                missing[name] = str(error)
        sums = {name: Compared() for name in engines}
        for number, ids in enumerate(chunks.tolist()):
            expected, following = exact(ids), torch.tensor(ids[HALF + 1 :])
            for name, logits in engines.items():
                for piece in zip(*(of.split(ROWS) for of in (expected, logits(ids), following)), strict=True):
                    sums[name].add(*piece)
            kls = ", ".join(f"{name} {one.figures()['mean_kl']:.3g}" for name, one in sums.items())
            print(f"quality: chunk {number + 1} of {len(chunks)}: mean KL {kls}", file=sys.stderr, flush=True)
    return {name: one.figures() for name, one in sums.items()}, missing


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="benchmark.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    parser.add_argument("--model", default="smollm2", help="embedded model or GGUF file (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="tokens to compute; half are compared (default: %(default)s)"
    )
    parser.add_argument(
        "--beside", action="append", default=[], metavar="DIR",
        help=f"also llama.cpp: a folder with {PERPLEXITY}; NAME=DIR: another build",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="NAME",
        help=f"in quotes each, of: {'; '.join(VARIANTS)} (default: all)",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    command = public_command(arguments, "python -m benchmark.quality")
    report = None if args.out is None else Report(args.out, "Logits beside transformers in float32", command=command)
    try:
        beside = llama_folders(args.beside)
        found, missing = measure(args.model, args.variants, beside, args.tokens, args.threads)
    except ConfigError as error:
        parser.error(str(error))
    rows = [(name, *(f"{one[key]:.4g}" for key in FIGURES)) for name, one in found.items()]
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
