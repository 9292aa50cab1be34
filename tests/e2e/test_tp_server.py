"""Servers of several ranks, each a process: exact texts under pressure, and no end of any process leaves another."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from minisgl.config import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.weights.sources import resolve_model
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import expected

POOL = ("--engine", "echo", "--num-pages", "64", "--page-size", "4", "--max-running-requests", "12")
CHUNKS = ("--max-prefill-length", "32")
LIMIT = 64 * 4 + 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 49_152,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}


async def _ask(client: httpx.AsyncClient, i: int) -> None:
    """One request; every fifth goes away after some pieces."""
    rng = random.Random(i)
    prompt = "once upon a time " * rng.randrange(6) + "".join(rng.choices("abcde", k=rng.randint(1, 60)))
    body = {"prompt": prompt, "max_tokens": rng.randint(40, 120), "seed": i, "stream": True}
    text, pieces = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                pieces += 1
            if i % 5 == 0 and pieces == 3:
                break
    whole = expected(prompt, min(int(str(body["max_tokens"])), LIMIT - len(prompt)), i)
    assert whole.startswith(text) if i % 5 == 0 else text == whole


def storm(url: str, count: int) -> dict[str, int]:
    """Many requests at once; what the server then says of itself."""

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            await asyncio.gather(*(_ask(client, i) for i in range(count)))

    asyncio.run(all_of_them())
    stats: dict[str, int] = httpx.get(url + "/health").json()["stats"]
    return stats


def rank_processes(server: ServerProcess) -> list[psutil.Process]:
    """Rank 0, then the others."""
    found = [child for child in server.children() if "minisgl.runner" in " ".join(child.cmdline())]
    return sorted(found, key=lambda child: child.cmdline()[-1])


def lost(server: ServerProcess, victim: psutil.Process, sent: signal.Signals, within_s: float = WAIT_S) -> str:
    """What `victim` is sent, and the server's end; returns its last line. Nothing stays, a stopped process neither."""
    processes = server.children()
    victim.send_signal(sent)
    code = server.ended(within_s)
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert code == 1 and not alive
    server.check_no_files()
    return server.lines[-1]


def is_told_of(server: ServerProcess, rank: str) -> bool:
    """Whether `/metrics` has the rank's CPU seconds and its memory, of which a Python has at least 10 MB."""
    figures = httpx.get(server.url + "/metrics").text
    told = dict(re.findall(rf'^minisgl:rank_(\w+){{rank="{rank}"}} (\S+)$', figures, re.MULTILINE))
    return float(told["cpu_seconds_total"]) > 0 and 1e7 < float(told["resident_bytes"]) < 1e10


def test_two_ranks_serve_exact_texts_and_one_that_dies_ends_the_server() -> None:
    with ServerProcess((*POOL, *CHUNKS, "--tp", "2")) as server:
        stats = storm(server.url, 40)
        assert stats["num_cached_tokens_total"] > 0 and stats["num_retracted_total"] > 0
        until(lambda: all(is_told_of(server, rank) for rank in "01"), "a rank's CPU time and memory are not told")
        with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "a", "stream": True}):
            said = lost(server, rank_processes(server)[1], signal.SIGKILL)
        assert said.endswith("minisgl: tensor-parallel rank 1 was ended by signal 9")


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_rank_that_stands_still_ends_the_server_within_the_step_timeout(busy: bool) -> None:
    """Rank 1 is named, though rank 2, if there is a step to do, does not get on either; without one rank 0 waits for
    nothing."""
    with ServerProcess((*POOL, *CHUNKS, "--tp", "3", "--step-timeout", "2")) as server:
        victim = rank_processes(server)[1]
        if busy:
            with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
                body = {"prompt": "a", "stream": True, "max_tokens": 200, "ignore_eos": True}
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
                    said = lost(server, victim, signal.SIGSTOP, 2 + WAIT_S)
        else:
            said = lost(server, victim, signal.SIGSTOP, 2 + WAIT_S)
        told = r"minisgl: no heartbeat from tensor-parallel rank 1 for [\d.]+ s, the limit is 2 \(--step-timeout\)"
        assert re.search(f"{told}$", said)


@pytest.mark.slow
def test_four_ranks_serve_exact_texts_and_end_when_told() -> None:
    with serving(*POOL, *CHUNKS, "--tp", "4") as server:
        assert len(rank_processes(server)) == 4
        stats = storm(server.url, 60)
        assert stats["num_cached_tokens_total"] > 0 and stats["num_retracted_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_any_rank_that_dies_ends_an_idle_server(rank: int) -> None:
    with ServerProcess(("--engine", "echo", "--tp", "4")) as server:
        said = lost(server, rank_processes(server)[rank], signal.SIGKILL)
        assert ("exit code -9" in said) if rank == 0 else ("tensor-parallel rank" in said and "signal 9" in said)


@pytest.mark.slow
def test_the_ranks_end_when_the_server_dies() -> None:
    with ServerProcess(("--engine", "echo", "--tp", "3")) as server:
        processes = server.children()
        server.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
        assert not alive


@pytest.mark.slow
def test_a_rank_that_dies_while_loading_ends_the_server() -> None:
    with ServerProcess(("--engine", "echo", "--tp", "3"), wait=False) as server:

        def workers() -> list[psutil.Process]:
            return [child for child in server.children() if "minisgl.runner.worker" in " ".join(child.cmdline())]

        until(lambda: len(workers()) == 2, "no two workers")
        both = workers()
        both[0].kill()
        assert server.ended() == 1
        assert "tensor-parallel rank" in server.lines[-1] and "signal 9" in server.lines[-1]
        _, alive = psutil.wait_procs(both, timeout=WAIT_S)
        assert not alive


def _model(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = resolve_model("smollm2", lambda *report: None, load_format="dummy") / "tokenizer.json"
    shutil.copy(tokenizer, folder)
    return str(folder)


@pytest.mark.parametrize("device", ["cpu", pytest.param("inline", marks=pytest.mark.slow)])
def test_the_offline_api_with_two_torch_ranks(device: str, tmp_path: Path) -> None:
    """inline: as on a CUDA device."""
    folder = _model(tmp_path)
    prompts = [[5, 6, 7], list(range(3, 60)), [9]]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    found, before = [], psutil.Process().children()
    for tp in (1, 2):
        with LLM(folder, engine="torch", load_format="dummy", num_pages=64, tp=tp, num_threads=1, device=device) as llm:
            found.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)])
            new = [child for child in psutil.Process().children() if child not in before]
            assert ["minisgl.runner.worker" in child.cmdline() for child in new] == [True] * (tp - 1)
    assert found[0] == found[1]
    assert not [child for child in psutil.Process().children() if child not in before]


def test_a_model_that_cannot_be_sharded_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"--tp 3: config.json: num_attention_heads: 4 .* choose --tp 1, 2, 4"):
        LLM(_model(tmp_path), load_format="dummy", tp=3)
    with pytest.raises(ConfigError, match=r"--tp 2: a simulated engine has no ranks"):
        LLM("smollm2", engine="sim", tp=2)
    with pytest.raises(ConfigError, match=r"^tp=0: must be at least 1"):
        LLM("smollm2", engine="echo", tp=0)
    assert not [child for child in psutil.Process().children() if child not in before]
