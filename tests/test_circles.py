"""No file, and no room, imports another that leads back to it, in Python and in Rust: read out of the sources.

An import counts wherever it stands: in a function, or for types only. In Rust `mod name;` says where a file stands and
is no import; a name that a `mod.rs` passes on counts as that file's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layering import PACKAGE, ROOT, imports_of, module_name

Graph = dict[str, set[str]]


def circle(graph: Graph) -> list[str]:
    """One of them, or nothing."""
    try:
        TopologicalSorter({name: targets - {name} for name, targets in graph.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def python_graph(sources: dict[str, str]) -> Graph:
    """By module, `minisgl.a.b`; a package's own file has the name of the package."""

    def file_of(target: str) -> str | None:
        """The longest beginning of a dotted name that is a module of the package; `minisgl` alone is none of it."""
        while "." in target and target not in sources:
            target = target.rpartition(".")[0]
        return target if target in sources else None

    found: Graph = {}
    for name, source in sources.items():
        targets = {file_of(target) for target in imports_of(source, name) if not target.startswith("minisgl._rust")}
        found[name] = {target for target in targets if target}
    return found


PATH = re.compile(r"(?<![\w:])(\w+)((?:::\w+)+)?(?:::\{([^;]*?)\}(?=;))?", re.S)


class Crate:
    """The files of one crate by path of modules, `radix::tree`; its root is the empty name."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.paths = {name: list(paths_in(source)) for name, source in sources.items()}
        self.passed_on = {name: list(paths_in(source, "pub")) for name, source in sources.items()}

    def graph(self) -> Graph:
        found: Graph = {}
        for name, paths in self.paths.items():
            targets = {self.file_of(path, name) for path in paths}
            found[name] = {target for target in targets if target is not None} - {name}
        return found

    def file_of(self, path: list[str], here: str) -> str | None:
        """Where a path of `here` leads: the longest beginning that is a file, or where that has the name from."""
        at = here.split("::") if here else []
        first, *rest = path
        if first == "crate":
            at = []
        elif first == "super":
            at = at[:-1]
        elif first != "self":
            if "::".join([*at, first]) not in self.paths:
                return None
            at = [*at, first]
        while rest and (rest[0] == "super" or "::".join([*at, rest[0]]) in self.paths):
            at = at[:-1] if rest[0] == "super" else [*at, rest[0]]
            rest = rest[1:]
        file = "::".join(at)
        for source in self.passed_on[file]:
            if rest and file != here and source[-1] == rest[0]:
                return self.file_of(source, file) or file
        return file


def paths_in(source: str, visibility: str = "") -> Iterator[list[str]]:
    """The paths in a file without its tests; with a visibility only those of such `use`."""
    text = re.sub(r"//[^\n]*", "", source.split("#[cfg(test)]\nmod tests {", maxsplit=1)[0])
    if visibility:
        text = "\n".join(re.findall(rf"\b{visibility}(?:\(\w+\))? use ([^;]*;)", text))
    for first, rest, group in PATH.findall(text):
        if rest or group:  # else a word, or `pub(crate)`
            for item in re.split(r"[,{}\s]+", group) if group else [""]:
                yield [part for part in f"{first}{rest}::{item}".split("::") if part]


def rust_sources(crate: Path) -> dict[str, str]:
    """The files of a crate but for its tests."""
    found = {}
    for file in sorted((crate / "src").rglob("*.rs")):
        parts = file.relative_to(crate / "src").with_suffix("").parts
        if parts[-1] != "tests":
            found["::".join(parts[:-1] if parts[-1] in ("mod", "lib") else parts)] = file.read_text()
    return found


def package_sources() -> dict[str, str]:
    return {
        module_name(file).removesuffix(".__init__"): file.read_text()
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != PACKAGE / "__init__.py"
    }


def test_no_circle_between_the_files_of_the_package() -> None:
    assert circle(python_graph(package_sources())) == []


def test_no_circle_between_the_rooms_of_the_package() -> None:
    rooms: Graph = {}
    for name, targets in python_graph(package_sources()).items():
        rooms.setdefault(name.split(".")[1], set()).update(target.split(".")[1] for target in targets)
    assert circle(rooms) == []


@pytest.mark.parametrize("crate", sorted(file.parent.name for file in ROOT.glob("rust/*/Cargo.toml")))
def test_no_circle_between_the_files_of_a_crate(crate: str) -> None:
    assert circle(Crate(rust_sources(ROOT / "rust" / crate)).graph()) == []
