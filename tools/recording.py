"""Record a terminal session for the README, from a real run: `python -m tools.recording [FILE]`, by default
docs/img/terminal.svg. Types into a shell in a pseudo terminal, and reads its screen by a terminal emulator (pyte).

Invariants: everything shown was printed; only pauses are shortened (`LONGEST_S`). Keys are sent when the screen shows
the prompt that waits for them, never after a fixed time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.terminal_svg import Cell, Frame, Screen, shorten, svg

FILE = Path(__file__).resolve().parent.parent / "docs" / "img" / "terminal.svg"
COLUMNS, ROWS = 96, 26
LONGEST_S = 1.2  # of a pause in the picture
FRAME_S = 0.04  # output within this time is one frame
WAIT_S = 120.0  # timeout in seconds; expiry is a failure
KEY_S = 0.045  # between two keys that are typed
SHELL = "$ "
PROMPT = "> "

# Pairs of the prompt to wait for at the beginning of the cursor's line, and the text then typed.
CHAT: tuple[tuple[str, str], ...] = (
    (SHELL, "minisgl chat --model smollm2 --temperature 0 --max-tokens 80\r"),
    (PROMPT, "/stats\r"),
    (PROMPT, "Name the capital of France.\r"),
    (PROMPT, "Write a Python function that adds two numbers.\r"),
    (PROMPT, "/exit\r"),
    (SHELL, ""),
)
"""Prompts to wait for and keys to type. The chat starts its own server; `/stats` shows figures below each answer."""


class Recorder:
    """Program in a pseudo terminal, and all its screens so far."""

    def __init__(self, typed: Sequence[str], env: dict[str, str]) -> None:
        import pyte  # by `make recording`, into a folder of its own

        class Answering(pyte.Screen):  # type: ignore[misc,name-defined]
            """Terminal screen that answers a program's queries, such as for the cursor's position."""

            def write_process_input(screen, data: str) -> None:
                os.write(self._terminal, data.encode())

        self._screen: Any = Answering(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.frames: list[Frame] = []
        self._began = time.monotonic()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            try:
                os.execvpe(typed[0], list(typed), env)
            finally:
                os._exit(127)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def text(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    def screen(self) -> Screen:
        return tuple(
            tuple(
                Cell(found.data, found.fg, found.bold)
                for found in (self._screen.buffer[row][column] for column in range(COLUMNS))
            )
            for row in range(ROWS)
        )

    def pump(self, wait_s: float = FRAME_S) -> bool:
        """Read the output of the next `wait_s` seconds into one frame. Return false if the program has ended."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                try:
                    self._stream.feed(os.read(self._terminal, 65536))
                except OSError:  # its last holder has closed it
                    return False
        screen = self.screen()
        if not self.frames or self.frames[-1].screen != screen:
            self.frames.append(Frame(time.monotonic() - self._began, screen))
        return True

    def until(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not seen():
            if not self.pump() or time.monotonic() > deadline:
                raise RuntimeError(f"recording: {what} did not come; the screen:\n" + "\n".join(self.text()))

    def waits_with(self, prompt: str) -> bool:
        """Return true if the cursor is right after `prompt` at the beginning of its line."""
        cursor = self._screen.cursor
        return cursor.x == len(prompt) and self._screen.display[cursor.y].startswith(prompt)

    def type(self, text: str) -> None:
        for key in text:
            os.write(self._terminal, key.encode())
            self.pump(KEY_S)

    def close(self) -> None:
        """End the program and its children by the terminal's hangup, which a shell passes on."""
        os.close(self._terminal)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGHUP)
        os.waitpid(self.pid, 0)


def record(script: Sequence[tuple[str, str]], folder: Path) -> list[Frame]:
    """Return the frames of a shell session typed from `script`. `folder` gets a `minisgl` for its PATH."""
    command = folder / "minisgl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m minisgl "$@"\n')
    command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PS1": SHELL,
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(folder),  # no suggestions from an earlier history
    }
    recorder = Recorder(["bash", "--norc", "--noprofile", "-i"], env)
    try:
        for prompt, typed in script:
            recorder.until(lambda prompt=prompt: recorder.waits_with(prompt), repr(prompt))  # type: ignore[misc]
            recorder.type(typed)
    finally:
        recorder.close()
    return recorder.frames


def main(file: Path = FILE) -> int:
    with tempfile.TemporaryDirectory() as folder:
        frames = record(CHAT, Path(folder))
    file.parent.mkdir(parents=True, exist_ok=True)
    title = "A terminal: minisgl chat starts a server with the embedded model, answers two questions, and ends it"
    file.write_text(svg(shorten(frames, LONGEST_S), title), encoding="utf-8")
    print(f"{file.name}: {len(frames)} screens in {frames[-1].at_s:.1f} s, {file.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
