"""Pages of strangers in a browser of the same machine: no work for them, and errors in our shape."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.config import ApiKey, ConfigError
from minisgl.server.admin.health import Starting
from minisgl.server.core.callers import Callers
from minisgl.server.core.middleware import Middleware
from minisgl.supervisor.serving import is_exposed
from tests.helpers.server import CONFIG, MODEL, Frontend, chat_body, check_error, frontend, read_all

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAGE = "http://page.example"
BODY = b'{"prompt": "say:on"}'


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end) as running:
        yield running
        assert not running.engine.requests("refused")


@pytest.fixture(scope="module")
def named(front_end: str) -> Iterator[httpx.Client]:
    """A server that knows one page, and wants a key."""
    config = msgspec.structs.replace(CONFIG, cors_origins=(PAGE,), allowed_hosts=("models.example",), api_key="k")
    with frontend(config=config, front_end=front_end) as running, running.http() as client:
        yield client


def bearer(**more: str) -> dict[str, str]:
    return {"authorization": "Bearer k", **more}


# --------------------------------------------------------------------------------------------------------- body types


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
        "text/json",
        "json",
        "application/jsonx",
        "+json",
        "text/plain; application/json",
    ],
)
def test_other_content_types_are_415(http: httpx.Client, kind: str) -> None:
    for path in (CHAT, TEXT, "/generate", "/tokenize", "/nowhere"):
        error = check_error(http.post(path, content=b'{"prompt": "refused"}', headers={"content-type": kind}), 415)
        assert error["code"] == "unsupported_media_type"
        assert kind in error["message"] and "-H 'Content-Type: application/json'" in error["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON ; charset=utf-8", "application/problem+json", "", None]
)
def test_json_types_and_no_type_are_accepted(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert http.post(TEXT, content=BODY, headers=headers).json()["choices"][0]["text"] == "on"


@pytest.mark.parametrize("header", [{"sec-fetch-mode": "no-cors"}, {"sec-fetch-site": "none"}, {"origin": "own"}])
def test_browser_without_json_type_is_415(server: Frontend, http: httpx.Client, header: dict[str, str]) -> None:
    header = {name: server.url if value == "own" else value for name, value in header.items()}
    assert "missing" in check_error(http.post(TEXT, content=BODY, headers=header), 415)["message"]
    said = http.post(TEXT, content=BODY, headers={**header, "content-type": "application/json"})
    assert said.status_code == 200


# ------------------------------------------------------------------------------------------------------------ origins


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:1", "http://localhost.evil.example", "", "evil"])
def test_foreign_origins_are_403(http: httpx.Client, origin: str) -> None:
    headers = {"origin": origin, "x-request-id": "mine"}
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/livez"), ("OPTIONS", CHAT), ("GET", "/x")):
        answer = http.request(method, path, headers=headers, json=chat_body("refused") if method == "POST" else None)
        assert check_error(answer, 403)["code"] == "origin_not_allowed"
        assert answer.headers["x-request-id"] == "mine" and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ({}, 403),
        ({"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/livez", "/", "/stats"])
def test_cross_site_embeds_are_403_and_links_allowed(
    http: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    answer = http.get(path, headers=bearer(**{"sec-fetch-site": "cross-site", **headers}))
    assert answer.status_code == status
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
    assert answer.headers.get_list("cross-origin-resource-policy") == ["same-origin"]


def test_nothing_of_a_foreign_pages_body_is_awaited(server: Frontend) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\norigin: {PAGE}\r\ncontent-length: 100\r\n\r\n"
    with server.connect(head.encode()) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 403 ")


def test_own_origin_is_allowed(server: Frontend, http: httpx.Client) -> None:
    port = server.address[1]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", "a.localhost"):
        for scheme in ("http", "https"):
            answer = http.post(TEXT, json={"prompt": "say:a"}, headers={"host": host, "origin": f"{scheme}://{host}"})
            assert answer.status_code == 200
    usual = http.get("/livez", headers={"host": "localhost:80", "origin": "http://localhost"})
    assert usual.status_code == 200


def test_origin_named_by_flag_is_allowed(named: httpx.Client) -> None:
    answer = named.post(TEXT, json={"prompt": "say:a"}, headers=bearer(origin=PAGE))
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"].lower()
    assert "x-request-id" in exposed and "retry-after" in exposed and answer.headers["vary"] == "Origin"
    without_key = named.post(TEXT, json={"prompt": "say:a"}, headers={"origin": PAGE})
    assert check_error(without_key, 401) and without_key.headers["access-control-allow-origin"] == PAGE
    other = named.get("/livez", headers={"origin": PAGE + ".evil"})
    assert check_error(other, 403) and other.headers["vary"] == "Origin"


def test_preflights(named: httpx.Client) -> None:
    """A browser sends no key with them."""
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    answer = named.options(CHAT, headers={**asks, "access-control-request-headers": "authorization,content-type"})
    assert answer.status_code == 204 and answer.content == b"" and answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "x-request-id" in answer.headers
    refused = named.options(CHAT, headers={**asks, "access-control-request-method": "PUT"})
    assert "PUT" in check_error(refused, 403)["message"] and "x-request-id" in refused.headers
    foreign = named.options(CHAT, headers={**asks, "origin": "http://other.example"})
    assert check_error(foreign, 403)["code"] == "origin_not_allowed"


# -------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize(
    "host",
    ["page.example", "page.example:80", "localhost.page.example", "127.0.0.1.page.example", "192.0.2.1", "", "[x]"],
)
def test_foreign_host_names_are_403(http: httpx.Client, host: str) -> None:
    for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/livez")):
        headers = {"host": host, "origin": f"http://{host}"}  # its own page, as the browser sees it
        answer = http.request(method, path, headers=headers, json={"prompt": "refused"} if method == "POST" else None)
        assert check_error(answer, 403)["code"] == "host_not_allowed" and "x-request-id" in answer.headers


@pytest.mark.parametrize("host", ["localhost", "LocalHost.:9", "x.localhost", "127.8.9.1:99", "[::1]:1919", "[::1]"])
def test_loopback_host_names_are_allowed(http: httpx.Client, host: str) -> None:
    assert http.get("/livez", headers={"host": host}).status_code == 200


def test_host_named_by_flag_is_allowed(named: httpx.Client) -> None:
    for host in ("models.example", "MODELS.example:8080", "localhost"):
        assert named.get("/livez", headers={"host": host}).status_code == 200
    assert check_error(named.get("/livez", headers={"host": "other.example"}), 403)


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "answers"),
    [
        ("0.0.0.0", [], "any.example", True),
        ("::", [], "any.example", True),
        ("0.0.0.0", ["one.example"], "one.example:80", True),
        ("0.0.0.0", ["one.example"], "other.example", False),
        ("0.0.0.0", ["one.example"], "127.0.0.1", True),
        ("192.0.2.7", ["one.example"], "192.0.2.7:1919", True),
        ("localhost", [], "other.example", False),
        ("::1", [], "other.example", False),
        ("127.0.0.2", ["*"], "other.example", True),
        ("127.0.0.1", ["[fd00::1]"], "[fd00::1]:1", True),
    ],
)
def test_host_check_follows_the_bound_address(bound: str, allowed: list[str], host: str, answers: bool) -> None:
    refused = Callers(bound, allowed).refusal("GET", "1.1", {b"host": host.encode()})
    assert (refused is None) == answers


@pytest.mark.parametrize(
    ("host", "fields", "exposed"),
    [
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("192.0.2.1", {}, True),
        ("127.0.0.1", {}, False),
        ("0.0.0.0", {"api_key": "k"}, False),
        ("0.0.0.0", {"api_keys": (ApiKey(name="a", key="k"),)}, False),
    ],
)
def test_is_exposed_beyond_loopback_without_key(host: str, fields: dict[str, Any], exposed: bool) -> None:
    assert is_exposed(msgspec.structs.replace(CONFIG, host=host, **fields)) is exposed


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/v1/files", {}, None),
        ("/v1/completions", {}, 415),
        ("/v1/files", {b"origin": b"http://localhost"}, None),
        ("/v1/files", {b"origin": b"https://page.example"}, 403),
        ("/v1/files", {b"origin": b"null"}, 403),
        ("/v1/files", {b"sec-fetch-site": b"same-origin"}, 415),
        ("/v1/files", {b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate"}, 403),
    ],
)
def test_a_form_is_for_files_and_not_from_other_pages(path: str, more: dict[bytes, bytes], status: int | None) -> None:
    headers = {b"host": b"localhost", b"content-type": b"multipart/form-data; boundary=x", **more}
    refused = Callers("127.0.0.1").refusal("POST", "1.1", headers, path)
    assert (None if refused is None else refused.status) == status


def test_missing_host_is_400_in_http_1_1() -> None:
    callers = Callers("127.0.0.1")
    assert callers.refusal("GET", "1.0", {}) is None
    refused = callers.refusal("GET", "1.1", {})
    assert refused is not None and refused.status == 400
    foreign = callers.refusal("GET", "1.0", {b"origin": b"http://"})
    assert foreign is not None and foreign.status == 403


def test_cors_origin_star_allows_all_origins(front_end: str) -> None:
    config = msgspec.structs.replace(CONFIG, cors_origins=("*",))
    with frontend(config=config, front_end=front_end) as running, running.http() as http:
        for origin in ("null", "https://page.example"):
            answer = http.post("/v1/completions", json={"prompt": "say:a"}, headers={"origin": origin})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-expose-headers" in answer.headers and "vary" not in answer.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"cors_origins": ("page.example",)},
        {"cors_origins": ("http://page.example/",)},
        {"cors_origins": ("",)},
        {"allowed_hosts": ("http://a",)},
        {"allowed_hosts": ("a:80",)},
        {"allowed_hosts": ("",)},
        {"allowed_hosts": ("a b",)},
    ],
)
def test_invalid_flags_are_rejected(fields: dict[str, tuple[str, ...]]) -> None:
    flag, (value,) = next(iter(fields.items()))
    with pytest.raises(ConfigError, match=f"--{flag[:-1].replace('_', '-')} '{value}': must be"):
        msgspec.structs.replace(CONFIG, **fields).check()
    good = msgspec.structs.replace(CONFIG, cors_origins=("https://a:1", "*", "null"), allowed_hosts=("a", "::1", "*"))
    good.check()


async def test_foreign_origins_are_403_while_loading() -> None:
    middleware = Middleware(Starting(MODEL), msgspec.structs.replace(CONFIG, cors_origins=(PAGE,)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://localhost") as http:
        asked = [
            http.get("/livez"),
            http.get("/livez", headers={"host": "page.example"}),
            http.get("/livez", headers={"origin": "http://other.example"}),
            http.post(TEXT, content=BODY, headers={"content-type": "text/plain"}),
            http.options(TEXT, headers={"origin": PAGE, "access-control-request-method": "POST"}),
            http.get("/v1/models", headers={"origin": PAGE}),
        ]
        answers = [await one for one in asked]
        assert answers[-1].headers["access-control-allow-origin"] == PAGE
        assert all("x-request-id" in one.headers for one in answers)
        assert [one.status_code for one in answers] == [200, 403, 403, 415, 204, 503]


UPGRADE = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "eA=="}


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/v1/realtime", "/v1/models"])
def test_upgrade_to_websocket_is_refused_with_426(http: httpx.Client, path: str, caplog: Any) -> None:
    answer = http.get(path, headers=UPGRADE)
    assert check_error(answer, 426)["code"] == "upgrade_refused"
    assert answer.headers["upgrade"] == "HTTP/1.1" and answer.headers["connection"] == "Upgrade"
    assert not [one for one in caplog.messages if "WebSocket" in one or "upgrade request" in one]


def test_upgrade_needs_the_key(named: httpx.Client) -> None:
    check_error(named.get("/v1/responses", headers={**UPGRADE, "host": "models.example"}), 401)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_request_that_offers_http_2_is_answered_with_its_body(server: Frontend, size: int) -> None:
    """As Java's client sends each of its requests, and `curl --http2`; however it is cut."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + OFFER
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:5], BODY[5:], b""))
    sent = head + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    sent += head + b"transfer-encoding: chunked\r\n\r\n" + chunks
    sent += b"GET /v1 HTTP/1.1\r\nhost: localhost\r\n" + OFFER + b"\r\n"
    sent += b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), size):
            connection.sendall(sent[at : at + size])
        found = read_all(connection)
    assert found.count(b"HTTP/1.1 200 OK") == 4 == found.count(b"HTTP/1.1 "), found
    assert found.count(b'"text":"on"') == 2 and found.endswith(b"}") and b'"version"' in found


OWN = "http://localhost:1919"
OCTETS, TYPED = "application/octet-stream", "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("kind", "more", "status"),
    [
        (OCTETS, {}, None),  # LiteLLM's, asynchronously
        (TYPED, {}, None),  # `curl -d`, as Ollama's documentation has it
        ("text/plain", {}, None),
        ("", {}, None),
        (OCTETS, {"origin": OWN}, None),  # not sent unasked to another host
        *(
            (kind, {"origin": "http://localhost:1919"}, 415)
            for kind in (TYPED, "text/plain", "multipart/form-data", "")
        ),
        *((TYPED, {f"sec-fetch-{name}": value}, 415) for name, value in (("site", "none"), ("mode", "no-cors"))),
        (TYPED, {"origin": "null"}, 403),
        (TYPED, {"origin": PAGE}, 403),
        (OCTETS, {"origin": PAGE}, 403),
        (TYPED, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
    ],
)
def test_ollama_s_clients_need_not_say_json_and_browsers_must(
    kind: str, more: dict[str, str], status: int | None
) -> None:
    headers = {"host": "localhost:1919", **({"content-type": kind} if kind else {}), **more}
    pairs = {name.encode(): value.encode() for name, value in headers.items()}
    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/show"):
        refused = Callers("127.0.0.1").refusal("POST", "1.1", pairs, path)
        assert (None if refused is None else refused.status) == status


def test_a_body_of_octets_is_answered_under_api(http: httpx.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "say:on"}], "stream": false}'
    for kind in (OCTETS, TYPED):
        answer = http.post("/api/chat", content=body, headers={"content-type": kind})
        assert answer.json()["message"]["content"] == "on", answer.text
