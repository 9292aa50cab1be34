"""The CPU engine's benchmark on the echo engine and on made-up figures: verdicts are right, every part writes what it
should, and what cannot be measured is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from benchmark.cpu import bars, growth, limits, models, text, variants
from benchmark.cpu.sidebyside import Found, measure, speeds_table
from benchmark.cpu.sizes import model_size
from benchmark.cpu.variants import Point, Setup
from minisgl.bench.compare_variants import Missing

ROOT = Path(__file__).resolve().parents[2]


def rehearse(part: str, out: Path, *more: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmark.cpu", part, "--rehearse", "--rounds", "1", "--out", str(out), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = (out / "README.md").read_text()
    assert f"python -m benchmark.cpu {part}" in report and str(out) not in report
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == f"cpu {part}"
    return result


def test_offline_and_growth_rehearsed(tmp_path: Path) -> None:
    result = rehearse("offline", tmp_path, "--only", "smollm2", "--models", str(tmp_path))
    assert result["medians"]["smollm2"]["echo"]["decode 1"] > 0  # type: ignore[index]
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["smollm2"]["samples"]["echo"]["prefill 16"] and not raw["smollm2"]["missing"]
    assert {one["met"] for one in raw["smollm2"]["verdicts"]} == {None}
    rehearse("growth", tmp_path, "--only", "batch")
    sweep = json.loads((tmp_path / "raw.json").read_text())["sweeps"]["batch"]["echo"]
    assert list(sweep["ms"]) == ["1", "2"] and (tmp_path / "batch.png").is_file()


def test_servers_rehearsed(tmp_path: Path) -> None:
    result = rehearse("http", tmp_path)
    assert result["medians"]["echo"]["clients 32, busy"] > 0  # type: ignore[index]
    itl = json.loads((tmp_path / "raw.json").read_text())["answers"]["echo"]["itl_ms"]
    assert itl["clients 8"]["p99"] >= itl["clients 8"]["p50"] >= 0


def test_starts_rehearsed(tmp_path: Path) -> None:
    rehearse("startup", tmp_path)
    found = json.loads((tmp_path / "raw.json").read_text())["engines"]["echo"]
    assert found["ready_seen"][0] > 0 and found["first_token"][0] > 0 and found["idle_cpu"] < 50
    assert found["rss_mb"]["rss"] > found["rss_mb"]["anonymous"] > 0


def test_an_variant_that_cannot_be_is_told(tmp_path: Path) -> None:
    setup = Setup(model=str(tmp_path / "nowhere.gguf"), gguf=tmp_path / "nowhere.gguf", llama={"llama.cpp": tmp_path})
    points = [Point("decode", 1, 4, 2)]
    found = measure(["echo", "torch", "llama.cpp", "llama.cpp other"], setup, points, 1, "test")
    assert "nowhere" in found.missing["torch"] and "llama-batched-bench" in found.missing["llama.cpp"]
    assert "--llama-bin" in found.missing["llama.cpp other"]
    assert found.medians(points)["echo"]["decode 1"] > 0 and "echo" in speeds_table(found, points)


def test_a_setting_that_is_unknown_is_missing() -> None:
    with pytest.raises(Missing, match="no setting warp"):
        Setup(model="smollm2", extra={"warp": 9}).config("echo")


def test_verdicts() -> None:
    medians = {"exact": {"decode 1": 13.0, "decode 8": 17.0}, "llama.cpp": {"decode 1": 10.0, "decode 8": 10.0}}
    judged = {(one["ours"], one["point"]): one for one in bars.verdicts("m", bars.SMOLLM2[:3], medians)}
    assert judged["exact", "decode 1"]["met"] and judged["exact", "decode 1"]["stretch"] is False
    assert judged["exact", "decode 8"]["met"] is False and judged["exact", "decode 32"]["met"] is None
    assert bars.score(list(judged.values())) == {"met": 1, "not_met": 1, "not_measured": 1}
    assert "**not met**" in bars.ratio_table(list(judged.values()))
    idle, top1 = bars.STARTUP["idle_cpu"], bars.QUALITY["int8 top1"]
    assert idle.record(0.4)["met"] and not idle.record(0.6)["met"] and idle.record(None)["met"] is None
    assert top1.record(96.5)["met"] and not top1.record(95.9)["met"]


def test_every_bar_is_about_a_point_that_is_measured() -> None:
    from benchmark.cpu import http, offline

    for part, of_part in offline.BARS.items():
        points = {point.name for point in offline.Settings().points(part)}
        assert {bar.point for bar in of_part} <= points
        assert {name for bar in of_part for name in (bar.ours, bar.theirs)} <= set(offline.VARIANTS[part])
    assert {bar.point for bar in bars.HTTP} == {f"clients {count}" for count in http.CLIENTS}


def test_exponents() -> None:
    sizes = [1, 2, 4, 8, 16]
    assert growth.exponent(sizes, [10 * size for size in sizes]) == pytest.approx(1)
    assert growth.exponent(sizes, [1, 1, 1, 4, 16]) == pytest.approx(2)
    assert growth.exponent([1], [1]) is None


def test_random_weights_are_a_model_that_gguf_reads(tmp_path: Path) -> None:
    files = {kind: models.qwen3(kind, tmp_path, models.TINY) for kind in models.TYPES}
    assert not list(tmp_path.glob("*.part"))
    sizes = {kind: model_size(file) for kind, file in files.items()}
    shape = models.TINY
    width = shape.heads * shape.head_dim
    layer = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim + 3 * shape.inner)
    for size in sizes.values():
        assert size["parameters"] == shape.layers * layer + shape.vocab * shape.hidden
        assert size["kv_bytes"] == shape.layers * 2 * 2 * shape.kv_heads * shape.head_dim
    assert sizes["bf16"]["weight_bytes"] == 2 * sizes["bf16"]["parameters"]
    assert sizes["q4_1"]["weight_bytes"] == sizes["q4_1"]["parameters"] * 20 // 32
    assert {str(t.name) for t in gguf.GGUFReader(files["q8_0"]).tensors} == {name for name, _ in shape.tensors()}


def test_shares_of_limits() -> None:
    limit = {"read_gb_s": 20.0, "int8_gmac_s": 100.0}
    found = limits.shares(
        limit, weight_bytes=10**8, parameters=10**8, kv_bytes=10**6, batch=10, tok_s=500.0, kind="int8"
    )
    assert found["read"] == pytest.approx(500 * 11e6 / 20e9)
    assert found["int8 multiply-adds"] == pytest.approx(0.5)


def test_differences_of_answers() -> None:
    assert text.first_difference([1, 2, 3], [1, 2, 4]) == 2 and text.first_difference([1, 2], [1, 2, 3]) is None
    assert text.margin(lambda ids: [[0.0, 0.0], [1.0, 3.0]], [7], 1, 0) == 2.0


def test_builds_of_llama_cpp_have_names() -> None:
    found = variants.llama_folders(["bin", "avx512=other/bin"])
    assert found == {"llama.cpp": Path("bin"), "llama.cpp avx512": Path("other/bin")}
    assert Found().medians([]) == {}
