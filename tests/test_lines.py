"""Each room of the repository has a ceiling of lines (tests/lines.json), which only falls.

A change that needs more raises the ceiling in a commit of its own, whose message says why. `python tests/test_lines.py`
lowers the ceilings of rooms that have shrunk; it raises none.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / "tests" / "lines.json"
SOURCE = {".py", ".pyi", ".rs", ".js", ".ts", ".css", ".html", ".jinja"}
FOLDERS = {"python": SOURCE, "rust": SOURCE, "tests": SOURCE, "tools": SOURCE, "benchmark": SOURCE, "docs": {".md"}}
"""The suffixes of the files that are counted below each folder."""
WHOLE = {"tools", "benchmark", "docs"}
"""Folders that are one room each; the rooms of the others are the folders in them."""
LEFT_OUT = {"__pycache__", "node_modules", "vendor", "runs"}
SLACK = 0.02
"""The fraction by which a ceiling may stand above its room: a small change needs no change of ceilings."""


def room_of(file: Path) -> str:
    """Return the room of a file, by its path from the root: `python/server`, `rust/minisgl-core`, `docs`."""
    top, *rest = file.parts[:-1]
    if top == "python":
        rest = rest[1:]  # python/minisgl
    return top if top in WHOLE else "/".join([top, *(rest[:1] or ["."])])


def lines_by_room() -> Counter[str]:
    """Count the lines of each room's files."""
    found: Counter[str] = Counter()
    for folder, suffixes in FOLDERS.items():
        for file in (ROOT / folder).rglob("*"):
            path = file.relative_to(ROOT)
            if file.suffix in suffixes and not LEFT_OUT.intersection(path.parts):
                found[room_of(path)] += file.read_bytes().count(b"\n")
    return found


def slack(lines: int) -> int:
    """Return how many lines a ceiling may stand above a room of `lines`."""
    return max(20, int(lines * SLACK))


def read_ceilings() -> dict[str, int]:
    ceilings: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    return ceilings


def test_no_room_has_more_lines_than_its_ceiling() -> None:
    ceilings = read_ceilings()
    more = {room: f"{lines} of {ceilings.get(room, 0)}" for room, lines in lines_by_room().items()}
    over = {room: more[room] for room, lines in lines_by_room().items() if lines > ceilings.get(room, 0)}
    assert not over, f"too many lines: {over}: delete some, or raise tests/lines.json in a commit that says why"


def test_a_ceiling_falls_with_its_room() -> None:
    rooms = lines_by_room()
    high = {room: most for room, most in read_ceilings().items() if most > rooms[room] + slack(rooms[room])}
    assert not high, f"lower these by `python tests/test_lines.py`: {high}"


if __name__ == "__main__":
    before = read_ceilings() if CEILINGS.exists() else {}
    after = {room: min(lines, before.get(room, lines)) for room, lines in sorted(lines_by_room().items())}
    CEILINGS.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
