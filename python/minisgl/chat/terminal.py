"""The chat's terminal side: reads lines from a terminal or a pipe and writes answers to standard output.

Invariants: Ctrl-C stops the current answer only; Ctrl-D and the end of a pipe leave the chat; whatever a model writes,
no control character but line feed and tab reaches the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

from minisgl.chat.client import ChatError
from minisgl.chat.pictures import COMMAND
from minisgl.chat.session import Exit, Session

PROMPT = "> "
DIM, NORMAL = "\x1b[2m", "\x1b[0m"
_UNSEEN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class TypingStopped(Exception):
    """Raised when Ctrl-C is pressed while typing. It is no `KeyboardInterrupt`, which would end the event loop."""


class Lines(Protocol):
    interactive: bool

    async def read(self) -> str:
        """Return the next message of the user. Raises `EOFError` at the end and `TypingStopped` on Ctrl-C."""


class PathAfterImage(Completer):
    """Completes the path in a line `/image PATH`."""

    _paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Yield completions of the path before the cursor; none in another line."""
        name, _, path = document.text_before_cursor.partition(" ")
        if name == COMMAND and "\n" not in path:
            yield from self._paths.get_completions(Document(path), complete_event)


class Typed:
    """Messages that a person types, with history. Enter sends; Alt-Enter or a backslash begins a new line."""

    interactive = True

    def __init__(self, history: History, keyboard: Input | None = None, screen: Output | None = None) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            history=history,
            auto_suggest=AutoSuggestFromHistory(),
            completer=PathAfterImage(),
            complete_while_typing=False,
            key_bindings=_keys(),
            prompt_continuation=". ",
            interrupt_exception=TypingStopped,
            input=keyboard,
            output=screen,
        )

    async def read(self) -> str:
        return await self._session.prompt_async(handle_sigint=False)  # so that Ctrl-C raises `TypingStopped`


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Piped:
    """Messages from a file or another program, one per line."""

    interactive = False

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._ended = False
        # a daemon: a read that never ends must not keep the process
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        rest, part = b"", b""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            while part := os.read(self._descriptor, 65536):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    loop.call_soon_threadsafe(self._lines.put_nowait, line.decode(errors="replace"))
            if rest:
                loop.call_soon_threadsafe(self._lines.put_nowait, rest.decode(errors="replace"))
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    async def read(self) -> str:
        line = None if self._ended else await self._lines.get()
        if line is None:
            self._ended = True
            raise EOFError
        return line


def file_history(file: Path) -> History:
    """Return the history of typed messages, in a file for its owner only, or in memory if that cannot be written."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


class Chat:
    """The loop of one chat. `write` prints text without changes. `gone` is done when the server has ended."""

    def __init__(
        self,
        session: Session,
        lines: Lines,
        write: Callable[[str], None],
        gone: asyncio.Future[int] | None = None,
    ) -> None:
        self._session = session
        self._lines = lines
        self._write = write
        self._gone: asyncio.Future[int] = gone if gone is not None else asyncio.get_running_loop().create_future()
        self._answer: asyncio.Task[bool] | None = None
        self._failed = False
        self._thinks = False  # the last written text was reasoning
        if lines.interactive:  # a pipe gets answers without reasoning
            session.on_thought = self._show_thought

    async def run(self) -> int:
        """Chat until the user leaves. Return 1 if the server ended or a piped message got no answer, else 0."""
        with self._ctrl_c():
            while True:
                try:
                    text = await self._first(self._lines.read())
                    if text is None:
                        self._write("the server has ended\n")
                        return 1
                    await self._take(text.strip())
                except TypingStopped:
                    self._write("(Ctrl-D or /exit leaves)\n")
                except (EOFError, Exit):
                    return 1 if self._failed and not self._lines.interactive else 0

    async def _take(self, text: str) -> None:
        if not text:
            return
        if (shown := self._session.command(text)) is not None:
            self._write(shown + "\n")
            return
        self._answer = asyncio.ensure_future(self._show(text))
        try:
            self._failed |= not await self._answer
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self._write("\n[stopped]\n")
        finally:
            self._answer = None
        if self._session.show_stats and self._session.stats is not None:
            self._write(f"[{self._session.stats}]\n")

    def _show_thought(self, text: str) -> None:
        self._thinks = True
        self._write(f"{DIM}{text.translate(_UNSEEN)}{NORMAL}")

    async def _show(self, text: str) -> bool:
        """Stream the answer to `text` to the terminal. Return False, after showing the error, if it failed."""
        self._thinks = False
        try:
            async with contextlib.aclosing(self._session.ask(text)) as chunks:
                async for chunk in chunks:
                    if self._thinks:
                        self._thinks = False
                        self._write("\n\n")
                    self._write(chunk.translate(_UNSEEN))
        except ChatError as error:
            self._write(f"\n[{str(error).translate(_UNSEEN)}]\n")
            return False
        self._write("\n")
        if self._session.finish_reason == "length":
            self._write("[truncated: the token limit is reached]\n")
        return True

    async def _first(self, reading: Awaitable[str]) -> str | None:
        """Wait for `reading` and return its result, or None if the server ends first."""
        task = asyncio.ensure_future(reading)
        either: set[asyncio.Future[Any]] = {task, self._gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return None
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    @contextlib.contextmanager
    def _ctrl_c(self) -> Iterator[None]:
        """Handle SIGINT: it stops a running answer, else it ends a piped chat and does nothing to a typed one."""
        loop = asyncio.get_running_loop()
        here = asyncio.current_task()
        assert here is not None

        def stop() -> None:
            if self._answer is not None:
                self._answer.cancel()
            elif not self._lines.interactive:
                here.cancel()

        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
