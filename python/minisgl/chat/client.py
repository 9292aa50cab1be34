"""HTTP client of the chat: lists a server's models and streams one answer at a time.

Invariants: every failure is a `ChatError` whose text can be shown to the user; closing the iterator closes the
connection, which stops the answer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 10.0
_IMAGE = "messages.content.image_url"  # in the header of a server that left images out


class ChatError(Exception):
    """A failed chat request, with a reason for the user. `status` is the HTTP status; None without a response."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """A piece of a streamed answer. `thought` is reasoning before the answer. `usage` comes once, at the end, from
    servers that send it."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    thought: str = ""


class ChatClient:
    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """Create a client for the server at `base_url`, with or without `/v1`. Raises `ChatError` for a bad URL."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ChatError(f"--base-url {base_url}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ChatError(f"--base-url {base_url}: must look like http://127.0.0.1:1919")
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            trust_env=not _is_loopback(url.host),  # a proxy cannot reach a loopback address
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Return the names of the server's models, at least one. Raises `ChatError`."""
        with self._explained():
            answer = await self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        if answer.status_code != 200:
            raise self._refusal(answer)
        try:
            names = [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f"{self.base_url}: is not OpenAI-compatible: its /v1/models lists no models") from error
        if not names:
            raise ChatError(f"{self.base_url}: the server has no model")
        return names

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[AnswerChunk, None]:
        """Stream one chat completion. Close the iterator to stop it. Raises `ChatError`."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._explained():
            async with self._http.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response)
                if _IMAGE in response.headers.get("x-minisgl-ignored", ""):
                    raise ChatError("the model reads text only: it would answer without the images", 400)
                async for data in _events(response):
                    if data == b"[DONE]":
                        return
                    yield _chunk(data)
        raise ChatError("the server ended the answer before it was complete")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ChatError(f"{self.base_url}: cannot connect: is the server running?") from error
        except httpx.TimeoutException as error:
            raise ChatError(f"{self.base_url}: no response in time") from error
        except httpx.HTTPError as error:
            raise ChatError(f"{self.base_url}: the connection broke: {str(error) or type(error).__name__}") from error

    def _refusal(self, response: httpx.Response) -> ChatError:
        status = response.status_code
        try:
            text = _message(response.json()["error"])
        except (ValueError, KeyError, TypeError):
            text = f"{self.base_url}: HTTP {status} from something that is no OpenAI-compatible server"
        if status in (401, 403):
            text += " (give --api-key)"
        return ChatError(text, status)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event. Only line feeds end a line: text may hold other separators."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _chunk(data: bytes) -> AnswerChunk:
    try:
        event = json.loads(data)
        if "error" in event:
            raise ChatError(_message(event["error"]))
        usage = event.get("usage")
        if not event["choices"]:
            return AnswerChunk(usage=usage)
        choice = event["choices"][0]
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        return AnswerChunk(delta.get("content") or "", choice.get("finish_reason"), usage, thought)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"the server sent an invalid chunk: {data[:80]!r}") from error


def _message(error: Any) -> str:
    return str(error["message"]) if isinstance(error, dict) else str(error)
