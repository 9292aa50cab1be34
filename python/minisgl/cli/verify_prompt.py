"""The prompts that a request's body may stand for, whichever API it was written for.

A body does not name its API, and several may fit: a list of messages alone is OpenAI's, Anthropic's and Ollama's. The
digest of the prompt in a receipt tells which one was used.
Invariants: each prompt is the one that the server makes of that body, unless the server truncates it or continues a
stored response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from minisgl.cli import request_body
from minisgl.config import ConfigError
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
from minisgl.server.core.tools import Parsing

if TYPE_CHECKING:
    from minisgl.llm import LLM

Read = Callable[["LLM", dict[str, Any]], list[int]]


def prompts_of(llm: LLM, data: bytes, said: str) -> list[list[int]]:
    """Return the possible prompts, at least one, of a text, a list of token ids, or a body. `said` is the file as the
    user named it, for errors. Raises `ConfigError`."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        if not isinstance(body, list):
            body = {"text": data.decode(errors="surrogateescape")}
        return [request_body.ids_of(llm, request_body.read(json.dumps(body).encode(), said), said, is_prefix=False)]
    prompts, reasons = list[list[int]](), list[str]()
    for read in _readings(body):
        try:
            prompts.append(read(llm, body))
        except (ApiError, ConfigError) as error:
            reasons.append(str(error))
    if not prompts:
        raise ConfigError(f"{said}: {'; '.join(dict.fromkeys(reasons)) or 'is no request body of a known API'}")
    return prompts


def _readings(body: dict[str, Any]) -> Iterator[Read]:
    if "input" in body or "previous_response_id" in body:
        yield _responses
    if "messages" in body:
        yield from (_chat, _messages, _ollama_chat)
    if "prompt" in body:
        yield from (_chat, _completion, _ollama_generate)


def _chat(llm: LLM, body: dict[str, Any]) -> list[int]:
    chat = checked(body, ChatRequest)
    if not chat.messages:
        raise ConfigError("messages: must not be empty")
    return request_body.chat_ids(llm, chat)


def _messages(llm: LLM, body: dict[str, Any]) -> list[int]:
    return request_body.chat_ids(llm, chat_of_messages(checked(body, MessagesRequest)))


def _responses(llm: LLM, body: dict[str, Any]) -> list[int]:
    request = checked(body, ResponsesRequest)
    items = kept_items(request.input or ())
    if request.previous_response_id is not None or any(isinstance(item, ReferenceItem) for item in items):
        raise ConfigError("input: refers to a stored response: give the whole conversation")
    messages = messages_of([item for item in items if not isinstance(item, ReferenceItem)])
    return request_body.chat_ids(llm, chat_of_responses(request, GivenTools(request), messages))


def _completion(llm: LLM, body: dict[str, Any]) -> list[int]:
    request = checked(body, CompletionRequest)
    if request.suffix is not None:
        raise ConfigError("suffix: is not supported: give the prompt's token ids")
    prompt, *others = request.prompts()
    if others:
        raise ConfigError("prompt: must be one prompt, not several")
    return request_body.encoded(llm, prompt, is_whole=False) if isinstance(prompt, str) else prompt


def _ollama_chat(llm: LLM, body: dict[str, Any]) -> list[int]:
    return _ollama(llm, checked(body, OllamaChatRequest))


def _ollama_generate(llm: LLM, body: dict[str, Any]) -> list[int]:
    request = checked(body, OllamaGenerateRequest)
    if request.suffix:
        raise ConfigError("suffix: is not supported: give the prompt's token ids")
    if request.raw:
        return request_body.encoded(llm, request.prompt or "", is_whole=False)
    return _ollama(llm, request)


def _ollama(llm: LLM, request: OllamaChatRequest | OllamaGenerateRequest) -> list[int]:
    fields = conversation_of(Parsing(llm.tokenizer), request)
    return request_body.chat_ids(llm, checked(present(fields), ChatRequest))
