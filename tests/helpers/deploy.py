"""Files in deploy/, and the server's configuration that follows from their flags."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from minisgl import cli
from minisgl.config import ServerConfig
from minisgl.runner.worker import GRACE_S as RANKS_GRACE_S
from minisgl.server.core.http import GRACE_S
from minisgl.supervisor import start as supervisor

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MINISGL_PORT = 1919
USER = 10001
CACHE = "/var/cache/minisgl"
AFTER_THE_DRAIN_S = GRACE_S + RANKS_GRACE_S
"""Seconds that a server may need between its drain and its end."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def served(monkeypatch: Any, arguments: Sequence[str]) -> ServerConfig:
    """Return the configuration that `minisgl ARGUMENTS` would serve, by the real parser. Fails for an unknown flag."""
    configs: list[ServerConfig] = []
    warned: list[str] = []

    def take(config: ServerConfig, *warnings: str) -> int:
        configs.append(config)
        warned.extend(warnings)
        return 0

    monkeypatch.setattr(supervisor, "run_server", take)
    assert cli.main(list(arguments)) == 0, arguments
    assert warned == [], arguments
    return configs[0]


def seconds(text: str) -> float:
    """Parse a duration of Docker or systemd (45, 45s, 30m, 10min) to seconds."""
    match = re.fullmatch(r"(\d+)(s|m|min|)", text)
    assert match is not None, text
    return int(match[1]) * {"s": 1, "": 1, "m": 60, "min": 60}[match[2]]


# ------------------------------------------------------------------------------------------------------ a Dockerfile


@dataclass
class Stage:
    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]

    def words(self, instruction: str) -> list[str]:
        """Return the words of the last `instruction` in exec form (a JSON list), which starts no shell."""
        words: list[str] = json.loads(self.last(instruction))
        return words

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for rest in self.all("ENV") for word in shlex.split(rest))

    @property
    def healthcheck(self) -> list[str]:
        words: list[str] = json.loads(self.last("HEALTHCHECK").partition("CMD ")[2])
        return words


def stages(path: Path) -> dict[str, Stage]:
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, re.sub(r"\\\n\s*", " ", text).splitlines()):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(base, name)
        else:
            assert stage is not None, line
            stage.steps.append((instruction, rest))
    return stages


def context(ignore: Path) -> set[str]:
    """Return the repository's files that a Docker build sees: a .dockerignore's last matching pattern decides."""
    patterns = [one for one in ignore.read_text(encoding="utf-8").splitlines() if one and not one.startswith("#")]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {name for name in filter(None, listed.stdout.split("\0")) if not _ignored(name, patterns)}


def _ignored(name: str, patterns: Sequence[str]) -> bool:
    ignored = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if any(_fits(part, wanted) for part in _beginnings(name)):
            ignored = not pattern.startswith("!")
    return ignored


def _beginnings(name: str) -> Iterator[str]:
    """Yield the path itself and each folder above it."""
    yield name
    yield from (str(one) for one in Path(name).parents if str(one) != ".")


def _fits(name: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(name.rpartition("/")[2], pattern[3:])
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
