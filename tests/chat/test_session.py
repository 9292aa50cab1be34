"""The conversation of the chat, against scripted answers: what is sent, what is kept, what the commands do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest

from minisgl import cli
from minisgl.chat.client import AnswerChunk, ChatClient, ChatError, _events
from minisgl.chat.session import Exit, Session
from minisgl.chat.terminal import DIM, NORMAL, Chat

USAGE = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
WHOLE = (AnswerChunk("a"), AnswerChunk("b"), AnswerChunk("", "stop"), AnswerChunk("", None, USAGE))


class Scripted(ChatClient):
    """Answers with what it was given, and remembers what it was asked."""

    def __init__(self, *chunks: AnswerChunk, error: ChatError | None = None) -> None:
        self.chunks = chunks
        self.error = error
        self.bodies: list[dict[str, Any]] = []
        self.closed = 0

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[AnswerChunk, None]:
        self.bodies.append(body)
        try:
            for piece in self.chunks:
                yield piece
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1


def ask(session: Session, text: str, take: int | None = None) -> list[str]:
    """The chunks of the answer; with `take`, of an answer stopped after so many."""

    async def collect() -> list[str]:
        found: list[str] = []
        async with contextlib.aclosing(session.ask(text)) as chunks:
            async for piece in chunks:
                found.append(piece)
                if len(found) == take:
                    break
        return found

    return asyncio.run(collect())


def test_reasoning_is_shown_and_not_stored() -> None:
    chunks = (AnswerChunk(thought="h"), AnswerChunk(thought="m"), *WHOLE)
    session = Session(Scripted(*chunks), "m")
    thoughts: list[str] = []
    session.on_thought = thoughts.append
    assert ask(session, "one") == ["a", "b"] and thoughts == ["h", "m"]
    assert session.messages[-1] == {"role": "assistant", "content": "ab"}


def test_thoughts_are_dim_on_a_terminal_only() -> None:
    class Once:
        def __init__(self, interactive: bool) -> None:
            self.interactive = interactive
            self.left = ["one"]

        async def read(self) -> str:
            if not self.left:
                raise EOFError
            return self.left.pop()

    async def shown(interactive: bool) -> str:
        session = Session(Scripted(AnswerChunk(thought="h\x1b"), AnswerChunk(thought="m"), *WHOLE), "m")
        written: list[str] = []
        assert await Chat(session, Once(interactive), written.append).run() == 0
        return "".join(written)

    assert asyncio.run(shown(False)) == "ab\n"
    text = asyncio.run(shown(True))
    assert text.endswith("\n\nab\n") and text.startswith(DIM + "h") and text.count(NORMAL) == 2
    assert text.count("\x1b") == 4  # none of the model's


def test_the_conversation_grows_and_is_sent_whole() -> None:
    client = Scripted(*WHOLE)
    session = Session(client, "m", system="be brief", settings={"temperature": 0.5})
    assert ask(session, "one") == ["a", "b"]
    assert ask(session, "two") == ["a", "b"]
    system = {"role": "system", "content": "be brief"}
    first = [{"role": "user", "content": "one"}]
    second = [*first, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "two"}]
    assert client.bodies == [
        {"model": "m", "temperature": 0.5, "messages": [system, *first]},
        {"model": "m", "temperature": 0.5, "messages": [system, *second]},
    ]
    assert session.finish_reason == "stop"


def test_a_stopped_answer_is_kept_as_far_as_it_was_shown() -> None:
    client = Scripted(*WHOLE)
    session = Session(client, "m")
    assert ask(session, "one", take=1) == ["a"]
    assert session.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "a"}]
    assert session.finish_reason is None and client.closed == 1


def test_a_question_without_an_answer_is_not_kept() -> None:
    session = Session(Scripted(error=ChatError("no")), "m")
    with pytest.raises(ChatError):
        ask(session, "one")
    assert session.messages == [] and session.stats is None


def test_an_empty_answer_is_an_answer() -> None:
    session = Session(Scripted(AnswerChunk("", "stop")), "m")
    assert ask(session, "one") == []
    assert session.messages[-1] == {"role": "assistant", "content": ""} and session.stats is None


def test_a_full_context_names_the_way_out_if_there_is_something_to_forget() -> None:
    client = Scripted(*WHOLE)
    session = Session(client, "m")
    client.error, client.chunks = ChatError("too many tokens: the context is 8", 400), ()
    with pytest.raises(ChatError) as alone:
        ask(session, "long")
    session.messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatError) as later:
        ask(session, "long")
    assert "/reset" not in str(alone.value) and "/reset" in str(later.value)


def test_reset_during_an_answer_forgets_that_answer_too() -> None:
    session = Session(Scripted(*WHOLE), "m")
    ask(session, "one")
    assert session.command("/reset") == "the conversation is cleared"
    assert session.messages == []


def test_the_numbers_of_an_answer() -> None:
    times: Iterator[float] = iter([10.0, 10.25, 10.75])
    session = Session(Scripted(*WHOLE), "m", clock=lambda: next(times))
    ask(session, "one")
    stats = session.stats
    assert stats is not None and (stats.ttft_s, stats.generation_s, stats.num_tokens) == (0.25, 0.5, 3)
    assert str(stats) == "TTFT 250 ms, 3 tokens, 4.0 tok/s, prompt 9 tokens, 4 cached"


def test_the_numbers_without_usage() -> None:
    times: Iterator[float] = iter([1.0, 1.5])
    session = Session(Scripted(AnswerChunk("a", "stop")), "m", clock=lambda: next(times))
    ask(session, "one")
    assert str(session.stats) == "TTFT 500 ms"


def test_system_and_stats_commands() -> None:
    session = Session(Scripted(*WHOLE), "m")
    assert session.command("/system  speak like a pirate ") == "system prompt set"
    assert session.system == "speak like a pirate"
    assert session.command("/system") == "no system prompt" and session.system is None
    assert session.command("/stats") == "numbers after each answer: on" and session.show_stats
    assert session.command("/stats") == "numbers after each answer: off" and not session.show_stats


def test_exit_leaves() -> None:
    with pytest.raises(Exit):
        Session(Scripted(), "m").command("/exit")


@pytest.mark.parametrize("line", ["/nope", "/resett", "/reset now", "/exit please"])
def test_unknown_command_changes_nothing(line: str) -> None:
    session = Session(Scripted(*WHOLE), "m")
    ask(session, "one")
    assert line.split(maxsplit=1)[0] in (session.command(line) or "")
    assert len(session.messages) == 2


def test_help_names_every_command() -> None:
    shown = Session(Scripted(), "m").command("/help") or ""
    assert all(name in shown for name in ("/help", "/reset", "/system", "/stats", "/exit", "Ctrl-C", "Ctrl-D"))


def test_two_slashes_say_one() -> None:
    client = Scripted(*WHOLE)
    session = Session(client, "m")
    assert session.command("//etc is a folder") is None
    ask(session, "//etc is a folder")
    assert client.bodies[0]["messages"] == [{"role": "user", "content": "/etc is a folder"}]


@pytest.mark.parametrize("url", ["", "localhost:1919", "ftp://x", "http://", "http://[::1"])
def test_a_bad_address_is_refused(url: str) -> None:
    with pytest.raises(ChatError, match="--base-url"):
        ChatClient(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://127.0.0.1:1/", "http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"]
)
def test_an_address_with_or_without_v1(url: str) -> None:
    assert ChatClient(url).base_url == "http://127.0.0.1:1"


def test_events_are_whole_wherever_the_bytes_were_cut() -> None:
    body = 'data: {"a": "ü"}\n\n: a comment\n\ndata:[DONE]\r\n\r\n'.encode()

    async def of(*parts: bytes) -> list[bytes]:
        async def stream() -> AsyncGenerator[bytes, None]:
            for part in parts:
                yield part

        return [data async for data in _events(httpx.Response(200, content=stream()))]

    for cut in range(len(body) + 1):
        assert asyncio.run(of(body[:cut], body[cut:])) == ['{"a": "ü"}'.encode(), b"[DONE]"], cut


@pytest.mark.parametrize("server", [("--base-url", "http://127.0.0.1:1"), ()])  # its own is not started
@pytest.mark.parametrize(("name", "value", "kind"), [("TOP_K", "many", "whole number"), ("TOP_P", "nan", "number")])
def test_a_bad_setting_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Any, name: str, value: str, kind: str
) -> None:
    assert cli.main(["chat", "--top-p", "nan", *server]) == 2
    monkeypatch.setenv(f"MINISGL_SHELL_{name}", value)
    assert cli.main(["chat", *server]) == 2
    said = "minisgl chat: --top-p nan: must be between 0 and 1\n"
    said += f"minisgl chat: MINISGL_SHELL_{name}: {value!r}: must be a {kind}"
    assert said in capsys.readouterr().err
