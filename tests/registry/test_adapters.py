"""Adapters that are loaded over HTTP, behind one port with several models: their names are known there, also when their
model was unloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.engine.echo import EchoModel
from minisgl.server.core.errors import ApiError
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import echo, entry, several, states, use, write_models

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "The same words for all of them."


def made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(place: Path, front_end: str) -> Iterator[ServerProcess]:
    """Room for one of two."""
    for name in ("own", "sql", "late"):
        made(place / name)
    models = [echo("a", adapters={"own": str(place / "own")}), echo("b", aliases=["also-b"])]
    file = write_models(place / "models.yaml", models)
    with serving("--models", file, "--memory", "160MB", "--lora-folder", str(place), "--frontend", front_end) as one:
        yield one
        for name in ("own", "sql", "late"):
            shutil.rmtree(place / name, ignore_errors=True)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=2 * WAIT_S) as client:
        yield client


def ask(http: httpx.Client, name: str) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "seed": 1, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def wanted(adapter: int) -> str:
    ids = Tokenizer.echo().encode(PROMPT).tolist()
    return Tokenizer.echo().decode(EchoModel(seed=1, adapter=adapter).generate(ids, 8, ignore_eos=True))


def cards(http: httpx.Client) -> dict[str, Any]:
    return {one["id"]: one for one in http.get("/v1/models").json()["data"]}


def test_a_name_is_known_until_it_is_unloaded(http: httpx.Client) -> None:
    assert ask(http, "sql").status_code == 404
    loaded = http.post(LOAD, json={"model": "a", "lora_name": "sql", "lora_path": "sql"})
    assert loaded.status_code == 200, loaded.text
    found = cards(http)
    assert list(found) == ["a", "own", "sql", "b"] and found["sql"]["parent"] == "a"
    assert http.get("/v1/models/sql").json() == found["sql"]
    for name, number in (("sql", 2), ("own", 1), ("a", 0)):
        answer = ask(http, name)
        assert answer.json()["model"] == name and answer.json()["choices"][0]["text"] == wanted(number)
    assert ask(http, "b").status_code == 200
    assert cards(http)["a"]["state"] == "unloaded"
    again = ask(http, "sql")  # its model comes back, and has it
    assert again.json()["choices"][0]["text"] == wanted(2) and cards(http)["b"]["state"] == "unloaded"
    assert ask(http, "b").status_code == 200
    assert http.post(UNLOAD, json={"lora_name": "sql"}).status_code == 200  # at the model that has it, whichever runs
    assert ask(http, "sql").status_code == 404 and "sql" not in cards(http)


def test_name_of_a_rejected_adapter_is_free(http: httpx.Client, place: Path) -> None:
    outside = http.post(LOAD, json={"model": "a", "lora_name": "far", "lora_path": ".."})
    assert outside.status_code == 400 and outside.json()["error"]["param"] == "lora_path"
    assert ask(http, "far").status_code == 404
    for name, of in (("b", "b"), ("also-b", "b"), ("own", "a")):
        taken = http.post(LOAD, json={"model": "b" if name == "own" else "a", "lora_name": name, "lora_path": "late"})
        assert taken.status_code == 400
        assert f"lora_name: '{name}' is a name of {of} already" in taken.json()["error"]["message"]
    assert http.post(LOAD, json={"model": "a", "lora_name": 3, "lora_path": "late"}).status_code == 400
    assert http.post(UNLOAD, json={"lora_name": "nobody"}).status_code == 404
    assert list(cards(http)) == ["a", "own", "b"]


def test_model_loads_without_an_adapter_whose_folder_is_gone(
    server: ServerProcess, http: httpx.Client, place: Path
) -> None:
    assert http.post(LOAD, json={"model": "a", "lora_name": "late", "lora_path": "late"}).status_code == 200
    assert http.post(LOAD, json={"model": "a", "lora_name": "late", "lora_path": "sql"}).status_code == 400
    assert ask(http, "late").json()["model"] == "late" and ask(http, "b").status_code == 200
    shutil.rmtree(place / "late")
    assert ask(http, "a").status_code == 200
    assert ask(http, "late").status_code == 404
    until(lambda: any("adapter late is not known any more" in line for line in server.lines), "the log does not say so")


async def test_adapter_that_fails_to_reload_is_forgotten(tmp_path: Path) -> None:
    async with several(entry("a"), room_for=1) as (fleet, found):
        a = found.models["a"]
        found.name_adapter(a, "late")
        assert found.find_exactly("late") is a
        await use(found, "a")
        assert fleet.configs["a"].engine.lora == ()  # it is being loaded
        await found.unload(a)
        a.adapters["late"] = str(tmp_path)
        fleet.refuse["a"] = "adapter late: it is none any more"
        with pytest.raises(ApiError):
            await use(found, "a")
        assert fleet.configs["a"].engine.lora == (("late", str(tmp_path)),) and found.find_exactly("late") is None
        fleet.refuse.clear()
        a.failure.retry_at = 0.0
        await use(found, "a")
        assert fleet.configs["a"].engine.lora == () and states(found) == {"a": "loaded"}
