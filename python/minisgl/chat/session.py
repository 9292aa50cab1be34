"""A conversation: its messages, its settings, and the commands that change them.

Invariants: the stored part of an answer is what was shown of it; a question without an answer is not stored.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.chat.client import ChatClient, ChatError
from minisgl.chat.pictures import COMMAND, PictureError, data_url, files_of

HELP = """\
/help            this list
/reset           forget the conversation (the system prompt stays)
/system TEXT     set the system prompt; without TEXT remove it
/image FILE ...  attach images to the next message; without FILE remove them
/stats           show time to first token and tokens per second after each answer, or stop showing them
/exit            leave (also Ctrl-D)
//TEXT           say something that begins with a slash
Ctrl-C stops an answer. Alt-Enter, or a backslash before Enter, begins a new line."""


class Exit(Exception):
    """Raised when the user asks to leave the chat."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Timings and token counts of one answer. `num_tokens` is None if it was stopped or the server sent none."""

    ttft_s: float
    generation_s: float  # from the first token to the last one
    num_tokens: int | None
    num_prompt_tokens: int | None
    num_cached_tokens: int

    def __str__(self) -> str:
        said = [f"TTFT {self.ttft_s * 1000:.0f} ms"]
        if self.num_tokens is not None:
            said.append(f"{self.num_tokens} tokens")
            if self.num_tokens > 1 and self.generation_s > 0:
                said.append(f"{(self.num_tokens - 1) / self.generation_s:.1f} tok/s")
        if self.num_prompt_tokens is not None:
            said.append(f"prompt {self.num_prompt_tokens} tokens, {self.num_cached_tokens} cached")
        return ", ".join(said)


class Session:
    """A conversation with one model of a server. `settings` are further fields of each request, such as temperature.
    `images` are data URLs for the first message."""

    def __init__(
        self,
        client: ChatClient,
        model: str,
        *,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        show_stats: bool = False,
        images: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = dict(settings or {})
        self._clock = clock
        self.model = model
        self.system = system or None
        self.messages: list[dict[str, Any]] = []
        self.images = [*images]  # of the next message
        self.show_stats = show_stats
        self.on_thought: Callable[[str], None] = lambda text: None  # receives reasoning
        self.stats: Stats | None = None  # of the last answer; None before the first
        self.finish_reason: str | None = None  # of the last answer; None: it was stopped or failed

    def command(self, line: str) -> str | None:
        """Run a slash command and return the text to show; None if `line` is a message. Raises `Exit`."""
        if not line.startswith("/") or line.startswith("//"):
            return None
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/system":
            self.system = rest or None
            return "system prompt set" if rest else "no system prompt"
        if name == COMMAND:
            return self._attach(rest)
        if rest and name in ("/help", "/reset", "/stats", "/exit"):
            return f"{name} takes no argument"
        if name == "/help":
            return HELP
        if name == "/reset":
            self.messages.clear()
            return "the conversation is cleared"
        if name == "/stats":
            self.show_stats = not self.show_stats
            return f"numbers after each answer: {'on' if self.show_stats else 'off'}"
        if name in ("/exit", "/quit"):
            raise Exit
        return f"{name}: no such command: /help lists them"

    def _attach(self, files: str) -> str:
        """Attach files to the next message, or remove what is attached, and return the text to show."""
        if not files:
            self.images.clear()
            return "no images are attached"
        try:
            self.images += [data_url(file) for file in files_of(files)]
        except PictureError as error:
            return str(error)
        return f"images for the next message: {len(self.images)}"

    def _question(self, text: str) -> dict[str, Any]:
        content = text.removeprefix("/") if text.startswith("//") else text
        if not self.images:
            return {"role": "user", "content": content}
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": content}]}

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        """Send `text` and yield the answer in chunks. Close the iterator to stop it. Raises `ChatError`."""
        question = self._question(text)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {**self._settings, "model": self.model, "messages": [*system, *self.messages, question]}
        conversation = self.messages
        self.stats = self.finish_reason = None
        shown: list[str] = []
        timing = _Timing(self._clock)
        try:
            async with contextlib.aclosing(self._client.answer(body)) as chunks:
                async for chunk in chunks:
                    timing.take(chunk.text or chunk.thought, chunk.usage)
                    if chunk.thought:
                        self.on_thought(chunk.thought)
                    self.finish_reason = chunk.finish_reason or self.finish_reason
                    if chunk.text:
                        shown.append(chunk.text)
                        yield chunk.text
        except ChatError as error:
            self.finish_reason = None
            if error.status in (400, 413) and self.images:
                self.images.clear()
                raise ChatError(f"{error} (images are no longer attached)", error.status) from error
            if error.status == 400 and "context" in str(error) and self.messages:
                raise ChatError(f"{error} (/reset forgets the conversation)", error.status) from error
            raise
        finally:
            if shown or self.finish_reason is not None:
                conversation += [question, {"role": "assistant", "content": "".join(shown)}]
                self.images.clear()
            self.stats = timing.stats()


class _Timing:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began
        self._usage: dict[str, Any] = {}

    def take(self, text: str, usage: dict[str, Any] | None) -> None:
        self._usage = usage or self._usage
        if text:
            self._last = self._clock()
            if self._first is None:
                self._first = self._last

    def stats(self) -> Stats | None:
        """Return the timings of the answer, or None if no text came."""
        if self._first is None:
            return None
        return Stats(
            ttft_s=self._first - self._began,
            generation_s=self._last - self._first,
            num_tokens=self._usage.get("completion_tokens"),
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_cached_tokens=(self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
