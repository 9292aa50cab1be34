"""Whole servers with adapters on the echo engine, whose text is another one with each: from the command line and over
HTTP, behind both front ends, with one engine and with two."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.data_parallel import engine_processes, until_all_ready
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import expected

POOL = ("--engine", "echo", "--num-pages", "256", "--page-size", "4", "--max-seq-len", "400")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
OUTSIDE = "must be a folder below the server's folder of adapters (lora_folder)"
PROMPT = "The same words for all of them."


def made(folder: Path, **config: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    return str(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(front_end: str, place: Path) -> Iterator[ServerProcess]:
    """Number 1 is sql, 2 is chat; it takes any name for its model's that is no adapter's."""
    sql, chat = made(place / "sql"), made(place / "chat")
    flags = ("--lora", f"sql={sql}", f"chat={chat}", "--any-model-name", "--served-model-name", "base")
    flags += ("--lora-folder", str(place), "--max-loras", "4")
    with serving(*POOL, *flags, "--frontend", front_end) as running:
        yield running


def wanted(prompt: str, adapter: int, count: int) -> str:
    return expected(prompt, count, 1, to_the_end=True, adapter=adapter)


def ask(http: httpx.Client, model: str | None, prompt: str = PROMPT, count: int = 8) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "seed": 1, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body if model is None else {**body, "model": model})
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def models(http: httpx.Client) -> dict[str, Any]:
    return {card["id"]: card for card in http.get("/v1/models").raise_for_status().json()["data"]}


def test_the_model_field_selects_the_adapter(http: httpx.Client, place: Path) -> None:
    for model, adapter in ((None, 0), ("base", 0), ("another", 0), ("sql", 1), ("chat", 2)):
        answer = ask(http, model)
        assert answer["choices"][0]["text"] == wanted(PROMPT, adapter, 8), model
        assert answer["model"] == (model if adapter else "base")
    cards = models(http)
    assert list(cards)[:3] == ["base", "sql", "chat"]
    assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("base", "sql")
    assert "parent" not in cards["base"]
    assert http.get("/v1/models/chat").json() == cards["chat"]


def test_chats_streams_and_other_apis_select_the_adapter(http: httpx.Client) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "seed": 1}
    texts = set()
    for model in ("base", "sql", "chat"):
        answer = http.post("/v1/chat/completions", json={**chat, "model": model}).raise_for_status().json()
        assert answer["model"] == model
        texts.add(answer["choices"][0]["message"]["content"])
        streamed = http.post("/v1/chat/completions", json={**chat, "model": model, "stream": True}).raise_for_status()
        assert f'"model":"{model}"' in streamed.text.replace(": ", ":")
        told = http.post("/v1/responses", json={"input": "Hello", "model": model, "max_output_tokens": 16}).json()
        assert told["model"] == model
        said = {"messages": chat["messages"], "max_tokens": 5, "model": model}
        assert http.post("/v1/messages", json=said).raise_for_status().json()["model"] == model
    assert len(texts) == 3


def test_cached_prefixes_are_not_shared_between_adapters(http: httpx.Client) -> None:
    prompt = "a prompt of some pages " * 4
    cached = [
        ask(http, model, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for model in ("sql", "base", "chat", "sql", "chat", "base")
    ]
    assert cached == [0, 0, 0] + [(len(prompt) - 1) // 4 * 4] * 3
    refused = http.post("/v1/cache/prefixes", json={"text": prompt, "model": "sql"})
    assert refused.status_code == 400 and "not for adapters" in refused.json()["error"]["message"]


def test_an_adapter_is_loaded_and_unloaded_while_others_stream(http: httpx.Client, place: Path) -> None:
    """Streams of the model, of another adapter and of the one that goes are what they are alone."""
    path = made(place / "late")
    loaded = http.post(LOAD, json={"lora_name": "late", "lora_path": path})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    number = 3
    texts: dict[tuple[str, int], str] = {}
    began = threading.Semaphore(0)

    def stream(model: str, i: int) -> None:
        body = {"prompt": f"stream {i}", "max_tokens": 300, "seed": 1, "ignore_eos": True, "stream": True}
        text = ""
        with http.stream("POST", "/v1/completions", json={**body, "model": model}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not text:
                        began.release()
                    text += json.loads(line[6:])["choices"][0]["text"]
        texts[model, i] = text

    asked = {("base", 0): 0, ("sql", 1): 1, ("late", 2): number, ("chat", 3): 2}
    threads = [threading.Thread(target=stream, args=key) for key in asked]
    for thread in threads:
        thread.start()
    for _ in threads:
        began.acquire(timeout=WAIT_S)
    gone = http.post(UNLOAD, json={"lora_name": "late"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'late' removed successfully.")
    assert http.post(UNLOAD, json={"lora_name": "late"}).status_code == 404
    assert "late" not in models(http)
    again = http.post(LOAD, json={"lora_name": "late", "lora_path": path, "load_inplace": False})
    assert again.status_code == 200
    assert ask(http, "late")["choices"][0]["text"] == wanted(PROMPT, number + 1, 8)
    for thread in threads:
        thread.join(WAIT_S)
    for (model, i), adapter in asked.items():
        assert texts[model, i] == wanted(f"stream {i}", adapter, 300), model
    assert http.post(UNLOAD, json={"lora_name": "late"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (LOAD, {"lora_name": "x"}, 400, "lora_path"),
        (LOAD, {"lora_path": "x"}, 400, "lora_name"),
        (LOAD, {"lora_name": "base", "lora_path": "x"}, 400, "the model's own name"),
        (LOAD, {"lora_name": "sql", "lora_path": "x"}, 400, "is loaded already"),
        (LOAD, {"lora_name": "x", "lora_path": "."}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "/etc/passwd"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "../../../etc"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "nowhere"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "sql\0"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "out/of"}, 400, OUTSIDE),
        (LOAD, {"lora_name": "x", "lora_path": "empty"}, 400, "adapter_config.json: No such file"),
        (LOAD, {"lora_name": "x", "lora_path": "pipe"}, 400, "adapter_config.json: is not a regular file"),
        (LOAD, {"lora_name": "x", "lora_path": "endless"}, 400, "lora_alpha: 1000000"),
        (LOAD, {"lora_name": "x", "lora_path": "deep"}, 400, "lora_path: adapter_config.json"),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere", "load_inplace": True}, 400, "load_inplace"),
        (UNLOAD, {"lora_name": "x"}, 404, "does not exist here"),
        (UNLOAD, {"lora_name": "base"}, 404, "does not exist here"),
        (UNLOAD, {}, 400, "lora_name"),
    ],
)
def test_invalid_adapters_are_refused(
    http: httpx.Client, place: Path, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    """Each under the same name, which stays free."""
    if not (place / "pipe").exists():
        made(place / "endless", lora_alpha=10**400)
        (place / "out").symlink_to("/etc")
        for name in ("empty", "pipe", "deep"):
            (place / name).mkdir()
        os.mkfifo(place / "pipe" / "adapter_config.json")
        (place / "deep" / "adapter_config.json").write_text("[" * 100_000)
    answer = http.post(path, json=body)
    assert str(place) not in answer.text
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
    assert set(models(http)) == {"base", "sql", "chat"}


def test_adapters_beyond_max_loras_are_refused(http: httpx.Client, place: Path) -> None:
    made(place / "one of many")
    answers = [http.post(LOAD, json={"lora_name": f"n{i}", "lora_path": "one of many"}) for i in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 400]
    assert "there are 4 adapters, the limit (max_loras)" in answers[2].text
    for i in range(2):
        assert http.post(UNLOAD, json={"lora_name": f"n{i}"}).status_code == 200
    assert set(models(http)) == {"base", "sql", "chat"}


def test_an_unsupported_adapter_ends_the_start(place: Path) -> None:
    path = made(place / "dora", use_dora=True)
    with pytest.raises(RuntimeError, match="use_dora: true: DoRA"), serving(*POOL, "--lora", f"x={path}"):
        pass


def test_loading_needs_the_api_key_and_unknown_adapters_return_404(front_end: str, place: Path) -> None:
    path = made(place / "keyed")
    flags = ("--api-key", "secret", "--served-model-name", "base", "--frontend", front_end, "--lora-folder", str(place))
    with serving(*POOL, *flags) as running:
        body = {"lora_name": "x", "lora_path": path}
        assert httpx.post(running.url + LOAD, json=body).status_code == 401
        assert httpx.post(running.url + UNLOAD, json=body).status_code == 401
        with httpx.Client(base_url=running.url, headers={"authorization": "Bearer secret"}, timeout=WAIT_S) as http:
            asks = {"prompt": "a", "model": "x", "max_tokens": 1}
            missing = http.post("/v1/completions", json=asks)
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
            assert http.post(LOAD, json=body).status_code == 200
            assert http.post("/v1/completions", json=asks).json()["model"] == "x"
            assert http.post(UNLOAD, json=body).status_code == 200
            assert http.post("/v1/completions", json=asks).status_code == 404


def test_only_keys_with_permission_load_adapters(front_end: str, place: Path, tmp_path: Path) -> None:
    made(place / "allowed")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n- {name: admin, key: sk-admin, lora: true}\n- {name: other, key: sk-other}\n")
    flags, body = ("--api-key-file", str(keys), "--frontend", front_end), {"lora_name": "x", "lora_path": "allowed"}
    for folder in ((), ("--lora-folder", str(place))):
        with serving(*POOL, *flags, *folder) as running:

            def status(key: str, path: str, running: ServerProcess = running) -> tuple[int, str]:
                head = {"authorization": f"Bearer {key}"}
                answer = httpx.post(running.url + path, json=body, headers=head, timeout=WAIT_S)
                return answer.status_code, answer.text

            for path in (LOAD, UNLOAD):
                code, text = status("sk-other", path)
                assert (
                    code,
                    ("API key other: needs `lora: true`" if folder else "lora_folder, a key of --config") in text,
                ) == (
                    403,
                    True,
                )
                assert status("sk-admin", path)[0] == (200 if folder else 403)


def test_every_engine_has_the_adapters_also_after_a_restart(front_end: str, place: Path) -> None:
    first, second = made(place / "first"), made(place / "second")
    flags = ("--dp", "2", "--lora", f"first={first}", "--served-model-name", "base", "--frontend", front_end)
    flags += ("--lora-folder", str(place))
    with serving(*POOL, *flags) as running, httpx.Client(base_url=running.url, timeout=WAIT_S) as http:
        assert http.post(LOAD, json={"lora_name": "second", "lora_path": second}).status_code == 200

        def check() -> None:
            for i in range(8):
                for model, adapter in (("base", 0), ("first", 1), ("second", 2)):
                    prompt = f"{model} {i}"
                    assert ask(http, model, prompt)["choices"][0]["text"] == wanted(prompt, adapter, 8)

        check()
        engine_processes(running)[0].send_signal(signal.SIGKILL)
        check()
        until_all_ready(running, 2)
        check()
