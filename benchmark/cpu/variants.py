"""Who is measured beside whom, offline: engines of ours in processes of their own, and llama.cpp's own benchmark.

    with start("exact", setup) as variant:          # raises `Missing` with the reason
        tok_s = variant.ask(Point("decode", 8, 128, 64), seed=(0, 1))["decode_tok_s"]

Invariants: what a variant started is gone with it; a variant that this checkout or machine does not have says why.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minisgl.bench.compare_variants import Child, Missing
from minisgl.config import EngineConfig

ENGINES: dict[str, dict[str, Any]] = {
    "exact": {"engine": "cpu", "activations": "exact"},
    "exact-f32": {"engine": "cpu", "activations": "exact", "kv_dtype": "f32"},
    "exact-q8": {"engine": "cpu", "activations": "exact", "kv_dtype": "q8"},
    "bf16": {"engine": "cpu", "activations": "bf16"},
    "int8": {"engine": "cpu", "activations": "int8"},
    "from-f32-q8": {"engine": "cpu", "quantization": "q8"},
    "from-f32-q4": {"engine": "cpu", "quantization": "q4"},
    "torch": {"engine": "torch", "dtype": "float32", "device": "cpu"},
    "torch-bf16": {"engine": "torch", "dtype": "bfloat16", "device": "cpu"},
    "echo": {"engine": "echo"},  # a stand-in, for tests of the harness
}
LLAMA = "llama.cpp"
BATCHED_BENCH = "llama-batched-bench"
START_S = 600.0
RUN_S = 900.0
SPARE_PAGES = 64


@dataclass(frozen=True, slots=True)
class Point:
    """`decode`: `batch` prompts of `num_in` tokens, `num_out` answers each; `prefill`: one prompt, one token."""

    kind: str
    batch: int
    num_in: int
    num_out: int = 1

    @property
    def name(self) -> str:
        return f"decode {self.batch}" if self.kind == "decode" else f"prefill {self.num_in}"

    def figure(self, answer: dict[str, Any]) -> float | None:
        return answer["decode_tok_s" if self.kind == "decode" else "prefill_tok_s"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`model`: for our engines; `gguf`: the file for llama.cpp; `llama`: folders of its programs by the variant's name;
    `extra`: settings over those of each of our variants."""

    model: str
    gguf: Path | None = None
    llama: Mapping[str, Path] = field(default_factory=dict)
    threads: int = 2
    points: Sequence[Point] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    page_size: int = 16

    def config(self, name: str) -> EngineConfig:
        """Raises `Missing` for a setting that this checkout does not know."""
        rows = max([point.batch for point in self.points], default=1)
        longest = max([point.num_in + point.num_out for point in self.points], default=256)
        pages = max([point.batch * (-(-(point.num_in + point.num_out) // self.page_size) + 1) for point in self.points],
                    default=64)  # fmt: skip
        settings = {
            "model": self.model,
            "num_threads": self.threads,
            "page_size": self.page_size,
            "num_pages": pages + SPARE_PAGES,
            "max_running_requests": max(rows, 4),
            "max_seq_len": longest + self.page_size,
            **ENGINES[name],
            **self.extra,
        }
        if unknown := sorted(settings.keys() - set(EngineConfig.__struct_fields__)):
            raise Missing(f"this checkout has no setting {', '.join(unknown)}")
        try:
            return msgspec.convert(settings, EngineConfig).check()
        except (msgspec.ValidationError, ValueError) as error:
            raise Missing(f"this checkout refuses it: {error}") from error


class Variant(Protocol):
    about: dict[str, Any]

    def ask(self, point: Point, seed: Sequence[int]) -> dict[str, Any]:
        """Raises `Missing`."""


class EngineVariant:
    """One of our engines, alive until its process is closed."""

    def __init__(self, child: Child, about: dict[str, Any]) -> None:
        self._child = child
        self.about = about
        self.pid = child.process.pid

    def ask(self, point: Point, seed: Sequence[int]) -> dict[str, Any]:
        if point.kind == "prefill":
            return self._child.ask({"op": "prefill", "length": point.num_in, "seed": list(seed)})
        sizes = {"batch": point.batch, "num_in": point.num_in, "num_out": point.num_out}
        return self._child.ask({"op": "decode", **sizes, "seed": list(seed)})

    def generate(self, prompts: Sequence[Sequence[int]], num_out: int) -> list[list[int]]:
        found = self._child.ask({"op": "generate", "prompts": [list(ids) for ids in prompts], "num_out": num_out})
        return list(found["tokens"])


class LlamaVariant:
    """llama.cpp by its own benchmark of batches: a process for every question, its loading outside the figures. It
    samples nothing: the likeliest token is not looked for."""

    def __init__(self, program: Path, file: Path, threads: int) -> None:
        self._command = [str(program), "-m", str(file), "-t", str(threads), "-tb", str(threads)]
        self.about: dict[str, Any] = {"program": program.name}

    def ask(self, point: Point, seed: Sequence[int]) -> dict[str, Any]:
        num_out = max(point.num_out, 2)
        context = str(-(-point.batch * (point.num_in + num_out) // 256) * 256)
        sizes = ["-c", context, "-npp", str(point.num_in), "-ntg", str(num_out), "-npl", str(point.batch)]
        try:
            done = subprocess.run(
                [*self._command, *sizes, "-b", "2048", "-ub", "512", "--output-format", "jsonl"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RUN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Missing(str(error)) from error
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise Missing(f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        found = json.loads(lines[-1])
        if info := [line for line in done.stderr.splitlines() if "system_info" in line]:
            self.about["system_info"] = info[-1].split("|", 1)[-1].strip()
        return {"decode_tok_s": found["speed_tg"], "prefill_tok_s": found["speed_pp"]}


@contextlib.contextmanager
def start(name: str, setup: Setup) -> Iterator[Variant]:
    """Raises `Missing`."""
    if name not in ENGINES:
        yield _llama(name, setup)
        return
    config = setup.config(name)
    with Child((sys.executable, "-m", "benchmark.cpu.variant")) as child:
        assert child.process.stdin is not None
        child.process.stdin.write(msgspec.json.encode(config) + b"\n")
        child.process.stdin.flush()
        yield EngineVariant(child, child.line(START_S))


def _llama(name: str, setup: Setup) -> LlamaVariant:
    if name not in setup.llama:
        raise Missing("give the folder of llama.cpp's programs: --llama-bin DIR")
    if setup.gguf is None:
        raise Missing("the model is no GGUF file")
    program = setup.llama[name] / BATCHED_BENCH
    if not program.is_file():
        raise Missing(f"no {BATCHED_BENCH} in {setup.llama[name].name}")
    return LlamaVariant(program, setup.gguf, setup.threads)


def llama_folders(given: Sequence[str]) -> dict[str, Path]:
    """By variant, from DIR (the variant `llama.cpp`) or NAME=DIR (another build: `llama.cpp NAME`)."""
    found = {}
    for text in given:
        name, sign, folder = text.rpartition("=")
        found[f"{LLAMA} {name}" if sign else LLAMA] = Path(folder).expanduser()
    return found
