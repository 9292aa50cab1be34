"""The caches of hubs: finding models without asking a hub, listing them, removing them.

The layout is the one of huggingface_hub, whose cache for models this is: `models--OWNER--REPO` with `blobs/HASH`,
`snapshots/COMMIT/PATH` (links to blobs) and `refs/BRANCH` (a commit).

Invariants: a snapshot that minisgl fetches is linked only when all its requested files are there; only listed entries
are removed, and a blob that another snapshot links to stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisgl import envs
from minisgl.config import ConfigError, ModelSource
from minisgl.weights.hub_names import INDEX, HubRequest, choose, gguf_models, mmprojs, quant_of

MAIN: dict[ModelSource, str] = {"huggingface": "main", "modelscope": "master"}
UNFINISHED = "unfinished"
_BLOCK = 512


def root(source: ModelSource) -> Path:
    return envs.cache_dir() / "modelscope" if source == "modelscope" else envs.hf_cache_dir()


@dataclass(frozen=True, slots=True)
class RepoCache:
    """The cache folder of one repository. It may not exist."""

    source: ModelSource
    repo: str

    @property
    def folder(self) -> Path:
        return root(self.source) / f"models--{self.repo.replace('/', '--')}"

    def blob(self, key: str) -> Path:
        return self.folder / "blobs" / key

    def commit(self, revision: str | None) -> str | None:
        """Return the commit of a branch or tag when it was last fetched; None if it was not."""
        with contextlib.suppress(OSError):
            return (self.folder / "refs" / (revision or MAIN[self.source])).read_text(encoding="utf-8").strip()
        return None

    def snapshots(self) -> list[Path]:
        """Return the folders of the cached snapshots, the newest first."""
        folders = [folder for folder in (self.folder / "snapshots").glob("*") if folder.is_dir()]
        return sorted(folders, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)

    def find(self, wanted: HubRequest, commit: str | None = None, *, weights: bool = True) -> Path | None:
        """Return the complete cached file or folder of `wanted`, at `commit`, its revision, or any; else None."""
        named = commit or self.commit(wanted.revision) or wanted.revision
        folders = [] if named is None else [self.folder / "snapshots" / named]
        if commit is None and wanted.revision is None:
            folders += self.snapshots()
        return next((path for snapshot in folders if (path := _found(snapshot, wanted, weights)) is not None), None)

    def link(self, commit: str, files: dict[str, str], revision: str | None) -> Path:
        """Link existing blobs as the snapshot of `commit`, by path, and return its folder."""
        snapshot = self.folder / "snapshots" / commit
        for path, key in files.items():
            pointer = snapshot / path
            pointer.parent.mkdir(parents=True, exist_ok=True)
            if not pointer.exists():  # another process may create it, too
                fresh = pointer.with_name(f"{pointer.name}.{os.getpid()}.tmp")
                fresh.symlink_to(os.path.relpath(self.blob(key), pointer.parent))
                os.replace(fresh, pointer)
        if (name := revision or MAIN[self.source]) != commit:
            ref = self.folder / "refs" / name
            ref.parent.mkdir(parents=True, exist_ok=True)
            fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            fresh.write_text(commit, encoding="utf-8")
            os.replace(fresh, ref)
        return snapshot


def _found(snapshot: Path, wanted: HubRequest, weights: bool) -> Path | None:
    paths = [one.relative_to(snapshot).as_posix() for one in snapshot.rglob("*") if one.is_file()]
    try:
        first, files = choose(wanted, paths, weights=weights)
    except ConfigError:
        return None
    if first is not None:
        return snapshot / first
    return snapshot if not weights or _is_whole(snapshot, files) else None


def _is_whole(snapshot: Path, files: list[str]) -> bool:
    if INDEX not in files:
        return True
    try:
        return set(json.loads((snapshot / INDEX).read_bytes())["weight_map"].values()) <= set(files)
    except (OSError, ValueError, KeyError, AttributeError):
        return True  # the loader reports the error


def touch(path: Path) -> None:
    """Update the access time of a model's files, for the listing: file systems often do not record reads."""
    with contextlib.suppress(OSError):
        for file in [path] if path.is_file() else path.glob("*.safetensors"):
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the cache listing: a model that `--model` accepts by this name, or an unfinished download."""

    source: ModelSource
    repo: str
    quant: str
    files: tuple[Path, ...]  # links to blobs, or unfinished blobs

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    def blobs(self) -> set[Path]:
        return {file.resolve() for file in self.files}

    @property
    def num_bytes(self) -> int:
        return sum(min(stat.st_size, stat.st_blocks * _BLOCK) for stat in self._stats())

    @property
    def used_ns(self) -> int:
        return max((max(stat.st_atime_ns, stat.st_mtime_ns) for stat in self._stats()), default=0)

    def _stats(self) -> Iterator[os.stat_result]:
        for blob in self.blobs():
            with contextlib.suppress(OSError):
                yield blob.stat()


def entries() -> list[Entry]:
    """Return all entries of the caches, sorted by name."""
    all_entries: list[Entry] = []
    for source in MAIN:
        for folder in root(source).glob("models--*"):
            repo = folder.name.removeprefix("models--").replace("--", "/")
            if folder.is_dir():
                all_entries += _entries(source, repo, folder)
    return sorted(all_entries, key=lambda entry: (entry.name.lower(), entry.source))


def _entries(source: ModelSource, repo: str, folder: Path) -> Iterator[Entry]:
    by_quant: dict[str, list[Path]] = {}
    for snapshot in (folder / "snapshots").glob("*"):
        links = {one.relative_to(snapshot).as_posix(): one for one in snapshot.rglob("*") if one.is_file()}
        towers = dict[str, Path]()  # of models that are here, each with all its own
        for first, parts in (models := gguf_models(links)).items():
            towers |= (own := {path: links[path] for path in mmprojs(first, links)})
            by_quant.setdefault(quant_of(first), []).extend([*(links[part] for part in parts), *own.values()])
        in_models = {*towers, *(part for parts in models.values() for part in parts)}
        by_quant.setdefault("", []).extend(one for path, one in links.items() if path not in in_models)
    by_quant[UNFINISHED] = [
        one for one in (folder / "blobs").glob("*") if one.name.endswith((".incomplete", ".progress"))
    ]
    for quant, files in by_quant.items():
        if files:
            yield Entry(source, repo, quant, tuple(files))


def remove(entry: Entry) -> int:
    """Remove an entry. Returns the bytes freed, which are those of blobs that no other entry uses. Raises `OSError`."""
    folder = RepoCache(entry.source, entry.repo).folder
    others = (one for one in _entries(entry.source, entry.repo, folder) if one.quant != entry.quant)
    own_links = set(entry.files) - {file for other in others for file in other.files}
    blobs, freed = {link.resolve() for link in own_links}, 0
    still_linked = {
        link.resolve() for link in (folder / "snapshots").rglob("*") if link.is_file() and link not in own_links
    }
    for link in own_links:
        if link.is_symlink():
            link.unlink()
    for blob in blobs - still_linked:
        with contextlib.suppress(FileNotFoundError):
            stat = blob.stat()
            blob.unlink()
            freed += min(stat.st_size, stat.st_blocks * _BLOCK)
    for parent in sorted((folder / "snapshots").rglob("*"), reverse=True):
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
    if not any((folder / "snapshots").glob("*")) and not any((folder / "blobs").glob("*")):
        shutil.rmtree(folder)  # also refs and lists of files
    return freed
