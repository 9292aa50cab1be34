"""`python -m benchmark.cpu http`: whole answers from servers, ours beside llama.cpp's, and how even their tokens come.

N clients ask at once for `NUM_OUT` tokens after prompts of about `NUM_IN`; the figure is tokens out over the time from
the first request to the last token. ITL is the time between two pieces of one answer, p99 over all answers of all
rounds, alone and with a busy neighbour: another process that keeps one core busy.

All servers are alive, one is asked at a time, in turns; no server gets a prompt twice.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmark.cpu import bars, models
from benchmark.cpu.sidebyside import missing_table
from benchmark.cpu.variants import LLAMA
from minisgl.bench.compare_variants import ASK_TIMEOUT_S, BODY, Missing, llama_server
from minisgl.bench.load import Server, first_model, generator
from minisgl.bench.render import words
from minisgl.bench.report import Report, print_result, table
from minisgl.bench.serve_metrics import latencies, tokens_of
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess

NUM_IN, NUM_OUT = 150, 64
CLIENTS = (1, 8, 32)
NEIGHBOURED = (8, 32)  # clients, with a busy neighbour
SERVERS: dict[str, tuple[str, ...]] = {
    "exact": ("--engine", "cpu", "--activations", "exact"),
    "int8": ("--engine", "cpu", "--activations", "int8"),
    "torch": ("--engine", "torch", "--dtype", "float32"),
    "echo": ("--engine", "echo"),
}
DEFAULT_VARIANTS = ("exact", "int8", LLAMA, "torch")
BUSY = "while True: pass"


@dataclass(slots=True)
class Answers:
    """Of one variant, by key such as `clients 8` or `clients 8, busy`: a value a round; ITL in ms of all rounds."""

    tok_s: dict[str, list[float]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    itl_ms: dict[str, list[float]] = field(default_factory=dict)

    def percentile(self, key: str, share: float) -> float:
        return float(np.percentile(self.itl_ms[key], share)) if self.itl_ms.get(key) else math.nan


@dataclass(frozen=True, kw_only=True)
class Settings:
    variants: Sequence[str]
    llama: Mapping[str, Path]
    rounds: int
    threads: int
    rehearse: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        return (16, 8) if self.rehearse else (NUM_IN, NUM_OUT)


def default_variants(llama: Mapping[str, Path], *, rehearse: bool) -> list[str]:
    """Every build of llama.cpp that was named, among others."""
    return ["echo"] if rehearse else list(dict.fromkeys((*DEFAULT_VARIANTS, *llama)))


@contextlib.contextmanager
def start(name: str, settings: Settings) -> Iterator[Server]:
    """A server of that variant. Raises `Missing`."""
    rows = max(CLIENTS)
    if name in SERVERS:
        flags = (*SERVERS[name], "--num-threads", str(settings.threads), "--max-running-requests", str(rows))
        try:
            with ServerProcess(Launch(flags=flags)) as own:
                yield Server(own.url, own.model, None, own)
        except ServerFailed as error:
            raise Missing(str(error).splitlines()[-1][:300]) from error
        return
    if name not in settings.llama:
        raise Missing("give the folder of llama.cpp's programs: --llama-bin DIR")
    length = 2 * -(-(NUM_IN + NUM_OUT) // 256) * 256
    with llama_server(settings.llama[name], models.smollm2(), settings.threads, rows, length) as (_, url):
        yield Server(url, first_model(url, None))


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def ask(server: Server, prompts: Sequence[str], num_out: int) -> tuple[float, float, list[float]]:
    """Tokens per second, median TTFT and every ITL in ms. Raises `Missing`."""
    fixed = {**BODY, "model": server.model, "max_tokens": num_out}
    result = generator()(
        server.url + "/v1/completions",
        [msgspec.json.encode({**fixed, "prompt": prompt}) for prompt in prompts],
        chains=[1] * len(prompts),
        concurrency=len(prompts),
        headers=server.headers(),
        timeout_s=ASK_TIMEOUT_S,
    )
    if result["failure"].any():
        raise Missing(f"a request failed: {next((text for text in result['errors'] if text), 'without a word')[:200]}")
    found = latencies(result)
    ends = np.where(result["text_events"] > 0, result["last"], result["end"])
    took = float(ends.max() - result["sent"].min())
    return int(tokens_of(result).sum()) / took, float(np.nanmedian(found.ttft)), found.itl.tolist()


def _round(settings: Settings, server: Server, answers: Answers | None, number: int) -> None:
    """Without `answers`: a warm-up. Prompts depend on the round and the number of clients."""
    num_in, num_out = settings.sizes
    points = [(clients, False) for clients in CLIENTS] + [(clients, True) for clients in NEIGHBOURED]
    for clients, busy in points[: 2 if answers is None else len(points)]:
        prompts = [words((number, clients, busy, i), num_in) for i in range(clients)]
        with neighbour(busy):
            tok_s, ttft, itl = ask(server, prompts, 8 if answers is None else num_out)
        if answers is not None:
            key = f"clients {clients}" + (", busy" if busy else "")
            answers.tok_s.setdefault(key, []).append(tok_s)
            answers.ttft_ms.setdefault(key, []).append(ttft)
            answers.itl_ms.setdefault(key, []).extend(itl)


def measure(settings: Settings) -> tuple[dict[str, Answers], dict[str, str]]:
    answers: dict[str, Answers] = {}
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        servers: dict[str, tuple[Server, contextlib.ExitStack]] = {}
        for name in settings.variants:
            own = stack.enter_context(contextlib.ExitStack())
            try:
                servers[name] = own.enter_context(start(name, settings)), own
                _round(settings, servers[name][0], None, 0)
            except Missing as error:
                missing[name] = str(error)
                servers.pop(name, None)
                own.close()
        for number in range(1, settings.rounds + 1):
            for name in list(servers) if number % 2 else list(reversed(servers)):
                try:
                    _round(settings, servers[name][0], answers.setdefault(name, Answers()), number)
                except Missing as error:
                    missing[name] = str(error)
                    servers.pop(name)[1].close()
                    continue
                said = ", ".join(f"{key}: {values[-1]:.0f}" for key, values in answers[name].tok_s.items())
                print(f"http: round {number}, {name}: {said} tok/s", file=sys.stderr, flush=True)
    return answers, missing


def run(settings: Settings, out: Path | None, command: str) -> dict[str, Any]:
    began = time.monotonic()
    report = None if out is None else Report(out, "The CPU engine's server beside llama.cpp's", command=command)
    answers, missing = measure(settings)
    medians = {
        variant: {key: statistics.median(values) for key, values in one.tok_s.items()}
        for variant, one in answers.items()
    }
    judged = bars.verdicts("smollm2", bars.HTTP, medians)
    shown = [_speeds(answers), bars.ratio_table(judged), missing_table(missing)]
    itl = _pauses(answers)
    print("\n\n".join(text for text in (*shown, itl) if text))
    raw = {
        "answers": {
            variant: {
                "tok_s": one.tok_s,
                "ttft_ms": one.ttft_ms,
                "itl_ms": {
                    key: {f"p{share}": one.percentile(key, share) for share in (50, 90, 99, 100)} for key in one.itl_ms
                },
            }
            for variant, one in answers.items()
        },
        "medians": medians,
        "verdicts": judged,
        "missing": missing,
        "seconds": time.monotonic() - began,
    }
    if report is not None:
        about = f"{settings.sizes[0]} tokens in, {settings.sizes[1]} out, medians of {settings.rounds} rounds."
        report.section("Whole answers", about, *shown)
        report.section("Time between pieces of an answer", itl)
        report.write(raw)
    print_result({"bench": "cpu http", "bars": bars.score(judged), "medians": medians, "missing": missing})
    return raw


def _speeds(answers: Mapping[str, Answers]) -> str:
    keys = list(dict.fromkeys(key for one in answers.values() for key in one.tok_s))
    rows = []
    for variant, one in answers.items():
        cells = [
            f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})" if values else ""
            for values in (one.tok_s.get(key, []) for key in keys)
        ]
        rows.append((variant, *cells))
    return table(("tok/s, median (lowest to highest)", *keys), rows) if rows else ""


def _pauses(answers: Mapping[str, Answers]) -> str:
    rows = [
        (variant, key, one.percentile(key, 50), one.percentile(key, 99), one.percentile(key, 100),
         statistics.median(one.ttft_ms[key]))
        for variant, one in answers.items()
        for key in one.itl_ms
    ]  # fmt: skip
    return table(("variant", "point", "ITL p50, ms", "ITL p99, ms", "longest, ms", "TTFT, ms"), rows) if rows else ""
