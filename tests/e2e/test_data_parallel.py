"""Several engines behind one server: exact texts whichever engine computes them, and streams that outlive the death of
their engine. Real processes; the echo engine, and the CPU engine where layers keep states."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.helpers.data_parallel import (
    Ask,
    Chaos,
    ask_all,
    engine_processes,
    pool,
    random_ask,
    until_all_ready,
)
from tests.helpers.e2e import Brake, ServerProcess, until
from tests.helpers.engines import NEEDS_CPU
from tests.helpers.llama_cpp import put_tokenizer
from tests.helpers.models import save, tiny_model
from tests.helpers.seconds import WAIT_S

ECHO = ("--engine", "echo", "--page-size", "16", "--num-pages", "1024", "--no-access-log")
NUM_ENGINES = 3
# `minisgl` that starts engines again soon, however often they die.
IMPATIENT = (
    "-c",
    "import sys; from minisgl import cli; from minisgl.runner import several\n"
    "several.LONGEST_WAIT_S = 0.4; sys.exit(cli.main())",
)


@pytest.fixture(scope="module")
def brake(tmp_path_factory: pytest.TempPathFactory) -> Brake:
    return Brake(tmp_path_factory.mktemp("brake"), 0)


@pytest.fixture(scope="module")
def server(front_end: str, brake: Brake) -> Iterator[ServerProcess]:
    flags = (*ECHO, "--dp", str(NUM_ENGINES), "--frontend", front_end)
    with ServerProcess(flags, brake.env, minisgl=IMPATIENT) as running:
        yield running
        assert running.stop() == 0, "\n".join(running.lines)


def by_engine(server: ServerProcess, *names: str) -> list[dict[str, float]]:
    """Samples of each family by label engine, all of one moment."""
    text = httpx.get(f"{server.url}/metrics", timeout=WAIT_S).text
    families = {one.name.removeprefix("minisgl:"): one for one in text_string_to_metric_families(text)}
    return [{one.labels.get("engine", "all"): one.value for one in families[name].samples} for name in names]


def num_restarts(server: ServerProcess) -> float:
    return sum(by_engine(server, "engine_restarts")[0].values())


def status(server: ServerProcess) -> str:
    answer = httpx.get(f"{server.url}/health", timeout=WAIT_S)
    assert answer.status_code == 200, (answer.text, server.lines[-20:])
    found: str = answer.json()["status"]
    return found


def test_texts_are_exact_and_engines_share_them(server: ServerProcess) -> None:
    rng = random.Random(1)
    ask_all(server, [random_ask(rng, 200) for _ in range(48)])
    assert by_engine(server, "engine_step_tokens")[0].keys() == {"0", "1", "2"}
    until(lambda: min(by_engine(server, "engine_step_tokens")[0].values()) > 0, "an engine had nothing to do")


def test_sums_are_of_all_engines(server: ServerProcess) -> None:
    def idle() -> bool:
        return by_engine(server, "requests_running")[0]["all"] == 0 == pool(server)["num_live"]

    until(idle, "an engine does not rest")
    for one, whole in (
        ("engine_steps", "steps"),
        ("engine_prompt_tokens", "prompt_tokens"),
        ("engine_kv_pages", "kv_pages"),
    ):
        of_each, of_all = by_engine(server, one, whole)
        assert sum(of_each.values()) == of_all["all"] > 0
    found = httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()
    assert [one["engine"] for one in found["engines"]] == [0, 1, 2]
    assert found["engine"]["num_steps_total"] == sum(one["stats"]["num_steps_total"] for one in found["engines"])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_outlive_their_engine(server: ServerProcess, brake: Brake, sent: signal.Signals) -> None:
    """Killed, or standing still; each has streams, since no two share a beginning."""
    until_all_ready(server, NUM_ENGINES)
    before, restarts = pool(server), num_restarts(server)
    brake.hold(20)

    def is_missed() -> bool:
        """Seen now, or told afterwards: it comes back soon."""
        return status(server) == "degraded" or sum(pool(server)["num_losses_total"]) > sum(before["num_losses_total"])

    def lose_one() -> None:
        until(lambda: min(pool(server)["loads"]) > 0, "an engine has nothing to do")
        victim = engine_processes(server)[1]
        victim.send_signal(sent)
        until(is_missed, "nobody misses it")
        assert httpx.get(f"{server.url}/readyz", timeout=WAIT_S).status_code == 200
        assert httpx.get(f"{server.url}/livez", timeout=WAIT_S).status_code == 200
        brake.release()

    ask_all(server, [Ask(f"{number} of many", number, 1500) for number in range(12)], lose_one)
    until_all_ready(server, NUM_ENGINES)
    until(lambda: status(server) == "ok", "it stays degraded")
    after = pool(server)
    assert after["num_moved_total"] > before["num_moved_total"]
    assert sum(after["num_losses_total"]) == sum(before["num_losses_total"]) + 1
    assert num_restarts(server) == restarts + 1


def survive(server: ServerProcess, seed: int, ask: Callable[[random.Random, int], Ask]) -> None:
    """Every answer of 64 clients is what it should be, though four engines die."""
    until_all_ready(server, NUM_ENGINES)
    chaos = Chaos(server, NUM_ENGINES, seed, ask)
    chaos.run(num_kills=4)
    assert chaos.num_kills == 4 and chaos.num_answers >= 64
    until_all_ready(server, NUM_ENGINES)
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.mark.slow
def test_streams_of_a_model_with_states_survive_killed_engines(front_end: str) -> None:
    """Of a model whose layers keep states: a moved request has none, and begins with what the other engine saved."""
    args = (*ECHO, "--dp", str(NUM_ENGINES), "--frontend", front_end, "--checkpoint-interval", "32")
    with ServerProcess(args, env={"MINISGL_ECHO_STATES": "40"}, minisgl=IMPATIENT) as server:
        survive(server, 23, partial(random_ask, states=True))


@pytest.mark.slow
@NEEDS_CPU
@pytest.mark.usefixtures("no_amx")  # what is moved is computed again
def test_streams_of_a_computed_model_with_states_survive_killed_engines(front_end: str, tmp_path: Path) -> None:
    """The same on the CPU engine: whatever is moved, saved and found, each text is that of a server of its own."""
    model = tiny_model("lfm2", vocab_size=put_tokenizer(tmp_path, "gpt-2"), max_position_embeddings=1024)
    folder, rng = str(save(model, tmp_path)), random.Random(29)
    settings = {"engine": "cpu", "page_size": 16, "num_pages": 2048, "max_seq_len": 1024, "num_threads": 1}
    asks = [random_ask(rng, 400) for _ in range(200)]
    with LLM(folder, log_level="error", cache="naive", **settings) as llm:
        params = [
            SamplingParams(temperature=one.seed % 2, seed=one.seed, max_tokens=one.max_tokens, ignore_eos=True)
            for one in asks
        ]
        for i, alone in enumerate(llm.generate([one.prompt for one in asks], params, progress=False)):
            asks[i] = replace(asks[i], known=(alone.text, len(alone.prompt_token_ids)))
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    pool_of = ("--dp", str(NUM_ENGINES), "--frontend", front_end, "--checkpoint-interval", "32", "--no-access-log")
    with ServerProcess(("--model", folder, *flags, *pool_of), minisgl=IMPATIENT) as server:
        survive(server, 31, lambda rng, _: rng.choice(asks))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_token_is_lost_or_repeated_in_many_kills(server: ServerProcess, seed: int, times: int) -> None:
    """0 lost, 0 repeated, 0 changed."""
    until_all_ready(server, NUM_ENGINES)
    chaos = Chaos(server, NUM_ENGINES, seed)
    chaos.run(num_kills=25 * times)
    print(f"{chaos.num_kills} kills under {chaos.num_answers} answers of 64 clients, all exact")
    until_all_ready(server, NUM_ENGINES)
