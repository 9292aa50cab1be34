"""`minisgl chat` with a real server: by pipe, by prompt_toolkit's own input, and in a pseudo terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from minisgl.chat.client import ChatClient
from minisgl.chat.session import Session
from minisgl.chat.terminal import Chat, Typed, file_history
from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import ServerProcess, canned, serving, until
from tests.helpers.forking import run
from tests.helpers.meaning import FRANCE, embedded_model
from tests.helpers.seconds import WAIT_S
from tests.helpers.several import expected

ECHO = ("--engine", "echo", "--num-pages", "256")
FIXED = ("--sampling-seed", "0", "--max-tokens", "24")
HELLO = {"role": "user", "content": "hello"}
CHAT = (sys.executable, "-m", "minisgl", "chat")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(*ECHO) as running:
        yield running


def echo_answer(messages: list[dict[str, str]], max_tokens: int) -> str:
    """What the echo engine says with seed 0: its text is a function of the conversation."""
    return expected(Tokenizer.echo().apply_chat_template(list(messages)), max_tokens)


def piped(server_url: str | None, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    address = () if server_url is None else ("--base-url", server_url)
    return run([*CHAT, *address, *flags], input=text, timeout=WAIT_S * 2)


# --- by pipe ---


def test_each_line_of_a_pipe_is_answered(server: ServerProcess) -> None:
    done = piped(server.url, "hello\n\n/stats\nagain\n", *FIXED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(echo_answer([HELLO], 24) + "\n")
    assert "numbers after each answer: on" in done.stdout
    assert re.search(r"\[TTFT \d+ ms, \d+ tokens, [\d.]+ tok/s, prompt \d+ tokens, \d+ cached\]", done.stdout)
    assert done.stderr == "" and "\x1b" not in done.stdout


def test_the_whole_conversation_reaches_the_server(server: ServerProcess) -> None:
    """The second prompt is long by what was said before; after /reset it is short again."""
    done = piped(server.url, "hello\nhello\n/reset\nhello\n", *FIXED, "--stats", "--system", "be brief")
    first, second, third = (int(found) for found in re.findall(r"prompt (\d+) tokens", done.stdout))
    assert first < second and third == first


def test_a_message_that_gets_no_answer_is_an_exit_code(server: ServerProcess) -> None:
    done = piped(server.url, "x" * 9000 + "\nshort\n", *FIXED)
    assert done.returncode == 1
    refusal, answer = done.stdout.split("]\n", 1)
    assert "[" in refusal
    assert answer.startswith(echo_answer([{"role": "user", "content": "short"}], 24) + "\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "other"), "--model other: must be a model of the server: smollm2"),
        (("--engine", "echo"), "--engine: cannot be used with --base-url"),
        (("--temperature", "hot"), "must be a number"),
    ],
)
def test_invalid_chat_flags_are_refused(server: ServerProcess, flags: Sequence[str], said: str) -> None:
    done = piped(server.url, "", *flags)
    assert done.returncode in (1, 2) and said in done.stderr and "Traceback" not in done.stderr


def test_an_unreachable_server_is_named_with_exit_code_1() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = piped(f"http://127.0.0.1:{free.getsockname()[1]}/v1", "hello\n")
    assert done.returncode == 1 and "is the server running?" in done.stderr and "Traceback" not in done.stderr


# --- a server of its own ---


SHELL = ("serve", "--shell", "--port", "0", "--api-key", "secret")


@pytest.mark.parametrize("command", [("chat",), SHELL], ids=["chat", "shell"])
def test_its_own_server_starts_and_ends_with_it(command: Sequence[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", *command, *ECHO, *(FIXED if command == ("chat",) else ())],
        input="hello\n",
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S * 2,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "ready: http://127.0.0.1:" in done.stderr
    assert done.stdout.endswith("\n") and "gone" not in done.stdout and "secret" not in done.stderr
    if command == ("chat",):
        assert done.stdout.startswith(echo_answer([HELLO], 24) + "\n")
    assert list(tmp_path.iterdir()) == [], "the server left files behind"


def test_a_server_that_does_not_start_says_why() -> None:
    done = piped(None, "hello\n", "--engine", "echo", "--num-pages", "0")
    assert done.returncode == 2 and "--num-pages 0" in done.stderr and "Traceback" not in done.stderr
    unknown = piped(None, "hello\n", "--unknown")
    assert unknown.returncode == 2 and "--unknown" in unknown.stderr


@contextlib.contextmanager
def answered(stderr: int, env: Mapping[str, str] = os.environ) -> Iterator[subprocess.Popen[str]]:
    """A chat with a server of its own, which has answered a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*CHAT, *ECHO], stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=env) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("hello\n")
        chat.stdin.flush()
        assert chat.stdout.readline()
        yield chat


def test_a_killed_chat_leaves_no_server(tmp_path: Path) -> None:
    with answered(subprocess.DEVNULL, {**os.environ, "TMPDIR": str(tmp_path)}) as chat:
        children = psutil.Process(chat.pid).children(recursive=True)
        assert len(children) == 2
        chat.kill()
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert not alive
    assert list(tmp_path.iterdir()) == []


def test_chat_exits_when_its_server_dies() -> None:
    with answered(subprocess.PIPE) as chat:
        for child in psutil.Process(chat.pid).children():
            child.kill()
        assert (
            chat.stdout is not None and "the server has ended" in chat.stdout.read()
        )  # while it waits for a line that never comes
        assert chat.wait(WAIT_S) == 1


# --- typed ---


class Typist:
    """A chat whose keyboard is a pipe input; `shown` is what it wrote."""

    def __init__(self, keyboard: PipeInput, url: str, **settings: object) -> None:
        self.keyboard = keyboard
        self.shown = ""
        self.session = Session(ChatClient(url), "smollm2", settings=settings)
        self.history = InMemoryHistory()
        self.lines = Typed(self.history, keyboard, DummyOutput())

    def write(self, text: str) -> None:
        self.shown += text

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)
        assert condition(), what


@contextlib.contextmanager
def typist(url: str, **settings: object) -> Iterator[Typist]:
    with create_pipe_input() as keyboard:
        yield Typist(keyboard, url, **settings)


def test_typed_lines_keys_and_history(server: ServerProcess) -> None:
    with typist(server.url, max_tokens=16, temperature=0, seed=0) as at:
        at.keyboard.send_text("hello\r")
        at.keyboard.send_text("two\x1b\rlines\r")  # Alt-Enter
        at.keyboard.send_text("more\\\rlines\r")  # backslash, Enter
        at.keyboard.send_text("half\x03")  # Ctrl-C drops what was typed
        at.keyboard.send_text("/stats\r\x04")  # and Ctrl-D leaves

        async def run() -> int:
            return await Chat(at.session, at.lines, at.write).run()

        assert asyncio.run(asyncio.wait_for(run(), WAIT_S)) == 0
    said = [message["content"] for message in at.session.messages if message["role"] == "user"]
    assert said == ["hello", "two\nlines", "more\nlines"]
    assert "numbers after each answer: on" in at.shown and "(Ctrl-D or /exit leaves)" in at.shown
    answers = [message["content"] for message in at.session.messages if message["role"] == "assistant"]
    for i, answer in enumerate(answers):
        assert answer == echo_answer(at.session.messages[: 2 * i + 1], 16)
        assert answer in at.shown
    assert list(at.history.get_strings())[:2] == ["hello", "two\nlines"]


def test_ctrl_c_stops_the_answer_and_nothing_else(server: ServerProcess) -> None:
    """SIGINT comes in the middle of a long answer: the server frees its pages, and the chat goes on."""
    with typist(server.url, max_tokens=4000, ignore_eos=True) as at:

        async def run() -> int:
            chat = asyncio.ensure_future(Chat(at.session, at.lines, at.write).run())
            at.keyboard.send_text("a long story\r")
            await at.until(lambda: len(at.shown) > 20, "no answer comes")
            os.kill(os.getpid(), signal.SIGINT)
            await at.until(lambda: "[stopped]" in at.shown, "the answer goes on")
            async with httpx.AsyncClient(base_url=server.url) as http:
                async with asyncio.timeout(WAIT_S):
                    while (await http.get("/health")).json()["stats"]["num_running"]:
                        await asyncio.sleep(0.02)
            assert not chat.done()
            at.keyboard.send_text("/exit\r")
            return await chat

        assert asyncio.run(run()) == 0
    question, answer = at.session.messages
    assert question["content"] == "a long story" and 20 < len(answer["content"]) < 4000
    assert at.shown.startswith(answer["content"])


def test_history_is_kept_in_a_file_of_the_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "chat_history"
    history = file_history(file)
    history.store_string("a secret")
    assert "a secret" in file.read_text() and file.stat().st_mode & 0o077 == 0
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert isinstance(file_history(blocked / "chat_history"), InMemoryHistory)


# --- answers as they come over the wire ---


def shown_for(body: bytes, status: str = "200 OK") -> str:
    """What a chat shows of this answer."""

    async def run(url: str, at: Typist) -> None:
        await asyncio.wait_for(Chat(at.session, at.lines, at.write).run(), WAIT_S)

    with canned(body, status) as url, typist(url) as at:
        at.keyboard.send_text("hello\r\x04")
        asyncio.run(run(url, at))
    return at.shown


def event(text: str) -> bytes:
    data = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def test_text_with_other_line_separators_stays_whole() -> None:
    text = "one\u2028two\x85three\nfour"
    assert shown_for(event(text) + b"data: [DONE]\n\n") == text.replace("\x85", "\ufffd") + "\n"


def test_control_characters_do_not_reach_the_terminal() -> None:
    shown = shown_for(event("a\x1b]0;title\x07b\x9bc\td\n") + b"data: [DONE]\n\n")
    assert shown == "a\ufffd]0;title\ufffdb\ufffdc\td\n\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (event("abc"), "200 OK", "ended the answer before it was complete"),
        (event("abc") + b'data: {"error": {"message": "the engine died"}}\n\n', "200 OK", "the engine died"),
        (b"data: what?\n\n", "200 OK", "an invalid chunk"),
        (b'{"error": {"message": "wrong key"}}', "401 Unauthorized", "wrong key (give --api-key)"),
        (b"<html>", "502 Bad Gateway", "HTTP 502"),
        (b'{"error": {"message": "the queue is full"}}', "429 Too Many Requests", "the queue is full"),
    ],
)
def test_a_failure_is_shown_and_the_chat_goes_on(body: bytes, status: str, said: str) -> None:
    assert said in shown_for(body, status)


# --- in a pseudo terminal ---


PROMPTED = rb"\x1b\[\?2004h.*>"  # a terminal that takes pastes as such, and a prompt


class Screen:
    """The real command with a terminal on all three ends."""

    def __init__(self, state: Path, *flags: str) -> None:
        self._text = b""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            environment = {"TERM": "xterm", "XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1"}
            os.execve(sys.executable, [*CHAT, *flags], {**os.environ, **environment})

    def expect(self, pattern: bytes) -> None:
        """Wait until this is written; what comes before it is forgotten."""
        deadline = time.monotonic() + WAIT_S * 2
        while not (found := re.search(pattern, self._text, re.DOTALL)):
            assert time.monotonic() < deadline, self._text
            if select.select([self._terminal], [], [], 1.0)[0]:
                self._text += os.read(self._terminal, 65536)
        self._text = self._text[found.end() :]

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def leaves(self) -> bool:
        """Whether it has ended well."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.pid = 0
            assert os.waitstatus_to_exitcode(status) == 0
        return bool(pid)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


def test_a_terminal_session_takes_keys_and_keeps_history(server: ServerProcess, tmp_path: Path) -> None:
    """Prompt, answer, Ctrl-C as a key, Ctrl-D; what was typed is remembered."""
    with contextlib.closing(
        Screen(tmp_path, "--base-url", server.url, "--max-tokens", "20", "--sampling-seed", "0", "--stats")
    ) as screen:
        screen.expect(rb"smollm2 at http.*" + PROMPTED)
        screen.type(b"/help\r")
        screen.expect(rb"forget the conversation.*" + PROMPTED)
        screen.type(b"hello\r")
        screen.expect(rb"\[TTFT \d+ ms.*" + PROMPTED)
        screen.type(b"half\x03")
        screen.expect(rb"Ctrl-D or /exit leaves.*" + PROMPTED)
        screen.type(b"\x04")
        until(screen.leaves, "Ctrl-D does not leave", WAIT_S)
    assert "hello" in (tmp_path / "minisgl" / "chat_history").read_text()


def test_ctrl_c_in_a_terminal_spares_the_chats_own_server(tmp_path: Path) -> None:
    """A real model, whose answers are slow enough to be stopped. The terminal sends SIGINT to the whole group."""
    embedded_model()
    flags = ("--model", "smollm2", "--num-pages", "256", "--temperature", "0", "--max-tokens", "3000")
    with contextlib.closing(Screen(tmp_path, *flags)) as screen:
        screen.expect(PROMPTED)
        screen.type(b"Write a very long story about a dragon and a princess.\r")
        screen.expect(rb"\x1b\[\?2004l.*[a-zA-Z]{3}")
        screen.type(b"\x03")
        screen.expect(rb"\[stopped\].*" + PROMPTED)
        screen.type(b"/reset\r")
        screen.expect(PROMPTED)
        screen.type(FRANCE.encode() + b"\r")
        screen.expect(rb"Paris.*" + PROMPTED)
        screen.type(b"\x04")
        until(screen.leaves, "Ctrl-D does not leave", WAIT_S)
