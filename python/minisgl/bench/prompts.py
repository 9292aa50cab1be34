"""Questions that people wrote, from the folder that MINISGL_DATA names: MT-Bench and GSM8K."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl import envs
from minisgl.config import ConfigError


def mt_bench() -> list[tuple[str, str]]:
    """Return the two turns of each of 80 questions. Raises `ConfigError` without the data."""
    return [(one["turns"][0], one["turns"][1]) for one in _lines("mt_bench_questions.jsonl")]


def gsm8k() -> list[tuple[str, str]]:
    """Return questions of the test split with their answers. Raises `ConfigError` without the data."""
    return [(one["question"], one["answer"]) for one in _lines("gsm8k_test.jsonl")]


def _lines(name: str) -> list[Any]:
    folder = envs.data_dir()
    if folder is None:
        raise ConfigError(f"workload: {envs.DATA} is not set: it must name the folder with prompts/{name}")
    path = Path(folder) / "prompts" / name
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"workload: prompts/{name} in {envs.DATA}: {error.strerror}") from error
