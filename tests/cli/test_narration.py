"""`minisgl generate --narrate` tells the life of one answer; a server has no such flag."""

from __future__ import annotations

import re

import pytest

from minisgl import LLM, SamplingParams, cli

FLAGS = ["--engine", "echo", "--raw", "--narrate", "--sampling-seed", "0"]


def narrated(capsys: pytest.CaptureFixture[str], prompt: str, *flags: str) -> tuple[str, list[str]]:
    """The answer, and the lines from the model on."""
    assert cli.main(["generate", prompt, *FLAGS, *flags]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    return out, lines[[line.startswith("model ") for line in lines].index(True) :]


def test_narration_tells_model_prompt_steps_tokens_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    text, lines = narrated(capsys, "hello, you", "--max-prefill-length", "8", "--page-size", "4", "--max-tokens", "4")
    with LLM("none", engine="echo") as llm:
        params = SamplingParams(temperature=0, max_tokens=4, seed=0)
        (output,) = llm.generate("hello, you", params, progress=False)
        named = [f"{token} {llm.tokenizer.decode([token], skip_special_tokens=False)!r}" for token in output.token_ids]
    assert text == output.text + "\n" and len(named) == 4
    first, *others = named
    assert lines[:-1] == [
        "model smollm2: echo engine on cpu, none",
        "end tokens: 256 '<|eos|>'",
        "request 0 arrives: 10 prompt tokens",
        "step 0: request 0 starts, 0 tokens cached",
        "step 0: prefill of request 0, 8 tokens: 8 of 10 are done",
        "step 1: prefill of request 0, 2 tokens: 10 of 10 are done",
        f"step 1: request 0 gets token {first}",
        *(
            line
            for step, token in enumerate(others, 2)
            for line in (f"step {step}: decode, 1 row, a token each", f"step {step}: request 0 gets token {token}")
        ),
        f"step 4: request 0 ends: {output.outputs[0].finish_reason}",
    ]
    assert re.fullmatch(r"answer: 4 tokens, TTFT \d+\.\d ms, then \d+\.\d tok/s", lines[-1])


def test_single_token_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = narrated(capsys, "hello", "--max-tokens", "1")
    assert re.fullmatch(r"answer: 1 token, TTFT \d+\.\d ms", lines[-1])


def test_narration_tells_what_of_the_prompt_was_cached(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "a" * 40
    _, lines = narrated(capsys, prompt, "--warm-prefix", prompt[:32], "--max-tokens", "1")
    assert any(re.fullmatch(r"step \d+: request \d+ starts, 32 tokens cached", line) for line in lines)
    assert sum("gets token" in line for line in lines) == 1


def test_serve_does_not_narrate(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--engine", "echo", "--narrate"]) == 2
    assert "--narrate: unknown flag" in capsys.readouterr().err
