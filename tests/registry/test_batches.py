"""Batches behind several models: whole servers of echo engines, whose texts are known beforehand."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from minisgl.config import EngineConfig, ServerConfig
from minisgl.registry.batches import BatchesOfSeveral
from minisgl.registry.keys import KeyLimits
from minisgl.server.batches.store import Store
from tests.helpers import batches
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import Fleet, echo, entry, expected, registry, write_models

KEYS = """keys:
- {name: ann, key: sk-ann, models: true}
- {name: bob, key: sk-bob}
"""
ANN = {"authorization": "Bearer sk-ann"}


def flags(folder: Path, *more: str) -> list[str]:
    """Room for one of two models."""
    (folder / "keys.yaml").write_text(KEYS)
    (folder / "delay").write_text("0")
    file = write_models(folder / "models.yaml", [echo("a"), echo("b"), echo("c", memory="400MB")])
    state = ("--state-dir", str(folder / "state"), "--api-key-file", str(folder / "keys.yaml"))
    return ["--models", file, "--memory", "170MB", *state, *more]


def env(folder: Path) -> dict[str, str]:
    return {"MINISGL_STEP_DELAY_FILE": str(folder / "delay")}


def lines_for(models: Sequence[str], num_lines: int) -> list[dict[str, Any]]:
    return [batches.request(i, f"text {i}", model=models[i % len(models)]) for i in range(num_lines)]


def check_answers(lines: Sequence[dict[str, Any]], models: Sequence[str]) -> None:
    """Each line once, from its model."""
    texts = batches.texts(lines)
    assert texts == {f"line {i}": batches.answer(i, f"text {i}") for i in range(len(texts))}
    told = {one["custom_id"]: one["response"]["body"]["model"] for one in lines}
    assert told == {f"line {i}": models[i % len(models)] for i in range(len(texts))}


def figures(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", headers=ANN, timeout=WAIT_S).text
    found = re.findall(r"^minisgl:(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("frontend", ["rust", pytest.param("python", marks=pytest.mark.slow)])
def test_lines_name_their_models_and_each_is_loaded_once(tmp_path: Path, frontend: str) -> None:
    with serving(*flags(tmp_path, "--frontend", frontend)) as server, batches.client(server, "sk-ann") as ann:
        lines = lines_for(["a", "b"], 200)
        wrong = [("nobody", 404, "model_not_found"), ("c", 400, "model_too_large"), ("a", 400, "invalid_value")]
        lines += [batches.request(200 + i, "x", model=name) for i, (name, _, _) in enumerate(wrong)]
        lines[-1]["body"]["temperature"] = 9
        batch = batches.ended(ann, batches.begin(ann, lines))
        answers = batches.content(ann, batch.output_file_id)
        assert batch.status == "completed" and len(answers) == 200
        check_answers(answers, ["a", "b"])
        errors = batches.content(ann, batch.error_file_id)
        said = [(one["response"]["status_code"], one["response"]["body"]["error"]["code"]) for one in errors]
        assert said == [(status, code) for _, status, code in wrong]
        usages = [one["response"]["body"]["usage"] for one in answers]
        assert batch.usage is not None and batch.usage.total_tokens == sum(one["total_tokens"] for one in usages)
        of_b = 'key_requests_total{model_name="b",key="ann"}'
        until(lambda: figures(server)[of_b] == 100, "the last of b's is not counted")
        now = figures(server)
        assert [now[f'model_loads_total{{model_name="{name}"}}'] for name in "ab"] == [1, 1]
        assert now["batch_lines_answered_total{}"] == 200 and now["batch_lines_failed_total{}"] == 3
        assert now['ttft_seconds_count{model_name="b"}'] == 0  # it is in the background there
        with batches.client(server, "sk-bob") as bob:
            assert list(bob.files.list()) == [] and list(bob.batches.list()) == []
            with pytest.raises(openai.NotFoundError):
                bob.batches.retrieve(batch.id)
        # b is loaded, and who says no model means the first all the same
        batch_id = batches.begin(ann, [batches.request(0, "text 0")])
        check_answers(batches.content(ann, batches.ended(ann, batch_id).output_file_id), ["a"])


@pytest.mark.parametrize("name", ["1e999", "[[1]]", "null", '""'])
async def test_invalid_model_name_goes_to_the_first_model(tmp_path: Path, name: str) -> None:
    found, config = registry(Fleet(), *map(entry, "ab"), room_for=1), ServerConfig(engine=EngineConfig(model="a"))
    one = BatchesOfSeveral(found, KeyLimits((), found), config, Store.open(str(tmp_path)))
    assert one._model(f'{{"model": {name}}}'.encode()).name == "a"
    one.all.state.close()


@pytest.mark.slow
def test_requests_for_another_model_do_not_wait_for_lines(tmp_path: Path) -> None:
    """Lines that take for ever give their room up, are asked again when there is some, and each is answered once."""
    with serving(*flags(tmp_path), env=env(tmp_path)) as server, batches.client(server, "sk-ann") as ann:
        (tmp_path / "delay").write_text("50")  # else the last line could be answered before no step ends any more
        batch_id = batches.begin(ann, lines_for(["a"], 300))
        until(lambda: count(ann, batch_id) > 0, "no line is answered")
        (tmp_path / "delay").write_text("600000")
        until(lambda: figures(server)["batch_lines_running{}"] > 0, "no line runs")
        (tmp_path / "delay").write_text("0")  # of servers that begin now: a step that waits goes on waiting
        body = {"model": "b", "prompt": "hello", "max_tokens": 12, "seed": 0}
        asked = httpx.post(f"{server.url}/v1/completions", json=body, headers=ANN, timeout=WAIT_S)
        assert asked.status_code == 200 and asked.json()["choices"][0]["text"] == expected("hello", 12)
        assert count(ann, batch_id) < 300
        assert figures(server)['model_loaded{model_name="b"}'] == 1  # somebody asked for it just now
        freed = httpx.post(f"{server.url}/v1/models/b/unload", json={}, headers=ANN, timeout=WAIT_S)
        assert freed.status_code == 200, freed.text
        check_answers(batches.content(ann, batches.ended(ann, batch_id).output_file_id), ["a"])


def has(api: openai.OpenAI, batch_id: str, num_answers: int) -> bool:
    return count(api, batch_id) >= num_answers


def count(api: openai.OpenAI, batch_id: str) -> int:
    found = api.batches.retrieve(batch_id).request_counts
    assert found is not None
    return found.completed + found.failed


@pytest.mark.slow
def test_killed_servers_answer_each_line_once(tmp_path: Path) -> None:
    """First a model's server, whichever is there, then the process at the port."""
    num_lines, chance, batch_id = 300, random.Random(1), ""
    server = ServerProcess(flags(tmp_path))
    try:
        with batches.client(server, "sk-ann") as api:
            batch_id = batches.begin(api, lines_for(["a", "b"], num_lines))
            for kill in (kill_a_model, ServerProcess.kill):
                enough = min(num_lines, count(api, batch_id) + 1 + chance.randrange(num_lines // 2))
                until(partial(has, api, batch_id, enough), "it stands still")
                kill(server)
    finally:
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)  # a killed server leaves its socket
    with serving(*flags(tmp_path)) as server, batches.client(server, "sk-ann") as api:
        batch = batches.ended(api, batch_id)
        assert batch.status == "completed" and batch.error_file_id is None
        answers = batches.content(api, batch.output_file_id)
        assert len(answers) == num_lines
        check_answers(answers, ["a", "b"])
        files = {path.name for path in (tmp_path / "state" / "files").iterdir()}
        assert files == {batch.input_file_id, batch.output_file_id}


def kill_a_model(server: ServerProcess) -> None:
    for child in psutil.Process(server.process.pid).children():
        os.kill(child.pid, signal.SIGKILL)
