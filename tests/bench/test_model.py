"""`minisgl bench model` on the echo engine and on made-up figures: it writes what it should, and says what cannot be
measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench import model
from minisgl.bench.model import BenchModel, Results
from minisgl.bench.model_run import Point
from minisgl.cli import bench_model
from minisgl.cli import main as cli
from minisgl.config import ConfigError, EngineConfig
from tests.helpers.clients import environment
from tests.helpers.forking import run
from tests.helpers.llama_cpp import FILES

ABOUT: dict[str, Any] = {
    "isa": "avx2",
    "threads": 2,
    "kinds": [("q4_k", 2**20)],
    "token_bytes": 10**8,
    "token_products": 10**8,
    "head_products": 10**7,
    "kv_bytes": 10**4,
    "experts": False,
    "windows": False,
}


def settings(*variants: str, points: tuple[Point, ...], beside: dict[str, Path] | None = None) -> BenchModel:
    return BenchModel(
        engine=EngineConfig(model="smollm2"), variants=variants, points=points, repeats=1, beside=beside or {}
    )


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minisgl", "bench", "model", *flags]
    return run(command)


def test_each_point_of_each_round(tmp_path: Path) -> None:
    sizes = ("--prompt", "16", "--generate", "8", "--depth", "0", "32", "--batch", "1", "3", "--repeats", "2")
    done = bench("--model", "smollm2", "--variants", "echo", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])["samples"]["echo"]
    names = ["pp16", "pp16 @ d32", "tg8", "tg8 x 3", "tg8 @ d32", "tg8 x 3 @ d32"]
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys(names, 2)
    assert min(min(values) for values in samples.values()) > 0
    report = (tmp_path / "README.md").read_text()
    assert "minisgl bench model" in report and str(tmp_path) not in report and "| pp16 @ d32 | echo |" in report
    assert json.loads((tmp_path / "raw.json").read_text())["result"]["samples"]["echo"].keys() == samples.keys()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--prompt", "0", "--generate", "0"), "one of them must be at least 1"),
        (("--depth", "-1"), "--depth -1"),
        (("--batch", "0"), "--batch 0"),
        (("--repeats", "0"), "--repeats 0"),
        (("--layers", "0"), "--layers 0"),
        (("--layers", "2"), "--layers 2: only with --model-config"),
        (("--type", "q8_0"), "--type q8_0: only with --model-config"),
        (("--beside", "nowhere"), "--beside nowhere: no such folder"),
    ],
)
def test_invalid_points_are_rejected(flags: tuple[str, ...], says: str) -> None:
    done = bench(*flags)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_random_weights_are_of_the_type_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that is told `dummy` fills weights of its own, in the model's type."""
    asked: list[Any] = []
    monkeypatch.setattr(bench_model, "random_model", lambda *of: asked.append(of) or tmp_path / "random.gguf")
    monkeypatch.setattr(bench_model, "run_model", lambda settings, *_, **__: asked.append(settings.engine) or 0)
    flags = ("--load-format", "dummy", "--model-config", "qwen2.5-1.5b", "--layers", "2")
    assert cli(["bench", "model", *flags, "--type", "q8_0"]) == cli(["bench", "model", *flags]) == 0
    assert asked[0::2] == [("qwen2.5-1.5b", "q8_0", 2), ("qwen2.5-1.5b", "q4_k_m", 2)]
    made = [(engine.load_format, Path(engine.model)) for engine in asked[1::2]]
    assert made == [("auto", tmp_path / "random.gguf")] * 2


def test_a_variant_that_cannot_be_is_named(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(tmp_path / "nowhere.gguf"))
    found = model.measure(
        BenchModel(
            engine=engine,
            variants=("echo", "torch"),
            points=(Point(num_in=16),),
            repeats=1,
            beside={"llama.cpp": tmp_path},
        )
    )
    assert "nowhere" in found.missing["torch"] and "nowhere" in found.missing["llama.cpp"]


def test_llama_cpp_needs_its_programs(tmp_path: Path) -> None:
    found = model.measure(settings("echo", points=(Point(num_in=16),), beside={"llama.cpp": tmp_path}))
    assert model.BATCHED_BENCH in found.missing["llama.cpp"] and list(found.samples) == ["echo"]


LLAMA_BENCH = """#!/bin/sh
case "$*" in *" -d "*) echo "error: invalid parameter for argument: -d" >&2; exit 1;; esac
echo "$*" >> "$0.asked"
cat <<END
[
  {
    "build_commit": "unknown",
    "build_number": 0,
    "cpu_info": "AMD EPYC",
    "gpu_info": "",
    "model_filename": "a[1].gguf",
    "model_type": "qwen2 1B Q4_K - Medium",
    "n_threads": 2,
    "flash_attn": true,
    "tensor_split": "0.00",
    "n_prompt": 16,
    "n_gen": 0,
    "test_time": "2026-11-30T17:40:27Z",
    "avg_ns": 40000000,
    "stddev_ns": 0,
    "avg_ts": $SPEED,
    "stddev_ts": 0.000000,
    "test": "pp16",
    "samples_ns": [ 40000000 ],
    "samples_ts": [ $SPEED ]
  }
]
END
exit $CODE
"""
"""A program that prints what `llama-bench -o json` of ik_llama.cpp prints, with fewer fields."""


@pytest.fixture
def llama_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEED", "400.125000")
    monkeypatch.setenv("CODE", "0")
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH)
    program.chmod(0o755)
    return program


def test_llama_bench_alone_is_enough(llama_bench: Path) -> None:
    points = (Point(num_in=16), Point(num_out=8))
    found = model.measure(settings(points=points, beside={"llama.cpp ik": llama_bench.parent}))
    assert found.samples == {"llama.cpp ik": {"pp16": [400.125], "tg8": [400.125]}} and not found.missing
    threads = settings(points=points).threads
    asked = [line.partition(" -ub 512 ")[2] for line in Path(f"{llama_bench}.asked").read_text().splitlines()]
    assert asked == [
        f"-p {num_in} -n {num_out} -t {threads} -r 1 -o json" for num_in, num_out in ((0, 4), (16, 0), (0, 8))
    ]


@pytest.mark.parametrize(
    ("point", "change", "says"),
    [
        (Point(num_out=8, batch=4), {}, "llama-bench decodes one sequence: use --batch 1"),
        (Point(num_in=16, depth=32), {}, "exit code 1: error: invalid parameter for argument: -d"),
        (Point(num_in=16), {"SPEED": ""}, "llama-bench: exit code 0"),
        (Point(num_in=16), {"CODE": "3"}, "llama-bench: exit code 3"),
    ],
)
def test_what_llama_bench_cannot_do(
    llama_bench: Path, monkeypatch: pytest.MonkeyPatch, point: Point, change: dict[str, str], says: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    found = model.measure(settings(points=(point,), beside={"llama.cpp": llama_bench.parent}))
    assert says in found.missing["llama.cpp"] and not found.samples


@pytest.mark.slow
def test_llama_cpp_answers_several_at_once() -> None:
    """SmolLM2's file, as prompts, behind others, alone and in four slots."""
    points = (Point(num_in=16), Point(num_in=16, depth=32), Point(num_out=8, depth=32), Point(num_out=8, batch=4))
    found = model.measure(settings(points=points, beside={"llama.cpp": environment("llama-cpp", FILES)}))
    assert not found.missing
    assert {name: len(tok_s) for name, tok_s in found.samples["llama.cpp"].items()} == {p.name: 1 for p in points}


def test_ratios_are_those_of_the_rounds() -> None:
    point = Point(num_out=2)
    found = Results({"exact": {"tg2": [20.0, 40.0]}, "llama.cpp": {"tg2": [10.0, 20.0]}})
    shown = model.speeds_table(settings("exact", points=(point,), beside={"llama.cpp": Path()}), found, {})
    assert "+100.0 % [+100.0, +100.0]" in shown and "30.0 ± 14.1" in shown


def test_the_nearer_limit() -> None:
    limits = {("read", ""): 20.0, ("int8", "avx2"): 100.0, ("int8", "avx512 vnni"): 1e6}
    eight = model.share(ABOUT, "int8", Point(depth=100, num_out=0, num_in=8), 500.0, limits)
    assert eight == "45% multiply-adds"
    assert model.share(ABOUT, "int8", Point(num_out=8, batch=10), 500.0, limits) == "50% multiply-adds"
    assert model.share(ABOUT, "int8", Point(num_out=8), 150.0, limits) == "75% read"
    assert model.share(ABOUT | {"windows": True}, "int8", Point(depth=9, num_out=8), 150.0, limits) == ""
    assert model.share(ABOUT | {"experts": True}, "int8", Point(num_out=8, batch=2), 150.0, limits) == ""
    assert model.share({}, "torch", Point(num_out=8), 150.0, limits) == ""


def test_builds_of_llama_cpp_have_names(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    found = model.llama_folders([str(tmp_path), f"avx512={other}"])
    assert found == {"llama.cpp": tmp_path, "llama.cpp avx512": other}
    with pytest.raises(ConfigError, match="--beside"):
        model.llama_folders([str(tmp_path / "none")])
