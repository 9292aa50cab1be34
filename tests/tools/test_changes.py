"""What a change touches: files, importers of modules, dependants of crates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.repository import committed, git, write
from tests.test_layering import PACKAGE, imports_of, module_name
from tools.changes import ROOT, Imports, base_of, changed_files, crates_of, dependants_of, imports_in

FILES = {
    "python/minisgl/__init__.py": "",
    "python/minisgl/a/__init__.py": "from minisgl.a.inner import x\n",
    "python/minisgl/a/inner.py": "x = 1\n",
    "python/minisgl/b.py": "def f():\n    from minisgl import (\n        a,  # the room\n    )\n",
    "tests/helpers/h.py": "import minisgl.b as b, os\n",
    "tests/test_b.py": "from tests.helpers.h import b\n",
    "tests/test_none.py": "import os\n",
}


def test_changed_files_since_the_branch_left_main_have_what_is_not_committed_and_not_what_is_deleted(
    tmp_path: Path,
) -> None:
    root = committed(tmp_path, {**FILES, ".gitignore": "*.so\n"})
    git(root, "checkout", "-q", "-b", "topic")
    write(root, {"committed.py": ""})
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "One")
    git(root, "checkout", "-q", "main")
    write(root, {"of_main.py": ""})
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "Other")
    git(root, "checkout", "-q", "topic")
    write(root, {"untracked file.py": "", "ignored.so": "", "python/minisgl/b.py": "y = 2\n"})
    (root / "tests/test_none.py").unlink()
    assert changed_files(root) == ["committed.py", "python/minisgl/b.py", "untracked file.py"]
    assert changed_files(root, "topic") == ["python/minisgl/b.py", "untracked file.py"]


def test_a_revision_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such"):
        base_of(committed(tmp_path, FILES), "no-such")


def test_a_repository_without_main_differs_from_its_head(tmp_path: Path) -> None:
    root = committed(tmp_path, FILES)
    git(root, "branch", "-q", "-m", "trunk")
    write(root, {"new.py": ""})
    assert changed_files(root) == ["new.py"]


def test_distances_count_imports_of_the_package_and_not_those_of_helpers(tmp_path: Path) -> None:
    imports = Imports(committed(tmp_path, FILES))
    assert imports.distances(["python/minisgl/a/inner.py"]) == {
        "python/minisgl/a/inner.py": 0,
        "python/minisgl/a/__init__.py": 1,
        "python/minisgl/b.py": 2,
        "tests/helpers/h.py": 3,
        "tests/test_b.py": 3,
    }
    assert imports.reach(["tests/test_b.py"], "python/minisgl/a/inner.py")
    assert not imports.reach(["tests/test_none.py"], "python/minisgl/a/inner.py")


@pytest.mark.parametrize("folder", ["cli", "runner", "utils"])
def test_imports_are_those_that_the_parser_finds(folder: str) -> None:
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        missing = set(imports_of(source, module_name(file))) - imports_in(source)
        assert missing == set(), file


def test_dependants_of_a_crate_are_those_that_reach_it() -> None:
    assert crates_of(["rust/minisgl-store/src/lib.rs", "Cargo.toml", "rust/README.md"]) == ["minisgl-store"]
    assert dependants_of(ROOT, ["minisgl-store"]) == ["minisgl-cpu", "minisgl-py"]
    assert dependants_of(ROOT, ["minisgl-py"]) == []
