"""Find what a change touches: files that differ, importers of Python modules, dependants of Rust crates.

Invariants: only git and the sources are read, nothing is imported, so that a module that no longer imports can be
analysed; lists are sorted, so that two runs over the same tree choose the same tests.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import defaultdict, deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ["--locked", "--profile", "serve", "--config", "rust/tests.toml"]  # of `cargo test`, as in the Makefile
MAIN = ("main", "origin/main")
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n(]*))|import[ \t]+([^\n]*))"
    r"|import_module\(\s*[\"']([\w.]+)[\"']",
    re.MULTILINE,
)
COMMENT = re.compile(r"#[^\n]*")


def git(root: Path, *args: str) -> str:
    """Return the output of a git command. Raises `CalledProcessError` if git fails."""
    return subprocess.run(["git", *args], cwd=root, check=True, capture_output=True, text=True).stdout


def base_of(root: Path, since: str | None = None) -> str:
    """Return the commit where this branch left `since`, or main; HEAD in a repository without main."""
    for name in (since,) if since else MAIN:
        try:
            return git(root, "merge-base", name, "HEAD").strip()
        except subprocess.CalledProcessError:
            continue
    if since:
        raise ValueError(f"{since}: no such git revision, or it has no common ancestor with HEAD")
    return "HEAD"


def changed_files(root: Path, since: str | None = None) -> list[str]:
    """Return the files that differ from `base_of`, uncommitted and untracked ones included, deleted ones not."""
    names = git(root, "diff", "--name-only", "--no-renames", "--diff-filter=d", "-z", base_of(root, since))
    names += git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for name in names.split("\0") if name})


def imports_in(source: str) -> set[str]:
    """Return the dotted names that a Python source imports anywhere. A name of `from a import b` is `a.b`, as `b` may
    be a module."""
    found: set[str] = set()
    for package, several, some, plain, by_name in IMPORT.findall(source):
        names = COMMENT.sub("", several or some or plain).replace("\\", "").split(",")
        words = [name.split()[0] for name in names if name.strip()]
        found.update(f"{package}.{word}" if package else word for word in words)
        if by_name:
            found.add(by_name)
    return found


def module_of(file: str) -> str:
    """Return a file's dotted module name: `minisgl.a.b` for a/b.py, and `minisgl.a` for a/__init__.py."""
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[parts[0] == "python" :]).removesuffix(".__init__")


class Imports:
    """Import graph of all Python files that git does not ignore."""

    def __init__(self, root: Path) -> None:
        listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.py", "*.pyi")
        files = [name for name in sorted(set(listed.split("\0"))) if name and (root / name).is_file()]
        self.sources = {file: (root / file).read_text(encoding="utf-8") for file in files}
        by_module = {module_of(file): file for file in files}
        self.imported: dict[str, set[str]] = {}
        self.importers: defaultdict[str, set[str]] = defaultdict(set)
        for file, source in self.sources.items():
            found = {self._file_of(name, by_module) for name in imports_in(source)} - {None, file}
            self.imported[file] = {one for one in found if one}
            for one in self.imported[file]:
                self.importers[one].add(file)

    @staticmethod
    def _file_of(name: str, by_module: dict[str, str]) -> str | None:
        """Return the file of the longest prefix of a dotted name that is a module here."""
        while name and name not in by_module:
            name = name.rpartition(".")[0]
        return by_module.get(name)

    def distances(self, changed: list[str]) -> dict[str, int]:
        """Return, for each file that reaches a changed one, the number of imports of package modules in between.
        Imports of test helpers count 0: a test that starts a server through a helper is as near as the helper."""
        distances = {file: 0 for file in changed if file in self.sources}
        waiting = deque(distances)
        while waiting:
            file = waiting.popleft()
            step = 0 if file.startswith("tests/") else 1
            for importer in self.importers[file]:
                if distances.get(importer, 1 << 30) > distances[file] + step:
                    distances[importer] = distances[file] + step
                    (waiting.append if step else waiting.appendleft)(importer)
        return distances

    def reach(self, files: list[str], target: str) -> bool:
        """Return true if one of these files imports `target`, directly or indirectly."""
        seen, waiting = set(files), list(files)
        while waiting:
            new = self.imported.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return target in seen


def is_test(file: str) -> bool:
    return bool(re.fullmatch(r"tests/(?:.*/)?test_\w+\.py", file))


def crates_of(files: list[str]) -> list[str]:
    """Return the Rust crates that these files belong to."""
    return sorted({file.split("/")[1] for file in files if file.startswith("rust/") and file.count("/") > 1})


def dependants_of(root: Path, crates: list[str]) -> list[str]:
    """Return the workspace's other crates that depend on these, directly or indirectly."""
    needs = {}
    for manifest in sorted(root.glob("rust/*/Cargo.toml")):
        read = tomllib.loads(manifest.read_text(encoding="utf-8"))
        needs[manifest.parent.name] = {name for name, one in read.get("dependencies", {}).items() if "path" in one}
    dependants = set(crates)
    while new := {name for name, needed in needs.items() if needed & dependants} - dependants:
        dependants |= new
    return sorted(dependants - set(crates))
