"""Whole servers with `--cache-dir`: what was computed before a `kill -9` is not computed after it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.config import ConfigError
from minisgl.weights.sources import find_smollm2
from tests.helpers.e2e import ServerProcess, serving, until

try:
    find_smollm2()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.any_cpu
ANSWER_S = 120.0
MODEL = ("--model", "smollm2", "--engine", "cpu", "--num-pages", "512", "--max-seq-len", "2048")
PROMPT = "The tides of the sea follow the moon, and the moon follows nobody. " * 20


def ask(server: ServerProcess, prompt: str = PROMPT) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were cached."""
    body: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": 4}
    found = httpx.post(server.url + "/v1/completions", json=body, timeout=ANSWER_S).raise_for_status().json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def files(folder: Path) -> list[Path]:
    return [one for one in folder.glob("??/*") if len(one.name) == 64]


def test_a_restart_after_kill_9_computes_nothing_twice(tmp_path: Path, front_end: str) -> None:
    cache = tmp_path / "cache"
    flags = (*MODEL, "--frontend", front_end, "--cache-dir", str(cache), "--cache-size", "1GiB")
    server = ServerProcess(flags)
    try:
        cold, cached = ask(server)
        assert cached == 0
        until(lambda: len(files(cache)) >= 15, "pages are written")
    finally:
        server.kill()
        shutil.rmtree(server.folder)
    with serving(*flags) as server:
        warm, cached = ask(server)
    assert warm == cold and cached >= 15 * 16
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(cache))
