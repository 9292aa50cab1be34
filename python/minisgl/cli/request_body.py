"""Prompts from files, as the server would read them: the JSON body of a request, or token ids.

Invariants: the ids are those that the server makes of the same body, unless it truncates the prompt.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from minisgl.config import ConfigError

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.server.core.bodies import ChatRequest
    from minisgl.server.core.sight import Seen

FIELDS = ("text", "prompt", "messages", "token_ids")


def read(data: bytes, said: str) -> dict[str, Any]:
    """Parse a body that has one of `FIELDS`; a list is `token_ids`. `said` names it. Raises `ConfigError`."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{said}: is not JSON: {error}") from error
    if isinstance(body, list):
        return {"token_ids": body}
    if not isinstance(body, dict) or sum(body.get(name) is not None for name in FIELDS) != 1:
        raise ConfigError(f"{said}: must have one of {', '.join(FIELDS)}")
    return body


def ids_of(llm: LLM, body: dict[str, Any], said: str, *, is_prefix: bool) -> list[int]:
    """Return the ids of a body's prompt. `is_prefix`: without a generation prompt. Raises `ConfigError`."""
    from minisgl.server.admin.body import PrefixRequest
    from minisgl.server.core.bodies import ChatRequest, CompletionRequest
    from minisgl.server.core.errors import ApiError
    from minisgl.server.core.request import checked

    try:
        if body.get("messages") is not None:
            chat = checked(body, ChatRequest)
            if is_prefix and chat.add_generation_prompt is None:
                chat = chat.model_copy(update={"add_generation_prompt": False})
            return chat_ids(llm, chat)
        given: str | list[int]
        if body.get("prompt") is not None:
            given, *others = checked(body, CompletionRequest).prompts()
            if others:
                raise ConfigError("prompt: must be one prompt, not several")
        else:
            prefix = checked(body, PrefixRequest)
            given = list(prefix.token_ids or ()) if prefix.text is None else prefix.text
    except (ApiError, ConfigError) as error:
        raise ConfigError(f"{said}: {error}") from error
    return encoded(llm, given, is_whole=False) if isinstance(given, str) else given


def chat_ids(llm: LLM, chat: ChatRequest, seen: Seen | None = None) -> list[int]:
    """Return the token ids of a conversation's prompt, with a placeholder for each of the images in `seen`. Raises
    `ApiError` or `ConfigError`."""
    from minisgl.server.core.prompts import conversation
    from minisgl.server.core.tools import Parsing
    from minisgl.server.core.turn import of_allowed_tools
    from minisgl.tokenizer import ChatTemplateError

    shaped, variables = conversation(Parsing(llm.tokenizer), of_allowed_tools(chat), sees=seen is not None)
    try:
        text = llm.tokenizer.apply_chat_template(
            shaped(), **variables if seen is None else {**variables, "images": seen.template}
        )
    except ChatTemplateError as error:
        raise ConfigError(str(error)) from error
    return encoded(llm, text, is_whole=True)


def encoded(llm: LLM, text: str, *, is_whole: bool) -> list[int]:
    """Return the token ids of `text`. Special tokens are added unless `is_whole`: the text has them already."""
    ids: list[int] = llm.tokenizer.encode(text, add_special_tokens=not is_whole).tolist()
    return ids
