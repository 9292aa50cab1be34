"""What a folder keeps: an answer once, whatever cuts writing short; files that nothing names go; full disks show."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from minisgl.config import ConfigError
from minisgl.server.batches import store as stores
from minisgl.server.batches.store import KEEP_S, BatchInfo, FileInfo, LineResult, Refused, Store, Usage, new_id, remove

NOW = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store.open(str(tmp_path / "state"))
    yield found
    found.close()


def file_in(store: Store, name: str = "file-in", owner: str = "ann", **more: object) -> FileInfo:
    store.path(name).write_bytes(b"1234")
    info = msgspec.structs.replace(
        FileInfo(id=name, owner=owner, bytes=4, created_at=NOW, filename="in.jsonl", num_lines=5), **more
    )
    store.add_file(info)
    return info


def batch_in(store: Store, name: str = "batch-a", owner: str = "ann", **more: object) -> BatchInfo:
    info = BatchInfo(
        id=name,
        owner=owner,
        endpoint="/v1/completions",
        input_file_id="file-in",
        completion_window="24h",
        created_at=NOW,
        expires_at=NOW + 86_400,
        total=5,
    )
    store.add_batch(msgspec.structs.replace(info, **more))
    return info


def again(store: Store, folder: Path) -> Store:
    store.close()
    return Store.open(str(folder / "state"))


def answers(*lines: int, ok: bool = True) -> list[LineResult]:
    return [LineResult(line, ok, b"%d\n" % line) for line in lines]


def test_an_answer_counts_once(store: Store) -> None:
    batch = batch_in(store, usage=Usage())
    both = [LineResult(line, True, b"%d\n" % line, Usage(line, 1, 10, 0)) for line in (3, 1)]
    assert store.record(batch, both).completed == 2
    found = store.record(batch, [*answers(2, 3, ok=False), LineResult(1, True, b"other\n", Usage(100))])
    assert (found.completed, found.failed, found.answer_bytes) == (2, 1, 6) and found.usage == Usage(4, 2, 20, 0)
    assert store.answered(batch.id) == {1, 2, 3}
    left = [LineResult(4, False, b"left\n"), LineResult(5, False, b"left 5\n")]
    ended = store.finish(batch, "cancelled", "", left, NOW)
    output, errors = store.file(str(ended.output_file_id), "ann"), store.file(str(ended.error_file_id), "ann")
    assert output is not None and errors is not None
    assert store.path(output.id).read_bytes() == b"1\n3\n"  # in the order of the lines, the first answer of each
    assert store.path(errors.id).read_bytes() == b"2\nleft\nleft 5\n"
    assert (output.bytes, output.purpose, output.expires_at) == (4, "batch_output", NOW + KEEP_S)
    assert store.answered(batch.id) == set() and store.open_batches() == []


def test_open_removes_unfinished_files_only(store: Store, tmp_path: Path) -> None:
    file_in(store)
    batch = batch_in(store)
    store.record(batch, answers(1, 2))
    store.path(new_id("file-")).write_bytes(b"half of")
    found = again(store, tmp_path)
    assert [one.name for one in (tmp_path / "state" / "files").iterdir()] == ["file-in"]
    assert found.open_batches() == [found.batch(batch.id, "ann")] and found.answered(batch.id) == {1, 2}
    found.close()


def content(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


def test_opening_a_store_removes_only_regular_files_of_its_own_naming(store: Store, tmp_path: Path) -> None:
    files, elsewhere = tmp_path / "state" / "files", tmp_path / "elsewhere"
    elsewhere.write_text("thesis")
    names = "thesis.tex", "file-stray", f"{new_id('file-')}.bak", f"x{new_id('file-')}", new_id("file-").upper()
    for name in names:
        (files / name).write_text("thesis")
    folder, link, stray = (files / new_id("file-") for _ in range(3))
    folder.mkdir()
    (folder / new_id("file-")).write_text("thesis")
    link.symlink_to(elsewhere)
    stray.write_text("half of")
    before = content(tmp_path / "state" / "files")
    again(store, tmp_path).close()
    assert set(before) - set(content(files)) == {stray.name}
    assert link.is_symlink() and elsewhere.read_text() == "thesis"


@pytest.mark.parametrize("name", ["thesis.tex", "files/thesis.tex", f"files/file-{'0' * 32}", "files/sub/a"])
def test_a_folder_of_others_without_a_database_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("thesis")
    for _ in range(2):  # a start that was refused is no start before this one
        with pytest.raises(ConfigError) as caught:
            Store.open(str(tmp_path))
        reason = "the folder has no state.sqlite and is not empty: name a new or an empty folder"
        assert str(caught.value) == f"--state-dir {tmp_path}: {reason}"
        assert content(tmp_path) == {name: "thesis"}


def test_a_start_that_was_cut_short_before_its_database_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("files", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").touch()
    Store.open(str(tmp_path)).close()


@pytest.mark.parametrize("has_database", [True, False])
def test_files_that_is_a_link_is_refused(has_database: bool, tmp_path: Path) -> None:
    state, home = tmp_path / "state", tmp_path / "home"
    home.mkdir()
    if has_database:
        Store.open(str(state)).close()
        (state / "files").rmdir()
    else:
        state.mkdir()
    (home / new_id("file-")).write_text("thesis")
    before = content(home)
    (state / "files").symlink_to(home)
    with pytest.raises(ConfigError, match=f"--state-dir {state}: {state}/files is a symbolic link: it must be"):
        Store.open(str(state))
    (state / "files").unlink()
    (state / "files").write_text("thesis")
    with pytest.raises(ConfigError, match=f"--state-dir {state}: {state}/files is not a folder: it must be"):
        Store.open(str(state))
    assert content(home) == before and (state / "files").read_text() == "thesis"


def test_files_of_another_user_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match=f"files belongs to user {me}, and the server runs as user {me + 1}: give"):
        again(store, tmp_path)


def test_interrupted_finish_leaves_batch_open(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are written, and what names them is not."""
    batch = batch_in(store)
    store.record(batch, answers(1, 2))

    def ends(db: sqlite3.Connection, info: FileInfo) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(stores, "_put_file", ends)
        store.finish(batch, "completed", "", (), NOW)
    found = again(store, tmp_path)
    assert list((tmp_path / "state" / "files").iterdir()) == []
    [now] = found.open_batches()
    assert now.status == "finalizing" and found.answered(batch.id) == {1, 2}
    assert found.path(str(found.finish(now, "completed", "", (), NOW).output_file_id)).read_bytes() == b"1\n2\n"
    found.close()


def test_a_full_disk_keeps_what_is_there(store: Store, tmp_path: Path) -> None:
    batch = batch_in(store)
    store.record(batch, answers(1))
    (num_pages,) = store.db.execute("PRAGMA page_count").fetchone()
    store.db.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.record(batch, [LineResult(2, True, b"x" * 100_000)])
    assert store.answered(batch.id) == {1}
    now = store.batch(batch.id, "ann")
    assert now is not None and (now.completed, now.answer_bytes) == (1, 2)
    found = again(store, tmp_path)
    assert found.answered(batch.id) == {1}
    found.close()


def test_keys_see_only_their_own_records(store: Store) -> None:
    file_in(store)
    batch = batch_in(store)
    assert store.file("file-in", "bob") is None and store.files("bob") == [] and store.batches("bob") == []
    assert store.batch(batch.id, "bob") is None and store.cancel(batch.id, "bob", NOW) is None
    assert not store.delete_file("file-in", "bob")
    store.record(batch, answers(1))
    assert (store.used_bytes("ann"), store.used_bytes("bob")) == (6, 0)


def test_a_file_that_a_batch_reads_stays(store: Store) -> None:
    file_in(store, expires_at=NOW + 10)
    batch = batch_in(store)
    with pytest.raises(Refused, match="file-in: batch-a reads it"):
        store.delete_file("file-in", "ann")
    store.sweep(NOW + 10)
    assert store.path("file-in").exists()
    store.finish(batch, "completed", "", (), NOW)
    store.sweep(NOW + 9)
    assert store.path("file-in").exists()
    store.sweep(NOW + 10)
    assert not store.path("file-in").exists() and store.files("ann") == []


def test_sweep_removes_expired_records(store: Store) -> None:
    file_in(store)
    batch = batch_in(store, output_keep_s=100)
    store.record(batch, answers(1))
    ended = store.finish(batch, "completed", "", (), NOW)
    store.sweep(NOW + 99)
    assert len(store.files("ann")) == 2
    store.sweep(NOW + 100)
    assert [one.id for one in store.files("ann")] == ["file-in"]
    assert not store.path(str(ended.output_file_id)).exists()
    store.sweep(NOW + KEEP_S - 1)
    assert len(store.batches("ann")) == 1
    store.sweep(NOW + KEEP_S)
    assert store.batches("ann") == []


def test_too_many_files_or_batches_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_FILES", 1)
    monkeypatch.setattr(stores, "MAX_OPEN_BATCHES", 1)
    file_in(store)
    with pytest.raises(Refused, match="there are 1 files of this API key"):
        file_in(store, "file-more")
    file_in(store, "file-of-bob", "bob")
    batch = batch_in(store)
    with pytest.raises(Refused, match="1 batches of this API key are not finished"):
        batch_in(store, "batch-b")
    store.finish(batch, "completed", "", (), NOW)
    batch_in(store, "batch-b")


def test_only_newest_ended_batches_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_ENDED_BATCHES", 2)
    batch_in(store, "of-bob", "bob", status="completed", ended_at=NOW)
    for name in "abcd":
        store.finish(batch_in(store, name), "completed", "", (), NOW)
    batch_in(store, "e")
    assert [one.id for one in store.batches("ann")] == ["c", "d", "e"] and len(store.batches("bob")) == 1


def test_ended_batch_cannot_be_cancelled(store: Store) -> None:
    batch = batch_in(store)
    found = store.cancel(batch.id, "ann", NOW)
    assert found is not None and (found.status, found.cancelling_at) == ("cancelling", NOW)
    assert store.cancel(batch.id, "ann", NOW + 1) == found
    store.finish(found, "cancelled", "", (), NOW + 2)
    with pytest.raises(Refused, match="it is cancelled"):
        store.cancel(batch.id, "ann", NOW)


def test_a_folder_is_of_one_server_and_one_version(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server uses it"):
        Store.open(str(tmp_path / "state"))
    store.db.execute("PRAGMA user_version = 9")
    with pytest.raises(ConfigError, match=r"another version of minisgl wrote it \(9;"):
        again(store, tmp_path)


def test_database_is_readable_by_its_user_only(store: Store, tmp_path: Path) -> None:
    state = tmp_path / "state"
    names = "", "files", "lock", "state.sqlite", "state.sqlite-wal", "state.sqlite-shm"

    def open_to_others() -> list[str]:
        return [name for name in names if os.stat(state / name).st_mode & 0o077]

    assert open_to_others() == []
    (state / "state.sqlite").chmod(0o644)  # as a version before made it
    found = again(store, tmp_path)
    assert open_to_others() == []
    found.close()


def test_a_store_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """`minisgl batch -o OUT` removed all of a folder OUT.state, whoever had made it."""
    folder = tmp_path / "out.state"
    Store.open(str(folder)).close()
    (folder / "files" / f"file-{'0' * 32}").write_bytes(b"ours")
    for place, name in ((folder, "thesis.tex"), (folder / "files", "notes"), (folder / "files", f"file-{'1' * 31}x")):
        (place / name).write_text("theirs")
    assert not remove(folder, ("whole.jsonl",))
    assert {one.name for one in folder.rglob("*")} == {"files", "thesis.tex", "notes", f"file-{'1' * 31}x"}
    other = tmp_path / "other.state"
    Store.open(str(other)).close()
    (other / "whole.jsonl").touch()
    assert remove(other, ("whole.jsonl",)) and not other.exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "lock").touch()
    assert not remove(foreign) and (foreign / "lock").exists()
