"""Converts tokenizers without a tokenizer.json, once, with transformers.

Invariants: transformers runs in a process of its own, without network access and without running the model's code; the
model's folder is only read; a result is identified by the content of its source files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from minisgl import envs
from minisgl.utils.installed import how_to_get, missing
from minisgl.utils.made_once import made_once

FORMAT = "1"  # part of the key: a change of what is written makes new folders
_SOURCES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
_READ = ("*.model", "*.tiktoken", "*.json", "*.txt")  # files that a tokenizer's class may read
_PROGRAM = """
import sys
from transformers import AutoTokenizer
made = AutoTokenizer.from_pretrained(sys.argv[1], use_fast=True, trust_remote_code=False, local_files_only=True)
if not made.is_fast:
    sys.exit(f"transformers has no fast form of {type(made).__name__}")
made.save_pretrained(sys.argv[2])
"""


class NoConversion(ValueError):
    """Error if transformers makes no tokenizer.json of the files; the text says why."""


def sources(folder: Path) -> list[str]:
    """Return the names of files from which a tokenizer can be converted."""
    return sorted({file.name for pattern in _SOURCES for file in folder.glob(pattern) if file.is_file()})


def converted(folder: Path, say: Callable[[str], None]) -> Path:
    """Return a folder with the converted tokenizer.json and tokenizer_config.json of `folder`, converting on first use.
    Raises `NoConversion`."""
    if missing("transformers"):
        raise NoConversion(f"it is not installed: {how_to_get('torch')}")

    def make(partial: Path) -> None:
        say(f"converting the tokenizer of {folder.name} ({', '.join(sources(folder))}), once")
        _convert(folder, partial)

    return made_once(envs.cache_dir() / "tokenizers" / _key(folder), make)


def _key(folder: Path) -> str:
    digest = hashlib.sha256(f"{FORMAT} {importlib.metadata.version('transformers')}".encode())
    for file in sorted({file for pattern in _READ for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"\n{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return f"{digest.hexdigest()[:32]}-{FORMAT}"


def _convert(folder: Path, partial: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, str(folder), str(partial)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=envs.child_environment(
            {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        ),
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise NoConversion(lines[-1].strip() if lines else f"transformers ended with code {done.returncode}")
    if not (partial / "tokenizer.json").is_file():
        raise NoConversion("it wrote no tokenizer.json")
