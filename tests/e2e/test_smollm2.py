"""Meaning: the embedded model through the real server, the offline API and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from minisgl import LLM, SamplingParams
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.forking import run
from tests.helpers.meaning import BEGINNINGS, CAPITALS, FRANCE, MAX_TOKENS, embedded_model, told_capital
from tests.helpers.seconds import WAIT_S

embedded_model()

ANSWER_S = 60.0  # for what takes a second: a failure, not a measurement


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(
        "--model", "smollm2", env={"OMP_NUM_THREADS": "1"}
    ) as running:  # its team would wait for others' cores
        yield running


@pytest.mark.any_cpu
def test_paris_streamed_through_the_openai_client(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", timeout=ANSWER_S, max_retries=0)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": FRANCE}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    pieces = [chunk.choices[0] for chunk in stream if chunk.choices]
    text = "".join(piece.delta.content or "" for piece in pieces)
    assert "Paris" in text and pieces[-1].finish_reason == "stop"


@pytest.mark.any_cpu
def test_the_printed_curl_command_works(server: ServerProcess) -> None:
    line = next(line for line in server.lines if line.strip().startswith("curl "))
    answer = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    assert "Paris" in answer


def test_unset_sampling_fields_use_the_models_defaults(server: ServerProcess) -> None:
    params = httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_p"]) == (0.2, 0.9)
    body = {"input": FRANCE, "max_output_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=ANSWER_S).json()
    assert (answer["temperature"], answer["top_p"]) == (0.2, 0.9)


@pytest.mark.any_cpu
def test_concurrent_answers_equal_those_alone(server: ServerProcess) -> None:
    """Greedy answers, each alone and then all together. Sums depend on the batch, so words may differ at a
    near-tie; these have none."""

    def ask(country: str) -> str:
        return told_capital(server.url, country, ANSWER_S)

    alone = {country: ask(country) for country in CAPITALS}
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(ask, list(CAPITALS) * 3))
    assert all(city in alone[country] for country, city in CAPITALS.items())
    assert together == [alone[country] for country in CAPITALS] * 3
    stats = httpx.get(server.url + "/health").json()["stats"]
    assert stats["num_cached_tokens_total"] > 0


def test_offline_api_chats_and_generates() -> None:
    with LLM("smollm2", dtype="float32", max_seq_len=512) as llm:
        assert llm.default_params == SamplingParams(temperature=0.2, top_p=0.9)
        answer = llm.chat(
            [{"role": "user", "content": FRANCE}], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), progress=False
        )[0]
        assert "Paris" in answer.text and answer.outputs[0].finish_reason == "stop"
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = llm.generate(list(BEGINNINGS), params, progress=False)
        assert all(out.text.startswith(text) for out, (text, _) in zip(outputs, BEGINNINGS.values(), strict=True))
        ids = outputs[0].prompt_token_ids
        assert llm.generate([ids], params, progress=False)[0].text == outputs[0].text
        sampled = SamplingParams(seed=3, n=2, max_tokens=8)
        again = [llm.generate("Once upon a time", sampled, progress=False)[0] for _ in range(2)]
        assert [c.text for c in again[0].outputs] == [c.text for c in again[1].outputs]
        assert again[0].outputs[0].text != again[0].outputs[1].text
        with pytest.raises(ValueError, match="prompt"):
            llm.generate("x" * 10_000, params)


def test_generate_command_prints_the_answer() -> None:
    command = [sys.executable, "-m", "minisgl", "generate", FRANCE, "--max-tokens", str(MAX_TOKENS)]
    done = run(command, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
