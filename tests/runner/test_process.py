"""The last words of an engine process: what users read when it ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.config import ConfigError, EngineConfig
from minisgl.runner import process
from minisgl.runner.launch import LastWords, ProcessConfig, RankDied, last_words_file


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("--tp 3: must divide 4"), LastWords("--tp 3: must divide 4", is_setting=True)),
        (
            RankDied("tensor-parallel rank 1 was ended by signal 9"),
            LastWords("tensor-parallel rank 1 was ended by signal 9"),
        ),
        (ValueError("a fault of ours"), LastWords("ValueError: a fault of ours")),
    ],
)
def test_only_a_fault_names_its_class(
    error: Exception, told: LastWords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ProcessConfig(engine=EngineConfig(model="none", engine="echo"), address=f"ipc://{tmp_path}/engine")

    def serve(*_: Any) -> None:
        raise error

    (tmp_path / "stdin").write_bytes(msgspec.json.encode(config) + b"\n")
    monkeypatch.setattr(process, "serve", serve)
    monkeypatch.setattr(process, "LAST_WORDS_MS", 0)
    before = signal.getsignal(signal.SIGINT)
    try:
        with open(tmp_path / "stdin") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert process.main() == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert msgspec.json.decode(last_words_file(config.socket_path).read_bytes(), type=LastWords) == told
