"""The records of runs: none is larger than a repository should carry, and its raw data can be read again."""

from __future__ import annotations

import gzip
from pathlib import Path

from minisgl.bench.report import RAW, Report, read_raw

RUNS = Path(__file__).resolve().parents[2] / "benchmark" / "runs"
LARGEST = 1 << 20  # bytes of a file that is not compressed: `gzip -9 -n raw.json`


def test_large_files_are_compressed() -> None:
    large = [file for file in RUNS.rglob("*") if file.suffix in (".json", ".md") and file.stat().st_size > LARGEST]
    assert large == []


def test_raw_data_is_read_whether_compressed_or_not(tmp_path: Path) -> None:
    Report(tmp_path, "A run", command="minisgl bench something").write({"runs": [1, 2]})
    plain = read_raw(tmp_path)
    assert plain["runs"] == [1, 2] and plain["environment"]
    file = tmp_path / RAW
    (tmp_path / f"{RAW}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    assert read_raw(tmp_path) == plain
