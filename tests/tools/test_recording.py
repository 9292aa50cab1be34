"""A shell that is typed into, and what is on its screen; and the recording that the README shows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import recording

PICTURE = recording.FILE


def shown(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_what_is_typed_and_what_is_printed_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pyte", reason="pyte is not installed (make recording)")
    script = ((recording.SHELL, "echo $((6*7)) | tr 4 x\r"), (recording.SHELL, ""))
    frames = recording.record(script, tmp_path)
    last = ["".join(cell.text for cell in line).rstrip() for line in frames[-1].screen]
    assert last[:3] == ["$ echo $((6*7)) | tr 4 x", "x2", "$"]
    assert [frame.at_s for frame in frames] == sorted(frame.at_s for frame in frames)


def test_what_does_not_come_is_an_error_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyte", reason="pyte is not installed (make recording)")
    monkeypatch.setattr(recording, "WAIT_S", 1.0)
    made: list[int] = []
    fork = recording.pty.fork
    monkeypatch.setattr(recording.pty, "fork", lambda: (made.append((both := fork())[0]), both)[1])
    with pytest.raises(RuntimeError, match="'no such prompt' did not come"):
        recording.record((("no such prompt", ""),), tmp_path)
    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], 0)


def test_the_recording_has_what_its_script_types() -> None:
    """One that was made by another script would show what nobody can type."""
    lines = shown(PICTURE.read_text(encoding="utf-8"))
    for prompt, typed in recording.CHAT:
        assert any(line.startswith(f"{prompt}{typed.rstrip()}".rstrip()) for line in lines), typed
    assert any(re.search(r"\[TTFT \d+ ms, \d+ tokens", line) for line in lines)
    assert any("Paris" in line for line in lines)
