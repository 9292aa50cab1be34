"""The CPU engine's benchmark on the echo engine and on made-up figures: it writes what it should, and says what cannot
be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from benchmark import cpu
from benchmark.cpu import Found, Point, Shape

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, inner=96, vocab=49_408, context=2048)


def test_offline_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmark.cpu", "offline", "--rehearse", "--rounds", "2", "--only", "smollm2"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "python")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    samples = json.loads(done.stdout.splitlines()[-1])["smollm2"]["samples"]["echo"]
    assert {name: len(values) for name, values in samples.items()} == {"decode 1": 2, "prefill 16": 2}
    assert min(min(values) for values in samples.values()) > 0
    report = (tmp_path / "README.md").read_text()
    assert "python -m benchmark.cpu offline" in report and str(tmp_path) not in report and "| echo |" in report
    assert json.loads((tmp_path / "raw.json").read_text())["smollm2"]["missing"] == {}


def test_a_variant_that_cannot_be_is_named(tmp_path: Path) -> None:
    names = ["echo", "torch", "llama.cpp", "llama.cpp other"]
    found = cpu.measure(names, tmp_path / "nowhere.gguf", [Point(1, 16, 4)], 1, 2, {"llama.cpp": tmp_path})
    assert "nowhere" in found.missing["torch"] and "llama-batched-bench" in found.missing["llama.cpp"]
    assert "--llama-bin" in found.missing["llama.cpp other"]
    assert list(found.samples) == ["echo"]


def test_ratios_are_those_of_the_rounds() -> None:
    found = Found({"exact": {"decode 1": [20.0, 40.0]}, "llama.cpp": {"decode 1": [10.0, 20.0]}})
    assert "| exact | llama.cpp | +100.0 % [+100.0, +100.0] |" in cpu.against(found, [Point(1, 4, 2)])
    assert "30.0 (20.0 to 40.0)" in cpu.speeds_table(found, [Point(1, 4, 2)])


@pytest.mark.slow
def test_random_weights_are_a_model_that_gguf_reads(tmp_path: Path) -> None:
    files = {kind: cpu.random_weights(kind, tmp_path, TINY) for kind in ("q4_1", "q8_0", "bf16")}
    assert not list(tmp_path.glob("*.part"))
    sizes = {kind: cpu.model_size(file) for kind, file in files.items()}
    layer = TINY.hidden * (2 * TINY.heads * TINY.head_dim + 2 * TINY.kv_heads * TINY.head_dim + 3 * TINY.inner)
    for size in sizes.values():
        assert size["parameters"] == TINY.layers * layer + TINY.vocab * TINY.hidden
        assert size["kv_bytes"] == TINY.layers * 2 * 2 * TINY.kv_heads * TINY.head_dim
    assert sizes["bf16"]["weight_bytes"] == 2 * sizes["bf16"]["parameters"]
    assert sizes["q4_1"]["weight_bytes"] == sizes["q4_1"]["parameters"] * 20 // 32
    assert {str(t.name) for t in gguf.GGUFReader(files["q8_0"]).tensors} == {name for name, _ in TINY.tensors()}


@pytest.mark.slow
@pytest.mark.parametrize("part", cpu.SHAPES)
def test_shapes_of_larger_models_are_computed(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    kind, shape = cpu.SHAPES[part]
    tiny = replace(shape, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, inner=96, vocab=49_408, context=2048)
    if shape.experts:
        tiny = replace(tiny, experts=8, expert_inner=96)
    found = cpu.measure(["exact"], cpu.random_weights(kind, tmp_path, tiny), [Point(1, 16, 4)], 1, 1, {})
    assert found.samples["exact"]["decode 1"][0] > 0, found.missing


def test_shares_of_limits() -> None:
    size = {"weight_bytes": 10**8, "parameters": 10**8, "head": 10**7, "kv_bytes": 10**4}
    limit = {"read_gb_s": 20.0, "int8_gmac_s": 100.0}
    found = cpu.shares(limit, size, Point(10, 96, 8), 500.0, "int8")
    assert found["read"] == pytest.approx(500 * 11e6 / 20e9) and found["multiply-adds"] == pytest.approx(0.5)
    assert cpu.shares(limit, size, Point(1, 96), 500.0, "int8") == {"multiply-adds": pytest.approx(0.45)}


def test_builds_of_llama_cpp_have_names() -> None:
    found = cpu.llama_folders(["bin", "avx512=other/bin"])
    assert found == {"llama.cpp": Path("bin"), "llama.cpp avx512": Path("other/bin")}
