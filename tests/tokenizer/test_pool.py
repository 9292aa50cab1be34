"""The lanes in which prompts are encoded: what one request does to a lane is over with that request."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from minisgl.metrics.meters import Meter
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.pool import TokenizePool
from minisgl.tokenizer.rendering import Work
from tests.helpers.server import WAIT_S, Frontend, chat_body, check_error

TEXT = "/v1/completions"


class _Panic(BaseException):
    """As the library's, which are no `Exception`."""


class _Text:
    """Can be watched, unlike a `str`."""


def pool(template: str = "") -> TokenizePool:
    """Its tokenizer knows the letter a."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    return TokenizePool(Tokenizer.from_json(backend.to_str(), chat_templates={"default": template}), Meter("encode"))


def messages_of(threads: list[str]) -> Callable[[], list[dict[str, Any]]]:
    """A conversation, which notes the name of each thread that asks for it."""

    def messages() -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return [{"role": "user", "content": "a"}]

    return messages


@pytest.mark.parametrize(("turns", "rendered"), [(3, 1), (99_999, 2)])
async def test_a_template_of_many_turns_is_rendered_in_the_lane_of_long_work(turns: int, rendered: int) -> None:
    """However short its conversation is."""
    lanes, threads = pool(f"{{% for i in range({turns}) %}}{{% endfor %}}a"), list[str]()
    async with asyncio.timeout(WAIT_S):
        found = await lanes.encode_chat(messages_of(threads), 1, {})
        assert found.tolist() == [0]
    assert threads == ["encode-short", "encode-long"][:rendered]


async def test_a_template_of_long_turns_is_rendered_in_the_lane_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turns are fewer than the other lane takes: their time sends it away, and ends it."""
    monkeypatch.setattr("minisgl.tokenizer.pool.MAX_WORK", Work(99_999, 1.0))
    lanes = pool("{% set all = range(99999) | list %}{% for i in range(500) %}{% set x = all | sort %}{% endfor %}a")
    threads = list[str]()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ValueError, match="too long over them"):
            await lanes.encode_chat(messages_of(threads), 1, {})
    assert threads == ["encode-short", "encode-long"]


def panic() -> Any:
    raise _Panic("out of range")


async def short(pool: TokenizePool, text: Callable[[], str]) -> list[int]:
    return (await pool.encode(text, 1, add_special_tokens=False)).tolist()  # type: ignore[no-any-return]


async def test_a_text_that_has_no_ids_is_a_value_error_and_its_lane_goes_on() -> None:
    lanes = pool()
    async with asyncio.timeout(WAIT_S):
        found = await asyncio.gather(*(short(lanes, lambda t=t: t) for t in "xay"), return_exceptions=True)
        assert found[1] == [0] and all("no ids" in str(found[i]) for i in (0, 2))
        assert isinstance(found[0], ValueError)
        assert await short(lanes, lambda: "a") == [0]


async def test_a_panic_fails_its_request_and_the_lanes_go_on() -> None:
    lanes = pool()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RuntimeError, match="_Panic: out of range"):
            await lanes.run(panic)
        with pytest.raises(RuntimeError, match="_Panic: out of range"):
            await short(lanes, panic)
        assert await lanes.run(lambda: 5) == 5
        assert await short(lanes, lambda: "a") == [0]


async def test_a_cancelled_job_releases_its_text() -> None:
    """Another one may be given room for a large body then."""
    lanes, go = pool(), threading.Event()
    async with asyncio.timeout(WAIT_S):
        first = asyncio.create_task(lanes.run(go.wait))
        text = _Text()
        watched = weakref.ref(text)
        second = asyncio.create_task(lanes.run(lambda text=text: None))
        del text
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        del second
        await asyncio.sleep(0)
        assert watched() is None
        go.set()
        assert await first


@pytest.mark.python_front_end
def test_a_long_tool_call_is_rendered_off_the_event_loop(server: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """And delays no short text."""
    lanes: list[str] = []
    render = Tokenizer.apply_chat_template

    def watched(self: Tokenizer, *args: Any, **kwargs: Any) -> str:
        lanes.append(threading.current_thread().name)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", watched)
    call = {"id": "x" * 20_000, "type": "function", "function": {"name": "write", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    with server.http() as http:
        for message in (called, {"role": "tool", "content": "done", "name": "x" * 20_000}):
            body = {"messages": [{"role": "user", "content": "say:ok"}, message]}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert lanes == ["encode-long"] * 2


@pytest.mark.python_front_end
def test_a_text_that_has_no_ids_is_a_bad_request(server: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    monkeypatch.setattr(server.app.context.tokenizer, "text", Tokenizer.from_json(backend.to_str()).text)
    with server.http() as http:
        for path, body, field in (
            (TEXT, {"prompt": "x"}, "prompt"),
            (TEXT, {"prompt": ["x", "y"]}, "prompt"),
            ("/v1/chat/completions", chat_body("x"), "messages"),
            ("/tokenize", {"prompt": "x"}, "prompt"),
            (TEXT, {"prompt": [1], "bad_words": ["x"]}, "bad_words"),
        ):
            error = check_error(http.post(path, json=body), 400)
            assert error["param"] == field and "WordLevel" in error["message"]
