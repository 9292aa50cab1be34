"""Packed weights that the CPU engine keeps in files: the same answers from them, and one copy for several servers."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import cpu_loading
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.models.config import ModelConfig
from tests.helpers.gguf import write_gguf, written_model
from tests.helpers.models import save, tiny_model

pytestmark = [pytest.mark.any_cpu, pytest.mark.timeout(180)]

IDS = np.arange(3, 60, dtype=np.int32)
LARGE = 2**30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_loading, "MIN_CACHED_BYTES", 0)
    return tmp_path / "cache" / "panels"


def load(model: Path, **settings: Any) -> CpuEngine:
    config = EngineConfig(model=str(model), engine="cpu", num_pages=16, **{"weights_cache": LARGE, **settings})
    return load_cpu_engine(config, lambda text, done=0, total=0: None)


def until_kept() -> None:
    for one in threading.enumerate():
        if one.name == "weights-cache":
            one.join()


def logits(engine: CpuEngine) -> bytes:
    found = engine.rust.prompt_logits(IDS)
    engine.close()
    return found


def kept(model: Path, **settings: Any) -> bytes:
    """Logits of a start without the file, which is there behind it."""
    engine = load(model, **settings)
    assert not engine.rust.about()["mapped"]
    until_kept()
    return logits(engine)


@pytest.mark.parametrize(
    "variant",
    [
        "llama3-tied",
        "qwen3-moe",
        "gpt2",
        "gpt-oss",
        "deepseek2",
        "deepseek3-yarn",
        "gemma3n",
        "lfm2-moe",
        "phi3-window",
    ],
)
def test_cached_weights_give_the_same_results(variant: str, tmp_path: Path, cache: Path) -> None:
    folder = save(tiny_model(variant), tmp_path / "model")
    packed = kept(folder)
    assert len(list(cache.glob("*.panels"))) == 1
    engine = load(folder)
    assert engine.rust.about()["mapped"]
    assert logits(engine) == packed
    assert logits(load(folder, weights_cache=None)) == packed


@pytest.mark.parametrize("settings", [{}, {"activations": "int8"}, {"max_seq_len": 80}, {"num_threads": 1}])
def test_all_settings_share_one_cache_file(settings: dict[str, Any], tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("qwen3-untied"), "qwen3")
    kept(file)
    plain = load(file, **settings, weights_cache=None)
    mapped = load(file, **settings)
    assert mapped.rust.about()["mapped"]
    assert not plain.rust.about()["mapped"]
    assert logits(mapped) == logits(plain)
    assert len(list(cache.glob("*.panels"))) == 1


def test_weights_that_change_are_packed_anew(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("qwen3-untied"), "qwen3")
    before = kept(file)
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.unlink()
    file.write_bytes(data)
    assert logits(load(file, weights_cache=None)) == kept(file) != before


def test_cached_matrix_of_another_layout_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a later version of minisgl: the file's tensors and their shapes are the same."""
    folder = save(tiny_model("gpt-oss"), tmp_path / "model")
    kept(folder)
    names = cpu_loading._names

    def other_names(model: ModelConfig) -> dict[str, Any]:
        found = names(model)
        return {**found, "checkpoint": {**found["checkpoint"], "gate_up_in_turns": False}}

    monkeypatch.setattr(cpu_loading, "_names", other_names)
    assert kept(folder) == logits(load(folder, weights_cache=None))


def test_a_cache_that_cannot_be_written_to_is_a_line_in_the_log(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("qwen3-untied"), "qwen3")
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("no folder")
    with caplog.at_level(logging.INFO, "minisgl.engine"):
        wanted = logits(load(file, weights_cache=None))
        assert kept(file) == wanted
        assert kept(file) == wanted
    said = [
        one.getMessage() for one in caplog.records if "weights_cache" in one.message or "weights-cache" in one.message
    ]
    assert len(said) == 2
    assert all("--weights-cache: the weights of m.gguf were not cached: " in one for one in said)


def test_cache_takes_at_most_half_of_the_free_disk(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept(write_gguf(tmp_path / "one.gguf", written_model("qwen3-untied"), "qwen3"))
    (file,) = cache.glob("*.panels")
    size = file.stat().st_size
    free = 2 * size  # with the file's own bytes three: half of that holds one file and not two
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    kept(write_gguf(tmp_path / "two.gguf", written_model("qwen3-untied"), "qwen3"))
    (other,) = cache.glob("*.panels")
    assert other != file
    free = size - 2
    with caplog.at_level(logging.INFO, "minisgl.engine"):
        kept(write_gguf(tmp_path / "three.gguf", written_model("qwen3-untied"), "qwen3"))
    assert list(cache.glob("*.panels")) == [other]
    assert f"needs {size} bytes; the cache limit is {size - 1}" in caplog.text


@pytest.mark.parametrize(("weights_cache", "num_lines"), [(None, 1), (LARGE, 0)])
def test_slow_load_without_the_cache_names_it(
    weights_cache: int | None, num_lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_loading, "SLOW_LOAD_S", -1.0)
    lines: list[str] = []
    file = write_gguf(tmp_path / "m.gguf", written_model("qwen3-untied"), "qwen3")
    config = EngineConfig(model=str(file), engine="cpu", num_pages=16, weights_cache=weights_cache)
    load_cpu_engine(config, lambda text, done=0, total=0: lines.append(text)).close()
    assert f"loading weights of m.gguf, {file.stat().st_size / 2**20:.0f} MiB" in lines
    named = [line for line in lines if "--weights-cache" in line]
    assert len(named) == num_lines
    assert all(line.startswith("--weights-cache 2GiB writes the converted weights to disk (0.0 GiB)") for line in named)


def test_only_the_cpu_engine_has_it() -> None:
    with pytest.raises(ConfigError, match="--weights-cache 5: cannot be used with --engine torch"):
        EngineConfig(engine="torch", weights_cache=5).check()
    with pytest.raises(ConfigError, match="--weights-cache 5: cannot be used with --load-format dummy"):
        EngineConfig(engine="cpu", weights_cache=5, load_format="dummy").check()


@pytest.mark.parametrize(("size", "why"), [(0, "at least 1"), (2**63, "at most 9223372036854775807")])
def test_invalid_cache_sizes_are_refused(size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--weights-cache {size}: must be {why}"):
        EngineConfig(engine="cpu", weights_cache=size).check()


def test_an_engine_that_is_closed_writes_no_more(tmp_path: Path, cache: Path) -> None:
    """A server's process ends right behind it: what was begun would stay."""
    cache.mkdir(parents=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # somebody else writes
        engine = load(write_gguf(tmp_path / "m.gguf", written_model("qwen3-untied"), "qwen3"))
        (keeper,) = (one for one in threading.enumerate() if one.name == "weights-cache")
        engine.close()
        assert not keeper.is_alive()
    assert [one.name for one in cache.iterdir()] == ["lock"]


SERVER = """
import json, sys, numpy as np
from minisgl.config import EngineConfig
from minisgl.engine import cpu_loading
cpu_loading.MIN_CACHED_BYTES = 0
config = EngineConfig(model=sys.argv[1], engine="cpu", num_pages=16, weights_cache=2**30)
engine = cpu_loading.load_cpu_engine(config, lambda text, done=0, total=0: None)
engine.rust.prompt_logits(np.arange(3, 40, dtype=np.int32))
print(json.dumps(engine.rust.about()), flush=True)
sys.stdin.readline()
sizes = {"Pss": 0, "Rss": 0}
mine = False
for line in open("/proc/self/smaps"):
    if "-" in line.split(" ")[0]:
        mine = ".panels" in line
    elif mine and line.split(":")[0] in sizes:
        sizes[line.split(":")[0]] += int(line.split()[1]) * 1024
print(json.dumps(sizes), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how memory is shared")
def test_two_servers_hold_weights_once(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}
    folder = save(tiny_model("llama3-tied", **sizes), tmp_path / "model")
    kept(folder)
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdin=-1, stdout=-1, text=True) for _ in range(2)
    ]
    try:
        abouts = [json.loads(_answer(one)) for one in servers]
        assert all(one["mapped"] for one in abouts)
        found = [json.loads(_answer(one, "\n")) for one in servers]
        for one in found:
            assert one["Rss"] >= abouts[0]["weight_bytes"]
            assert one["Pss"] <= 0.51 * one["Rss"]
    finally:
        for one in servers:
            one.kill()
            one.communicate()


def _answer(server: subprocess.Popen[str], said: str = "") -> str:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(said)
    server.stdin.flush()
    return server.stdout.readline()
