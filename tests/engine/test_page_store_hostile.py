"""Whole engines over folders that somebody has damaged, filled, closed or emptied: right tokens, and a counter."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl._rust import PageStore
from minisgl.engine.api import StoreCounts
from tests.helpers.models import save, tiny_model
from tests.helpers.stores import counts, store_of

pytestmark = pytest.mark.any_cpu

SIZE = 8
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
RNG = random.Random(5)
BEGIN = [RNG.randrange(3, 131) for _ in range(60)]
PROMPTS = [BEGIN + [RNG.randrange(3, 131) for _ in range(20)] for _ in range(3)]


@pytest.fixture(scope="module", params=["qwen3-tied", "lfm2"], ids=["pages", "pages and states"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(variant, vocab_size=258), tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


def opened(model: Path, **settings: Any) -> LLM:
    small = {"page_size": SIZE, "num_pages": 60, "max_seq_len": 200, "num_threads": 1, "max_running_requests": 4}
    small |= {"checkpoint_interval": 16} if "lfm2" in (model / "config.json").read_text() else {}
    return LLM(str(model), engine="cpu", log_level="error", **small | settings)  # type: ignore[arg-type]


def answers(llm: LLM) -> list[list[int]]:
    """Of all prompts, with nothing in the tree."""
    llm.clear_cache()
    return [one.token_ids for one in llm.generate(PROMPTS, PARAMS, progress=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with opened(model) as llm:
        return answers(llm)


def pages(folder: Path) -> list[Path]:
    return sorted(one for one in folder.glob("??/*") if len(one.name.removesuffix(".state")) == 64)


class Damage:
    def __init__(self, folder: Path, foreign: list[Path]) -> None:
        self.folder = folder
        self._foreign = foreign
        self.rng = random.Random(11)

    def one(self) -> None:
        """Of what can happen to a folder, one thing."""
        rng = self.rng
        if not (found := pages(self.folder)):
            return
        file, other = rng.choice(found), rng.choice(found)
        data = bytearray((file.read_bytes() if file.is_file() else b"") or b"?")
        match rng.choices(("bytes", "length", "swap", "foreign", "place", "folder"), (40, 15, 15, 15, 13, 2))[0]:
            case "bytes":
                for _ in range(rng.randrange(1, 9)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case "length":
                data = data[: rng.randrange(len(data))] if rng.random() < 0.7 else data + bytes(rng.randrange(1, 99))
            case "swap" if other.is_file():
                data = bytearray(other.read_bytes())
            case "foreign":
                data = bytearray(rng.choice(self._foreign).read_bytes())
            case "place":
                self._instead(file, other)
                return
            case "folder":
                place = rng.choice((self.folder, file.parent))
                shutil.rmtree(place)
                if rng.random() < 0.3 and place != self.folder:
                    place.write_text("a file in its place")
                return
        _remove(file)
        file.write_bytes(data)

    def _instead(self, file: Path, other: Path) -> None:
        _remove(file)
        match self.rng.randrange(5):
            case 0:
                file.mkdir()
            case 1:
                os.mkfifo(file)
            case 2:
                file.symlink_to(other)
            case 3:
                file.symlink_to("/dev/zero")
            case _:
                pass  # it is gone

    def heal(self) -> None:
        """What no engine can: a folder or a file that stands where it wants the other."""
        for one in self.folder.glob("??"):
            if not one.is_dir():
                _remove(one)
        for one in pages(self.folder):
            if one.is_dir():
                _remove(one)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def foreign(variant: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Pages of another model, of the same size."""
    folder, cache = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("foreign")
    save(tiny_model(variant, vocab_size=258, intermediate_size=96), folder, tokenizer=True)
    with opened(folder, cache_dir=str(cache)) as llm:
        answers(llm)
    return pages(cache)


def _damaged(
    times: int, cases: int, model: Path, cache: Path, expected: list[list[int]], foreign: list[Path]
) -> StoreCounts:
    damage, found = Damage(cache, foreign), StoreCounts(*[0] * 8)
    for _ in range(times):
        with opened(model, cache_dir=str(cache)) as llm:
            for _ in range(cases):
                store_of(llm).flush(60.0)
                for _ in range(damage.rng.randrange(1, 6)):
                    damage.one()
                assert answers(llm) == expected
                damage.heal()
            seen = counts(llm)
        found = StoreCounts(*(getattr(found, one) + getattr(seen, one) for one in StoreCounts.__slots__))
    return found


def test_damaged_pages_never_give_wrong_tokens(
    model: Path, tmp_path: Path, expected: list[list[int]], foreign: list[Path]
) -> None:
    found = _damaged(2, 10, model, tmp_path / "cache", expected, foreign)
    assert found.num_loaded > 20 and found.num_damaged > 0
    assert (found.num_loaded_states > 0) == (found.num_written_states > 0)


@pytest.mark.slow
def test_damaged_pages_never_give_wrong_tokens_long(
    model: Path, tmp_path: Path, expected: list[list[int]], foreign: list[Path], times: int
) -> None:
    found = _damaged(20 * times, 20, model, tmp_path / "cache", expected, foreign)
    print(f"{400 * times} damaged folders: {found}")
    assert found.num_loaded > 400 and found.num_damaged > 100


class SmallDisk:
    """A file system of 1 MiB, where this user may make one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mount("-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs")

    def _mount(self, *how: str) -> None:
        done = subprocess.run(["mount", *how, str(self.folder)], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")

    def fill(self) -> None:
        with pytest.raises(OSError, match="No space left"), (self.folder / "full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))

    def set_read_only(self) -> None:
        self._mount("-o", "remount,ro")

    def close(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if shutil.which("mount") is None:
        pytest.skip("a small file system cannot be mounted: there is no mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    found = SmallDisk(folder)
    try:
        yield found
    finally:
        found.close()


def test_a_full_disk_is_a_warning_a_counter_and_right_answers(
    model: Path, disk: SmallDisk, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    cache = disk.folder / "cache"
    with opened(model, cache_dir=str(cache)) as llm:
        disk.fill()
        assert answers(llm) == expected
        store_of(llm).flush(60.0)
        assert counts(llm).num_failed > 0 and counts(llm).num_written == 0
        told = [one for one in caplog.messages if "No space left" in one]
        assert len(told) == 1 and told[0].startswith("--cache-dir: a page could not be written")
        (disk.folder / "full").unlink()
        assert answers(llm) == expected
        store_of(llm).flush(60.0)
        assert counts(llm).num_written > 20, "it goes on when there is room"
    assert PageStore.verify(str(cache))[3] == 0, "and no half pages are left"
    assert not list(cache.glob("writing-*"))


def test_a_disk_that_becomes_full_keeps_what_fits(model: Path, disk: SmallDisk, expected: list[list[int]]) -> None:
    size = 4  # tokens of a page
    with opened(model, cache_dir=str(disk.folder), page_size=size, num_pages=120, kv_dtype="f32") as llm:
        for number in range(3, 130):
            llm.generate([[number, *BEGIN]], SamplingParams(temperature=0, max_tokens=1), progress=False)
            store_of(llm).flush(60.0)
            if counts(llm).num_failed:
                break
        assert counts(llm).num_failed > 0 and counts(llm).num_written > 0
    assert PageStore.verify(str(disk.folder))[3] == 0


def test_a_folder_that_may_only_be_read_gives_its_pages(
    model: Path, disk: SmallDisk, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(model, cache_dir=str(disk.folder)) as llm:
        answers(llm)
    disk.set_read_only()
    with opened(model, cache_dir=str(disk.folder)) as llm:
        assert answers(llm) == expected and counts(llm).num_loaded > 0
        llm.generate([BEGIN[::-1]], PARAMS, progress=False)
        store_of(llm).flush(60.0)
        assert counts(llm).num_failed > 0
    assert any("Read-only file system" in one for one in caplog.messages)


def test_two_engines_race_to_create_use_and_clear_one_folder(
    model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    cache, done, cleared = tmp_path / "made" / "cache", threading.Event(), [0]

    def clear() -> None:
        while not done.is_set():
            if cache.is_dir():
                cleared[0] += PageStore.clear(str(cache))[0]
                shutil.rmtree(cache, ignore_errors=True)

    def use(found: list[list[list[int]]]) -> None:
        for _ in range(4):
            with opened(model, cache_dir=str(cache)) as llm:
                found += [answers(llm) for _ in range(4)]

    found: list[list[list[list[int]]]] = [[], []]
    users = [threading.Thread(target=use, args=(one,)) for one in found]
    clearing = threading.Thread(target=clear)
    for one in (*users, clearing):
        one.start()
    for one in users:
        one.join()
    done.set()
    clearing.join()
    assert all(one == [expected] * 16 for one in found) and cleared[0] > 0


def test_slow_disk_does_not_delay_steps(model: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """An hour a page: nobody waits for it, and neither does the end."""
    with opened(model, cache_dir=str(tmp_path)) as llm:
        answers(llm)
    with opened(model, cache_dir=str(tmp_path), page_size=4, num_pages=120) as llm:
        store_of(llm).slow_down(3600.0)
        assert answers(llm) == expected
        assert counts(llm).num_written == 0
