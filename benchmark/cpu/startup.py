"""`python -m benchmark.cpu startup`: how long until a server is ready, a command's first token, `make serve`'s answer;
what the engine process holds and uses when idle. The CPU engine beside the torch engine.

A file "never seen" has a cache folder of its own that is empty; the system's cache of files is warm in both cases.
Times begin with the process. Memory is read after some requests: all that is resident less the weights file and the KV
pages in use, with file-backed pages (libraries, the file itself) told apart.

Every start is a fresh process; medians of `rounds`; what a part started is gone with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmark.cpu import bars, models
from benchmark.cpu.sizes import model_size
from minisgl import envs
from minisgl.bench.report import Report, print_result, table
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {
    "cpu": ("--engine", "cpu"),
    "torch": ("--engine", "torch", "--dtype", "float32"),
    "echo": ("--engine", "echo"),
}
KV_WIDTH = {"cpu": 1, "torch": 2, "echo": 0}  # of a KV number, in float16s
IDLE_S = 10.0
MAKE_PORT = 1919
MAKE_TIMEOUT_S = 60.0
POLL_S = 0.01
QUESTION = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
LOAD = {"prompt": "one two three four five six seven eight nine ten " * 15, "max_tokens": 48, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Settings:
    engine: str
    rounds: int
    threads: int
    rehearse: bool = False

    def flags(self) -> tuple[str, ...]:
        return (*ENGINES[self.engine], "--num-threads", str(self.threads))


Measured = dict[str, Any]


def seconds_to_ready(settings: Settings, cache: str) -> tuple[float, float]:
    """Of the clock, and of CPU time in all its processes: the latter says what a busy machine hides."""
    with ServerProcess(Launch(settings.flags(), {envs.CACHE: cache})) as server:
        return server.start_s, sum(server.cpu_seconds().values())


def starts(settings: Settings) -> Measured:
    """Never seen: each with an empty cache of its own. Seen: the starts after the first in one cache."""
    new, seen = [], []
    with tempfile.TemporaryDirectory() as kept:
        for _ in range(settings.rounds):
            with tempfile.TemporaryDirectory() as cache:
                new.append(seconds_to_ready(settings, cache))
        seconds_to_ready(settings, kept)
        seen = [seconds_to_ready(settings, kept) for _ in range(settings.rounds)]
    return {
        "ready_new": [clock for clock, _ in new],
        "ready_new_cpu": [cpu for _, cpu in new],
        "ready_seen": [clock for clock, _ in seen],
        "ready_seen_cpu": [cpu for _, cpu in seen],
    }


def first_token(settings: Settings) -> Measured:
    """`minisgl generate` until its first byte on stdout, in a cache that has seen the file."""
    times = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(settings.rounds + 1):
            command = [sys.executable, "-P", "-m", "minisgl", "generate", "Say hello.", "--max-tokens", "8"]
            began = time.monotonic()
            process = subprocess.Popen(
                [*command, *settings.flags()],
                env=envs.child_environment({envs.CACHE: cache}),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdout is not None
            first = process.stdout.read(1)
            took = time.monotonic() - began
            process.stdout.read()
            process.stdout.close()
            if process.wait() != 0 or not first:
                raise ServerFailed(f"minisgl generate ended with {process.returncode} and without a token")
            times.append(took)
    return {"first_token": times[1:]}


def memory_and_idle(settings: Settings) -> Measured:
    """Resident memory of the engine process after some requests, and its CPU while nothing is asked."""
    size = model_size(models.smollm2())
    with ServerProcess(Launch(settings.flags())) as server:
        engine = server.processes()["engine"].pid
        before = resident(engine)
        body = {**LOAD, "model": server.model}
        for _ in range(1 if settings.rehearse else 6):
            httpx.post(server.url + "/v1/completions", json=body, timeout=120).raise_for_status()
        told = httpx.get(server.url + "/stats").json()["engine"]
        after = resident(engine)
        idle_s = 1.0 if settings.rehearse else IDLE_S
        time.sleep(1.0)  # whatever spins gives up
        used = cpu_seconds(engine)
        time.sleep(idle_s)
        idle = (cpu_seconds(engine) - used) / idle_s
    pages = told["num_pages"] - told["num_free_pages"]
    kv_mb = pages * 16 * size["kv_bytes"] * KV_WIDTH[settings.engine] / 1e6
    file_mb = models.smollm2().stat().st_size / 1e6
    return {
        "rss_mb": after,
        "rss_ready_mb": before,
        "weights_file_mb": file_mb,
        "kv_in_use_mb": kv_mb,
        "rss_above": after["rss"] - file_mb - kv_mb,
        "idle_cpu": 100 * idle,
    }


def resident(pid: int) -> dict[str, float]:
    """MB of a process: all that is resident, and of it what is backed by files, and what is not."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    kb = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    rss, anonymous = kb["Rss"] * 1.024e-3, kb["Anonymous"] * 1.024e-3
    return {"rss": rss, "anonymous": anonymous, "file_backed": rss - anonymous, "pss": kb["Pss"] * 1.024e-3}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, in ticks of the clock, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_serve(rounds: int, root: Path = ROOT) -> Measured:
    """From `make serve` to an answer. Only where everything is installed: nothing may be built here."""
    plan = subprocess.run(["make", "-n", "serve"], cwd=root, capture_output=True, text=True, check=False)
    if plan.returncode or "pip install" in plan.stdout:
        return {"make_serve": [], "make_serve_why": "make serve would install first: run make install"}
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", MAKE_PORT)) == 0:
            return {"make_serve": [], "make_serve_why": f"port {MAKE_PORT} is in use"}
    times = []
    for _ in range(rounds + 1):
        began = time.monotonic()
        process = subprocess.Popen(
            ["make", "serve"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            times.append(_until_answered(process, began))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"make_serve": times[1:]}  # the first one is the one before the second start


def _until_answered(process: subprocess.Popen[bytes], began: float) -> float:
    while time.monotonic() - began < MAKE_TIMEOUT_S and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{MAKE_PORT}/v1/completions"
            if httpx.post(url, json={**QUESTION, "model": "smollm2"}, timeout=30).status_code == 200:
                return time.monotonic() - began
        time.sleep(POLL_S)
    raise ServerFailed(f"make serve gave no answer in {MAKE_TIMEOUT_S:g} s")


def measure(engine: str, rounds: int, threads: int, rehearse: bool) -> tuple[Measured, dict[str, str]]:
    settings = Settings(engine, rounds, threads, rehearse)
    found: Measured = {}
    missing: dict[str, str] = {}
    parts: list[Callable[[Settings], Measured]] = [starts, first_token, memory_and_idle]
    for part in parts:
        try:
            found.update(part(settings))
        except (ServerFailed, httpx.HTTPError, KeyError, OSError) as error:
            missing[f"{engine}: {part.__name__}"] = f"{error!r}"[-300:]
        print(f"startup: {engine}: {part.__name__}: {found}", file=sys.stderr, flush=True)
    return found, missing


def run(
    engines: Sequence[str], rounds: int, threads: int, out: Path | None, command: str, *, rehearse: bool
) -> dict[str, Any]:
    report = None if out is None else Report(out, "Start, memory and idleness", command=command)
    by_engine: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    for engine in engines:
        by_engine[engine], failed = measure(engine, rounds, threads, rehearse)
        missing.update(failed)
    ours, others = by_engine[engines[0]], by_engine[engines[1]] if len(engines) > 1 else {}
    if not rehearse:
        ours.update(make_serve(rounds))
        if why := ours.get("make_serve_why"):
            missing["make_serve"] = why
    records = [limit.record(_median(ours.get(key)), _median(others.get(key))) for key, limit in bars.STARTUP.items()]
    beside = engines[1] if len(engines) > 1 else "beside"
    shown = [bars.limit_table(records, beside), _cpu_times(by_engine), _memory(by_engine)]
    if missing:
        shown.append(table(("not measured", "why"), missing.items()))
    print("\n\n".join(text for text in shown if text))
    raw = {"engines": by_engine, "records": records, "missing": missing}
    if report is not None:
        report.section("Bars", f"Medians of {rounds} starts.", *shown)
        report.write(raw)
    print_result({"bench": "cpu startup", "bars": bars.score(records), "records": records})
    return raw


def _median(values: Any) -> float | None:
    if isinstance(values, list):
        return statistics.median(values) if values else None
    return None if values is None else float(values)


def _cpu_times(by_engine: dict[str, Measured]) -> str:
    rows = [
        (engine, _median(one["ready_seen_cpu"]), _median(one["ready_new_cpu"]))
        for engine, one in by_engine.items()
        if "ready_seen_cpu" in one
    ]
    return table(("CPU s until ready, all processes", "file seen", "never seen"), rows) if rows else ""


def _memory(by_engine: dict[str, Measured]) -> str:
    head = ("engine process, MB", "resident", "of it anonymous", "file-backed", "resident when ready", "weights file",
            "KV in use", "above both")  # fmt: skip
    rows = [
        (engine, one["rss_mb"]["rss"], one["rss_mb"]["anonymous"], one["rss_mb"]["file_backed"],
         one["rss_ready_mb"]["rss"], one["weights_file_mb"], one["kv_in_use_mb"], one["rss_above"])
        for engine, one in by_engine.items()
        if "rss_mb" in one
    ]  # fmt: skip
    return table(head, rows) if rows else ""
