"""What reaches the engine is the same, whichever front end a body went through: token ids, every parameter of sampling,
the order of choices, priorities, the number of the caller's key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from minisgl.config import ApiKey, Limits
from minisgl.message import AddRequest
from tests.gateway.test_same_answers import LOOSE
from tests.helpers.answers import Client
from tests.helpers.bodies import CHAT, COMPLETION, GENERATE, is_seeded, mutated, usual_bodies, written
from tests.helpers.gateway import has_gateway
from tests.helpers.http_requests import GOOD_HEAD, KEY, Request, framed
from tests.helpers.long_fuzz import for_long
from tests.helpers.server import CONFIG, MODEL, Frontend, frontend

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 30}


LIMITED = msgspec.structs.replace(
    CONFIG, api_keys=(ApiKey(name="a", key="x"), ApiKey(name="b", key=KEY)), limits=Limits(context_margin=470)
)


@pytest.fixture(
    scope="module", params=[({}, CONFIG), (DEFAULTS, CONFIG), ({}, LIMITED)], ids=["plain", "defaults", "limited"]
)
def servers(request: pytest.FixtureRequest) -> Iterator[list[tuple[Frontend, Client]]]:
    if not has_gateway():
        pytest.skip("the extension has no gateway")
    defaults, config = request.param
    with (
        frontend(front_end="rust", defaults=defaults, config=config) as rust,
        frontend(front_end="python", defaults=defaults, config=config) as python,
    ):
        found = [(one, Client(one.address)) for one in (rust, python)]
        yield found
        for _, client in found:
            client.close()


@st.composite
def bodies(draw: st.DrawFn) -> Request:
    path = draw(st.sampled_from([CHAT, COMPLETION, GENERATE]))
    value = mutated(draw, draw(usual_bodies(path)), path)
    if value.get("model") == "m":
        value["model"] = MODEL
    body = written(value, ascii_only=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return Request("POST", path, framed(GOOD_HEAD, body), body, is_seeded=is_seeded(body))


def asked(server: Frontend, client: Client, request: Request) -> tuple[int, list[Any]]:
    """Status, and what reached the engine, without the numbers of requests."""
    before = len(server.engine.received)
    answer = client.ask(request)
    assert answer is not None
    found = [one for one in server.engine.received[before:] if isinstance(one, AddRequest)]
    plain = [msgspec.structs.replace(one, req_id=i) for i, one in enumerate(found)]
    if not request.is_seeded:
        plain = [msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, seed=0)) for one in plain]
    return answer.status, plain


Servers = list[tuple[Frontend, Client]]


def checked(servers: Servers) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        rust, python = (asked(*one, request) for one in servers)
        note(f"{request.raw()!r}\nrust: {rust}\npython: {python}")
        assert rust == python

    return check


def test_random_bodies_become_equal_engine_requests(servers: Servers) -> None:
    settings(LOOSE, max_examples=200)(given(bodies())(checked(servers)))()


@pytest.mark.slow
def test_many_random_bodies_become_equal_engine_requests(servers: Servers, times: int) -> None:
    for_long(checked(servers), given(bodies()), LOOSE, 2_000 * times)
