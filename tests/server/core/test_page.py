"""The page's files: who gets them, what the browser is told, what is kept of others."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import msgspec
import pytest

from minisgl.server.core.page import FOLDER, POLICY, TYPES, WebPage
from tests.helpers.server import CONFIG, check_error, frontend

LINKS = re.compile(r'(?:href|src)="([^"#:]+)"')
IMPORTS = re.compile(r'(?:from|import) "(\.[^"]+)";')


def test_the_page_and_all_that_it_names(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    for path in LINKS.findall(page.text):
        assert http.get(f"/{path}").status_code == 200, path
    assert http.get("/web/js/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert http.get("/web/css/base.css").headers["content-type"] == "text/css; charset=utf-8"


def test_browsers_are_told_to_run_and_ask_nothing_else(http: httpx.Client) -> None:
    for path in ("/", "/web/js/main.js", "/web/icon.svg"):
        headers = http.get(path).headers
        assert headers["content-security-policy"] == POLICY and "unsafe" not in POLICY
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get("/web/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    for tag in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = http.get("/web/js/main.js", headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert http.get("/web/js/main.js", headers={"if-none-match": '"x"'}).status_code == 200
    head = http.head("/")
    assert head.content == b"" and head.headers["content-length"] == str(len(http.get("/").content))


@pytest.mark.parametrize(
    "path", ["/web/nothing.js", "/web", "/web/../server/core/page.py", "/web/%2e%2e/config.py", "/web/js"]
)
def test_other_paths_are_404(http: httpx.Client, path: str) -> None:
    assert check_error(http.get(path), 404)["code"] == "not_found"


def test_page_accepts_only_get_and_head(http: httpx.Client) -> None:
    for path in ("/", "/web/js/main.js"):
        check_error(http.post(path, json={}), 404)


def test_the_page_needs_no_key_and_the_api_does(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, api_key="k")
    with frontend(config=config, front_end=front_end) as running, running.http() as http:
        assert {http.get(path).status_code for path in ("/", "/web/js/main.js", "/web/vendor/marked.js")} == {200}
        for path in ("/v1/models", "/web/nothing.js", "/stats"):
            check_error(http.get(path), 401)
        check_error(http.get("/", headers={"host": "elsewhere.example"}), 403)


def test_before_there_is_a_model_the_page_is_there() -> None:
    with frontend(ready=False) as running, running.http() as http:
        assert http.get("/").status_code == 200


def files() -> list[Path]:
    return [file for file in FOLDER.rglob("*") if file.is_file()]


def test_every_file_is_given() -> None:
    assert {f"/web/{file.relative_to(FOLDER).as_posix()}" for file in files()} | {"/"} == set(WebPage().paths)
    assert {file.suffix for file in files()} <= TYPES.keys()


def test_modules_import_what_is_there_and_nothing_from_elsewhere() -> None:
    own = [file for file in files() if file.parent.name != "vendor"]
    for file in own:
        text = file.read_text(encoding="utf-8")
        for path in IMPORTS.findall(text) if file.suffix == ".js" else ():
            assert (file.parent / path).is_file(), f"{file.name}: {path}"
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), file.name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
        assert not re.search(r"<style|<script>|\bstyle=|\son\w+=", text) or file.suffix != ".html", file.name
        assert len(text.splitlines()) <= 400, file.name


def test_kept_libraries_are_as_they_were_published() -> None:
    folder = FOLDER / "vendor"
    rows = re.findall(
        r"^\| (\S+) \| (\S+) \| .* ([0-9a-f]{64}) \|$", (folder / "VERSIONS.md").read_text(), re.MULTILINE
    )
    assert {name for name, _, _ in rows} == {file.name for file in folder.iterdir() if file.suffix in (".js", ".css")}
    for name, _, digest in rows:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert (folder / name).with_suffix(".LICENSE").is_file()


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [("text/plain", True), ("application/json, text/plain;q=0.9, */*", True), ("text/html, text/plain", False)],
)
def test_who_asks_for_text_gets_what_ollama_s_clients_look_for(http: httpx.Client, accept: str, is_text: bool) -> None:
    answer = http.get("/", headers={"accept": accept})
    assert answer.status_code == 200 and (answer.text == "Ollama is running") == is_text
    assert answer.headers["content-type"].startswith("text/plain" if is_text else "text/html")
    assert answer.headers["vary"] == "accept"
    assert http.head("/", headers={"accept": accept}).status_code == 200
