"""`minisgl verify` of answers about images: it sees those of the body or of files, and names another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGUFWriter

from minisgl import cli
from tests.helpers.e2e import ServerProcess, serving
from tests.helpers.image_files import encoded, picture
from tests.helpers.seconds import WAIT_S
from tests.helpers.seeing_gguf import seer_of_files, write_text, write_tower
from tests.helpers.sight import PAD_ID, TEMPLATE, data_url, in_base64
from tests.helpers.vision_chat import talking

pytestmark = pytest.mark.any_cpu
FIRST, SECOND = (encoded(picture(*size)) for size in ((400, 320), (200, 300)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("seer"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--model", str(folder), "--max-image-tokens", "300", "--num-threads", "1") as running:
        yield running


Verify = Callable[..., int]


@pytest.fixture
def verify(folder: Path, tmp_path: Path) -> Verify:
    def run(answer: Any, prompt: Any, *flags: str) -> int:
        (tmp_path / "receipt.json").write_text(json.dumps(answer))
        (tmp_path / "prompt.json").write_text(json.dumps(prompt))
        files = (str(tmp_path / "receipt.json"), "--prompt", str(tmp_path / "prompt.json"))
        return cli.main(["verify", *files, "--model", str(folder), "--max-image-tokens", "300", *flags])

    return run


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json={**body, "receipt": True}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(*images: bytes, detail: str = "auto") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(one), "detail": detail}} for one in images]
    content = [{"type": "text", "text": "Compare"}, *parts, {"type": "text", "text": "briefly."}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "return_token_ids": True}


def test_an_answer_about_images_is_what_its_receipt_says(
    server: ServerProcess, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = set()
    for detail in ("low", "auto"):
        body = chat(FIRST, SECOND, detail=detail)
        found = post(server, "/v1/chat/completions", body)
        sizes.add(found["choices"][0]["receipt"]["prompt"]["count"])
        assert verify(found, body) == 0, capsys.readouterr()
    assert len(sizes) == 2
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(FIRST)}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    body = {"messages": messages, "max_tokens": 8}
    assert verify(post(server, "/v1/messages", body), body) == 0, capsys.readouterr()
    body = {"messages": [{"role": "user", "content": "Hi", "images": [in_base64(SECOND)]}], "stream": False}
    assert verify(post(server, "/api/chat", body), body) == 0, capsys.readouterr()


def test_images_of_files_stand_for_those_of_a_body_or_of_ids(
    server: ServerProcess, verify: Verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "first.png", tmp_path / "second.png"
    for file, data in zip(files, (FIRST, SECOND), strict=True):
        file.write_bytes(data)
    flags = [part for file in files for part in ("--image", str(file))]
    body = chat(FIRST, SECOND)
    found = post(server, "/v1/chat/completions", body)
    ids = found["prompt_token_ids"]
    assert verify(found, chat(SECOND, SECOND), *flags) == 0, capsys.readouterr()
    once = [token for at, token in enumerate(ids) if token != PAD_ID or ids[at - 1] != PAD_ID]
    for shown in (ids, once):
        assert verify(found, shown, *flags) == 0, capsys.readouterr()
    assert verify(found, body, *flags[:2]) == 2
    assert "--image: 1 files for the 2 images of the prompt" in capsys.readouterr().err


def test_another_image_is_named(server: ServerProcess, verify: Verify, capsys: pytest.CaptureFixture[str]) -> None:
    body = chat(FIRST, SECOND)
    found = post(server, "/v1/chat/completions", body)
    ours, theirs = found["choices"][0]["receipt"]["images"]
    assert verify(found, chat(FIRST, FIRST)) == 1
    assert f"differs: another image 1: {ours}, in the receipt {theirs}" in capsys.readouterr().out
    assert verify(found, body, "--max-image-tokens", "100") == 1
    assert "differs: another image 0" in capsys.readouterr().out
    assert verify(found, chat(FIRST)) == 1
    assert "another number of images: 1, in the receipt 2" in capsys.readouterr().out
    found["choices"][0]["receipt"]["images"] = [theirs, ours]
    assert verify(found, body) == 2, "the digest covers them"


def test_a_conversation_beyond_the_limit_of_images_has_the_notes_of_the_server(
    server: ServerProcess, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [encoded(picture(32, 32, seed)) for seed in range(17)]
    messages = [*chat(*small[:16])["messages"], {"role": "assistant", "content": "so"}, *chat(small[16])["messages"]]
    body = {"messages": messages, "max_tokens": 8}
    found = post(server, "/v1/chat/completions", body)
    assert len(found["choices"][0]["receipt"]["images"]) == 13
    assert verify(found, body) == 0, capsys.readouterr()
    assert verify(found, body, "--max-images", "17") == 1


@pytest.mark.parametrize(("flag", "value"), [("--max-image-tokens", "0"), ("--max-images", "-1")])
def test_a_limit_out_of_its_range_is_refused(
    verify: Verify, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify({}, {}, flag, value) == 2
    assert f"{flag} {value}: must be at least" in capsys.readouterr().err


def test_a_tower_in_a_file_belongs_to_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = seer_of_files()

    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.chat_template"].value = TEMPLATE

    text, tower = write_text(tmp_path / "m.gguf", model, edit), write_tower(tmp_path / "eyes.gguf", model)
    (prompt := tmp_path / "prompt.json").write_text(json.dumps(chat(FIRST)))
    with serving("--model", str(text), "--mmproj", str(tower), "--num-threads", "1") as running:
        answer = post(running, "/v1/chat/completions", chat(FIRST))
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 900
    (given := tmp_path / "receipt.json").write_text(json.dumps(answer))
    command = ["verify", str(given), "--prompt", str(prompt), "--model", str(text)]
    assert cli.main([*command, "--mmproj", str(tower)]) == 0, capsys.readouterr().out
    assert cli.main(command) == 1
    assert "differs: another model: weights" in capsys.readouterr().out
