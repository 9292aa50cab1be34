"""`minisgl generate` shows text while it comes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams, cli
from tests.helpers import sight
from tests.helpers.forking import Minisgl, run
from tests.helpers.vision_chat import talking


class Screen(io.StringIO):
    """What has been flushed, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_generate_shows_text_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    flags = ["--engine", "echo", "--max-tokens", "24", "--raw", "--sampling-seed", "0"]
    assert cli.main(["generate", "hello", *flags]) == 0
    with LLM("none", engine="echo") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, seed=0)
        whole = llm.generate("hello", params, progress=False)[0].text
    assert screen.getvalue() == whole + "\n"
    assert len([seen for seen in dict.fromkeys(screen.seen) if 0 < len(seen) < len(whole)]) > 3


def test_the_log_of_each_step_does_not_cut_the_answer() -> None:
    command = [sys.executable, "-m", "minisgl", "generate", "hi", "--raw", "--engine", "echo", "--sampling-seed", "0"]
    command += ["--max-tokens", "20"]
    done = [run([*command, *more], stderr=subprocess.STDOUT) for more in ((), ("--log-level", "debug"))]
    answer, told = (one.stdout for one in done)
    assert told.endswith(f"\n{answer}") and "step 2" in told


def test_generate_ends_when_nobody_reads() -> None:
    command = [sys.executable, "-m", "minisgl", "generate", "hi", "--engine", "echo", "--max-tokens", "200"]
    with Minisgl(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_generate_takes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the prompt, or at its placeholders with `--raw`."""
    folder = talking(tmp_path)
    (tmp_path / "a.png").write_bytes(sight.png())
    answers = []
    for prompt, *flags in (["what?"], [f"<user>{sight.MARKED}what?</user>\n<assistant>", "--raw"], ["what?", "text"]):
        screen = Screen()
        monkeypatch.setattr("sys.stdout", screen)
        image = ["--image", str(tmp_path / "a.png")] if "text" not in flags else []
        settings = ["--model", str(folder), "--num-pages", "64", "--max-tokens", "8", "--log-level", "error"]
        assert cli.main(["generate", prompt, *settings, *image, *(one for one in flags if one != "text")]) == 0
        answers.append(screen.getvalue())
    assert answers[0] == answers[1] != answers[2]
