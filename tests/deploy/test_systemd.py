"""The systemd unit: systemd has nothing against it, its settings are the server's, and it waits for the drain."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl import envs
from tests.helpers.deploy import AFTER_THE_DRAIN_S, DEPLOY, seconds, served
from tests.helpers.seconds import WAIT_S

UNIT = DEPLOY / "systemd" / "minisgl.service"
SETTINGS = DEPLOY / "systemd" / "minisgl.yaml"


def unit() -> dict[str, dict[str, str]]:
    """Settings by section; one that stands twice is a mistake here."""
    found: dict[str, dict[str, str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert name not in section, name
            section[name] = value
    return found


def test_systemd_analyze_reports_nothing(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("systemd-analyze is not installed")
    text = UNIT.read_text(encoding="utf-8")
    there = text.replace("/opt/minisgl/bin/minisgl", "/bin/true")  # a program that is there
    assert there != text
    (tmp_path / UNIT.name).write_text(there, encoding="utf-8")
    verify = [systemd, "verify", "--man=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(verify, check=False, capture_output=True, text=True, timeout=WAIT_S)
    about_it = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert done.returncode == 0 and about_it == [], done.stdout + done.stderr


def test_the_unit_starts_the_installed_program_with_valid_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    service = unit()["Service"]
    program, command, flag, file = service["ExecStart"].split()
    assert (program, command, flag) == ("/opt/minisgl/bin/minisgl", "serve", "--config")
    assert file == "/etc/minisgl/minisgl.yaml"
    config = served(monkeypatch, [command, flag, str(SETTINGS)])
    assert config.host == "127.0.0.1"
    assert seconds(service["TimeoutStopSec"]) >= config.limits.drain_timeout + AFTER_THE_DRAIN_S


def test_only_the_server_is_told_to_end_and_only_failures_are_started_again() -> None:
    service = unit()["Service"]
    assert service["Type"] == "exec"  # it tells systemd nothing; /readyz says when it serves
    assert (service["KillMode"], service["KillSignal"]) == ("mixed", "SIGTERM")
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"


def test_the_unit_runs_unprivileged_and_writes_only_its_own_folders() -> None:
    service = unit()["Service"]
    assert service["DynamicUser"] == "yes" and service["User"] == "minisgl" and int(service["LimitNOFILE"]) >= 65536
    assert service["ProtectSystem"] == "strict"
    set_here = dict(re.findall(r"(\w+)=(\S+)", service["Environment"]))
    assert {name for name in set_here if name.startswith(envs.PREFIX)} <= set(envs.ALL)
    assert all(value.startswith(("%C/minisgl", "%S/minisgl")) for value in set_here.values())
    assert service["CacheDirectory"] == service["StateDirectory"] == "minisgl"
