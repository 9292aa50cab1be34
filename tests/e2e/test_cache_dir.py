"""Whole servers with `--cache-dir`: what was computed before a `kill -9` is not computed after it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from minisgl import LLM, SamplingParams
from minisgl._rust import PageStore
from minisgl.config import ConfigError
from minisgl.tokenizer.echo import echo_json
from minisgl.weights.sources import find_smollm2
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.models import save, tiny_model

try:
    find_smollm2()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.any_cpu
ANSWER_S = 120.0
MODEL = ("--model", "smollm2", "--engine", "cpu", "--num-pages", "512", "--max-seq-len", "2048")
PROMPT = "The tides of the sea follow the moon, and the moon follows nobody. " * 20


def ask(server: ServerProcess, prompt: str | list[int] = PROMPT, max_tokens: int = 24) -> tuple[str, int]:
    """The answer, and how many of the prompt's tokens were cached."""
    body: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9}
    body["seed"] = 4
    found = httpx.post(server.url + "/v1/completions", json=body, timeout=ANSWER_S).raise_for_status().json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def files(folder: Path) -> list[Path]:
    return [one for one in folder.glob("??/*") if len(one.name) == 64]


def files_of(server: ServerProcess, prompt: list[int], folder: Path) -> set[Path]:
    """Those that are there when its pages of 16 tokens are written, too: no name tells which page a file has."""
    ask(server, prompt, max_tokens=1)
    until(lambda: len(files(folder)) >= len(prompt) // 16, "its pages are written")
    return set(files(folder))


def test_a_restart_after_kill_9_computes_nothing_twice(tmp_path: Path, front_end: str) -> None:
    cache = tmp_path / "cache"
    flags = (*MODEL, "--frontend", front_end, "--cache-dir", str(cache), "--cache-size", "1GiB")
    server = ServerProcess(flags)
    try:
        cold, cached = ask(server)
        assert cached == 0
        until(lambda: len(files(cache)) >= 15, "pages are written")
    finally:
        server.kill()
        shutil.rmtree(server.folder)
    with serving(*flags) as server:
        warm, cached = ask(server)
    assert warm == cold and cached >= 15 * 16
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(cache))


def metric(server: ServerProcess, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=ANSWER_S).raise_for_status().text
    lines = [line for line in text.splitlines() if line.startswith(f"minisgl:store_{name}")]
    return float(lines[0].split()[-1])


@pytest.mark.slow
def test_damage_is_computed_and_counted(tmp_path: Path) -> None:
    flags = (*MODEL, "--cache-dir", str(tmp_path))
    prompt = [*range(1000, 1000 + 20 * 16)]
    with serving(*flags) as server:
        seven, eight, all_of_it = (files_of(server, prompt[: count * 16], tmp_path) for count in (7, 8, 20))
        cold, _ = ask(server, prompt)
    (eighth,), later = eight - seven, min(all_of_it - eight)
    data = eighth.read_bytes()
    eighth.write_bytes(data[:5000] + bytes([data[5000] ^ 4]) + data[5001:])
    later.write_bytes(data[:100])
    with serving(*flags) as server:
        found, cached = ask(server, prompt)
        assert (found, cached) == (cold, 7 * 16), "up to the first that is damaged"
        until(lambda: metric(server, "damaged_pages_total") == 1, "it is counted")
        again, _ = ask(server, prompt)
    assert again == cold
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "cache", "verify", str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1 and "damaged, and removed: 1 page\n" in done.stdout


@pytest.mark.slow
def test_a_folder_that_goes_while_it_is_served_costs_no_answer(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with serving(*MODEL, "--cache-dir", str(cache)) as server:
        first, _ = ask(server)
        until(lambda: metric(server, "written_pages_total") >= 15, "pages are written")
        shutil.rmtree(cache)
        cache.write_text("a file in its place")
        others = [ask(server, f"{number} {PROMPT}") for number in range(2)]
        until(lambda: metric(server, "failed_pages_total") > 0, "what cannot be written is counted")
        httpx.request("DELETE", server.url + "/v1/cache", timeout=ANSWER_S).raise_for_status()
        assert ask(server) == (first, 0)
        cache.unlink()
        assert [ask(server, f"{number} {PROMPT}")[0] for number in range(2)] == [text for text, _ in others]
        ask(server, f"3 {PROMPT}")
        until(lambda: len(files(cache)) > 0, "and it comes back")


@pytest.mark.slow
def test_what_one_engine_has_computed_another_one_loads(tmp_path: Path) -> None:
    flags = (*MODEL, "--num-pages", "512", "--dp", "2", "--routing", "round_robin", "--cache-dir", str(tmp_path))
    with serving(*flags, env={"MINISGL_CPU_ISA": "avx2"}) as server:
        cold, cached = ask(server)
        assert cached == 0
        until(lambda: len(files(tmp_path)) >= 15, "pages are written")
        warm, cached = ask(server)
        assert warm == cold and cached >= 15 * 16
    with serving(*MODEL, "--cache-dir", str(tmp_path)) as server:
        warm, cached = ask(server)
        assert warm == cold and cached >= 15 * 16, "one of the best instruction set that is here"


@pytest.mark.slow
def test_what_is_evicted_comes_back(tmp_path: Path) -> None:
    flags = ("--model", "smollm2", "--engine", "cpu", "--num-pages", "40", "--max-seq-len", "600")
    prompts = [f"{number} {PROMPT}" for number in range(4)]
    with serving(*flags, "--cache-dir", str(tmp_path)) as server:
        first = [ask(server, prompt)[0] for prompt in prompts]
        until(lambda: len(files(tmp_path)) >= 60, "pages are written")
        again = [ask(server, prompt) for prompt in prompts]
        assert [text for text, _ in again] == first and all(cached >= 15 * 16 for _, cached in again)
        assert metric(server, "loaded_pages_total") >= 45


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = save(tiny_model("qwen3-tied", vocab_size=258), tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_after_kills_at_random_moments_every_answer_is_exact(tiny: Path, tmp_path: Path) -> None:
    """A storm of prompts that share beginnings, ended by `kill -9` again and again, on one folder."""
    rng = random.Random(11)
    cache = tmp_path / "cache"
    begins = [[rng.randrange(3, 250) for _ in range(rng.randrange(20, 150))] for _ in range(6)]
    prompts = [rng.choice(begins) + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    sampling = {"max_tokens": 30, "temperature": 0.8, "seed": 9}
    small = {"page_size": 4, "num_pages": 200, "max_seq_len": 256}
    with LLM(str(tiny), log_level="error", **small) as llm:  # type: ignore[arg-type]
        texts = [one.text for one in llm.generate(prompts, SamplingParams(**sampling), progress=False)]  # type: ignore[arg-type]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in small.items()]
    right = found = 0
    for _ in range(20):
        server = ServerProcess(("--model", str(tiny), "--engine", "cpu", *flags, "--cache-dir", str(cache)))
        killed = Event()  # its processes end one after the other: who still lives says that another one is gone

        def answer(index: int, url: str = server.url, killed: Event = killed) -> tuple[str, int] | None:
            body = {"model": "tiny", "prompt": prompts[index], **sampling}
            try:
                said = httpx.post(url + "/v1/completions", json=body, timeout=ANSWER_S)
            except httpx.TransportError:
                return None
            if said.status_code != 200 and killed.is_set():
                return None
            assert said.status_code == 200, said.text
            usage = said.json()["usage"]
            assert said.json()["choices"][0]["text"] == texts[index]
            return texts[index], usage["prompt_tokens_details"]["cached_tokens"]

        try:
            with ThreadPoolExecutor(8) as threads:
                asked = [threads.submit(answer, rng.randrange(len(prompts))) for _ in range(60)]
                for one in asked[: rng.randrange(1, 60)]:  # the moment of the kill
                    one.result()
                killed.set()
                server.kill()
                done = [one.result() for one in asked]
        finally:
            server.kill()
            shutil.rmtree(server.folder)
        right += sum(one is not None for one in done)
        found += sum(one is not None and one[1] > 0 for one in done)
    assert right > 200 and found > 150
    whole = PageStore.verify(str(cache))
    assert whole[0] > 100 and whole[2] == 0, "a file is there as a whole, or not at all"
