"""Small git repositories, for tests of tools that analyse a change."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(root: Path, *args: str) -> None:
    """Run a git command with a fixed author, independent of the machine."""
    author = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *author, *args], cwd=root, check=True, capture_output=True)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def committed(root: Path, files: dict[str, str]) -> Path:
    """Return `root` as a repository whose branch main has these files."""
    git(root, "init", "-q", "-b", "main")
    write(root, files)
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "Begin")
    return root
