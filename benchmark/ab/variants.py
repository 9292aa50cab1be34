"""The two sides of a comparison: flags, environment and git revision of a server.

A revision is a checkout of its own (a git worktree in a temporary folder) with its own extension, built there by cargo;
both are gone at the end.

Invariants: this checkout and its extension stay as they are; a variant without a revision is this checkout.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minisgl.bench.server_process import Launch
from minisgl.config import ConfigError

CARGO = ("cargo", "build", "--release", "--locked", "-p", "minisgl-py", "--features", "extension-module")
LIBRARIES = ("lib_rust.so", "lib_rust.dylib")
EXTENSION = "_rust.abi3.so"


@dataclass(frozen=True, slots=True)
class Variant:
    """`flags` come after those that both variants share; `env` is set over the caller's environment."""

    name: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    revision: str | None = None

    def launch(self, shared: Sequence[str], source: Path | None) -> Launch:
        return Launch((*shared, *self.flags), dict(self.env), source)

    def describe(self) -> str:
        parts = [shlex.join(self.flags), *(f"{key}={value}" for key, value in self.env)]
        parts.append("" if self.revision is None else f"revision {self.revision}")
        return ", ".join(part for part in parts if part) or "as it is"


def parse_env(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """From NAME=VALUE texts. Raises `ConfigError`."""
    found = []
    for text in pairs:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError(f"{text}: an environment variable is given as NAME=VALUE")
        found.append((name, value))
    return tuple(found)


@contextlib.contextmanager
def sources(variants: Sequence[Variant]) -> Iterator[dict[str, Path | None]]:
    """The `python` folder to run by variant name, None for this checkout. Raises `ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="minisgl-revisions-") as folder, contextlib.ExitStack() as stack:
        found: dict[str, Path | None] = {}
        built: dict[str, Path] = {}
        for variant in variants:
            if variant.revision is None:
                found[variant.name] = None
                continue
            commit = _git("rev-parse", "--verify", f"{variant.revision}^{{commit}}")
            if commit not in built:
                built[commit] = stack.enter_context(_checkout(commit, Path(folder)))
            found[variant.name] = built[commit]
        yield found


@contextlib.contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[Path]:
    tree = folder / commit[:12]
    _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        print(f"building the extension of {commit[:12]} ...", file=sys.stderr, flush=True)
        _build(tree, folder / "target")
        yield tree / "python"
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _build(tree: Path, target: Path) -> None:
    """The target folder is shared by the variants: what they have in common is compiled once."""
    if not (tree / "Cargo.toml").exists():
        return  # a revision from before the extension
    try:
        _run((*CARGO, "--target-dir", str(target)), tree)
    except FileNotFoundError as error:
        raise ConfigError("cargo is missing: a revision's extension is built by it") from error
    libraries = [target / "release" / name for name in LIBRARIES if (target / "release" / name).exists()]
    if not libraries:
        raise ConfigError(f"{tree.name}: cargo built no extension")
    shutil.copy(libraries[0], tree / "python" / "minisgl" / EXTENSION)


def _git(*args: str) -> str:
    """In the checkout that this file lies in."""
    return _run(("git", *args), Path(__file__).resolve().parent)


def _run(program: Sequence[str], folder: Path) -> str:
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{shlex.join(program[:3])} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()
