"""A trace in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.bench import MOONCAKE


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in MOONCAKE))
    return str(file)
