"""The operations that tiny models become, as `minisgl model FOLDER --operations` prints them: a change of how a
layer is computed shows here. `operations/` holds the lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.cli import main
from tests.helpers.models import save, tiny_model

HELD = Path(__file__).parent / "operations"


@pytest.mark.parametrize("held", sorted(HELD.glob("*.txt")), ids=lambda held: held.stem)
def test_the_operations_of_a_model(held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tiny_model(held.stem), tmp_path)
    assert main(["model", str(folder), "--operations"]) == 0
    assert capsys.readouterr().out == held.read_text(encoding="utf-8")
