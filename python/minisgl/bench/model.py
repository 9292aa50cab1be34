"""The command `minisgl bench model`: the speed of a model without a server, in llama-bench's terms, with the machine's
limits and, if asked, with llama.cpp on the same file.

    minisgl bench model --model FILE --depth 0 4096 --variants exact int8 --beside DIR

All variants stay loaded and are measured in turns; ratios are of pairs in one round. llama.cpp runs as one of its own
benchmarks, which do not sample, or as the package xllamacpp, whose server reports its own times.
Invariants: a variant that fails is listed with its reason and ends no other; prompts depend on round and point only.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from minisgl.bench.compare_variants import ASK_TIMEOUT_S, START_TIMEOUT_S, Child, Missing
from minisgl.bench.model_run import LAST_ID, Point
from minisgl.bench.report import Report, number, print_result, table
from minisgl.bench.stats import paired_difference, turns
from minisgl.config import ConfigError, EngineConfig
from minisgl.extension import _rust
from minisgl.weights.sources import find_model

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {"engine": "cpu", "activations": "exact"},
    "bf16": {"engine": "cpu", "activations": "bf16"},
    "int8": {"engine": "cpu", "activations": "int8"},
    "int8-q8": {"engine": "cpu", "activations": "int8", "kv_dtype": "q8"},
    "int8-q4": {"engine": "cpu", "activations": "int8", "kv_dtype": "q4"},
    "torch": {"engine": "torch", "dtype": "float32"},
    "torch-bf16": {"engine": "torch", "dtype": "bfloat16"},
    "echo": {"engine": "echo"},
}
LLAMA, BATCHED_BENCH = "llama.cpp", "llama-batched-bench"
MULTIPLIED = {"exact": "f32", "bf16": "bf16", "int8": "int8"}
LIMIT_S = 0.4
Limits = Mapping[tuple[str, str], float]
Ask = Callable[[Point, Sequence[int]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """Settings of `bench model`. `engine` has those that variants share; `beside` has llama.cpp's folders by name."""

    engine: EngineConfig
    variants: tuple[str, ...]
    points: tuple[Point, ...]
    repeats: int
    beside: Mapping[str, Path]

    @property
    def threads(self) -> int:
        return self.engine.num_threads or len(os.sched_getaffinity(0))


@dataclass(slots=True)
class Results:
    """Results: tokens per second by variant, point and round; engine details; reasons of missing variants."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def points_of(prompt: int, generate: int, depths: Sequence[int], batches: Sequence[int]) -> tuple[Point, ...]:
    """Return the points: prefill at each depth, and decoding at each depth and batch size. Raises `ConfigError`."""
    for flag, values in (("--prompt", [prompt]), ("--generate", [generate]), ("--depth", depths)):
        if min(values) < 0:
            raise ConfigError(f"{flag} {min(values)}: must be 0 or more")
    if min(batches) < 1:
        raise ConfigError(f"--batch {min(batches)}: must be at least 1")
    points = [Point(depth=depth, num_in=prompt) for depth in depths if prompt]
    points += [Point(depth=depth, num_out=generate, batch=batch) for depth in depths for batch in batches if generate]
    if not points:
        raise ConfigError("--prompt 0 --generate 0: one of them must be at least 1")
    return tuple(points)


def run_model(settings: BenchModel, out: Path | None, *, command: str) -> int:
    """Measure, print the table and the result, and write the report to `out`. Return the exit code."""
    report = None if out is None else Report(out, "A model's speed", command=command)  # records the load average now
    limits: Limits = {(what, isa): rate for what, isa, rate in _rust.cpu_limits(settings.threads, LIMIT_S)}
    results = measure(settings)
    texts = [speeds_table(settings, results, limits), limits_table(limits)]
    if results.missing:
        texts.append(table(("not measured", "why"), results.missing.items()))
    print("\n\n".join(texts))
    result = {
        "bench": "model",
        "model": Path(settings.engine.model).name,
        "threads": settings.threads,
        "limits": {f"{what} {isa}".rstrip(): rate for (what, isa), rate in limits.items()},
        "samples": results.samples,
        "about": results.about,
        "missing": results.missing,
    }
    if report is not None:
        report.section(Path(settings.engine.model).name, *texts)
        report.write({"result": result})
    print_result(result)
    return 1 if results.missing else 0


def measure(settings: BenchModel) -> Results:
    results = Results()
    with contextlib.ExitStack() as stack:
        alive: dict[str, Ask] = {}
        for name in (*settings.variants, *settings.beside):
            own = stack.enter_context(contextlib.ExitStack())
            try:
                ask = own.enter_context(_start(settings, name, results))
                ask(Point(num_out=4), (0, 0))  # warms up
                alive[name] = ask
            except Missing as error:
                own.close()
                results.missing[name] = str(error)
        for number_of_round, name in turns(list(alive), settings.repeats):
            for i, point in enumerate(settings.points):
                if name in results.missing:
                    break
                try:
                    tok_s = alive[name](point, (number_of_round + 1, i))
                except Missing as error:
                    results.missing[name] = str(error)
                    results.samples.pop(name, None)
                    break
                print(f"round {number_of_round + 1}: {name}: {point.name}: {number(tok_s)} tok/s", file=sys.stderr)
                results.samples.setdefault(name, {}).setdefault(point.name, []).append(tok_s)
    return results


# ---------------------------------------------------------------------------------------------------------- variants


@contextlib.contextmanager
def _start(settings: BenchModel, name: str, results: Results) -> Iterator[Ask]:
    """Start a variant and yield a function that measures a point in tokens per second. Both raise `Missing`."""
    longest = max(point.length for point in settings.points)
    if folder := settings.beside.get(name):
        file = _file(settings.engine.model)
        if (folder / "xllamacpp").is_dir():
            most = max(point.batch for point in settings.points)
            with _served(folder, file, settings.threads, longest + 16, most) as ask:
                yield ask
        else:
            yield _program(folder, file, settings.threads)
        return
    page = settings.engine.page_size
    changes = {
        "num_threads": settings.threads,
        "num_pages": 64 + max(point.batch * (-(-point.length // page) + 1) for point in settings.points),
        "max_running_requests": max(4, *(point.batch for point in settings.points)),
        "max_seq_len": longest + 16,
        **VARIANTS[name],
    }
    try:
        config = msgspec.convert({**msgspec.to_builtins(settings.engine), **changes}, EngineConfig).check()
    except (msgspec.ValidationError, ValueError) as error:
        raise Missing(str(error)) from error
    with Child((sys.executable, "-m", "minisgl.bench.model_run")) as process:
        assert process.process.stdin is not None
        process.process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.process.stdin.flush()
        results.about[name] = process.line(START_TIMEOUT_S)

        def ask(point: Point, seed: Sequence[int]) -> float:
            return float(process.ask({"point": msgspec.to_builtins(point), "seed": list(seed)})["tok_s"])

        yield ask


def _file(model: str) -> Path:
    try:
        source = find_model(model, lambda *_: None)
    except ConfigError as error:
        raise Missing(str(error)) from error
    if source.suffix != ".gguf" and not source.is_file():
        raise Missing("llama.cpp reads only GGUF files: give one as --model")
    return source


def _program(folder: Path, file: Path, threads: int) -> Ask:
    """Return a measurement by a program of llama.cpp: one process per point, whose loading is not timed."""
    name = next((name for name in PROGRAMS if (folder / name).is_file()), None)
    if name is None:
        raise Missing(f"needs the package xllamacpp, {' or '.join(PROGRAMS)} in {folder.name}")
    flags_of, speed_of = PROGRAMS[name]

    def ask(point: Point, seed: Sequence[int]) -> float:
        flags = [text for flag, size in flags_of(point, threads).items() for text in (flag, str(size))]
        command = [str(folder / name), "-m", str(file), "-b", "2048", "-ub", "512", *flags]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=ASK_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Missing(str(error)) from error
        try:
            if done.returncode == 0:
                return float(speed_of(done.stdout, point))
        except (LookupError, TypeError, ValueError):
            pass
        raise Missing(f"{name}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")

    return ask


def _batched_flags(point: Point, threads: int) -> dict[str, Any]:
    if point.num_in and point.depth:
        raise Missing(f"{BATCHED_BENCH} has no prefill at a depth: use --depth 0, llama-bench alone or xllamacpp")
    num_in, num_out = point.num_in or max(point.depth, 1), max(point.num_out, 2)
    context = -(-point.batch * (num_in + num_out) // 256) * 256
    sizes = {"-c": context, "-npp": num_in, "-ntg": num_out, "-npl": point.batch, "-t": threads, "-tb": threads}
    return {**sizes, "--output-format": "jsonl"}


def _batched_speed(out: str, point: Point) -> Any:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["speed_pp" if point.num_in else "speed_tg"]


def _bench_flags(point: Point, threads: int) -> dict[str, Any]:
    """Return the flags of `llama-bench`. ik_llama.cpp's has no `-d` and says so."""
    if point.batch > 1:
        raise Missing(f"llama-bench decodes one sequence: use --batch 1, {BATCHED_BENCH} or xllamacpp")
    sizes = {"-p": point.num_in, "-n": point.num_out, "-t": threads, "-r": 1, "-o": "json"}
    return {**sizes, "-d": point.depth} if point.depth else sizes


def _bench_speed(out: str, point: Point) -> Any:
    tests, _ = json.JSONDecoder().raw_decode(out, 0)
    return tests[-1]["avg_ts"]


PROGRAMS: dict[str, tuple[Callable[[Point, int], dict[str, Any]], Callable[[str, Point], Any]]] = {
    BATCHED_BENCH: (_batched_flags, _batched_speed),
    "llama-bench": (_bench_flags, _bench_speed),
}
"""llama.cpp's programs: the flags of a point, and its speed in what they print. The first one in a folder is used."""


@contextlib.contextmanager
def _served(folder: Path, file: Path, threads: int, length: int, most: int) -> Iterator[Ask]:
    """Start the server of the package xllamacpp in `folder`, with `most` slots."""
    program = str(Path(__file__).with_name("compare_llama_cpp.py"))
    sizes = (str(file), str(threads), str(most), str(-(-length // 256) * 256))
    with (
        Child(("env", f"PYTHONPATH={folder}", sys.executable, "-P", program, *sizes)) as process,
        ThreadPoolExecutor(most) as pool,
    ):
        url = process.line(START_TIMEOUT_S)["url"]

        def complete(slot: int, ids: Sequence[int], num_out: int = 0, *, kept: bool = True) -> dict[str, float]:
            body = {"prompt": ids, "n_predict": num_out + 1, "temperature": 0, "ignore_eos": True}
            data = json.dumps({**body, "id_slot": slot, "cache_prompt": kept}).encode()
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{url}/completion", data), timeout=ASK_TIMEOUT_S
                ) as answer:
                    times: dict[str, float] = json.load(answer)["timings"]
            except OSError as error:
                raise Missing(str(error)) from error
            return times

        def ask(point: Point, seed: Sequence[int]) -> float:
            prompts = [ids.tolist() for ids in point.prompts(seed, LAST_ID)]
            if point.num_in:
                if point.depth:
                    complete(0, prompts[0][: point.depth])
                return complete(0, prompts[0], kept=point.depth > 0)["prompt_per_second"]
            slots = range(point.batch)
            for slot, ids in enumerate(prompts):  # prefill first, so that all decode together
                complete(slot, ids)
            times = list(pool.map(complete, slots, prompts, [point.num_out] * point.batch))
            return point.batch * point.num_out / max(each["predicted_ms"] for each in times) * 1e3  # the slowest

        yield ask


def llama_folders(given: Sequence[str]) -> dict[str, Path]:
    """Parse DIR (variant `llama.cpp`) and NAME=DIR (`llama.cpp NAME`) to folders. Raises `ConfigError`."""
    folders = {}
    for text in given:
        name, sign, folder = text.rpartition("=")
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ConfigError(f"--beside {text}: no such folder")
        folders[f"{LLAMA} {name}" if sign else LLAMA] = path
    return folders


# ------------------------------------------------------------------------------------------------------------ tables


def speeds_table(settings: BenchModel, results: Results, limits: Limits) -> str:
    """Return the table with a row per point and variant: mean and standard deviation, the fraction of the nearer limit,
    and the ratio to each llama.cpp in the same round."""
    head = ["test", "engine", "weights", "tok/s", "of the limit", *(f"of {name}" for name in settings.beside)]
    rows = []
    for point in settings.points:
        for name, samples in results.samples.items():
            ours, about = samples.get(point.name, []), results.about.get(name, {})
            weights = ", ".join(f"{kind} {size / 2**20:.0f} MiB" for kind, size in about.get("kinds", ()))
            beside = [
                str(paired_difference(results.samples[other][point.name], ours))
                if name not in settings.beside and other in results.samples
                else ""
                for other in settings.beside
            ]
            of_limit = "" if name in settings.beside else share(about, name, point, statistics.fmean(ours), limits)
            rows.append((point.name, engine_name(name, about), weights, spread(ours), of_limit, *beside))
    return table(head, rows)


def engine_name(name: str, about: Mapping[str, Any]) -> str:
    return f"{name} ({about['isa']}, {about['threads']} threads)" if "isa" in about else name


def spread(samples: Sequence[float]) -> str:
    deviation = f" ± {number(statistics.stdev(samples))}" if len(samples) > 1 else ""
    return number(statistics.fmean(samples)) + deviation


def share(about: Mapping[str, Any], name: str, point: Point, tok_s: float, limits: Limits) -> str:
    """Return the fraction of the memory bandwidth or of the multiply-adds, whichever is nearer to its limit. A decode
    step reads the weights once and the K and V of each row; a prompt needs the LM head once only. Empty if rows read
    different weights (experts) or not every K (windows)."""
    if "token_bytes" not in about or (about["experts"] and point.batch > 1) or (about["windows"] and point.depth):
        return ""
    shares = {}
    if point.num_out and ("read", "") in limits:
        kv_bytes = about["kv_bytes"] * (point.depth + point.num_out / 2)
        shares["read"] = tok_s * (about["token_bytes"] / point.batch + kv_bytes) / 1e9 / limits["read", ""]
    of_kind = {isa: rate for (what, isa), rate in limits.items() if what == MULTIPLIED[VARIANTS[name]["activations"]]}
    if peak := max((rate for isa, rate in of_kind.items() if isa.startswith(about["isa"])), default=0.0):
        needed = about["token_products"] - (about["head_products"] if point.num_in else 0)
        shares["multiply-adds"] = tok_s * needed / 1e9 / peak
    if not shares:
        return ""
    nearer = max(shares, key=lambda limit: shares[limit])
    return f"{shares[nearer]:.0%} {nearer}"


def limits_table(limits: Limits) -> str:
    units = {"read": "memory read, GB/s"}
    rows = [(units.get(what, f"{what}, G multiply-adds/s"), isa, rate) for (what, isa), rate in limits.items()]
    return table(("limit of this machine", "by", "measured"), rows)
