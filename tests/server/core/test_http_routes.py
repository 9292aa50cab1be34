"""Routes by the other names and methods that clients use."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from minisgl.config import EngineConfig
from minisgl.server.routes import ROUTES
from tests.helpers.server import CONFIG, MAX_SEQ_LEN, MODEL, chat_body, check_error, frontend

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GET = [
    route.path.replace("{model_id}", MODEL)
    for route in ROUTES
    if route.method == "get"
    and 501 not in route.errors
    and not {"{prefix_id}", "{response_id}"} & {*route.path.split("/")}
]


@pytest.mark.parametrize("path", [*GET, "/docs", "/openapi.json"])
def test_head_says_what_get_would(http: httpx.Client, path: str) -> None:
    asked, got = http.head(path), http.get(path)
    assert asked.status_code == got.status_code == 200 and asked.content == b""
    assert asked.headers["content-type"] == got.headers["content-type"]
    if path not in ("/metrics", "/stats", "/health", "/v1/health"):  # their numbers grow
        assert asked.headers["content-length"] == str(len(got.content))
    assert int(asked.headers["content-length"]) > 0


def test_head_of_unknown_route_is_404(http: httpx.Client) -> None:
    assert http.head("/nowhere").status_code == http.head("/v1/models/other").status_code == 404
    answer = http.head(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert "HEAD" in http.delete("/health").headers["allow"]


def test_slashes_at_the_end_mean_nothing(http: httpx.Client) -> None:
    for path in GET:
        assert http.get(path + "/").status_code == 200
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    assert http.post(TEXT + "/", json={"prompt": "say:a"}).json()["choices"][0]["text"] == "a"
    assert http.post(CHAT + "//", json=chat_body("say:b")).json()["choices"][0]["message"]["content"] == "b"
    assert http.post("/tokenize/", json={"prompt": "ab"}).json()["count"] == 2
    assert check_error(http.post("/", json={}), 404)


def test_a_slash_needs_the_key_as_well() -> None:
    with frontend(config=msgspec.structs.replace(CONFIG, api_key="k")) as running, running.http() as http:
        assert http.get("/livez/").status_code == 200
        for path in ("/v1/models/", "/v1/", "/docs/", "/livez/x"):
            check_error(http.get(path), 401)


@pytest.mark.parametrize("path", ["/v1", "/v1/"])
def test_v1_answers_get_post_and_options(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert http.head(path).status_code == 200
    check_error(http.delete(path), 405)


# ------------------------------------------------------------------------------------------------------------- models


def test_the_card_of_a_model() -> None:
    config = msgspec.structs.replace(CONFIG, served_model_name="mine", engine=EngineConfig(model="some/folder"))
    with frontend(config=config) as running, running.http() as http:
        card = http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["root"], card["max_model_len"]) == ("mine", "some/folder", MAX_SEQ_LEN)
        assert http.get("/v1/models/mine").json() == card
        check_error(http.get("/v1/models/some/folder"), 404)


def test_a_local_model_has_its_name_and_its_path(tmp_path: Path, front_end: str) -> None:
    """The id is the file's name without its suffix."""
    file = tmp_path / "tiny-1.5B.gguf"
    file.touch()
    config = msgspec.structs.replace(CONFIG, served_model_name=None, engine=EngineConfig(model=str(file)))
    with frontend(config=config, front_end=front_end) as running, running.http() as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["tiny-1.5B"]
        for name in ("tiny-1.5B", "tiny-1.5B.gguf", str(file)):
            answer = http.post(CHAT, json={**chat_body("say:a"), "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == "tiny-1.5B"
            assert http.get(f"/v1/models/{name}").json()["id"] == "tiny-1.5B"
        check_error(http.post(CHAT, json={**chat_body("say:a"), "model": "tiny"}), 404)


def test_any_model_name() -> None:
    """Answers say what was served."""
    with frontend(config=msgspec.structs.replace(CONFIG, any_model_name=True)) as running, running.http() as http:
        for path, body in ((CHAT, chat_body("say:a")), (TEXT, {"prompt": "say:a"})):
            for stream in (False, True):
                answer = http.post(path, json={**body, "model": "gpt-99", "stream": stream})
                assert answer.status_code == 200 and f'"model":"{MODEL}"' in answer.text
        assert http.post("/generate", json={"prompt": "say:a", "model": "gpt-99"}).status_code == 200
        assert http.get("/v1/models/gpt-99").json()["id"] == MODEL
        with openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0) as client:
            assert client.models.retrieve("gpt-99").id == MODEL
        assert check_error(http.post(TEXT, json={"prompt": "a", "model": 5}), 400)["param"] == "model"


# --------------------------------------------------------------------------------------------------------------- docs


def test_the_page_of_the_routes_needs_no_other_host(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "http" not in policy and "*" not in policy
    style = hashlib.sha256(answer.text.partition("<style>")[2].partition("</style>")[0].encode()).digest()
    assert f"style-src 'sha256-{b64encode(style).decode()}'" in policy
    own = answer.text.replace('href="#', "").replace('href="/openapi.json"', "")
    assert not re.findall(r"\b(?:src|href|action|style)=|url\(|@import|<script|<link", own)
    for route in ROUTES:
        assert route.path in answer.text and route.summary.replace("'", "&#x27;") in answer.text
    page = json.loads(http.get("/openapi.json").text)
    for name, schema in page["components"]["schemas"].items():
        assert f'id="{name}"' in answer.text
        assert all(field in answer.text for field in schema.get("properties", {}))
