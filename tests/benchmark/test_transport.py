"""The codecs of the transport benchmark carry the same facts, and its last line is the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark import transport


def test_a_codec_that_loses_something_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    transport.check()
    whole = transport.CODECS["pickle"].decode
    monkeypatch.setitem(
        transport.CODECS, "pickle", transport.CODECS["pickle"]._replace(decode=lambda frame: whole(frame)[:-1])
    )
    with pytest.raises(AssertionError, match="pickle"):
        transport.check()


def test_the_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transport.main(["--rounds", "1", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["operations_per_s"]
    assert found["tokens of a step, 256 rows"]["typed"] > 0
    assert "| ---" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "raw.json").read_text())["environment"]
