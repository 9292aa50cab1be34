"""Neither process of a server has torch or transformers, and neither has the offline API, unless the torch engine
computes. They do without whatever an extra of the package brings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.engines import CPU
from tests.helpers.seconds import WAIT_S

OF_EXTRAS = ("torch", "transformers", "safetensors", "gguf", "sentencepiece", "google.protobuf", "llguidance")
HEAVY = ("libtorch", "/torch/", "/transformers/", "/tokenizers/")
FLAGS = {
    "echo": ("--engine", "echo"),
    "sim": ("--engine", "sim", "--sim-profile", "null"),
    "cpu": ("--engine", "cpu", "--num-pages", "64"),
}


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that finds nothing of the extras, as after `pip install minisgl`."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({OF_EXTRAS!r}))\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def test_packages_of_the_extras_cannot_be_imported(alone: dict[str, str]) -> None:
    for name in OF_EXTRAS:
        command = [sys.executable, "-c", f"import {name}"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **alone})
        assert "ModuleNotFoundError" in done.stderr, name


@pytest.mark.parametrize("engine", ["echo", "sim", CPU])
def test_no_process_of_a_server_maps_torch(engine: str, alone: dict[str, str]) -> None:
    with serving(*FLAGS[engine], env=alone) as server:
        answer = httpx.get(f"{server.url}/health").json()
        assert answer["engine"] == engine
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S).status_code == 200
        assert "<title>" in httpx.get(f"{server.url}/").text
        processes = [psutil.Process(server.process.pid), *server.children()]
        assert len(processes) == 2
        for process in processes:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "python" in maps
            assert not [name for name in HEAVY if name in maps], process.cmdline()


@pytest.mark.parametrize("engine", ["echo", CPU])
def test_the_offline_api_imports_no_torch(engine: str) -> None:
    program = f"""
import sys
from minisgl import LLM, SamplingParams
with LLM("smollm2", engine={engine!r}, num_pages=64) as llm:
    assert llm.chat([{{"role": "user", "content": "hi"}}], SamplingParams(max_tokens=2), progress=False)[0].token_ids
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert {"torch", "transformers"}.isdisjoint(done.stdout.split())


def test_purge_delay_is_set_before_the_extension_is_loaded() -> None:
    """It reads what it is told once: afterwards a server holds all that loading took for a moment."""
    program = """
import os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "minisgl._rust":
            print(os.environ.get("MIMALLOC_PURGE_DELAY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
from minisgl import cli
cli.main(["serve", "--engine", "echo", "--port", "0", "--tool-call-parser", "hermes"])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_event_loop_exists_ends_the_server(signum: int) -> None:
    """The engine process is there, the HTTP side is being imported."""
    with ServerProcess(("--engine", "echo"), wait=False, forked=False) as server:
        until(lambda: bool(server.children()), "no engine process")
        assert server.stop(signum) == 0, server.lines
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(("signum", "said"), [(signal.SIGINT, "stopped: "), (signal.SIGTERM, "drained: ")])
def test_a_server_logs_the_requests_that_a_signal_cut_off(signum: int, said: str) -> None:
    with ServerProcess(("--engine", "echo")) as server:
        assert server.stop(signum) == 0, server.lines
        assert any(f"{said}0 " in line and "requests are cut off" in line for line in server.lines), server.lines
