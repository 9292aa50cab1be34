"""Frames are, byte for byte, what is recorded; the gateway's tests read the same files."""

from __future__ import annotations

import pytest

from minisgl.message import SCHEMA_VERSION, FromEngine, ToEngine
from minisgl.message.codec import LENGTH_BYTES, MessageError, decode_from_engine, decode_to_engine, sent_ns
from minisgl.message.prepared import Prepared
from tests.message.golden_frames import FOLDER, FROM_ENGINE, PREPARED, STEP, TO_ENGINE, frames


def recorded(name: str) -> bytes:
    """The frame without its length."""
    data = (FOLDER / f"{name}.bin").read_bytes()
    assert int.from_bytes(data[:LENGTH_BYTES], "little") == len(data) - LENGTH_BYTES
    return data[LENGTH_BYTES:]


@pytest.mark.parametrize("name", frames())
def test_frames_are_as_recorded(name: str) -> None:
    """Other bytes for the same messages are another schema version: `python -m tests.message.golden_frames`."""
    assert frames()[name][LENGTH_BYTES:] == recorded(name)


def test_nothing_else_is_recorded() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == frames().keys()


def test_every_kind_of_message_is_recorded() -> None:
    kinds = {type(one) for many in (*TO_ENGINE.values(), *FROM_ENGINE.values()) for one in many}
    assert kinds == {*ToEngine.__args__, *FromEngine.__args__}
    assert {type(one) for one in PREPARED.values()} == {*Prepared.__args__}


def test_records_are_read() -> None:
    for name, to_engine in TO_ENGINE.items():
        assert decode_to_engine(recorded(name)) == to_engine, name
    for name, from_engine in FROM_ENGINE.items():
        assert decode_from_engine(recorded(name)) == from_engine, name
    assert decode_from_engine(recorded("stamped")) == [STEP]
    assert sent_ns(recorded("stamped")) == 2**62 + 5


@pytest.mark.parametrize("name", ["foreign_version", "foreign_version_stamped"])
def test_another_version_is_refused_with_both_named(name: str) -> None:
    with pytest.raises(MessageError, match=f"^schema version {SCHEMA_VERSION + 1}, this side speaks {SCHEMA_VERSION}$"):
        decode_from_engine(recorded(name))
