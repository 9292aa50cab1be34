"""Files of prefixes: what is read is what was written, and whatever happened to a file is said before it is taken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from minisgl.config import ConfigError
from minisgl.utils.prefix_file import (
    MAGIC,
    Head,
    Ids,
    is_prefix_file,
    read_head,
    take_in,
    what_differs,
    write,
)

HEAD = Head(identity=b"{}", page_size=4, page_bytes=50, tokens=[*range(80)])
PAGES = [bytes([number]) * 50 for number in range(20)]


class Shelf:
    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}
        self.states: dict[int, bytes] = {}

    def put(self, tokens: Ids, first: int, pages: Sequence[bytes]) -> None:
        assert tokens.tolist() == HEAD.tokens
        self.pages |= dict(enumerate(pages, first))

    def put_state(self, tokens: Ids, num_pages: int, state: bytes) -> None:
        assert tokens.tolist() == HEAD.tokens
        self.states[num_pages] = state


class Full:
    def put(self, tokens: Ids, first: int, pages: Sequence[bytes]) -> NoReturn:
        raise OSError(28, "No space left on device")

    put_state = put


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "prefix", HEAD, PAGES)
    return tmp_path / "prefix"


def test_read_returns_what_was_written(file: Path) -> None:
    shelf = Shelf()
    assert is_prefix_file(file) and read_head(str(file)) == HEAD
    assert take_in(str(file), lambda head: shelf) == HEAD
    assert shelf.pages == dict(enumerate(PAGES))
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]


def test_a_state_goes_with_its_pages(tmp_path: Path) -> None:
    shelf, head = Shelf(), msgspec.structs.replace(HEAD, state_bytes=33, state_behind=19)
    write(tmp_path / "prefix", head, [*PAGES, bytes(33)])
    assert take_in(str(tmp_path / "prefix"), lambda head: shelf) == head
    assert (shelf.pages, shelf.states) == (dict(enumerate(PAGES)), {19: bytes(33)})
    assert b"state" not in msgspec.msgpack.encode(HEAD), "a file of another model is as it was"


def test_damaged_file_is_rejected_before_any_import(file: Path) -> None:
    whole, rng = file.read_bytes(), random.Random(3)

    def is_refused(data: bytes) -> None:
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=f"^{file}: "):
            take_in(str(file), lambda head: pytest.fail("it was taken"))

    for at in [*range(300), *range(300, len(whole), 9)]:
        is_refused(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    for length in range(0, len(whole), 41):
        is_refused(whole[:length])
    is_refused(whole + b"x")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"page_size": 0}, "page_size"),
        ({"tokens": [*range(79)]}, "its size is wrong"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"page_bytes": 2**31 - 1}, "its size is wrong"),
        ({"more": 1}, "more"),
        ({"state_bytes": -1}, "state_bytes"),
        ({"state_bytes": 9}, "its size is wrong"),
    ],
    ids=str,
)
def test_a_head_that_means_nothing_is_refused(file: Path, head: dict[str, Any], reason: str) -> None:
    packed = msgspec.msgpack.encode(msgspec.structs.asdict(HEAD) | head)
    file.write_bytes(MAGIC + len(packed).to_bytes(4, "little") + packed + bytes(1000))
    with pytest.raises(ConfigError, match=reason):
        read_head(str(file))


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("You are a helpful assistant.")
    assert not is_prefix_file(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"text: is not a file that minisgl cache export wrote"):
        read_head(str(tmp_path / "text"))
    with pytest.raises(ConfigError, match=r"none: No such file"):
        read_head(str(tmp_path / "none"))
    (tmp_path / "long").write_bytes(MAGIC + b"\xff" * 100)
    with pytest.raises(ConfigError, match="long: it is damaged: its header is too long"):
        read_head(str(tmp_path / "long"))


def test_a_full_disk_is_said(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"its pages cannot be written: .*No space left"):
        take_in(str(file), lambda head: Full())


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    def pages() -> Any:
        yield PAGES[0]
        raise ConfigError("gone")

    with pytest.raises(ConfigError, match="gone"):
        write(tmp_path / "prefix", HEAD, pages())
    assert not list(tmp_path.iterdir())


def test_differing_fields_are_named() -> None:
    ours = msgspec.json.encode({"version": "1", "settings": {"kv_dtype": "f16", "seed": 0}})
    theirs = msgspec.json.encode({"version": "2", "settings": {"kv_dtype": "q8", "seed": 0, "more": 1}})
    assert what_differs(theirs, ours) == ["kv_dtype", "more", "version"] and not what_differs(ours, ours)


@pytest.mark.parametrize(("size", "behind"), [(3, 0), (0, 1), (3, 20)])
def test_a_state_behind_no_page_of_the_prefix_is_refused(tmp_path: Path, size: int, behind: int) -> None:
    write(
        tmp_path / "prefix", msgspec.structs.replace(HEAD, state_bytes=size, state_behind=behind), [*PAGES, bytes(size)]
    )
    with pytest.raises(ConfigError, match="its state does not follow one of its pages"):
        read_head(str(tmp_path / "prefix"))
