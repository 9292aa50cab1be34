"""What `make audit` makes of the reports of its two tools."""

from __future__ import annotations

from typing import Any

import pytest

from tools import audit

PYTHON = {
    "dependencies": [
        {"name": "fine", "version": "1", "vulns": []},
        {"name": "old", "version": "2", "vulns": [{"id": "PYSEC-1"}]},
        {"name": "unknown", "skip_reason": "not found on PyPI"},
    ]
}
RUST = {
    "vulnerabilities": {"list": [{"advisory": {"id": "RUSTSEC-1"}, "package": {"name": "a", "version": "0.1"}}]},
    "warnings": {"yanked": [{"kind": "yanked", "advisory": None, "package": {"name": "b", "version": "3"}}]},
}


def test_findings_and_what_was_not_asked_are_told_apart() -> None:
    assert audit.python_findings(PYTHON) == (["PYSEC-1: old 2"], ["not found on PyPI"])
    assert audit.rust_findings(RUST) == ["RUSTSEC-1: a 0.1", "yanked: b 3"]


@pytest.mark.parametrize(
    ("reports", "allowed", "code"),
    [
        ((PYTHON, None), {}, 1),
        ((PYTHON, None), {"PYSEC-1": "not used"}, 0),
        ((None, RUST), {"RUSTSEC-1": "not used"}, 1),
        ((None, None), {}, 0),
    ],
)
def test_what_is_not_allowed_fails_and_what_cannot_be_asked_does_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: Any,
    allowed: dict[str, str],
    code: int,
) -> None:
    found = iter(reports)
    monkeypatch.setattr(audit, "_run", lambda *command: (next(found), "no such host"))
    monkeypatch.setattr(audit, "ALLOWED", allowed)
    assert audit.main("locked.txt") == code
    said = capsys.readouterr().out
    assert ("no such host" in said) == (None in reports) and ("FOUND" in said) == bool(code)
