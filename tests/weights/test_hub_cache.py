"""The cache of hubs: what is listed, what removing one leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl import cli
from minisgl.weights.hub_cache import RepoCache, entries, remove

FILES = {
    "x-Q4_0-00001-of-00002.gguf": b"1" * 30_000,
    "x-Q4_0-00002-of-00002.gguf": b"2" * 30_000,
    "x-Q8_0.gguf": b"8" * 50_000,
    "README.md": b"#",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RepoCache:
    """Two commits of a repository, one file of which is another in the second."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "own"))
    found = RepoCache("huggingface", "a/b")
    (found.folder / "blobs").mkdir(parents=True)
    for commit in ("1" * 40, "2" * 40):
        keys = {}
        for path, data in FILES.items():
            keys[path] = f"{path}-{commit[0]}" if path == "README.md" else path
            found.blob(keys[path]).write_bytes(data)
        found.link(commit, keys, None)
    (tmp_path / "datasets--a--b").mkdir()
    return found


def test_listing_of_cached_models(cache: RepoCache, capsys: pytest.CaptureFixture[str]) -> None:
    (cache.folder / "blobs" / "z.minisgl.incomplete").write_bytes(b"z" * 5000)
    assert {one.name: one.num_bytes for one in entries()} == {
        "a/b": 2, "a/b:Q4_0": 60_000, "a/b:Q8_0": 50_000, "a/b:unfinished": 5000,
    }  # fmt: skip
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in out[1:]] == [
        ["a/b", "2", "B"], ["a/b:Q4_0", "60.0", "kB"], ["a/b:Q8_0", "50.0", "kB"], ["a/b:unfinished", "5.0", "kB"],
    ]  # fmt: skip


def test_removing_a_model_keeps_all_others(
    cache: RepoCache, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["rm", "a/b:Q4_0"]) == 0
    assert capsys.readouterr().out == "removed a/b:Q4_0: 60.0 kB freed\n"
    assert {one.name for one in cache.folder.joinpath("blobs").iterdir()} == {
        "x-Q8_0.gguf",
        "README.md-1",
        "README.md-2",
    }
    assert [one.name for one in entries()] == ["a/b", "a/b:Q8_0"]
    assert cli.main(["rm", "a/b", "a/b:Q8_0"]) == 0
    assert not cache.folder.exists() and (tmp_path / "datasets--a--b").exists()


def test_a_tower_stays_with_the_models_that_are_left(cache: RepoCache) -> None:
    cache.blob("t").write_bytes(b"t" * 1000)
    cache.link("1" * 40, {"mmproj-F16.gguf": "t"}, None)
    by_name = {one.name: one for one in entries()}
    assert {name: one.num_bytes for name, one in by_name.items()} == {"a/b": 2, "a/b:Q4_0": 61_000, "a/b:Q8_0": 51_000}
    assert remove(by_name["a/b:Q4_0"]) == 60_000 and cache.blob("t").exists()
    assert remove(by_name["a/b:Q8_0"]) == 51_000 and not cache.blob("t").exists()


def test_a_blob_that_another_file_is_stays(cache: RepoCache) -> None:
    """One blob under two names: removing the one frees nothing."""
    cache.link("1" * 40, {"y-Q5_0.gguf": "x-Q8_0.gguf"}, None)
    by_name = {one.name: one for one in entries()}
    assert remove(by_name["a/b:Q8_0"]) == 0
    assert cache.blob("x-Q8_0.gguf").exists()
    assert remove(by_name["a/b:Q5_0"]) == 50_000


@pytest.mark.parametrize(
    ("name", "said"), [("a/b:Q2_K", "there are a/b, a/b:Q4_0, a/b:Q8_0"), ("../x", "see minisgl list")]
)
def test_unlisted_files_are_not_removed(
    cache: RepoCache, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor what stands beside it."""
    before = sorted(os.listdir(cache.folder / "blobs"))
    assert cli.main(["rm", "a/b:Q8_0", name]) == 2
    assert f"{name}: is not listed: {said}" in capsys.readouterr().err
    assert sorted(os.listdir(cache.folder / "blobs")) == before
