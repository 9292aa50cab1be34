"""What pages on disk gain after a restart, and what writing them costs.

    python -m benchmark.store restart --model smollm2 --out FOLDER
    python -m benchmark.store restart --shape qwen2.5-1.5b --tokens 1024 --out FOLDER
    python -m benchmark.store cost --model smollm2 --out FOLDER

`restart`: the time to the first token of one prompt over HTTP from a server with an empty folder; after `kill -9` of
all of it and a new start; and after another one, without the folder. All bits of the answers must be equal: texts and
log probabilities are compared. `--shape`: a model of random weights in Q4_K_M.

`cost`: prompts that nobody asked before, and then a batch that decodes, with and without a folder in turns, there and
back, in one process. "written" waits in each turn until the disk has all: the whole price, where nothing is idle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from minisgl.bench.random_models import random_model
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.stats import geometric_interval, in_turns
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

TITLE = "Pages on disk"
COMMAND = "python -m benchmark.store"
ANSWER = 16  # tokens
TIMEOUT_S = 600.0


def prompt(tokens: int, seed: int) -> list[int]:
    """Ids that any vocabulary has, and no special ones."""
    return [int(token) for token in np.random.default_rng(seed).integers(1000, 30_000, tokens)]


def ask(server: ServerProcess, tokens: list[int]) -> dict[str, Any]:
    body = {
        "model": server.model,
        "prompt": tokens,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, answer, cached = time.monotonic(), 0.0, [], 0
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                first = first or time.monotonic() - began
                answer.append((choice["text"], choice["logprobs"]))
    assert response.status_code == 200 and first, "no answer"
    return {"ttft_s": first, "cached_tokens": cached, "answer": answer}


def kill(server: ServerProcess) -> None:
    """As a machine that loses its processes."""
    every = list(server.processes().values())
    for process in every:
        process.kill()
    psutil.wait_procs(every)
    server.stop()


def restart(args: argparse.Namespace, model: str) -> dict[str, Any]:
    tokens, found = prompt(args.tokens, args.seed), dict[str, Any]()
    with tempfile.TemporaryDirectory(dir=args.cache_in) as folder:
        plain = ("--model", model, "--engine", "cpu", "--max-seq-len", str(args.tokens + 64), *args.flag)
        kept = (*plain, "--cache-dir", folder)
        for name, flags in (("cold", kept), ("after kill -9", kept), ("without a folder", plain)):
            server = ServerProcess(Launch(flags=flags)).start()
            try:
                found[name] = ask(server, tokens) | {"start_s": server.start_s}
                if name == "cold":
                    wait_for_pages(Path(folder), args.tokens // 16)
            finally:
                kill(server)
    answers = [one.pop("answer") for one in found.values()]
    found["same bits"] = answers[0] == answers[1] == answers[2]
    found["cold / after"] = found["cold"]["ttft_s"] / found["after kill -9"]["ttft_s"]
    return found


def wait_for_pages(folder: Path, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(folder.glob("??/*"))) < count:
        assert time.monotonic() < deadline, "pages do not come to the folder"
        time.sleep(0.05)


def cost(args: argparse.Namespace, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.cache_in) as folder:
        settings: dict[str, Any] = {"engine": "cpu", "log_level": "error", "max_seq_len": args.tokens + 512}
        llms = {"without": LLM(model, **settings), "with": LLM(model, cache_dir=folder, **settings)}
        numbers = iter(range(args.seed, 1 << 30))

        def measure(name: str) -> dict[str, float]:
            one, times = llms[name], dict[str, float]()
            began = time.monotonic()
            one.generate([prompt(args.tokens, next(numbers))], params(1), progress=False)
            times["prompt"] = time.monotonic() - began
            began = time.monotonic()
            one.generate([prompt(16, next(numbers)) for _ in range(args.rows)], params(args.decode), progress=False)
            times["decode"] = time.monotonic() - began
            began = time.monotonic()
            if isinstance(one._engine, CpuEngine) and one._engine.store is not None:
                one._engine.store.flush(TIMEOUT_S)
            times["written"] = times["prompt"] + times["decode"] + time.monotonic() - began
            return times

        in_turns(list(llms), 1, measure)
        found = in_turns(list(llms), args.rounds, measure)
        counts = llms["with"]._engine.store_counts()  # type: ignore[attr-defined]
        for one in llms.values():
            one.close()
    ratios = {
        name: [a[name] / b[name] for a, b in zip(found["with"], found["without"], strict=True)]
        for name in ("prompt", "decode", "written")
    }
    shown = {name: str(geometric_interval(values)) for name, values in ratios.items()}
    return {"with / without, time": shown, "counts": str(counts), "times": found}


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("restart", "cost"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="a model of random weights instead")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flag", action="append", default=[], help="of the server, such as --flag=--kv-dtype=q8")
    parser.add_argument("--cache-in", help="where the folder is made (default: for temporary files)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = args.model if args.shape is None else str(random_model(args.shape, "q4_k_m"))
    found = restart(args, model) if args.part == "restart" else cost(args, model)
    report = Report(args.out, TITLE, command=public_command([args.part], COMMAND))
    rows = [(name, json.dumps(value)) for name, value in found.items() if name != "times"]
    report.section(args.part, table(("", "found"), rows))
    report.write(found)
    print_result(found)


if __name__ == "__main__":
    main()
