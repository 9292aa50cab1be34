"""Starting a server: what it says on the way, and that every failure says what to change."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.e2e import ServerProcess, refused, serving, until
from tests.helpers.engines import CPU
from tests.helpers.seconds import WAIT_S

SERVE = (sys.executable, "-m", "minisgl", "serve", "--port", "0")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def model_folder(at: Path, **changes: object) -> str:
    at.mkdir(exist_ok=True)
    (at / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(at)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "./nowhere"), "--model ./nowhere: no such folder"),
        (("--model", "nowhere.gguf"), "--model nowhere.gguf: no such file"),
        (("--device", "tpu"), "--device tpu"),
        (("--model", "tests/conftest.py"), "is neither a folder nor a GGUF file"),
    ],
)
def test_missing_models_and_files_are_named(flags: Sequence[str], said: str) -> None:
    assert said in refused(*flags)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", architectures=["GrokForCausalLM"])
    said = refused("--model", folder, "--load-format", "dummy")
    assert "GrokForCausalLM" in said and "LlamaForCausalLM" in said


def test_a_pool_that_does_not_fit_says_what_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    said = refused("--model", folder, "--load-format", "dummy", "--num-pages", str(2**40))
    assert f"--num-pages {2**40}: the KV pool would take" in said and "pages fit" in said


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert "*.safetensors" in refused("--model", model_folder(tmp_path / "m"))


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    assert "tokenizer.json" in refused("--model", model_folder(tmp_path / "m"), "--load-format", "dummy")


@pytest.mark.parametrize("engine", [CPU, pytest.param("torch", marks=pytest.mark.slow)])
def test_off_a_terminal_there_are_plain_lines_only(engine: str, tmp_path: Path) -> None:
    env = {"MINISGL_CACHE": str(tmp_path)}
    with serving("--engine", engine, "--model", "smollm2", "--num-pages", "64", env=env) as server:
        lines = server.lines[:]
    assert not any("\r" in line or "\x1b" in line or "%|" in line for line in lines), lines
    steps = ["loading weights", "loaded ", "KV pool: 64 pages of 16 tokens", "ready: "]
    if engine == "torch":
        steps.insert(0, "importing ")
    most = {"loading weights": len(lines)}  # the step is told again every ten seconds
    assert all(1 <= sum(step in line for line in lines) <= most.get(step, 1) for step in steps), lines
    found = [next(i for i, line in enumerate(lines) if step in line) for step in steps]
    assert found == sorted(found), lines


def test_on_a_terminal_there_are_bars(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    env = {**os.environ, "MINISGL_CACHE": str(tmp_path)}
    server = subprocess.Popen(
        [*SERVE, "--engine", "torch", "--model", "smollm2", "--num-pages", "64"], stderr=theirs, env=env
    )
    os.close(theirs)
    screen = b""
    try:
        while b"ready: " not in screen:
            screen += os.read(terminal, 65536)
    finally:
        server.terminate()
        server.wait(WAIT_S)
        os.close(terminal)
    assert b"once: " in screen and b"loading weights: " in screen and b"%|" in screen


def test_a_server_answers_while_its_model_is_loading() -> None:
    """The engine process is held still, so that it loads for as long as this looks; then it goes on."""
    with ServerProcess(("--engine", "echo", "--api-key", "secret"), wait=False, forked=False) as server:
        engine = server.engine()
        engine.suspend()
        key = {"Authorization": "Bearer secret"}
        body = {"model": "smollm2", "prompt": "a" * 100_000, "max_tokens": 3}
        until(lambda: bool(ports(server)), "it does not listen while it is loading")
        with httpx.Client(base_url=f"http://127.0.0.1:{ports(server)[0]}", timeout=WAIT_S) as http:
            until(lambda: answers(http), "it does not answer while it is loading")
            assert http.get("/readyz").status_code == 503
            health = http.get("/health", headers=key)
            assert health.status_code == 503 and health.json()["status"] == "loading"
            refused = http.post("/v1/completions", json=body, headers=key)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
            assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-request-id"]
            assert http.get("/v1/models").status_code == 401, "the key is wanted from the start"
            engine.resume()
            until(lambda: http.get("/readyz").status_code == 200, "it does not get ready")
            found = http.post("/v1/completions", json={**body, "prompt": "a"}, headers=key)
            assert found.status_code == 200, found.text
        assert server.stop() == 0


def ports(server: ServerProcess) -> list[int]:
    """At which it listens; it says so only when it is ready."""
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False
