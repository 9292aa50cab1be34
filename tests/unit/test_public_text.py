"""The check of public text finds what it must, and nothing in what is tracked."""

from __future__ import annotations

import pytest

from tools.check_public_text import findings, main

# joined here, so that the check does not find its own samples
BAD = {
    "home path": "/" + "home/someone/x",
    "work path": "see /" + "work/main",
    "windows home path": "C:" + "\\Users\\me",
    "private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "access key": "gh" + "p_" + "a" * 36,
    "user at host": "me@" + "box" + ".internal",
    "internal host": "http://ci." + "corp/job",
    "private address": "10" + ".1.2.3",
    "package registry": "https://" + "pypi" + ".org/simple",
}


@pytest.mark.parametrize("kind", BAD)
def test_finds(kind: str) -> None:
    assert kind in {found for _, found, _ in findings(BAD[kind])}


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:1919", "http://localhost", "../shared/data", "a 10.5 s run", "v1.2.3.4"]
)
def test_leaves_alone(text: str) -> None:
    assert list(findings(text)) == []


def test_repository_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
