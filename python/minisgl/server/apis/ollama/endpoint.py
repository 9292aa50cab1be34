"""Ollama's API. Bodies become chat requests, completion requests (`raw`, `suffix`) or embedding requests; responses are
JSON objects, or JSON lines when streamed.

Invariants: errors name the fields that the client wrote; the joined contents, thoughts and calls of a stream equal
those of a complete response; fields without effect are named in `warning` and in the header `X-Minisgl-Ignored`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from starlette.responses import Response

from minisgl.frontend.output_processor import Delta
from minisgl.server.apis.ollama.body import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaMessage,
    OllamaRequest,
)
from minisgl.server.core.bodies import ChatRequest, CompletionRequest, EmbeddingRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.continuation import continuation
from minisgl.server.core.embeddings import EmbeddingFormatter, embeddings_endpoint
from minisgl.server.core.errors import ApiError, Names, bad_value, renamed, renamed_field, wrong
from minisgl.server.core.fields import Place, present
from minisgl.server.core.formatter import Formatter, json_line, json_response, receipt_field
from minisgl.server.core.generation import Generation
from minisgl.server.core.lengths import TO_THE_END
from minisgl.server.core.request import HttpRequest, checked
from minisgl.server.core.sampling_fields import Sampling
from minisgl.server.core.sections import Closed, Grown, Section
from minisgl.server.core.tools import Parsing
from minisgl.server.core.turn import SectionFormatter, Turn, chat_turn
from minisgl.server.core.unserved import shown

SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
OPTIONS = {**{name: name for name in SAME}, "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Supported `options`, and the names of their sampling fields."""
NEUTRAL: dict[str, tuple[float, ...]] = {"mirostat": (0,), "typical_p": (1,), "tfs_z": (1,), "repeat_last_n": (-1,)}
"""Neutral values of unsupported options."""
MAX_NAMED = 32
OF_LOADS = frozenset({"model", "keep_alive", "stream", "options"})
"""Fields that a body without a prompt may have, which only loads the model."""
UNLOADED = (0, "0", "0s", "0m", "0h")
NAMES: Names = (
    *((name, f"options.{option}") for option, name in OPTIONS.items()),
    (r"response_format(\.json_schema)?(\.schema)?", "format"),
    (r"enable_thinking", "think"),
    (r"reasoning_effort", "think"),
    (r"truncate_prompt_tokens", "truncate"),
    (r"messages\.(\d+)\.content\.0\.type", r"messages.\1.images"),
)
OF_PROMPTS: Names = ((r"messages(\..*)?", "prompt"), *NAMES)
Shape = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""Function that formats text, thoughts and calls as a part of a response."""


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def as_message(text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def as_response(text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def ping(model: str, shape: Shape) -> bytes:
    """Return a stream's keep-alive line: an object with empty text, since clients parse every line as JSON."""
    return json_line({"model": model, "created_at": now(), **shape("", "", []), "done": False})


# ------------------------------------------------------------------------------------------------------ what is asked


def _options(body: OllamaRequest, max_seq_len: int) -> tuple[dict[str, Any], list[str]]:
    """Return sampling fields, and options without effect; a `num_ctx` up to the model's context is no such option."""
    fields: dict[str, Any] = {}
    ignored = list[str]()
    for option, value in (body.options or {}).items():
        if value is None or value in NEUTRAL.get(option, ()):
            continue
        if (name := OPTIONS.get(option)) is not None:
            fields[name] = TO_THE_END if option == "num_predict" and value == -2 else value
        elif option != "num_ctx" or not isinstance(value, int) or value > max_seq_len:
            ignored.append(_named(option))
    if fields.get("seed") == -1:
        del fields["seed"]  # -1 is a random seed
    if body.keep_alive in UNLOADED:
        ignored.append("keep_alive")
    return fields, list(dict.fromkeys(ignored))[:MAX_NAMED]


def _named(option: str) -> str:
    """Return an option's name for a header, or just "options" if the client's text is not safe there."""
    return f"options.{option}" if re.fullmatch(r"[a-z0-9_]{1,32}", option) else "options"


def _format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not given and isinstance(given, str | None):
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, str):
        raise bad_value("format", given, "must be json or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}


def _think(parsing: Parsing, think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if think is not True:
        return {"reasoning_effort": think or "none"}
    if "enable_thinking" in parsing.variables:
        return {"enable_thinking": True}
    if parsing.thinking is None:
        raise bad_value("think", True, "this model does not support thinking", "unsupported_value")
    return {}


def conversation_of(parsing: Parsing, body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """Return the chat request's fields that determine the prompt. Raises `ApiError`."""
    if isinstance(body, OllamaChatRequest):
        fields = {"messages": _messages(body.messages or ()), "tools": body.tools or None}
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        content = _content(body.prompt, body.images, "images")
        fields = {"messages": [*system, {"role": "user", "content": content}]}
    return {**fields, **_think(parsing, body.think)}


def _content(text: str | None, images: Sequence[Any] | None, place: str) -> str | list[dict[str, Any]]:
    """Return the content of a chat message. Ollama shows a model the images of a message before its text."""
    if not images:
        return text or ""
    parts: list[dict[str, Any]] = [
        {"type": "image", "image_url": image, "place": Place(f"{place}.{i}")} for i, image in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages to those of the chat API. A tool result names its tool or nothing: results are matched with the
    calls before them, in order."""
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (id, name)
    for i, message in enumerate(given):
        content = _content(message.content, message.images, f"messages.{i}.images")
        one: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{i}_{j}", call.function) for j, call in enumerate(message.tool_calls)]
            one["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments or {}, ensure_ascii=False)},
                }
                for call_id, call in calls
            ]
            open_calls = [(call_id, call.name) for call_id, call in calls]
        if message.role == "tool":
            of_tool = (one for one in open_calls if message.tool_name in (None, one[1]))
            call = next(of_tool, None)
            if call is not None:
                open_calls.remove(call)
            call_id = message.tool_call_id or (None if call is None else call[0])
            one |= {"tool_call_id": call_id, "name": message.tool_name}
        messages.append(present(one))
    return messages


async def chat_endpoint(context: ServerContext, body: OllamaChatRequest, request: HttpRequest) -> Formatter | Response:
    if not body.messages:
        return _loaded(context, body, request, "messages", as_message(""))
    return await _chat(context, body, request, as_message)


async def generate_endpoint(
    context: ServerContext, body: OllamaGenerateRequest, request: HttpRequest
) -> Formatter | Response:
    if not body.prompt and not body.suffix and not body.images:
        return _loaded(context, body, request, "prompt", as_response(""))
    if body.images and (body.raw or body.suffix or not context.info.sees):
        with_template = "cannot be used with raw or suffix, which leave out the chat template"
        reason = with_template if context.info.sees else context.text_only
        raise bad_value("images", body.images, reason, "unsupported_value")
    if body.raw or body.suffix:
        return await _continued(context, body)
    return await _chat(context, body, request, as_response)


def _loaded(
    context: ServerContext, body: OllamaGenerating, request: HttpRequest, needed: str, empty: dict[str, Any]
) -> Response:
    """Answer a body without a prompt, by which clients load or unload a model; here the model is always loaded. Raises
    `ApiError` 400 if the body has other fields: then the field `needed` is missing."""
    given = [name for name in body.model_fields_set if name not in OF_LOADS and getattr(body, name)]
    if more := [*request.ignored, *sorted(given)]:
        raise wrong(more[0], f"needs {needed}")
    head = {"model": body.model or context.served.name, "created_at": now(), **empty, "done": True}
    _, ignored = _options(body, context.info.max_seq_len)
    return json_response({**head, "done_reason": "load", **_warning(ignored)})


def _warning(ignored: Sequence[str]) -> dict[str, str]:
    return {"warning": f"without effect here: {shown(ignored)}"} if ignored else {}


def _fields(context: ServerContext, body: OllamaGenerating) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that chat and completion requests share, and the names of options without effect."""
    fields, ignored = _options(body, context.info.max_seq_len)
    fields |= {"model": body.model, "stream": body.stream is not False, "response_format": _format(body.format)}
    return fields, ignored


async def _chat(
    context: ServerContext,
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: HttpRequest,
    shape: Shape,
) -> OllamaFormatter:
    fields, ignored = _fields(context, body)
    fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    fields |= await context.prompts.run_work(lambda: conversation_of(context.parsing, body), request.is_large)
    with renamed(NAMES if isinstance(body, OllamaChatRequest) else OF_PROMPTS):
        chat = await context.prompts.run_work(lambda: checked(present(fields), ChatRequest), request.is_large)
        turn = await chat_turn(context, chat)
    turn.ignored = (*(renamed_field(NAMES, name) for name in turn.ignored), *ignored)
    return OllamaFormatter(context, body, chat, turn, shape)


async def _continued(context: ServerContext, body: OllamaGenerateRequest) -> OllamaFormatter:
    fields, ignored = _fields(context, body)
    fields = {"max_tokens": TO_THE_END, **fields, "prompt": body.prompt or "", "suffix": body.suffix}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    if body.think:
        raise bad_value("think", body.think, "cannot be used with raw or suffix, which leave out the chat template")
    with renamed(NAMES):
        completion = checked(present(fields), CompletionRequest)
        generation_input = await continuation(context, completion, has_gap=bool(body.suffix))
    turn = Turn(generation_input.prompts, generation_input.sampling, only_prompt=generation_input.only_prompt)
    turn.ignored = (*(renamed_field(NAMES, name) for name in generation_input.ignored), *ignored)
    return OllamaFormatter(context, body, completion, turn, as_response)


# --------------------------------------------------------------------------------------------------------- the answer


class OllamaFormatter(SectionFormatter):
    media_type = b"application/x-ndjson"

    def __init__(
        self, context: ServerContext, body: OllamaGenerating, chat: Sampling, turn: Turn, shape: Shape
    ) -> None:
        super().__init__(context, turn, chat.stream, chat.priority)
        self._model = body.model or context.served.name
        self._shape = shape

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        self._take(choices[0])
        sections = self._sections.whole()
        text, thought = ("".join(one.text for one in sections if one.kind == kind) for kind in ("text", "reasoning"))
        calls = [_call(one, i) for i, one in enumerate(one for one in sections if one.kind == "call")]
        return self._last(generation, self._shape(text, thought, calls))

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        return b"".join(json_line(self._answer(part, False)) for delta in deltas for part in self._take(delta))

    def ping(self) -> bytes:
        return ping(self._model, self._shape)

    def end(self, generation: Generation) -> bytes:
        return json_line(self._last(generation, self._shape("", "", [])))

    def error(self, error: ApiError) -> bytes:
        return json_line(error.ollama_body())

    def _take(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the new parts of the output in a delta, in Ollama's shape."""
        parts = []
        for change in self.changes(delta):
            section = change.section
            if isinstance(change, Grown) and section.kind == "text":
                parts.append(self._shape(change.text, "", []))
            elif isinstance(change, Grown) and section.kind == "reasoning":
                parts.append(self._shape("", change.text, []))
            elif isinstance(change, Closed) and section.kind == "call" and section.arguments is not None:
                index = sum(one.kind == "call" for one in self._sections.all[: section.index])
                parts.append(self._shape("", "", [_call(section, index)]))
        return parts

    def _answer(self, part: dict[str, Any], done: bool) -> dict[str, Any]:
        logprobs, self._new_logprobs = self._new_logprobs, []
        shown = {"logprobs": logprobs} if logprobs else {}
        return {"model": self._model, "created_at": now(), **part, **shown, "done": done}

    def _last(self, generation: Generation, part: dict[str, Any]) -> dict[str, Any]:
        usage, (prompt_s, answer_s) = generation.usage_of(0), generation.times_s(0)
        prompt_ns, answer_ns = int(prompt_s * 1e9), int(answer_s * 1e9)
        return {
            **self._answer(part, True),
            "done_reason": "length" if self._choice.finish_reason == "length" else "stop",
            "total_duration": prompt_ns + answer_ns,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage["completion_tokens"],
            "eval_duration": answer_ns,
            **receipt_field(generation, 0),
            **_warning(self._turn.ignored),
        }


def _call(section: Section, index: int) -> dict[str, Any]:
    function = {"index": index, "name": section.name, "arguments": section.arguments}
    return {"id": section.call_id, "function": function}


# --------------------------------------------------------------------------------------------------------- embeddings


async def embed_endpoint(
    context: ServerContext, body: OllamaEmbedRequest, request: HttpRequest
) -> Formatter | Response:
    return await _embedded(context, body, request, body.input, Embed, truncates=body.truncate is not False)


async def embedding_endpoint(
    context: ServerContext, body: OllamaEmbeddingsRequest, request: HttpRequest
) -> Formatter | Response:
    return await _embedded(context, body, request, body.prompt, OneEmbedding)


async def _embedded(
    context: ServerContext,
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    request: HttpRequest,
    texts: str | list[str],
    shown_as: type[OllamaEmbeddings],
    *,
    truncates: bool = True,
) -> Formatter | Response:
    """Return the formatter for the embeddings of `texts`. A text without tokens gets an empty vector and no error,
    since clients load a model so; if all are such texts, the response is complete."""
    _, ignored = _options(body, context.info.max_seq_len)
    ignored = [*(f"options.{name}" for name in OPTIONS if name in (body.options or {})), *ignored, *request.ignored]
    given = [texts] if isinstance(texts, str) else texts
    has_tokens = [bool(text) or bool(len(context.tokenizer.encode(""))) for text in given]
    if not any(has_tokens) or texts == "":
        nothing: dict[str, Any] = {"embedding": []}
        if shown_as is Embed:
            counts = dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), 0)
            model = body.model or context.served.name
            nothing = {"model": model, "embeddings": [[] for _ in texts], **counts}
        return json_response({**nothing, **_warning(ignored)})
    fields: dict[str, Any] = {"input": [text for text, has in zip(given, has_tokens, strict=True) if has]}
    fields["model"] = body.model
    if isinstance(body, OllamaEmbedRequest):
        fields["dimensions"] = body.dimensions
    if truncates:
        fields |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    with renamed((*NAMES, (r"input", "input" if isinstance(body, OllamaEmbedRequest) else "prompt"))):
        formatter = await embeddings_endpoint(context, checked(fields, EmbeddingRequest), request, shown_as)
    assert isinstance(formatter, shown_as)
    formatter.warning, formatter.has_tokens = _warning(ignored), has_tokens
    return formatter


class OllamaEmbeddings(EmbeddingFormatter):
    """Formatter of embeddings. `warning`: see `_warning`; `has_tokens`: for each text, whether it gets a vector."""

    warning: Mapping[str, str] = MappingProxyType({})
    has_tokens: Sequence[bool] = ()


class Embed(OllamaEmbeddings):
    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        response = super().whole(generation, choices)
        vectors = iter([one["embedding"] for one in response["data"]])
        total_s, _ = generation.times_s(0)
        return {
            "model": response["model"],
            "embeddings": [next(vectors) if has else [] for has in self.has_tokens],
            "total_duration": int(total_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": response["usage"]["prompt_tokens"],
            **self.warning,
        }


class OneEmbedding(OllamaEmbeddings):
    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        return {"embedding": super().whole(generation, choices)["data"][0]["embedding"], **self.warning}
