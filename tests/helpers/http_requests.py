"""Hypothesis strategies for HTTP requests: valid and invalid headers, targets and framing."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.helpers.bodies import (
    CHAT,
    COMPLETION,
    GENERATE,
    Pairs,
    damaged,
    is_seeded,
    mutated,
    odd_values,
    usual_bodies,
    written,
)

KEY = "key-of-the-test"
ORIGIN = "https://page.example"


@dataclass(frozen=True)
class Request:
    """HTTP request. `is_seeded`: the output is the same each time. `cuts`: no request can follow on its connection."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""
    version: str = "HTTP/1.1"
    is_seeded: bool = True
    cuts: bool = False

    def raw(self) -> bytes:
        lines = [f"{self.method} {self.target} {self.version}", *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


GOOD_HEAD = (("Host", "localhost"), ("Content-Type", "application/json"), ("Authorization", f"Bearer {KEY}"))
AS_CLIENTS_SEND = (
    ("Accept", "*/*"),
    ("Accept-Encoding", "gzip, deflate"),
    ("User-Agent", "OpenAI/Python 2.0.0"),
    ("X-Stainless-Lang", "python"),
)
VALUES = {
    "Content-Type": [
        "application/json; charset=utf-8",
        "APPLICATION/JSON",
        "application/vnd.x+json",
        "text/plain",
        "",
        "a",
    ],
    "Authorization": ["", "Bearer", "Bearer wrong", f"bearer  {KEY} ", f"Basic {KEY}", f"Bearer {KEY}x", KEY],
    "Host": [
        "127.0.0.1:1",
        "LOCALHOST.",
        "a.localhost",
        "evil.example",
        "",
        "[::1]:80",
        "a b",
        "localhost:",
        "127.0.0.2",
    ],
    "Origin": [ORIGIN, "null", "https://evil.example", "http://localhost", "", "HTTPS://PAGE.EXAMPLE:443", "x"],
    "X-Request-Id": ["abc", "a b", "", "x" * 128, "x" * 129, "é", "a/b:c=@+", '"'],
    "Access-Control-Request-Method": ["POST", "PUT", ""],
    "Sec-Fetch-Site": ["cross-site"],
    "Connection": ["keep-alive", "Keep-Alive, x"],
    "X-Other": ["a", " padded ", "\t", "é" * 50],
    "Accept": ["text/event-stream"],
    "Accept-Encoding": ["gzip"],
}


@st.composite
def heads(draw: st.DrawFn) -> tuple[tuple[str, str], ...]:
    """Draw request headers without those that frame the body."""
    head = list(GOOD_HEAD)
    if draw(st.booleans()):
        head += AS_CLIENTS_SEND
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        name = draw(st.sampled_from(sorted(VALUES)))
        value = draw(st.sampled_from(VALUES[name]))
        match draw(st.integers(0, 4)):
            case 0:
                head = [pair for pair in head if pair[0] != name]
            case 1:
                head.append((name, value))  # it may be there twice
            case _:
                head = [pair for pair in head if pair[0] != name] + [(name, value)]
    if draw(st.integers(0, 5)) == 0:
        head = [(name.lower() if draw(st.booleans()) else name.upper(), value) for name, value in head]
    return tuple(head)


targets = st.one_of(
    st.sampled_from([CHAT, COMPLETION, GENERATE]),
    st.sampled_from(
        [CHAT + "/", COMPLETION + "?a=b", "/v1//completions", "/V1/completions", "/generate#x", "/%67enerate"]
    ),
)


def framed(head: tuple[tuple[str, str], ...], body: bytes) -> tuple[tuple[str, str], ...]:
    return (*head, ("Content-Length", str(len(body))))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Draw a request of any kind, most often a usual one."""
    kind = draw(st.sampled_from(["body"] * 12 + ["damaged"] * 3 + ["head"] * 3 + ["get"] + ["framing"]))
    if kind == "get":
        return draw(gets())
    path = draw(st.sampled_from([CHAT, CHAT, COMPLETION, GENERATE]))
    value = mutated(draw, draw(usual_bodies(path)), path)
    if kind == "body" and draw(st.integers(0, 9)) == 0 and value:
        name = draw(st.sampled_from(sorted(value)))
        pairs = [*value.items(), (name, draw(st.one_of(odd_values, st.just(value[name]))))]
        value = Pairs(tuple(draw(st.permutations(pairs))))
    text = written(value, ascii_only=draw(st.booleans()), spaced=draw(st.integers(0, 4)) == 0)
    body = text.encode("utf-8", "surrogatepass")
    if kind == "damaged":
        body = damaged(draw, body)
    head = draw(heads()) if kind == "head" else (*GOOD_HEAD, *(AS_CLIENTS_SEND if draw(st.booleans()) else ()))
    if kind == "framing":
        return draw(oddly_framed(path, head, body))
    target = draw(targets) if kind == "head" else path
    method = draw(st.sampled_from(["POST"] * 8 + ["GET", "PUT", "OPTIONS", "post"])) if kind == "head" else "POST"
    return Request(method, target, framed(head, body), body, is_seeded=is_seeded(body))


@st.composite
def gets(draw: st.DrawFn) -> Request:
    places = [
        "/livez",
        "/readyz",
        "/v1/models",
        "/v1/models/m",
        "/v1/models/x",
        "/v1",
        "/version",
        "/nope",
        "/",
        "/livez/",
    ]
    method = draw(st.sampled_from(["GET", "GET", "GET", "HEAD", "OPTIONS", "POST", "DELETE"]))
    return Request(
        method, draw(st.sampled_from(places)), framed(draw(heads()), b"") if method == "POST" else draw(heads())
    )


@st.composite
def oddly_framed(draw: st.DrawFn, path: str, head: tuple[tuple[str, str], ...], body: bytes) -> Request:
    """Draw a request with rare or invalid framing; after one that is not widely supported the connection is closed."""
    size, seeded = len(body), is_seeded(body)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if size else b"0\r\n\r\n"
    kind = draw(st.integers(0, 9))
    length = ("Content-Length", str(size))
    more: tuple[tuple[str, str], ...] = (length,)
    version = "HTTP/1.1"
    match kind:
        case 0:
            more, body = (("Transfer-Encoding", "chunked"),), chunks
        case 1:
            more = (length, ("Expect", draw(st.sampled_from(["100-continue", "x"]))))
        case 2:
            version = draw(st.sampled_from(["HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1", "HTTP/1.1 "]))
        case 3:
            more = (length, ("Connection", "close"))
        case 4:
            more = (length, ("Connection", "upgrade"), ("Upgrade", "websocket"))
        case 5:
            more = (("Content-Length", draw(st.sampled_from([f"+{size}", f"{size}, {size}", f"0{size}", "x", ""]))),)
        case 6:
            more = (length, length)
        case 7:
            more = (length, ("Transfer-Encoding", "chunked"))
        case 8:
            more, body = (), b""
        case _:
            more = (length, ("Bad Name", "x"))
    return Request("POST", path, (*head, *more), body, version, is_seeded=seeded, cuts=True)
