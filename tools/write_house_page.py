"""Draw docs/house.md, the rooms (folders) by floor with the allowed imports between them:
`python -m tools.write_house_page`.

The imports allowed in Python are the table of `tests/test_layering.py`; those of the crates come from their manifests.
A test fails when the page differs from the output.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.test_layering import MAY_IMPORT, PACKAGE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "house.md"
EVERYWHERE = ("config", "envs", "extension", "prompt_image", "sampling_params", "step", "utils")
"""Rooms omitted from the drawing: data, settings and small tools, which nearly all rooms import."""
Rooms = Mapping[str, set[str]]


def room_of(name: str) -> str:
    """Return the room of a module: the innermost folder with a row in `MAY_IMPORT`, else the first part of its name."""
    while "." in name and not (name in MAY_IMPORT and (PACKAGE / name.replace(".", "/")).is_dir()):
        name = name.rpartition(".")[0]
    return name


def python_rooms() -> dict[str, set[str]]:
    """Return the rooms that each room of the package may import."""
    rooms: dict[str, set[str]] = {}
    for name, targets in MAY_IMPORT.items():
        if not name.startswith("_"):
            called = rooms.setdefault(room_of(name), set())
            called |= {room_of(target) for target in targets if target != "_rust"} - {room_of(name)}
    return rooms


def crates() -> dict[str, set[str]]:
    """Return the crates of the workspace that each crate depends on; names are without `minisgl-`."""
    crates = {}
    for manifest in sorted(ROOT.glob("rust/*/Cargo.toml")):
        needed = tomllib.loads(manifest.read_text(encoding="utf-8")).get("dependencies", {})
        crates[short(manifest.parent.name)] = {short(name) for name, one in needed.items() if "path" in one}
    return crates


def short(crate: str) -> str:
    return crate.removeprefix("minisgl-")


def floor(rooms: Rooms, room: str) -> int:
    """Return the floor of a room: one above the highest room that it imports. Rooms have no import cycles."""
    return max((floor(rooms, called) + 1 for called in rooms[room]), default=0)


def drawn(rooms: Rooms, left_out: tuple[str, ...] = ()) -> str:
    """Return a line for each room, from the top floor down: its floor, its name, and the rooms that it may import."""
    shown = {room: called.difference(left_out) for room, called in rooms.items() if room not in left_out}
    order = sorted(shown, key=lambda room: (-floor(shown, room), room))
    width = max(map(len, shown))
    lines = (f"{floor(shown, room):2} {room:{width}}  {' '.join(sorted(shown[room]))}" for room in order)
    return "".join(line.rstrip() + "\n" for line in lines)


def written() -> str:
    return f"""# The house

Each line is a floor, a room, and the rooms that it may call; all of them lie below it. `tests/test_layering.py` holds
the table. The `__init__.py` of a folder and the `lib.rs` of a crate say what the room is for, what does not belong
there, and where to start reading. {", ".join(f"`{name}`" for name in EVERYWHERE)} are
left out of the drawing, because most rooms call them.

```
python/minisgl/
{drawn(python_rooms(), EVERYWHERE)}
rust/minisgl-
{drawn(crates())}```
"""


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
