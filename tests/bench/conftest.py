"""A trace in a file, and an engine whose steps take ten milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.config import EngineConfig
from tests.helpers.bench import MOONCAKE, lines

PROFILE = {"name": "ten-ms", "table": {"rows": [1], "prefill_tokens": [0], "kv_len": [1], "ms": [[[10]]]}}


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines(*MOONCAKE))
    return str(file)


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    file = tmp_path / "ten-ms.yaml"
    file.write_text(json.dumps(PROFILE))
    return EngineConfig(engine="sim", sim_profile=str(file), cpu_backend="python", num_pages=400, max_seq_len=2048)
