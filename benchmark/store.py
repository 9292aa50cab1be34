"""What pages on disk gain after a restart, and what writing them costs.

    python -m benchmark.store restart --model smollm2 --out FOLDER
    python -m benchmark.store restart --shape qwen2.5-1.5b --tokens 1024 --out FOLDER
    python -m benchmark.store cost --model smollm2 --out FOLDER
    MINISGL_DATA=... python -m benchmark.store trace --out FOLDER

`restart`: the time to the first token of one prompt over HTTP from a server with an empty folder; after `kill -9` of
all of it and a new start; and after another one, without the folder. All bits of the answers must be equal: texts and
log probabilities are compared. `--shape`: a model of random weights in Q4_K_M.

`cost`: prompts that nobody asked before, and then a batch that decodes, with and without a folder in turns, there and
back, in one process. "written" waits in each turn until the disk has all: the whole price, where nothing is idle.
"cpu" is the process's time with that, which others on the machine disturb least. "itl": from one text of a
row to its next; a p99 is that of five rounds together, as one has few steps. With MINISGL_STORE_BYTES_PER_S the disk is
slow in the turns with it, and nobody waits for it; between turns it is fast, so that those without have none to write.

`trace`: Mooncake's conversations on the simulated engine in virtual time, with a pool alone, with a store of ten times
the pool below it, and with a pool that holds everything; both schedulers. Loads take no time in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from minisgl import envs
from minisgl.bench.random_models import random_model
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.stats import geometric_interval, in_turns
from minisgl.bench.traces import read_trace
from minisgl.bench.virtual_run import VirtualServer
from minisgl.config import EngineConfig
from minisgl.engine.api import SlotAssignment, StepHandle
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.sim import SimEngine
from minisgl.llm import LLM, RequestOutput
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array, StepBuffers, StepPlan

TITLE = "Pages on disk"
COMMAND = "python -m benchmark.store"
ANSWER = 16  # tokens
TIMEOUT_S = 600.0
P99_ROUNDS = 5  # that are measured as one


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
    began, first, text, numbers, cached = time.monotonic(), 0.0, "", list[Any](), 0
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                first = first or time.monotonic() - began
                text += choice["text"]
                if (one := choice["logprobs"]) is not None:  # of an event, which may have several
                    numbers += zip(one["tokens"], one["token_logprobs"], one["top_logprobs"], strict=True)
    assert response.status_code == 200 and first, "no answer"
    return {"ttft_s": first, "cached_tokens": cached, "answer": (text, numbers)}


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
        numbers, slow = iter(range(args.seed, 1 << 30)), envs.store_bytes_per_s()
        all_gaps: dict[str, list[Any]] = {name: [] for name in llms}

        def measure(name: str) -> dict[str, float]:
            one, times, cpu = llms[name], dict[str, float](), time.process_time()
            engine = one._engine
            assert isinstance(engine, CpuEngine)
            if engine.store is not None and slow:
                engine.store.slow_down(engine.pool_bytes / engine.info.num_pages / slow)
            began = time.monotonic()
            one.generate([prompt(args.tokens, next(numbers))], params(1), progress=False)
            times["prompt"] = time.monotonic() - began
            began, came = time.monotonic(), defaultdict[int, list[float]](list)
            batch = [prompt(16, next(numbers)) for _ in range(args.rows)]

            def note(output: RequestOutput, text: str) -> None:
                came[id(output)].append(time.monotonic())

            one.generate(batch, params(args.decode), progress=False, on_text=note)
            times["decode"] = time.monotonic() - began
            gaps = np.concatenate([np.diff(row) for row in came.values()])
            all_gaps[name].append(gaps)
            times["itl_p50"], began = float(np.percentile(gaps, 50)), time.monotonic()
            if engine.store is not None:
                engine.store.slow_down(0)
                engine.store.flush(TIMEOUT_S)
            times["written"] = times["prompt"] + times["decode"] + time.monotonic() - began
            times["cpu"] = time.process_time() - cpu
            return times

        in_turns(list(llms), 1, measure)
        for gaps in all_gaps.values():
            gaps.clear()
        found = in_turns(list(llms), args.rounds, measure)
        counts = llms["with"]._engine.store_counts()  # type: ignore[attr-defined]
        for one in llms.values():
            one.close()
    ratios = {
        name: [a[name] / b[name] for a, b in zip(found["with"], found["without"], strict=True)]
        for name in ("prompt", "decode", "itl_p50", "written", "cpu")
    }
    p99s = {
        name: [
            float(np.percentile(np.concatenate(gaps[at : at + P99_ROUNDS]), 99))
            for at in range(0, len(gaps), P99_ROUNDS)
        ]
        for name, gaps in all_gaps.items()
    }
    ratios["itl_p99"] = [a / b for a, b in zip(p99s["with"], p99s["without"], strict=True)]
    shown = {name: dataclasses.asdict(geometric_interval(values)) for name, values in ratios.items()}
    return {"with / without, time": shown, "counts": str(counts), "times": found, "itl_p99_s": p99s}


class Shelf:
    """A store of a simulated engine: the keys of its pages, the last used last."""

    def __init__(self, page_size: int, most: int) -> None:
        self._page_size = page_size
        self._most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def keys(self, tokens: Int32Array) -> Iterator[bytes]:
        key = b""
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            key = hashlib.blake2b(key + tokens[end - self._page_size : end].tobytes(), digest_size=16).digest()
            yield key

    def stage(self, tokens: Int32Array, first: int, most: int) -> Found:
        found = list(takewhile(self._keys.__contains__, self.keys(tokens)))
        for key in found:
            self._keys.move_to_end(key)
        return Found((first, min(max(first, len(found)), first + most)))

    def give(self, tokens: Int32Array) -> None:
        for key in self.keys(tokens):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Found:
    columns: tuple[int, int]

    def page(self, column: int) -> bytes:
        return b""


class Shelved(SimEngine):
    """A simulated engine that has stored each prompt which it was given."""

    def __init__(self, sim: SimEngine, shelf: Shelf) -> None:
        self.__dict__.update(sim.__dict__)
        self.store = shelf

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        for one in assignments:
            self.store.give(one.tokens)
        return super().launch(plan, buffers, assignments)

    def store_counts(self) -> None:
        return None


def trace(args: argparse.Namespace) -> dict[str, Any]:
    requests = read_trace("mooncake-conversation")[: args.requests]
    arrivals = np.array([one.arrival_s for one in requests]) * args.slower
    found = dict[str, Any]()
    for backend in ("rust_hotpath", "python"):
        for name, pages, times in (("pool", args.pages, 0), ("pool and store", args.pages, 10), ("all", 1 << 20, 0)):
            config = EngineConfig.of(
                {
                    "engine": "sim",
                    "sim_profile": "qwen3-8b-h200",
                    "cpu_backend": backend,
                    "page_size": args.page_size,
                    "num_pages": pages,
                }
            )
            shelf = Shelf(args.page_size, times * pages)
            around = (lambda sim, shelf=shelf: Shelved(sim, shelf)) if times else (lambda sim: sim)
            run = VirtualServer(config, len(requests), 0.0, around).run(requests, arrivals.copy(), 0)
            stats = run.engines[0].stats
            ttft = run.first_token_s - run.arrival_s
            found[f"{backend}, {name}"] = {
                "hit_rate": stats.num_cached_tokens_total / stats.num_prompt_tokens_total,
                "loaded_pages": stats.num_loaded_pages_total,
                "refused": int(run.refused.sum()),
                "end_s": run.end_s,
                "ttft_p50_s": float(np.nanpercentile(ttft, 50)),
                "ttft_p99_s": float(np.nanpercentile(ttft, 99)),
            }
            print(f"{backend}, {name}: {found[f'{backend}, {name}']}", file=sys.stderr)
    return found


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("restart", "cost", "trace"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="a model of random weights instead")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flag", action="append", default=[], help="of the server, such as --flag=--kv-dtype=q8")
    parser.add_argument("--cache-in", help="where the folder is made (default: for temporary files)")
    parser.add_argument("--requests", type=int, help="of the trace (default: all)")
    parser.add_argument("--pages", type=int, default=1000, help="of the simulated pool")
    parser.add_argument("--page-size", type=int, default=256)
    parser.add_argument("--slower", type=float, default=3.0, help="than the trace: one engine stands for several")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = args.model if args.shape is None else str(random_model(args.shape, "q4_k_m"))
    parts = {"restart": lambda: restart(args, model), "cost": lambda: cost(args, model), "trace": lambda: trace(args)}
    found = parts[args.part]()
    report = Report(args.out, TITLE, command=public_command([args.part], COMMAND))
    rows = [(name, json.dumps(value)) for name, value in found.items() if name not in ("times", "itl_p99_s")]
    report.section(args.part, table(("", "found"), rows))
    report.write(found)
    print_result(found)


if __name__ == "__main__":
    main()
