"""`minisgl cache`: what it says of a folder, and what it does to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl._rust import PageStore
from minisgl.cli import main

SIZE = 8


def filled(folder: Path) -> list[Path]:
    """Three files that look like pages; none is whole."""
    PageStore(str(folder), 2**30, b"model", SIZE, 100)
    made = []
    for number in range(3):
        name = f"{number:064x}"
        (folder / name[:2]).mkdir(exist_ok=True)
        made.append(folder / name[:2] / name)
        made[-1].write_bytes(bytes(172))
    (folder / "README").write_text("of somebody else")
    return made


def test_info_counts_and_clear_removes_pages_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = filled(tmp_path)
    assert main(["cache", "info", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 3 pages, 516 B\n"
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: removed 3 pages, 516 B\n"
    assert not any(file.exists() for file in made) and (tmp_path / "README").exists()


def test_verify_removes_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = filled(tmp_path)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}: whole: 0 pages, 0 B\n{tmp_path}: damaged, and removed: 3 pages\n"
    assert not any(file.exists() for file in made)
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for order in ("info", "clear", "verify"):
        assert main(["cache", order, str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == (
            f"minisgl cache: {tmp_path / 'none'}: no such folder: name that of --cache-dir\n"
        )
    assert not (tmp_path / "none").exists()


def test_a_damaged_page_is_nothing_that_is_at_hand(tmp_path: Path) -> None:
    filled(tmp_path)
    store = PageStore(str(tmp_path), 2**30, b"model", SIZE, 100)
    assert store.stage(np.zeros(20, np.int32), 0, 2).columns == (0, 0)
