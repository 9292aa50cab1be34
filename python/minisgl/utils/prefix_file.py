"""A file with the KV pages of one prefix and, for a model with states, one state. `minisgl cache export` writes it, to
be copied to another machine.

Invariants: a damaged file is refused by name before any of it is stored; a file says which model and arithmetic
computed its pages and from which tokens, so that the importer computes the pages' keys itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ParamSpec, Protocol, TypeAlias

import msgspec

from minisgl.config import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAGIC = b"minisgl pages of a prefix, 1\n"
_DIGEST = hashlib.sha256().digest_size
_MOST_HEAD = 64 * 2**20
_AT_ONCE = 16  # pages
P = ParamSpec("P")
Ids: TypeAlias = "npt.NDArray[np.int32]"
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Header of a prefix file. `identity` is what computed the pages (engine/page_store.py). If the model has states,
    the state after `state_behind` pages follows the pages, with `state_bytes` bytes; else both are 0."""

    identity: bytes
    page_size: Count
    page_bytes: Size
    tokens: Annotated[list[Token], msgspec.Meta(min_length=1)]
    state_bytes: Size = 0
    state_behind: Size = 0

    @property
    def ids(self) -> Ids:
        import numpy as np  # slow to import, and not needed for --help

        return np.array(self.tokens, np.int32)

    @property
    def num_pages(self) -> int:
        return len(self.tokens) // self.page_size

    @property
    def body_bytes(self) -> int:
        return self.num_pages * self.page_bytes + self.state_bytes


class Pages(Protocol):
    """The methods of a `PageStore` that an import needs."""

    def put(self, tokens: Ids, first: int, pages: Sequence[bytes]) -> None: ...

    def put_state(self, tokens: Ids, num_pages: int, state: bytes) -> None: ...


def is_prefix_file(path: Path) -> bool:
    """Return True if the file begins like a prefix file. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def write(path: Path, head: Head, pages: Iterable[bytes]) -> None:
    """Write a prefix file that only its owner can read. It appears as a whole or not at all. Raises `OSError`."""
    packed = msgspec.msgpack.encode(head)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for data in (MAGIC, len(packed).to_bytes(4, "little"), packed, *pages):
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_head(path: str) -> Head:
    """Read and check the header of a prefix file. Raises `ConfigError`."""
    return _opened(path, _head)


def take_in(path: str, store_for: Callable[[Head], Pages]) -> Head:
    """Import a prefix file into the store that `store_for` opens for it, if it is whole. Raises `ConfigError`."""

    def work(file: BinaryIO) -> Head:
        head = _head(file)
        begin = file.tell()
        file.seek(0)
        digest, left = hashlib.sha256(), begin + head.body_bytes
        while left and (data := file.read(min(left, 2**20))):
            digest.update(data)
            left -= len(data)
        if file.read(_DIGEST) != digest.digest():
            raise ValueError("it is damaged: its digest does not match")
        store = store_for(head)
        file.seek(begin)
        for first in range(0, head.num_pages, _AT_ONCE):
            count = min(_AT_ONCE, head.num_pages - first)
            pages = [file.read(head.page_bytes) for _ in range(count)]
            _written(path, store.put, head.ids, first, pages)
        if head.state_bytes:
            state = file.read(head.state_bytes)
            _written(path, store.put_state, head.ids, head.state_behind, state)
        return head

    return _opened(path, work)


def _written(path: str, put: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        put(*args, **kwargs)
    except OSError as error:
        raise ConfigError(f"{path}: its pages cannot be written: {error}") from error


def _opened(path: str, work: Callable[[BinaryIO], Head]) -> Head:
    try:
        with Path(path).expanduser().open("rb") as file:
            return work(file)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: {reason}") from error


def _head(file: BinaryIO) -> Head:
    """Read the header of a prefix file. Raises `ValueError` if it is damaged or implies another file size."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError("is not a file that minisgl cache export wrote")
    length = int.from_bytes(file.read(4), "little")
    if length > _MOST_HEAD:
        raise ValueError("it is damaged: its header is too long")
    try:
        head = msgspec.msgpack.decode(file.read(length), type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is damaged: {error}") from error
    size = len(MAGIC) + 4 + length + head.body_bytes + _DIGEST
    if len(head.tokens) % head.page_size or os.fstat(file.fileno()).st_size != size:
        raise ValueError("it is damaged: its size is wrong")
    if head.state_behind >= head.num_pages or bool(head.state_behind) != bool(head.state_bytes):
        raise ValueError("it is damaged: its state does not follow one of its pages")
    return head


def what_differs(theirs: bytes, ours: bytes) -> list[str]:
    """Return the sorted names of the fields in which two identities differ. Raises `ValueError` if one is invalid."""
    a, b = (dict(_flat(msgspec.json.decode(one, type=dict[str, Any]))) for one in (theirs, ours))
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _flat(said: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in said.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value
