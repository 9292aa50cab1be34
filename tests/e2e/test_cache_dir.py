"""Whole servers with `--cache-dir`: what was computed before a `kill -9` is not computed after it."""

from __future__ import annotations

import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl._rust import PageStore
from minisgl.tokenizer.echo import echo_json
from tests.helpers.adapters import TinyAdapter
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.forking import run
from tests.helpers.meaning import embedded_model
from tests.helpers.models import save, tiny_model
from tests.helpers.processor import without_amx
from tests.helpers.seconds import WAIT_S
from tests.helpers.stores import store_of

embedded_model()

pytestmark = pytest.mark.any_cpu
ANSWER_S = 2 * WAIT_S
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
    with ServerProcess(flags) as server:
        cold, cached = ask(server)
        assert cached == 0
        until(lambda: len(files(cache)) >= 15, "pages are written")
    with serving(*flags) as server:
        warm, cached = ask(server)
    assert warm == cold and cached >= 15 * 16
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(cache))


def metric(server: ServerProcess, name: str, headers: dict[str, str] | None = None) -> float:
    text = httpx.get(server.url + "/metrics", headers=headers, timeout=ANSWER_S).raise_for_status().text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"minisgl:store_{name}"))


@pytest.mark.slow
def test_damaged_pages_are_recomputed_and_counted(tmp_path: Path) -> None:
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
    done = run([sys.executable, "-m", "minisgl", "cache", "verify", str(tmp_path)])
    assert done.returncode == 1 and "damaged, and removed: 1 file\n" in done.stdout


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
        told = "--cache-dir: a page could not be written or read: "
        until(lambda: any(told in line for line in server.lines), "and there is a warning")
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
    with without_amx(), serving(*MODEL, "--cache-dir", str(tmp_path)) as server:
        warm, cached = ask(server)
        assert warm == cold and cached >= 15 * 16, "one of the best instruction set of the same bits"


@pytest.mark.slow
def test_evicted_pages_are_loaded_from_disk(tmp_path: Path) -> None:
    flags = ("--model", "smollm2", "--engine", "cpu", "--num-pages", "40", "--max-seq-len", "600")
    prompts = [f"{number} {PROMPT}" for number in range(4)]
    with serving(*flags, "--cache-dir", str(tmp_path)) as server:
        first = [ask(server, prompt)[0] for prompt in prompts]
        until(lambda: len(files(tmp_path)) >= 60, "pages are written")
        again = [ask(server, prompt) for prompt in prompts]
        assert [text for text, _ in again] == first and all(cached >= 15 * 16 for _, cached in again)
        until(lambda: metric(server, "loaded_pages_total") >= 45, "it is counted")


@pytest.fixture(params=["qwen3-tied", "lfm2"], ids=["pages", "pages and states"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = save(tiny_model(request.param, vocab_size=258), tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    return folder


SAMPLING: dict[str, Any] = {"max_tokens": 30, "temperature": 0.8, "seed": 9}
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 200, "max_seq_len": 256}
Answer = tuple[float, str, int]


def small(model: Path) -> dict[str, Any]:
    """Settings of a tiny model."""
    has_states = "lfm2" in (model / "config.json").read_text(encoding="utf-8")
    return SMALL | ({"checkpoint_interval": 16} if has_states else {})


def flags_of(model: Path, cache: Path) -> tuple[str, ...]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in small(model).items()]
    return "--model", str(model), "--engine", "cpu", *given, "--cache-dir", str(cache)


def complete(server: ServerProcess, prompt: list[int]) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, **SAMPLING}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=ANSWER_S)


class Storm:
    """A server under prompts that come all at once, and its end by `kill -9` before all are answered."""

    def __init__(self, model: Path, cache: Path) -> None:
        self._server = ServerProcess(flags_of(model, cache))
        self._killed = Event()  # its processes end one after the other: who still lives says that another one is gone

    def _answer(self, prompt: list[int]) -> Answer | None:
        try:
            said = complete(self._server, prompt)
        except httpx.TransportError:
            return None
        if said.status_code != 200 and self._killed.is_set():
            return None
        found = said.raise_for_status().json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return time.monotonic(), found["choices"][0]["text"], cached

    def run(self, prompts: list[list[int]], num_before: int) -> tuple[float, list[Answer | None]]:
        """The moment of the kill, after so many answers, and all of them: when it came, text, cached tokens."""
        with self._server, ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(self._answer, prompt) for prompt in prompts]
            for one in asked[:num_before]:
                one.result()
            self._killed.set()
            moment = time.monotonic()
            self._server.kill()
            return moment, [one.result() for one in asked]


def test_a_model_with_states_goes_on_after_kill_9(tmp_path: Path, front_end: str) -> None:
    folder, cache = save(tiny_model("lfm2", vocab_size=258), tmp_path / "tiny"), tmp_path / "cache"
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    flags = (*flags_of(folder, cache), "--frontend", front_end)
    prompt = [3 + at * at % 250 for at in range(90)]

    def answer(server: ServerProcess) -> tuple[str, int]:
        found = complete(server, prompt).raise_for_status().json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ServerProcess(flags) as server:
        cold, cached = answer(server)
        assert cached == 0
        until(lambda: len([*cache.glob("??/*.state")]) >= 90 // 16 + 1, "states are written")
        until(lambda: len(files(cache)) >= 29, "pages are written")
    with serving(*flags) as server:
        assert answer(server) == (cold, 88), "of 90 tokens two are computed"
        until(lambda: metric(server, "loaded_pages_total") == 22, "its pages are counted")
        until(lambda: metric(server, "loaded_states_total") == 1, "its state is counted")
    for state in cache.glob("??/*.state"):
        state.write_bytes(state.read_bytes()[:-1])
    with serving(*flags) as server:
        assert answer(server) == (cold, 0)
        until(lambda: metric(server, "damaged_pages_total") > 0, "it is counted")


def test_keys_with_a_cache_of_their_own_find_theirs_after_a_restart(tmp_path: Path, front_end: str) -> None:
    """And neither each other's nor everybody's, with an adapter or without one; with a new secret a key begins anew."""
    cache, keys = tmp_path / "cache", tmp_path / "keys.yaml"
    model = tiny_model("qwen3-tied", vocab_size=258)
    folder, adapter = save(model, tmp_path / "tiny"), TinyAdapter(model, 1).save(tmp_path / "adapter")
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    flags = (*flags_of(folder, cache), "--frontend", front_end, "--api-key-file", str(keys), "--lora", f"x={adapter}")
    body = {"prompt": [3 + at * at % 250 for at in range(90)], **SAMPLING, "ignore_eos": True}
    computed, found = (29, 0), (0, 22)  # pages that are written and loaded, of an answer of 30 tokens to 90

    def answers(secrets: dict[str, str], expected: list[tuple[int, int]]) -> list[str]:
        """Of each key, by the names of `secrets`, without the adapter and with it. `c` shares with all."""
        lines = [
            f"- {{name: {name}, key: {key}, own_cache: {str(name != 'c').lower()}}}" for name, key in secrets.items()
        ]
        keys.write_text("\n".join(["keys:", *lines]))
        texts, total = [], (0, 0)
        with serving(*flags) as server:
            for number, counts in enumerate(expected):
                headers = {"authorization": f"Bearer {secrets['abc'[number // 2]]}"}
                asked = {**body, "model": ("tiny", "x")[number % 2]}
                said = httpx.post(server.url + "/v1/completions", json=asked, headers=headers, timeout=ANSWER_S)
                texts.append(said.raise_for_status().json()["choices"][0]["text"])
                total = total[0] + counts[0], total[1] + counts[1]
                until(partial(counted, server, headers, total), f"{total} pages after answer {number}")
        return texts

    def counted(server: ServerProcess, headers: dict[str, str], total: tuple[int, int]) -> bool:
        return tuple(metric(server, f"{what}_pages_total", headers) for what in ("written", "loaded")) == total

    cold = answers({"a": "sk-1", "b": "sk-2", "c": "sk-3"}, [computed] * 6)
    assert cold == cold[:2] * 3 and cold[0] != cold[1]
    assert answers({"c": "sk-3", "b": "sk-2", "a": "sk-1"}, [found] * 6) == cold, "in whatever order"
    assert answers({"a": "sk-new", "b": "sk-2", "c": "sk-3"}, [computed] * 2 + [found] * 4) == cold


@pytest.mark.slow
@pytest.mark.usefixtures("no_amx")  # storms retract
@pytest.mark.timeout(3600)  # 300 kills: `--times 20 -o faulthandler_timeout=0`
def test_after_kills_at_random_moments_every_answer_is_exact(tiny: Path, tmp_path: Path, times: int) -> None:
    """Storms of prompts that share beginnings, each ended by `kill -9`, on one folder. How long it takes to open the
    folder and how old the answers are whose pages are lost is printed, and no matter of right and wrong."""
    rng, cache, kills = random.Random(times), tmp_path / "cache", 15 * times
    begins = [[rng.randrange(3, 250) for _ in range(rng.randrange(20, 150))] for _ in range(6)]
    right = found = lost = 0
    ages, opens = [0.0], [0.0]
    with (
        LLM(str(tiny), log_level="error", **small(tiny)) as plain,
        LLM(str(tiny), log_level="error", cache_dir=str(cache), **small(tiny)) as watcher,
    ):
        store = store_of(watcher)
        for _ in range(kills):
            tails = [[rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
            prompts = [rng.choice(begins) + rng.choice(tails) for _ in range(60)]
            moment, done = Storm(tiny, cache).run(prompts, rng.randrange(1, 60))
            plain.clear_cache()
            wanted = plain.generate(prompts, SamplingParams(**SAMPLING), progress=False)
            for prompt, one, want in zip(prompts, done, wanted, strict=True):
                if one is None:
                    continue
                at, text, cached = one
                assert text == want.text
                right, found = right + 1, found + (cached > 0)
                pages = len(prompt) // 4
                there = store.stage(np.array(prompt, np.int32), 0, pages).columns[1]
                if there < pages:
                    lost += pages - there
                    ages.append(moment - at)
            began = time.monotonic()
            PageStore(str(cache), 2**40, b"", 4, 100)
            opens.append(time.monotonic() - began)
    assert right > 10 * kills and found > 7 * kills
    whole, _, num_bytes, damaged = PageStore.verify(str(cache))
    print(
        f"{kills} kills: {right} answers exact, {found} of them with cached tokens; {lost} pages of answers lost, of "
        f"answers at most {max(ages):.2f} s old; {whole} pages, {num_bytes} bytes, opened in {max(opens):.3f} s"
    )
    assert whole > 5 * kills and damaged == 0, "a file is there as a whole, or not at all"


@pytest.mark.slow
@pytest.mark.usefixtures("no_amx")  # many prompts at once retract
def test_two_servers_race_to_create_a_folder_that_somebody_clears(tiny: Path, tmp_path: Path) -> None:
    rng, cache, done = random.Random(4), tmp_path / "made" / "cache", Event()
    begin = [rng.randrange(3, 250) for _ in range(100)]
    prompts = [begin + [rng.randrange(3, 250) for _ in range(40)] for _ in range(40)] * 2
    with LLM(str(tiny), log_level="error", **small(tiny)) as plain:
        wanted = [one.text for one in plain.generate(prompts, SamplingParams(**SAMPLING), progress=False)]

    def clear() -> int:
        cleared = 0
        while not done.wait(0.01):
            if cache.is_dir():
                cleared += PageStore.clear(str(cache))[0]
        return cleared

    def serve() -> list[str]:
        with serving(*flags_of(tiny, cache)) as server:
            return [complete(server, prompt).json()["choices"][0]["text"] for prompt in prompts]

    with ThreadPoolExecutor(3) as threads:
        clearing, both = threads.submit(clear), [threads.submit(serve) for _ in range(2)]
        try:
            assert [one.result() for one in both] == [wanted, wanted]
        finally:
            done.set()
        assert clearing.result() > 0


@pytest.mark.slow
def test_an_exported_prefix_is_loaded_by_a_server_that_never_computed_it(tmp_path: Path) -> None:
    text, file = tmp_path / "manual.txt", tmp_path / "manual.pages"
    text.write_text(PROMPT)
    command = (sys.executable, "-m", "minisgl", "cache", "export", f"@{text}", str(file))
    done = run([*command, *MODEL])
    assert done.returncode == 0 and "a prefix of " in done.stdout, done.stderr
    with serving(*MODEL) as server:
        cold, _ = ask(server)
    with serving(*MODEL, "--cache-dir", str(tmp_path / "cache"), "--warm-prefix", f"@{file}") as server:
        until(lambda: metric(server, "loaded_pages_total") >= 15, "it is counted")
        warm, cached = ask(server)
    assert warm == cold and cached >= 15 * 16
    flags = (*MODEL, "--kv-dtype", "f32", "--cache-dir", str(tmp_path / "cache"), "--warm-prefix", f"@{file}")
    done = run([sys.executable, "-m", "minisgl", "serve", *flags, "--port", "0"])
    assert done.returncode != 0
    assert f"{file}: its pages were computed by another model or other settings: kv_dtype" in done.stderr
