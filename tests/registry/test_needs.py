"""What models were seen to need is known to the next server, as long as it is about the same."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from minisgl.registry import needs as module
from minisgl.registry.entries import Entry
from minisgl.registry.needs import Needs
from tests.helpers.e2e import serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import MIB, NEED, echo, entry, several, use, write_models


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "needs.json"


def of_file(path: Path, **settings: object) -> Entry:
    """Of a GGUF file, as far as its first bytes say."""
    one = entry("a", memory=None)
    engine = replace(one.config.engine, engine="cpu", model=str(path), **settings)
    return replace(one, config=replace(one.config, engine=engine))


async def test_the_next_server_makes_room_for_what_this_one_saw(file: Path) -> None:
    async with several(*map(entry, "ab"), room_for=2.5, needs=Needs(file)) as (fleet, first):
        fleet.used["a"] = NEED * 2
        for name in "ab":
            await use(first, name)
            await first.measure(first.models[name])
    given = fleet.configs["a"].engine.memory
    async with several(*map(entry, "ab"), room_for=2.5, needs=Needs(file)) as (again, second):
        again.used["a"] = NEED
        assert (second.models["a"].seen.most_bytes, second.models["b"].seen.most_bytes) == (NEED * 2, NEED)
        await use(second, "a")
        assert second.set_aside == NEED * 2
        assert again.configs["a"].engine.memory == given, "what is measured grows with what is given"
    assert Needs(file).of(entry("a")) == NEED * 2, "less than was seen once is no news"


def test_another_file_or_other_settings_are_another_model(file: Path, tmp_path: Path) -> None:
    weights = tmp_path / "a.gguf"
    weights.write_bytes(b"GGUF" + b"x" * 1000)
    known = Needs(file)
    known.keep(of_file(weights), NEED)
    assert Needs(file).of(of_file(weights)) == NEED
    assert known.of(replace(of_file(weights), name="b", aliases=("c",), ttl_s=1.0)) == NEED  # names are none of it
    assert known.of(of_file(weights, max_seq_len=100)) == 0
    assert known.of(replace(of_file(weights), memory=NEED)) == 0
    weights.write_bytes(b"GGUF" + b"y" * 1001)
    assert known.of(of_file(weights)) == 0
    weights.unlink()
    assert known.of(of_file(weights)) == 0
    known.keep(of_file(weights), NEED)
    assert len(json.loads(file.read_bytes())["needs"]) == 1


@pytest.mark.parametrize("text", ["", "{", '{"format": 0}', '{"format": 1, "needs": {"a": 3}}', "\xff"])
def test_a_damaged_file_is_ignored_with_a_line(file: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode("latin-1"))
    known = Needs(file)
    with caplog.at_level(logging.WARNING):
        assert [known.of(entry(name)) for name in "ab"] == [0, 0]
    assert caplog.text.count(f"{file}: what models needed is not known any more") == 1
    known.keep(entry("a"), NEED)
    assert known.of(entry("a")) == NEED


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        Needs(tmp_path / "cache" / "needs.json").keep(entry("a"), NEED)
    assert "what a needs is not remembered" in caplog.text


def test_oldest_entries_are_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    clock = iter(range(100))
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    known = Needs(file)
    for name in "abcde":
        known.keep(entry(name), NEED)
    assert [known.of(entry(name)) for name in "abcde"] == [0, 0, NEED, NEED, NEED]
    known.keep(entry("c"), NEED + MIB)
    known.keep(entry("f"), NEED)
    assert [known.of(entry(name)) for name in "cdef"] == [NEED + MIB, 0, NEED, NEED]


def test_concurrent_writes_are_all_stored(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    known, names = Needs(file), [f"model-{i}" for i in range(40)]
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: known.keep(entry(name), NEED), names))
    assert [Needs(file).of(entry(name)) for name in names] == [NEED] * len(names) and not caplog.text


def test_a_real_server_remembers(tmp_path: Path) -> None:
    models = write_models(tmp_path / "models.yaml", [echo("a")])
    env = {"MINISGL_CACHE": str(tmp_path / "cache")}
    with serving("--models", models, env=env) as first, httpx.Client(base_url=first.url, timeout=WAIT_S) as http:
        assert http.get("/v1/models/a").json()["memory"] is None
        http.post("/v1/models/a/load", json={})
        until(lambda: http.get("/v1/models/a").json()["memory"] is not None, "its memory is not measured")
    with serving("--models", models, env=env) as second, httpx.Client(base_url=second.url, timeout=WAIT_S) as http:
        card = http.get("/v1/models/a").json()
        assert card["state"] == "unloaded" and card["memory"] > 10 * MIB
