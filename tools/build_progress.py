"""Run a command that runs cargo, and show cargo's progress: `57 of 202 crates, 41 s: minisgl-kernels, tokenizers`.

On a terminal one line changes in place; elsewhere a line is printed every few seconds. All other output on stderr, such
as warnings and errors, is passed through. Exits with the command's exit code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

EVERY_S = 5.0
WIDTH = 100
PROGRESS = re.compile(r"Building \[[^]]*\] (\d+)/(\d+)(?:: (.*))?")
NAMES = re.compile(r"\s*(Compiling|Checking|Fresh|Downloading|Downloaded|Locking|Updating|Adding) ")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines_of(stream: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a stream as they arrive, also those that end with a carriage return, without colours."""
    left = b""
    while piece := os.read(stream.fileno(), 65536):
        *whole, left = re.split(rb"[\r\n]", left + piece)
        yield from (ESCAPES.sub("", line.decode(errors="replace")).rstrip() for line in whole)
    yield left.decode(errors="replace")


def status(line: str, seconds: float) -> str | None:
    """Return the text to show for a line of cargo's progress; `None` for any other line."""
    match = PROGRESS.search(line)
    if match is None:
        return None
    names = re.sub(r"\([^)]*\)|\.\.\.$", "", match[3] or "").strip(" ,")
    return f"{match[1]} of {match[2]} crates, {seconds:.0f} s{': ' if names else ''}{names}"


def main(command: list[str]) -> int:
    if not command:
        print("usage: python tools/build_progress.py COMMAND ...", file=sys.stderr)
        return 2
    terms = {"CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": str(WIDTH)}
    begin, shown = time.monotonic(), -EVERY_S
    on_terminal = sys.stderr.isatty()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **terms}) as process:
        assert process.stderr is not None
        for line in lines_of(process.stderr):
            now = time.monotonic() - begin
            if (text := status(line, now)) is not None:
                if on_terminal:
                    print(f"\r\x1b[K   {text[:WIDTH]}", end="", file=sys.stderr, flush=True)
                elif now - shown >= EVERY_S:
                    shown = now
                    print(f"   {text}", file=sys.stderr, flush=True)
            elif line and not NAMES.match(line):
                print(f"\r\x1b[K{line}" if on_terminal else line, file=sys.stderr, flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
