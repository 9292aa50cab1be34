"""Every command with what a user may get wrong: an exit code, a message that names the thing, never a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from minisgl import cli
from minisgl.supervisor import start
from minisgl.weights import hub

ECHO = ("--engine", "echo")
RUN = ("--num-sequences", "1", "--repeats", "1", *ECHO)
SERVE = ("serve", *ECHO)

# what is typed -> what the message must have; files are those of `files`
WRONG: dict[tuple[str, ...], str] = {
    ("nosuch",): "nosuch",
    ("serve", "--nosuch"): "--nosuch",
    ("serve", "--port", "x"): "--port",
    (*SERVE, "--port", "70000"): "--port 70000",
    (*SERVE, "--host", ""): "--host",
    (*SERVE, "--host", "nosuch.invalid"): "nosuch.invalid",
    (*SERVE, "--port", "TAKEN"): "--port TAKEN: Address already in use: choose another",
    ("serve", "a", "--model", "b"): "--model b",
    ("serve", "--model", ""): "--model",
    (*SERVE, "--state-dir", "folder/file/state"): "Not a directory",
    (*SERVE, "--state-dir", "."): "--state-dir .: the folder has no state.sqlite and is not empty: name a new or an",
    (*SERVE, "--state-dir", "broken"): "--state-dir broken: broken/state.sqlite: file is not a database",
    (*SERVE, "--config", "nofile"): "nofile: No such file",
    (*SERVE, "--config", "folder"): "folder",
    (*SERVE, "--config", "broken.yaml"): "broken.yaml:2",
    ("--config", "bytes"): "bytes: not UTF-8",
    (*SERVE, "--context-margin", "-1"): "--context-margin -1: must be at least 0",
    (*SERVE, "--api-key-file", "nofile"): "--api-key-file nofile: No such file",
    (*SERVE, "--api-key-file", "broken.yaml"): "broken.yaml:2",
    (*SERVE, "--chat-template", "nofile"): "--chat-template nofile",
    (*SERVE, "--chat-template", "{% if %}"): "minisgl serve: --chat-template: does not parse",
    ("generate", "x", "--tokenizer", "./nowhere"): "--tokenizer ./nowhere",
    (*SERVE, "--lora", "a=nofolder"): "--lora a=nofolder",
    (*SERVE, "--lora", "a=folder"): "--lora a=folder",
    (*SERVE, "--lora", "a"): "NAME=PATH",
    (*SERVE, "--warm-prefix", "@nofile"): "@nofile",
    (*SERVE, "--record-trace", "nofolder/x"): "--record-trace nofolder/x",
    (*SERVE, "--num-pages", "99999999999999999"): "--num-pages 99999999999999999",
    (*SERVE, "--seed", "-1"): "seed",
    (*SERVE, "--api-key", "\u00e9"): "--api-key",
    (*SERVE, "--dp", "0"): "--dp 0",
    (*SERVE, "--tp", "0"): "--tp 0: must be a whole number, at least 1, or auto",
    (*SERVE, "--page-size", "0"): "--page-size 0: must be at least 1",
    (*SERVE, "--speculative", "ngram:many"): "must be ngram:K, model:FILE[:K] or mtp",
    ("serve", "--engine", "cpu", "--tp", "2"): "--tp 2",
    ("generate",): "prompt",
    ("generate", "x", "--model", "./nowhere"): "--model ./nowhere",
    ("generate", "x", "--model", "folder/file"): "--model folder/file",
    ("generate", "x", "--model", "folder"): "folder: no config.json",
    ("generate", "x", "--model", "broken"): "broken/config.json",
    ("generate", "x", "--model", "cut.gguf"): "cut.gguf",
    ("generate", "\udcff", *ECHO): "prompt",
    ("generate", "x", "--top-p", "7", *ECHO): "top_p",
    ("generate", "x", "--lora", "a=nofolder", *ECHO): "--lora a=nofolder",
    ("generate", "x", "--chat-template", "nofile", *ECHO): "--chat-template nofile",
    ("generate", "x", "--chat-template", "{{ raise_exception('no') }}", *ECHO): "no",
    ("generate", "x", "--engine", "sim", "--sim-profile", "nofile"): "--sim-profile nofile",
    ("generate", "x", "--page-size", "1000000", "--num-pages", "2000000000", *ECHO): "memory",
    ("generate", "x", "--page-size", "2000000000", "--num-pages", "2000000000", *ECHO): "--num-pages 2000000000",
    ("chat", "--base-url", "nonsense"): "--base-url nonsense",
    ("chat", "--base-url", "http://127.0.0.1:1"): "http://127.0.0.1:1",
    ("chat", "--api-key", "x"): "--api-key",
    ("chat", "--temperature", "nan"): "--temperature nan",
    ("replay",): "--report",
    ("replay", "nofile"): "nofile: No such file",
    ("replay", "folder"): "folder: Is a directory",
    ("replay", "bytes"): "bytes",
    ("pull",): "MODEL",
    ("pull", "justaname"): "justaname: no such folder, and not a hub id",
    ("pull", "https://example.org/a/b"): "https://example.org/a/b: must be an address of a hub",
    ("pull", "a/b", "--model-source", "nosuch"): "--model-source",
    ("pull", "a/b:Q4_0"): "--model a/b:Q4_0: Hugging Face cannot be reached",
    ("list", "a/b"): "a/b",
    ("rm",): "MODEL",
    ("rm", "a/b"): "a/b: is not listed: see minisgl list",
    ("doctor", "--nosuch"): "--nosuch",
    ("bench", "nosuch"): "nosuch",
    ("bench", "offline", "--num-sequences", "0", *ECHO): "--num-sequences 0",
    ("bench", "offline", "--out", "bytes/x", *RUN): "--out bytes/x",
    ("bench", "offline", "--engine", "sim", "--sim-profile", "nofile"): "--sim-profile nofile",
    ("bench", "serve", "--base-url", "nonsense"): "nonsense",
    ("bench", "serve", "--base-url", "http://127.0.0.1:9", "--", *ECHO): "--base-url",
    ("bench", "serve", "--extra-body", "["): "--extra-body",
    ("bench", "serve", "--concurrency", "0"): "--concurrency",
    ("bench", "serve", "--rate", "0"): "--rate",
    ("bench", "serve", "--rate", "1", "--duration", "5"): "--duration",
    ("bench", "serve", "--num-requests", "0"): "--num-requests",
    ("bench", "serve", "--workload", "nothing"): "--workload",
    ("bench", "serve", "--trace", "nothing"): "nothing",
    ("bench", "serve", "--trace", "azure-code", "--workload", "random"): "--trace",
    ("bench", "serve", "--", "--num-pages", "none"): "--num-pages",
    ("bench", "serve", "--workload", "nofile", "--base-url", "http://127.0.0.1:1"): "nofile",
    ("bench", "scheduler", "--out", "folder"): "--out folder",
    ("bench", "compare", "--out", "bytes"): "--out bytes",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with files of other kinds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(hub, "FIRST_WAIT_S", 0.0)
    for folder in ("folder", "broken"):
        Path(folder).mkdir()
    Path("folder/file").write_text("text")
    Path("broken/config.json").write_text("{")
    Path("broken/state.sqlite").write_text("this is no database, and long enough to be seen to be none" * 20)
    Path("broken.yaml").write_text("port: [1\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    Path("cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("typed", WRONG, ids=lambda typed: " ".join(typed).encode("ascii", "replace").decode())
def test_wrong_arguments_end_with_an_error_before_an_engine_starts(
    typed: tuple[str, ...], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*_: object) -> None:
        raise AssertionError("an engine is started before this is noticed")

    monkeypatch.setattr(start, "_engines", no_engine)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = cli.main([port if one == "TAKEN" else one for one in typed])
    said = capfd.readouterr().err
    assert code in ((1, 2) if typed[0] in ("chat", "bench", "generate") else (2,)), said
    assert WRONG[typed].replace("TAKEN", port) in said and "Traceback" not in said, said
    assert "usage:" not in said, said


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (OSError(28, "No space left on device", "x"), MemoryError("8 GiB")):
        monkeypatch.setattr("minisgl.cli.doctor.main", Mock(side_effect=error))
        assert cli.main(["doctor"]) == 1
        assert str(error) in capsys.readouterr().err


def test_ctrl_c_during_an_answer_ends_without_a_traceback() -> None:
    """More than a pipe holds, so that it cannot be over before the signal comes: the echo engine ends texts by chance,
    here by one that does not come."""
    sizes = ("--max-tokens", "100000", "--max-seq-len", "150000", "--num-pages", "10000")
    program = (
        "import runpy, sys\n"
        "from minisgl.engine import echo\n"
        "echo.EOS_ONE_IN = 1 << 31\n"
        f"sys.argv = ['minisgl', {', '.join(map(repr, ('generate', 'x', *ECHO, *sizes)))}]\n"
        "runpy.run_module('minisgl', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize("module", ["minisgl.cli.chat", "minisgl.llm", "minisgl.supervisor.start"])
def test_ctrl_c_during_imports_ends_without_a_traceback(module: str) -> None:
    """A finder that gets a signal when `module` is looked for."""
    finder = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"sys.argv = ['minisgl', {', '.join(map(repr, ('generate', 'x', *ECHO)))}]\n"
        "runpy.run_module('minisgl', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", finder], check=False, capture_output=True, text=True)
    assert done.returncode in (130, -signal.SIGINT) and "Traceback" not in done.stderr, done.stderr


def test_ctrl_c_during_loading_ends_without_a_traceback(tmp_path: Path) -> None:
    """Through a named pipe that nobody writes: it waits there for ever."""
    os.mkfifo(tmp_path / "profile.yaml")
    command = [sys.executable, "-m", "minisgl", "generate", "x", "--engine", "sim", "--sim-profile"]
    with subprocess.Popen([*command, str(tmp_path / "profile.yaml")], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        with (tmp_path / "profile.yaml").open("w"):  # returns when it reads
            process.send_signal(signal.SIGINT)
            assert (process.stderr.read(), process.wait()) == ("", 130)
