"""The server that a benchmark starts: measured by process, and looked through for what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from minisgl.bench import server_process
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from tests.helpers.e2e import is_gone, until


def test_a_server_is_measured_and_leaves_nothing() -> None:
    with ServerProcess(Launch(("--engine", "echo", "--served-model-name", "parrot"))) as server:
        assert server.model == "parrot"
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "parrot"
        assert set(server.processes()) == {"http", "engine"}
        pids = [process.pid for process in server.processes().values()]
    assert server.exit_code == 0
    assert server.left_behind == []
    assert server.start_s > 0 and server.stop_s > 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerFailed, match="--no-such-flag"):
        ServerProcess(Launch(("--no-such-flag",))).start()


def a_program(folder: Path, body: str) -> Path:
    """A package `minisgl` whose `serve` is `body`."""
    (folder / "minisgl").mkdir()
    (folder / "minisgl" / "__init__.py").write_text("")
    ready = "import json\nprint(json.dumps({'url': 'http://127.0.0.1:9', 'model': 'm'}), flush=True)\n"
    (folder / "minisgl" / "__main__.py").write_text(body + "\n" + ready + "sys.stdin.read()\n")
    return folder


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("import os, sys\nopen(os.environ['TMPDIR'] + '/socket', 'w')", "file socket"),
        ("import subprocess, sys\nsubprocess.Popen(['sleep', '60'])", "process"),
        ("import os, sys\nopen(os.environ['SEGMENTS'] + '/segment', 'w')", "shared memory segment"),
    ],
)  # fmt: skip
def test_leftovers_are_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, left: str) -> None:
    segments = tmp_path / "segments"
    segments.mkdir()
    monkeypatch.setattr(server_process, "SHARED_MEMORY", segments)
    monkeypatch.setattr(server_process, "LEFT_ALIVE_S", 0.5)
    source = a_program(tmp_path, body)
    with ServerProcess(Launch(env={"SEGMENTS": str(segments)}, source=source)) as server:
        pids = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
    assert len(server.left_behind) == 1 and server.left_behind[0].startswith(left)
    for pid in pids:
        until(lambda pid=pid: is_gone(pid), "it goes on")  # type: ignore[misc]


def test_another_checkout_is_run(tmp_path: Path) -> None:
    with ServerProcess(Launch(source=a_program(tmp_path, "import sys"))) as server:
        assert (server.url, server.model) == ("http://127.0.0.1:9", "m")
