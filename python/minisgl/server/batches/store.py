"""Storage of files, batches and line results in a folder: metadata in SQLite, contents as files.

    DIR/state.sqlite    files and batches with their owners, and results of unfinished batches
    DIR/files/ID        a file's content
    DIR/lock            held by the server that uses the folder

Invariants: a line has one result, because (batch, line) is a key: a second one is dropped; a file is complete and
synced before a record names it; opening a folder removes only files that a store wrote there and never recorded;
another key finds nothing. A store is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from minisgl.config import ConfigError

SCHEMA = 1
PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
KEEP_S = 30 * 86_400
"""Default retention of a batch's output files, and retention of ended batches."""
MAX_FILES = 10_000
"""Maximum files of one key."""
MAX_OPEN_BATCHES = 100
"""Maximum unfinished batches of one key."""
MAX_ENDED_BATCHES = 10_000
"""Maximum ended batches of one key; the oldest ones beyond are dropped."""
LOCK_S = 0.05
DATABASE, LOCK, FILES = "state.sqlite", "lock", "files"
BEFORE_DATABASE = {LOCK, FILES, "lost+found"}
"""Entries that a folder without a database may have: an interrupted start leaves the first two, mkfs the last."""
FILE_PREFIX = "file-"
_FILE_NAME = re.compile(FILE_PREFIX + "[0-9a-f]{32}")
T = TypeVar("T")
Status = Literal[
    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]  # OpenAI's without "validating": files are checked on upload
OPEN: frozenset[Status] = frozenset({"in_progress", "finalizing", "cancelling"})
_TABLES = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, owner TEXT NOT NULL, bytes INTEGER NOT NULL, doc BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, owner TEXT NOT NULL, open INTEGER NOT NULL, doc BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS answers (batch TEXT, line INTEGER, ok INTEGER, answer BLOB, PRIMARY KEY (batch, line));
CREATE TABLE IF NOT EXISTS deaths (batch TEXT, line INTEGER, count INTEGER NOT NULL, PRIMARY KEY (batch, line));
"""


class Refused(Exception):
    """The store refuses an operation. The message says why; `code` is for programs."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a file. Times are Unix seconds. `url` and `num_lines`: of a batch's input. `owner`: name of an API key,
    empty for callers that are not in a key file."""

    id: str
    owner: str
    bytes: int
    created_at: int
    filename: str
    purpose: str = PURPOSE
    expires_at: int | None = None
    url: str = ""
    num_lines: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Token counts of results; `cached` is part of the input, `reasoning` part of the output."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)))


class BatchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a batch: OpenAI's fields, and `owner`, `reason` (of a failure) and `answer_bytes` (results not yet in a
    file). Times are Unix seconds. `usage` is `None` in records of older versions."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    total: int
    status: Status = "in_progress"
    metadata: dict[str, str] | None = None
    output_keep_s: int = KEEP_S
    completed: int = 0
    failed: int = 0
    answer_bytes: int = 0
    usage: Usage | None = None
    reason: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    cancelling_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None


class LineResult(msgspec.Struct, frozen=True):
    """Result of line number `line`; `text` is a line of the output file or, if not `ok`, of the error file."""

    line: int
    ok: bool
    text: bytes
    usage: Usage = Usage()


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(16)}"


class Store:
    """Storage in a folder; create it with `open`. Failures to read or write are `OSError` or `sqlite3.Error`."""

    def __init__(self, folder: Path, lock: int, db: sqlite3.Connection) -> None:
        self._folder = folder
        self._lock = lock
        self.db = db

    @classmethod
    def open(cls, folder: str, wait_s: float = 0.0) -> Store:
        """Open or create a store. `wait_s`: how long another server may hold the lock. Raises `ConfigError`."""
        path = Path(folder).expanduser()
        flag = f"--state-dir {folder}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(path, flag)
            (path / FILES).mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"{flag}: {error.strerror}: {error.filename}") from error
        try:
            _take(lock, wait_s, flag)
            _make_private(path / DATABASE)
            db = sqlite3.connect(path / DATABASE, isolation_level=None, check_same_thread=False)
            try:
                store = cls(path, lock, db)
                store._prepare(flag)
                store._drop_strays()
            except BaseException:
                db.close()
                raise
        except (OSError, sqlite3.Error) as error:
            os.close(lock)
            raise ConfigError(f"{flag}: {path / DATABASE}: {error}") from error
        except BaseException:
            os.close(lock)
            raise
        return store

    def _prepare(self, flag: str) -> None:
        db = self.db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise ConfigError(f"{flag}: another version of minisgl wrote it ({schema}; this one writes {SCHEMA})")
        db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SCHEMA}; COMMIT;")

    def _drop_strays(self) -> None:
        """Remove files that a store began to write and never recorded."""
        known = {name for (name,) in self.db.execute("SELECT id FROM files")}
        folder = os.open(self._folder / FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for name in os.listdir(folder):
                is_stray = _FILE_NAME.fullmatch(name) and name not in known
                if is_stray and stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the database and release the lock. Idempotent."""
        self.db.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield self.db
            self.db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                self.db.execute("ROLLBACK")
            raise

    # ------------------------------------------------------------------------------------------------------- files

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content; it need not exist."""
        return self._folder / FILES / file_id

    def add_file(self, info: FileInfo) -> None:
        """Record a file whose content is already synced. Raises `Refused` if its owner has too many files."""
        sync(self._folder / FILES)
        self.check_num_files(info.owner)
        with self._writing() as db:
            _put_file(db, info)

    def check_num_files(self, owner: str) -> None:
        """Check that a key may have one more file. Raises `Refused`."""
        (count,) = self.db.execute("SELECT count(*) FROM files WHERE owner = ?", (owner,)).fetchone()
        if count >= MAX_FILES:
            raise Refused(f"file: there are {count} files of this API key: delete some", "too_many_files")

    def drop_stray(self, file_id: str) -> None:
        """Remove a file's content unless the file is recorded."""
        if self.db.execute("SELECT 1 FROM files WHERE id = ?", (file_id,)).fetchone() is None:
            self.path(file_id).unlink(missing_ok=True)

    def file(self, file_id: str, owner: str) -> FileInfo | None:
        return next(iter(self._docs(FileInfo, "files WHERE id = ? AND owner = ?", file_id, owner)), None)

    def files(self, owner: str) -> list[FileInfo]:
        """Return all files of a key, oldest first."""
        return self._docs(FileInfo, "files WHERE owner = ? ORDER BY rowid", owner)

    def _docs(self, kind: type[T], where: str, *values: str) -> list[T]:
        rows = self.db.execute(f"SELECT doc FROM {where}", values).fetchall()
        return [msgspec.json.decode(doc, type=kind) for (doc,) in rows]

    def delete_file(self, file_id: str, owner: str) -> bool:
        """Delete a file. Return whether it existed. Raises `Refused` while an open batch reads it."""
        if self.file(file_id, owner) is None:
            return False
        for batch in self.open_batches():
            if batch.input_file_id == file_id:
                raise Refused(f"file_id: {file_id}: {batch.id} reads it: cancel that first", "file_in_use")
        self._delete([file_id])
        return True

    def _delete(self, file_ids: Iterable[str]) -> None:
        names = list(file_ids)
        with self._writing() as db:
            db.executemany("DELETE FROM files WHERE id = ?", ((name,) for name in names))
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def used_bytes(self, owner: str) -> int:
        """Return the bytes of a key's files, and of its results that are not yet in a file."""
        (files,) = self.db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)).fetchone()
        return int(files) + sum(batch.answer_bytes for batch in self.open_batches() if batch.owner == owner)

    # ----------------------------------------------------------------------------------------------------- batches

    def add_batch(self, info: BatchInfo) -> None:
        """Record a batch and drop the oldest ended ones. Raises `Refused` if its owner has too many open batches."""
        count = sum(batch.owner == info.owner for batch in self.open_batches())
        if count >= MAX_OPEN_BATCHES:
            text = f"{count} batches of this API key are not finished, the limit: wait for one, or cancel it"
            raise Refused(text, "too_many_batches")
        ended = "SELECT id FROM batches WHERE owner = ? AND NOT open ORDER BY rowid DESC LIMIT -1 OFFSET ?"
        with self._writing() as db:
            db.execute(f"DELETE FROM batches WHERE id IN ({ended})", (info.owner, MAX_ENDED_BATCHES))
            db.execute("INSERT INTO batches VALUES (?, ?, 1, ?)", (info.id, info.owner, msgspec.json.encode(info)))

    def batch(self, batch_id: str, owner: str) -> BatchInfo | None:
        return next(iter(self._docs(BatchInfo, "batches WHERE id = ? AND owner = ?", batch_id, owner)), None)

    def batches(self, owner: str) -> list[BatchInfo]:
        """Return all batches of a key, oldest first."""
        return self._docs(BatchInfo, "batches WHERE owner = ? ORDER BY rowid", owner)

    def open_batches(self) -> list[BatchInfo]:
        """Return the unfinished batches of all keys, oldest first."""
        return self._docs(BatchInfo, "batches WHERE open ORDER BY rowid")

    def cancel(self, batch_id: str, owner: str, now: int) -> BatchInfo | None:
        """Mark a batch as cancelling; `None` if there is none. Raises `Refused` if it has ended or is finalizing."""
        batch = self.batch(batch_id, owner)
        if batch is None or batch.status == "cancelling":
            return batch
        if batch.status != "in_progress":
            raise Refused(f"batch_id: {batch_id}: it is {batch.status}: nothing is left to cancel", "batch_ended")
        return self._update(batch, status="cancelling", cancelling_at=now)

    def _update(self, batch: BatchInfo, **fields: object) -> BatchInfo:
        changed = msgspec.structs.replace(batch, **fields)
        with self._writing() as db:
            _put_batch(db, changed)
        return changed

    def answered(self, batch_id: str) -> set[int]:
        """Return the numbers of a batch's lines that have results."""
        return {line for (line,) in self.db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def add_deaths(self, lines: Iterable[tuple[str, int]]) -> None:
        """Add one engine death to each of these lines, given as (batch id, line number)."""
        with self._writing() as db:
            added = "INSERT INTO deaths VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1"
            db.executemany(added, lines)

    def deaths(self, batch_id: str) -> dict[int, int]:
        """Return for each line number of a batch how many engines died while running it."""
        return dict(self.db.execute("SELECT line, count FROM deaths WHERE batch = ?", (batch_id,)))

    def record(self, batch: BatchInfo, answers: Iterable[LineResult]) -> BatchInfo:
        """Store results atomically and return the updated batch. Lines that already have a result are unchanged."""
        with self._writing() as db:
            now = self.batch(batch.id, batch.owner) or batch
            completed, failed, size, usage = now.completed, now.failed, now.answer_bytes, now.usage
            for one in answers:
                row = (batch.id, one.line, one.ok, one.text)
                if db.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", row).rowcount:
                    completed, failed, size = completed + one.ok, failed + (not one.ok), size + len(one.text)
                    usage = None if usage is None else usage + one.usage
            now = msgspec.structs.replace(now, completed=completed, failed=failed, answer_bytes=size, usage=usage)
            _put_batch(db, now)
        return now

    def finish(self, batch: BatchInfo, status: Status, reason: str, left: Iterable[LineResult], now: int) -> BatchInfo:
        """Write the files of a batch and mark it as ended. `left`: results for lines that have none, in line order."""
        batch = self.batch(batch.id, batch.owner) or batch
        if batch.status != "finalizing":
            now_is = "finalizing" if status == "completed" else batch.status
            batch = self._update(batch, finalizing_at=now, status=now_is)
        made = [self._write(batch, ok=True, left=(), now=now), self._write(batch, ok=False, left=left, now=now)]
        ended = msgspec.structs.replace(
            batch,
            status=status,
            reason=reason,
            ended_at=now,
            answer_bytes=0,
            output_file_id=None if made[0] is None else made[0].id,
            error_file_id=None if made[1] is None else made[1].id,
        )
        sync(self._folder / FILES)
        with self._writing() as db:
            for info in made:
                if info is not None:
                    _put_file(db, info)
            _put_batch(db, ended)
            for table in ("answers", "deaths"):
                db.execute(f"DELETE FROM {table} WHERE batch = ?", (batch.id,))
        return ended

    def _write(self, batch: BatchInfo, *, ok: bool, left: Iterable[LineResult], now: int) -> FileInfo | None:
        """Write the results with this `ok` to a file, in line order. Returns `None` if there are none."""
        name = new_id(FILE_PREFIX)
        rows = self.db.execute(
            "SELECT line, answer FROM answers WHERE batch = ? AND ok = ? ORDER BY line", (batch.id, ok)
        )
        with self.path(name).open("wb") as file:
            others = ((one.line, one.text) for one in left)
            for _, text in heapq.merge(rows, others, key=lambda one: one[0]):  # both are sorted by line
                file.write(text)
            num_bytes = file.tell()
            written(file)
        if not num_bytes:
            self.path(name).unlink()
            return None
        return FileInfo(
            id=name,
            owner=batch.owner,
            bytes=num_bytes,
            created_at=now,
            filename=f"{batch.id}_{'output' if ok else 'error'}.jsonl",
            purpose=OUTPUT_PURPOSE,
            expires_at=now + batch.output_keep_s,
        )

    # --------------------------------------------------------------------------------------------------- retention

    def sweep(self, now: int) -> None:
        """Delete expired files that no open batch reads, and batches that ended `KEEP_S` ago."""
        in_use = {batch.input_file_id for batch in self.open_batches()}
        files = self._docs(FileInfo, "files")
        over = [one.id for one in files if one.expires_at is not None and one.expires_at <= now]
        self._delete(name for name in over if name not in in_use)
        ended = self._docs(BatchInfo, "batches WHERE NOT open")
        with self._writing() as db:
            old = ((one.id,) for one in ended if (one.ended_at or 0) + KEEP_S <= now)
            db.executemany("DELETE FROM batches WHERE id = ?", old)


def _put_file(db: sqlite3.Connection, info: FileInfo) -> None:
    db.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (info.id, info.owner, info.bytes, msgspec.json.encode(info)))


def _put_batch(db: sqlite3.Connection, info: BatchInfo) -> None:
    row = (info.status in OPEN, msgspec.json.encode(info), info.id)
    db.execute("UPDATE batches SET open = ?, doc = ? WHERE id = ?", row)


def error_text(error: OSError | sqlite3.Error) -> str:
    """Describe an error for clients, without the server's folder names."""
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"


def remove(folder: Path, others: Iterable[str] = ()) -> bool:
    """Remove the folder of an unused store: all files that a store writes there, and those named in `others`. Returns
    false if other files remain, and with them the folder. Raises `OSError`."""
    files, own = folder / FILES, {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", LOCK, *others}
    if folder.is_symlink() or files.is_symlink() or not (folder / DATABASE).is_file():
        return False
    of_files = [one for one in files.iterdir() if _FILE_NAME.fullmatch(one.name)] if files.is_dir() else []
    for one in (*of_files, *(folder / name for name in own)):
        if stat.S_ISREG(one.lstat().st_mode) if os.path.lexists(one) else False:
            one.unlink()
    for place in (files, folder):
        if place.is_dir() and not os.listdir(place):
            place.rmdir()
    return not folder.exists()


def _take(lock: int, wait_s: float, flag: str) -> None:
    """Acquire the lock, waiting up to `wait_s`. Raises `ConfigError` if another process holds it."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"{flag}: another server uses it: give each server its own folder") from error
        time.sleep(LOCK_S)


def _check_folder(path: Path, flag: str) -> None:
    """Check that a store may write and remove files in the folder. Raises `ConfigError`."""
    files, names = path / FILES, set(os.listdir(path))
    if FILES in names:
        status = files.lstat()
        if not stat.S_ISDIR(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a folder"
            raise ConfigError(f"{flag}: {files} is {kind}: it must be a folder, where files are written and removed")
        if status.st_uid != os.geteuid():
            users = f"user {status.st_uid}, and the server runs as user {os.geteuid()}"
            raise ConfigError(f"{flag}: {files} belongs to {users}: give each its own folder")
    if DATABASE not in names and (names - BEFORE_DATABASE or (FILES in names and os.listdir(files))):
        raise ConfigError(f"{flag}: the folder has no {DATABASE} and is not empty: name a new or an empty folder")


def _make_private(database: Path) -> None:
    """Restrict the database to its user (mode 0600) before SQLite opens it; its journals get the same mode."""
    descriptor = os.open(database, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def written(file: BinaryIO) -> None:
    """Flush a file's content to the disk (fsync)."""
    file.flush()
    os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush a folder's entries to the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
