"""Models from a hub: listing of a repository, and download of its files to the hub's cache. Every failure says what to
do.

Files are fetched in segments, several at once, and checked by the hash that the hub lists. huggingface_hub's own
download checks sizes only and starts over after its process has ended, so it is not used; its cache and variables are.

Invariants: a blob gets its name only after its hash was verified; the received part of a file survives the end of the
connection, the process or the disk space, and only the rest is requested again; a token is sent to the hub alone, not
to redirect targets; several processes that want a repository fetch it once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from minisgl import envs
from minisgl.config import ConfigError, ModelSource
from minisgl.utils.installed import own_version
from minisgl.utils.progress import Report
from minisgl.weights.hub_cache import MAIN, RepoCache, touch
from minisgl.weights.hub_names import HubRequest, choose, is_model

SEGMENT = 64 << 20  # bytes of one request
CHUNK = 1 << 20
WORKERS = 8
MAX_FILES, MAX_PAGES = 100_000, 1000
TRIES = 5  # tries without receiving a byte
MAX_WAIT_S = 60.0  # maximum Retry-After that is waited for
FIRST_WAIT_S = 0.5
_SHOW_S = 0.2
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubError(ConfigError):
    """Error of a hub, with the failure and a remedy. A cached model may be used instead."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


class NotOnHubError(HubError):
    """Error for a repository, revision or file that the hub says does not exist."""


class HubUnreachableError(HubError):
    """Error for a hub that cannot be connected to, or does not answer in time."""


class DownloadError(HubError):
    """Error of a download that had begun. A cached version would be another one, so it is not used instead."""


class _RetryableError(Exception):
    """Error of a request that may succeed when retried."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    size: int
    key: str  # the blob's name: SHA-256, or git's hash of a file that is not in LFS
    is_hash: bool = True


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub: its address and the variable of its token. `source` is its value of --model-source."""

    source: ModelSource
    name: str
    endpoint: str
    token_name: str
    another: str

    @property
    def token(self) -> str | None:
        return envs.hub_token(self.token_name)

    def headers(self) -> dict[str, str]:
        if (token := self.token) is None:
            return {}
        cookie = {"Cookie": f"m_session_id={token}"} if self.source == "modelscope" else {}
        return {"Authorization": f"Bearer {token}", **cookie}

    def file_address(self, repo: str, commit: str, path: str) -> str:
        if self.source == "modelscope":
            query = urlencode({"Revision": commit, "FilePath": path})
            return f"{self.endpoint}/api/v1/models/{repo}/repo?{query}"
        return f"{self.endpoint}/{repo}/resolve/{quote(commit, safe='')}/{quote(path)}"


def hub_of(source: ModelSource) -> Hub:
    if source == "modelscope":
        endpoint = envs.hub_endpoint("MODELSCOPE_ENDPOINT", "https://modelscope.cn")
        return Hub(source, "ModelScope", endpoint, "MODELSCOPE_API_TOKEN", "--model-source huggingface")
    endpoint = envs.hub_endpoint("HF_ENDPOINT", "https://huggingface.co")
    return Hub("huggingface", "Hugging Face", endpoint, "HF_TOKEN", "--model-source modelscope")


def fetch(wanted: HubRequest, say: Report, *, weights: bool = True) -> Path:
    """Return the GGUF file or the folder of `wanted`, downloaded if it is not cached. The cache is used if the hub does
    not answer; without it ModelScope is tried, if `wanted` allows that. Raises `ConfigError`."""
    other = replace(wanted, source="modelscope", or_modelscope=False) if wanted.or_modelscope else None
    cached = RepoCache(wanted.source, wanted.repo).find(wanted, weights=weights)
    if cached is not None:
        other = None
    elif other is not None:
        cached = RepoCache(other.source, other.repo).find(other, weights=weights)
    try:
        if envs.hub_offline():
            raise HubError("HF_HUB_OFFLINE is set", "unset it, or give a local folder or file")
        path = _ask(wanted, other, say, tries=TRIES if cached is None else 1, weights=weights)
    except DownloadError:
        raise
    except HubError as error:
        if cached is None and isinstance(error, NotOnHubError):
            raise
        if cached is None:
            raise HubError(f"{error.what}, and {wanted.repo} is not in the cache", error.remedy) from error
        say(f"{error.what}: using the cached {wanted.repo}")
        path = cached
    touch(path)
    return path


def _ask(wanted: HubRequest, other: HubRequest | None, say: Report, *, tries: int, weights: bool) -> Path:
    """Fetch `wanted` from its hub, or `other` from its own if the first hub does not answer. Raises `ConfigError`."""

    def fetched(one: HubRequest) -> Path:
        return Client(hub_of(one.source), tries).fetch(one, RepoCache(one.source, one.repo), say, weights=weights)

    try:
        return fetched(wanted)
    except HubUnreachableError as error:
        if other is None:
            raise
        say(f"{error.what}: looking for {other.repo} on {hub_of(other.source).name}")
        try:
            return fetched(other)
        except DownloadError:
            raise
        except HubError as second:
            raise HubError(f"{error.what}, {second.what}", error.remedy) from second


class Client:
    """HTTP client of one hub, which retries requests up to `tries` times."""

    def __init__(self, hub: Hub, tries: int) -> None:
        self._hub, self._tries = hub, tries
        self._http = httpx.Client(
            follow_redirects=True,
            timeout=httpx.Timeout(30.0, connect=10.0),
            headers={"User-Agent": f"minisgl/{own_version()}", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=2 * WORKERS),
        )

    def fetch(self, wanted: HubRequest, cache: RepoCache, say: Report, *, weights: bool) -> Path:
        with self._http:
            say(f"looking for {wanted.repo} on {self._hub.name}")
            commit, files = self._listing(wanted, cache, say)
            # whether there is a vision tower beside a file, only the hub knows
            named = (wanted.quant is not None or wanted.file is not None) and not wanted.mmproj
            if files is None and named and (path := cache.find(wanted, commit)) is not None:
                return path
            files = self._tree(wanted, commit, say) if files is None else files
            first, paths = choose(wanted, files, weights=weights)
            chosen = {path: files[path] for path in paths}
            if first is not None:
                parts = f" and {many - 1} more parts" if (many := sum(map(is_model, paths))) > 1 else ""
                tower = "" if is_model(paths[-1]) else f", {paths[-1]}"
                say(f"{wanted.repo}: {first}{parts}{tower}")
            self._download(wanted, commit, list(chosen.values()), cache, say)
            try:
                folder = cache.link(commit, {path: one.key for path, one in chosen.items()}, wanted.revision)
            except OSError as error:
                raise _disk(error, cache.folder) from error
            return folder if first is None else folder / first

    # listing

    def _listing(self, wanted: HubRequest, cache: RepoCache, say: Report) -> tuple[str, dict[str, HubFile] | None]:
        """Return the commit of the revision, and its files if the hub lists both at once (else None)."""
        revision = wanted.revision or MAIN[wanted.source]
        if wanted.source == "modelscope":
            query = urlencode({"Revision": revision, "Recursive": "True"})
            address = f"{self._hub.endpoint}/api/v1/models/{wanted.repo}/repo/files?{query}"
            body, _ = self._json(address, wanted, say)
            listed = self._checked(body, lambda said: said["Data"]["Files"])
            files = self._files(
                (one["Path"], one["Size"], one.get("Sha256")) for one in listed if one.get("Type") != "tree"
            )
            about = "\n".join(f"{one.path} {one.key}" for one in files.values())
            return hashlib.sha1(about.encode(), usedforsecurity=False).hexdigest(), files
        if _HEX.fullmatch(revision):
            return revision, None
        address = f"{self._hub.endpoint}/api/models/{wanted.repo}/revision/{quote(revision, safe='')}"
        body, _ = self._json(address, wanted, say)
        return self._checked(body, _commit_of), None

    def _tree(self, wanted: HubRequest, commit: str, say: Report) -> dict[str, HubFile]:
        address: str | None = f"{self._hub.endpoint}/api/models/{wanted.repo}/tree/{commit}?recursive=true"
        rows: list[dict[str, Any]] = []
        num_pages = 0
        while address is not None:
            body, links = self._json(address, wanted, say)
            rows += self._checked(body, list)
            num_pages += 1
            if len(rows) > MAX_FILES or num_pages > MAX_PAGES:
                raise HubError(f"{wanted.repo} has more than {MAX_FILES} files", "that is no model: check the spelling")
            address = links.get("next", {}).get("url")
        return self._files(
            (one["path"], one["size"], (one.get("lfs") or {}).get("oid") or one["oid"])
            for one in rows
            if one.get("type") == "file"
        )

    def _files(self, rows: Iterator[tuple[str, int, str | None]]) -> dict[str, HubFile]:
        """Return the listed files by path. Paths that would leave their folder are dropped."""

        def checked(rows: Iterator[tuple[str, int, str | None]]) -> dict[str, HubFile]:
            files = {}
            for path, size, key in rows:
                if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or "\0" in path:
                    continue
                if type(size) is not int or size < 0 or (key and not _HEX.fullmatch(key)):
                    raise ValueError(f"{path}: a size of {size!r}, a hash of {key!r}")
                named = f"{path} {size}".encode()
                files[path] = HubFile(path, size, key or hashlib.sha256(named).hexdigest(), is_hash=bool(key))
            return files

        files: dict[str, HubFile] = self._checked(rows, checked)
        return files

    def _checked(self, body: Any, read: Callable[[Any], Any]) -> Any:
        try:
            return read(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HubError(
                f"{self._hub.endpoint} does not answer as {self._hub.name} does ({error!r})",
                "check the variable for its address, or a proxy on the way",
            ) from error

    def _json(self, address: str, wanted: HubRequest, say: Report) -> tuple[Any, dict[str | None, dict[str, str]]]:
        for wait_s in _waits(self._tries):
            try:
                own = address.startswith(f"{self._hub.endpoint}/")
                answer = self._http.get(address, headers=self._hub.headers() if own else {})
                self._check(answer, wanted)
                return self._checked(answer, lambda one: one.json()), answer.links
            except (httpx.TransportError, _RetryableError) as error:
                self._wait(error, wait_s, say)
        raise AssertionError("the last wait raises")

    def _wait(self, error: Exception, wait_s: float | None, say: Report) -> None:
        """Sleep before the next try; `wait_s` None means there is none, and raises `HubError`."""
        retry_after_s = error.wait_s if isinstance(error, _RetryableError) else None
        if retry_after_s is not None and retry_after_s > MAX_WAIT_S:
            raise _too_many(self._hub, retry_after_s) from error
        if wait_s is None or isinstance(error, httpx.ProxyError | httpx.UnsupportedProtocol):
            kind = HubError if isinstance(error, _RetryableError) else HubUnreachableError
            raise kind(
                f"{self._hub.name} cannot be reached ({str(error) or type(error).__name__})",
                f"check the network and {self._hub.endpoint}, give a local folder or file, or try another hub "
                f"({self._hub.another})",
            ) from error
        if retry_after_s is not None:
            say(f"{self._hub.name} asks to wait {retry_after_s:.0f} s")
        time.sleep(max(wait_s, retry_after_s or 0.0))

    def _check(self, answer: httpx.Response, wanted: HubRequest) -> None:
        """Raise `HubError` for a permanent error status, `_RetryableError` for a temporary one."""
        hub, code, why = self._hub, answer.status_code, answer.headers.get("X-Error-Code", "")
        page = f"{hub.endpoint}/{wanted.repo}"
        if code == 429:
            raise _RetryableError("429 Too Many Requests", _retry_after(answer.headers.get("Retry-After")))
        if code >= 500 or code == 408:
            raise _RetryableError(f"it answers {code} {answer.reason_phrase}".strip())
        if code in (401, 403) and (why == "GatedRepo" or "gated" in answer.headers.get("X-Error-Message", "").lower()):
            account = f"the account of {hub.token_name} has no access" if hub.token else f"{hub.token_name} is not set"
            raise HubError(
                f"{wanted.repo} is gated on {hub.name} and {account} ({code})",
                f"accept its terms at {page}, then set {hub.token_name} to a token of that account",
            )
        if code in (401, 403) and hub.token:
            raise HubError(
                f"{hub.name} does not let {hub.token_name} read {wanted.repo} ({code})",
                "check the token, and that its account may see the repository",
            )
        if code in (401, 403):
            raise NotOnHubError(
                f"{wanted.repo} is not on {hub.name}, or is private ({code})",
                f"check the spelling, or set {hub.token_name}",
            )
        if code == 404 and why == "RevisionNotFound":
            raise NotOnHubError(f"{wanted.repo} has no revision {wanted.revision} (404)", f"see {page}")
        if code == 404:
            raise NotOnHubError(
                f"{wanted.repo} is not on {hub.name} (404)", f"check the spelling, or try another hub ({hub.another})"
            )
        if code >= 400:
            raise HubError(f"{hub.name} answers {code} {answer.reason_phrase}", f"see {page}")

    # files

    def _download(
        self, wanted: HubRequest, commit: str, files: Sequence[HubFile], cache: RepoCache, say: Report
    ) -> None:
        if all(cache.blob(file.key).exists() for file in files):
            return
        try:
            (cache.folder / "blobs").mkdir(parents=True, exist_ok=True)
            with _repository_lock(cache.folder, say):
                once = {file.key: file for file in files if not cache.blob(file.key).exists()}
                parts = _check_disk_space([(cache.blob(file.key), file) for file in once.values()], cache.folder)
                _Transfer(self._http, self._hub, self._check, wanted, commit, parts, say).run()
        except OSError as error:
            raise _disk(error, cache.folder) from error


def _commit_of(said: Any) -> str:
    """Return the commit hash of a revision's listing. Raises `KeyError`, `TypeError` or `ValueError` if it has none."""
    commit: str = said["sha"]
    if not _HEX.fullmatch(commit):
        raise ValueError(f"sha: {commit!r}")
    return commit


def _waits(tries: int = TRIES) -> Iterator[float | None]:
    """Yield the seconds to wait after each of `tries` tries; None after the last."""
    yield from (FIRST_WAIT_S * (2**i - 1) for i in range(tries - 1))
    yield None


def _too_many(hub: Hub, wait_s: float) -> HubError:
    return HubError(
        f"{hub.name} takes no more requests for {wait_s:.0f} s (429)",
        f"wait, or set {hub.token_name}: accounts may ask more; what has arrived is kept",
    )


def _retry_after(value: str | None) -> float:
    """Parse a Retry-After header, a number or a date; returns seconds, 1 if it is missing or malformed."""
    if value is None:
        return 1.0
    if value.isdecimal():
        return float(value)
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 1.0


@contextmanager
def _repository_lock(folder: Path, say: Report) -> Iterator[None]:
    """Lock this repository's downloads against other processes; waits for one that is running."""
    lock_file = folder.parent / ".locks" / folder.name / "minisgl.lock"
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process downloads it: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class PartialBlob:
    """A partly downloaded blob: its segments, and the progress of each, which is stored in a file next to it."""

    def __init__(self, blob: Path, file: HubFile) -> None:
        self.blob, self.file = blob, file
        self.data = blob.with_name(f"{blob.name}.minisgl.incomplete")
        self.notes = blob.with_name(f"{blob.name}.minisgl.progress")
        self.lengths = [min(SEGMENT, file.size - at) for at in range(0, file.size, SEGMENT)] or [0]
        self.done = array("Q", self._noted())
        self.rest = [i for i, length in enumerate(self.lengths) if self.done[i] < length]
        self.left = max(1, len(self.rest))  # segments that `_Transfer` still has to fetch; an empty file counts as one

    def _noted(self) -> list[int]:
        with suppress(OSError, ValueError):
            noted = array("Q", self.notes.read_bytes())
            if len(noted) == len(self.lengths) and self.data.stat().st_size == self.file.size:
                return [done if done <= length else 0 for done, length in zip(noted, self.lengths, strict=True)]
        return [0] * len(self.lengths)

    @property
    def num_done(self) -> int:
        return sum(self.done)

    def open(self) -> None:
        self._fd = os.open(self.data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, self.file.size)
        self._notes_fd = os.open(self.notes, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.pwrite(self._notes_fd, self.done.tobytes(), 0)

    def write(self, segment: int, data: bytes) -> None:
        """Write data of a segment, then record it, so that recorded bytes are always on disk."""
        at, view = segment * SEGMENT + self.done[segment], memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, at)
            at, view = at + written, view[written:]
        self.done[segment] += len(data)
        os.pwrite(self._notes_fd, self.done[segment : segment + 1].tobytes(), 8 * segment)

    def close(self) -> None:
        for descriptor in (self._fd, self._notes_fd):
            os.close(descriptor)

    def finish(self) -> None:
        """Rename the file to the blob if its hash is right, else remove it. Raises `HubError` if the hash is wrong."""
        is_git = len(self.file.key) == 40
        digest = hashlib.sha1(usedforsecurity=False) if is_git else hashlib.sha256()
        if is_git:
            digest.update(f"blob {self.file.size}\0".encode())
        with self.data.open("rb", buffering=0) as opened:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
        right = digest.hexdigest() == self.file.key or not self.file.is_hash
        if right:
            os.fsync(self._fd)
            os.replace(self.data, self.blob)
        else:
            self.data.unlink()
        self.notes.unlink()
        if not right:
            raise DownloadError(
                f"{self.file.path} arrived with another hash than the hub lists, and was removed",
                "repeat the command; if the error repeats, a proxy or a mirror changes files",
            )


_FREE_SPACE = "remove models (minisgl list, minisgl rm), or set HF_HOME to a folder on another disk"


def _check_disk_space(files: Sequence[tuple[Path, HubFile]], folder: Path) -> list[PartialBlob]:
    """Return the partial downloads of `files`. Raises `HubError` if the missing bytes do not fit on the disk."""
    disk, needed = shutil.disk_usage(folder), sum(file.size for _, file in files)
    free, parts = disk.free, list[PartialBlob]()
    if needed <= disk.total:
        parts = [PartialBlob(blob, file) for blob, file in files]
        needed -= sum(part.num_done for part in parts)
    if needed > free:
        raise DownloadError(
            f"{needed / 1e9:.2f} GB have to be fetched, and {free / 1e9:.2f} GB are free in {folder.parent}",
            _FREE_SPACE,
        )
    return parts


def _disk(error: OSError, folder: Path) -> HubError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DownloadError(f"the disk of {folder.parent} is full", f"{_FREE_SPACE}; what has arrived is kept")
    return DownloadError(f"{error.filename or folder}: {error.strerror or error}", "set HF_HOME to a folder for it")


def _raisable(error: Exception) -> Exception:
    """Return the error to raise for a worker's error: `HubError` and `OSError` unchanged, others as `DownloadError`."""
    if isinstance(error, HubError | OSError):
        return error
    broken = DownloadError(f"the download broke: {type(error).__name__}: {error}", "try again, or another hub")
    broken.__cause__ = error
    return broken


@dataclass
class _Transfer:
    """The download of all segments of all files, by several threads. The caller's thread reports progress."""

    http: httpx.Client
    hub: Hub
    check: Callable[[httpx.Response, HubRequest], None]
    wanted: HubRequest
    commit: str
    parts: Sequence[PartialBlob]
    say: Report
    _errors: list[Exception] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Download everything. Blocks. Raises `HubError` or `OSError`; received bytes are kept."""
        for part in self.parts:
            part.open()
        self._todo = deque((part, i) for part in self.parts for i in part.rest or [0])
        total, received = sum(part.file.size for part in self.parts), sum(part.num_done for part in self.parts)
        if received:
            self.say(f"{received / 1e6:.1f} of {total / 1e6:.1f} MB are already downloaded: requesting the rest")
        number = min(WORKERS, len(self._todo))
        threads = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(number)]
        text = f"downloading {self.wanted.repo} ({total / 1e6:.1f} MB)"
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_SHOW_S)
                    self.say(text, min(sum(part.num_done for part in self.parts), total - 1), total)
        except BaseException:
            self._stop.set()  # the threads may be waiting for bytes: they end with the process, or when bytes arrive
            raise
        for part in self.parts:
            part.close()
        if self._errors:
            raise _raisable(self._errors[0])
        if missing := [part.file.path for part in self.parts if not part.blob.is_file()]:
            raise DownloadError(f"{', '.join(missing)} of {self.wanted.repo} did not arrive", "repeat the command")
        self.say(text, total, total)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not self._todo:
                        return
                    part, segment = self._todo.popleft()
                self._segment(part, segment)
                with self._lock:
                    part.left -= 1
                    last = part.left == 0
                if last and not self._stop.is_set():
                    part.finish()
        # any error: otherwise the thread would end silently, and its segments count as fetched
        except Exception as error:
            self._errors.append(error)
            self._stop.set()

    def _segment(self, part: PartialBlob, segment: int) -> None:
        waits = _waits()
        while part.done[segment] < part.lengths[segment] and not self._stop.is_set():
            before = part.done[segment]
            try:
                self._stream(part, segment)
            except (httpx.TransportError, _RetryableError) as error:
                if part.done[segment] > before:
                    waits = _waits()
                self._wait(error, next(waits))

    def _wait(self, error: Exception, wait_s: float | None) -> None:
        retry_after_s = error.wait_s if isinstance(error, _RetryableError) else None
        if retry_after_s is not None and retry_after_s > MAX_WAIT_S:
            raise _too_many(self.hub, retry_after_s) from error
        if wait_s is None:
            done, total = sum(one.num_done for one in self.parts), sum(one.file.size for one in self.parts)
            raise DownloadError(
                f"the connection to {self.hub.name} broke {TRIES} times without receiving a byte "
                f"({str(error) or type(error).__name__})",
                f"{done / 1e6:.1f} of {total / 1e6:.1f} MB are kept, and the same command continues from there",
            ) from error
        self._stop.wait(max(wait_s, retry_after_s or 0.0))

    def _stream(self, part: PartialBlob, segment: int) -> None:
        begin, done, length = segment * SEGMENT, part.done[segment], part.lengths[segment]
        at, end = begin + done, begin + length
        whole = at == 0 and end == part.file.size
        headers = self.hub.headers() | ({} if whole else {"Range": f"bytes={at}-{end - 1}"})
        address = self.hub.file_address(self.wanted.repo, self._revision(), part.file.path)
        with self.http.stream("GET", address, headers=headers) as answer:
            self.check(answer, self.wanted)
            content_range = answer.headers.get("Content-Range", "")
            if answer.status_code == 206 and not content_range.startswith(f"bytes {at}-"):
                raise _RetryableError(f"asked for bytes from {at} on, it sends {content_range!r}")
            skip = 0 if answer.status_code == 206 else at  # the server ignores Range: skip the bytes already received
            for data in answer.iter_bytes():
                passed = data[skip:]
                skip -= len(data) - len(passed)
                part.write(segment, passed[: length - part.done[segment]])
                if self._stop.is_set() or part.done[segment] == length:
                    return
        raise _RetryableError("the file ended early")

    def _revision(self) -> str:
        return self.wanted.revision or MAIN["modelscope"] if self.wanted.source == "modelscope" else self.commit
