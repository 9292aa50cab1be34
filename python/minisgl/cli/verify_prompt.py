"""The prompts that a request's body may stand for, whichever API it was written for.

A body does not name its API, and several may fit: a list of messages alone is OpenAI's, Anthropic's and Ollama's. The
digest of the prompt in a receipt tells which one was used.
Invariants: each prompt is the one that the server makes of that body, unless the server truncates it or continues a
stored response. Images are those of the body, or of files.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.cli import request_body
from minisgl.config import ConfigError, ImageLimits
from minisgl.llm import LLM, Encoded
from minisgl.server.apis.anthropic.body import MessagesRequest
from minisgl.server.apis.anthropic.endpoint import to_chat as chat_of_messages
from minisgl.server.apis.ollama.body import OllamaChatRequest, OllamaGenerateRequest
from minisgl.server.apis.ollama.endpoint import conversation_of
from minisgl.server.apis.responses.body import ReferenceItem, ResponsesRequest
from minisgl.server.apis.responses.endpoint import kept_items, messages_of
from minisgl.server.apis.responses.endpoint import to_chat as chat_of_responses
from minisgl.server.apis.responses.tools import GivenTools
from minisgl.server.core.bodies import ChatRequest, CompletionRequest
from minisgl.server.core.errors import ApiError
from minisgl.server.core.fields import present
from minisgl.server.core.request import checked
from minisgl.server.core.sight import GivenImage, Seen, Sight, images_of, leave_out_oldest
from minisgl.server.core.tools import Parsing

Read = Callable[[dict[str, Any]], Encoded]


class PromptReader:
    """Reads prompts for `llm`. `files` are images in place of those of a body, or those of a text or list of ids."""

    def __init__(self, llm: LLM, files: Sequence[str], limits: ImageLimits) -> None:
        self._llm = llm
        self._files = files
        self._limits = limits
        self._sight = Sight(limits)

    def read(self, data: bytes, said: str) -> list[Encoded]:
        """Return the possible prompts, at least one, of a text, a list of token ids, or a body. `said` is the file as
        the user named it, for errors. Raises `ConfigError`."""
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            given = body if isinstance(body, list) else {"text": data.decode(errors="surrogateescape")}
            body = request_body.read(json.dumps(given).encode(), said)
            readings: Iterable[Read] = [
                lambda body: self._plain(request_body.ids_of(self._llm, body, said, is_prefix=False))
            ]
        else:
            readings = self._readings(body)
        prompts, reasons = list[Encoded](), list[str]()
        for read in readings:
            try:
                prompts.append(read(body))
            except (ApiError, ConfigError) as error:
                reasons.append(str(error).removeprefix(f"{said}: "))
        if not prompts:
            raise ConfigError(f"{said}: {'; '.join(dict.fromkeys(reasons)) or 'is no request body of a known API'}")
        return prompts

    def _readings(self, body: dict[str, Any]) -> Iterator[Read]:
        if "input" in body or "previous_response_id" in body:
            yield self._responses
        if "messages" in body:
            yield from (self._chat, self._messages, self._ollama_chat)
        if "prompt" in body:
            yield from (self._chat, self._completion, self._ollama_generate)

    # ----------------------------------------------------------------------------------------------------- images

    def _see(self, given: Sequence[GivenImage]) -> Seen | None:
        """Prepare the images of a prompt, or `files` in their place; `None` if there are none. Raises `ConfigError` or
        `ApiError`."""
        info = self._llm.engine_info
        if self._files:
            if given and len(given) != len(self._files):
                raise ConfigError(f"--image: {len(self._files)} files for the {len(given)} images of the prompt")
            details = [one.detail for one in given] or [None] * len(self._files)
            given = [_in_file(*one) for one in zip(self._files, details, strict=True)]
        if not given or not (info.sees or self._files):
            return None
        return asyncio.run(self._sight.see(given, info.model_dir if info.sees else None))

    def _plain(self, ids: list[int]) -> Encoded:
        """Return the prompt of token ids. `files` are its images, at the placeholders: one for each, or one for each of
        its tokens, as responses show them."""
        if (seen := self._see(())) is None:
            return _with_images(ids, None)
        seen.template.order = [*range(len(seen.prepared))]
        counts = iter([tile.num_tokens for one in seen.prepared for tile in one.tiles])
        at, once = 0, list[int]()
        while at < len(ids):
            once.append(ids[at])
            run = next(counts, 1) if ids[at] == seen.marker_id else 1
            at += run if {*ids[at : at + run]} == {ids[at]} else 1
        return _with_images(once, seen)

    def _of_chat(self, chat: ChatRequest) -> Encoded:
        if not chat.messages:
            raise ConfigError("messages: must not be empty")
        if self._llm.engine_info.sees:
            leave_out_oldest(chat.messages, self._limits.max_images)
        seen = self._see(images_of(chat.messages))
        return _with_images(request_body.chat_ids(self._llm, chat, seen), seen)

    # ------------------------------------------------------------------------------------------------------- bodies

    def _chat(self, body: dict[str, Any]) -> Encoded:
        return self._of_chat(checked(body, ChatRequest))

    def _messages(self, body: dict[str, Any]) -> Encoded:
        return self._of_chat(chat_of_messages(checked(body, MessagesRequest)))

    def _responses(self, body: dict[str, Any]) -> Encoded:
        request = checked(body, ResponsesRequest)
        items = kept_items(request.input or ())
        if request.previous_response_id is not None or any(isinstance(item, ReferenceItem) for item in items):
            raise ConfigError("input: refers to a stored response: give the whole conversation")
        messages = messages_of([item for item in items if not isinstance(item, ReferenceItem)])
        return self._of_chat(chat_of_responses(request, GivenTools(request), messages))

    def _completion(self, body: dict[str, Any]) -> Encoded:
        request = checked(body, CompletionRequest)
        if request.suffix is not None:
            raise ConfigError("suffix: is not supported: give the prompt's token ids")
        prompt, *others = request.prompts()
        if others:
            raise ConfigError("prompt: must be one prompt, not several")
        if isinstance(prompt, str):
            prompt = request_body.encoded(self._llm, prompt, is_whole=False)
        return self._plain(prompt)

    def _ollama_chat(self, body: dict[str, Any]) -> Encoded:
        return self._ollama(checked(body, OllamaChatRequest))

    def _ollama_generate(self, body: dict[str, Any]) -> Encoded:
        request = checked(body, OllamaGenerateRequest)
        if request.suffix:
            raise ConfigError("suffix: is not supported: give the prompt's token ids")
        if request.raw:
            return self._plain(request_body.encoded(self._llm, request.prompt or "", is_whole=False))
        return self._ollama(request)

    def _ollama(self, request: OllamaChatRequest | OllamaGenerateRequest) -> Encoded:
        fields = conversation_of(Parsing(self._llm.tokenizer), request)
        return self._of_chat(checked(present(fields), ChatRequest))


def _with_images(ids: list[int], seen: Seen | None) -> Encoded:
    """Return the prompt with the images of `seen` at the placeholders. Raises `ApiError`."""
    array = np.array(ids, np.int32)
    return Encoded(array, ids) if seen is None else Encoded(seen.expand(array, "prompt"), ids, None, seen.images)


def _in_file(file: str, detail: Any) -> GivenImage:
    try:
        data = base64.b64encode(Path(file).read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"--image {file}: {error.strerror}") from error
    return GivenImage(f"--image {file}", data, detail)
