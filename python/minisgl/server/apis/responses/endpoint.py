"""POST /v1/responses, and the routes of stored responses. A body becomes a chat request; the output is an object with a
list of items, or a stream of events.

Invariants: consecutive reasoning, text and calls are one assistant message, as chat templates require; errors name the
fields that the client wrote. Each event has the next `sequence_number`; the joined deltas of an item equal its final
text; the final object of a stream equals that of a complete response. A finished response is stored unless `store` is
false; only its caller finds it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.output_processor import Delta
from minisgl.parsers import ids
from minisgl.server.apis.responses.body import (
    TEXTS,
    CallItem,
    Content,
    CustomCallItem,
    CustomTool,
    HostedTool,
    Item,
    MessageItem,
    NamespaceTool,
    OutputItem,
    ReasoningItem,
    ReferenceItem,
    ResponsePart,
    ResponsesRequest,
    ResponseTool,
    ShellCallItem,
    ShellOutputItem,
    UnreadItem,
)
from minisgl.server.apis.responses.store import ResponseStore
from minisgl.server.apis.responses.tools import SHELL, GivenTools, custom_arguments, flat_name
from minisgl.server.core.bodies import ChatRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import RESPONSES, ApiError, Names, bad_value, missing, renamed, renamed_field, wrong
from minisgl.server.core.fields import LeftOut, Place, present
from minisgl.server.core.formatter import json_bytes, json_response, page_of, receipt_field
from minisgl.server.core.generation import Generation
from minisgl.server.core.history import History, plain
from minisgl.server.core.log import say
from minisgl.server.core.request import REQUEST, HttpRequest, checked
from minisgl.server.core.routes import Routes
from minisgl.server.core.sampling_fields import shared_fields
from minisgl.server.core.sections import Change, Closed, Grown, Opened, Section
from minisgl.server.core.streams import sse
from minisgl.server.core.turn import SectionFormatter, Turn, chat_turn
from minisgl.server.core.unserved import shown

LOGPROBS = "message.output_text.logprobs"
OWN = {"max_tokens", "n", "stream", "stream_options", "user", "metadata", "store", "response_format"}
"""Sampling fields that are not copied to the chat request, because they differ or do not exist here."""
NAMES: Names = (
    (r"messages(\..*)?", "input"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"max_tokens", "max_output_tokens"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"reasoning_effort", "reasoning.effort"),
)


def new_id(prefix: str) -> str:
    return f"{prefix}_{ids.new_id()}"


def to_chat(body: ResponsesRequest, tools: GivenTools, messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """Convert a body with its resolved `messages` and tools into a chat request. Raises `ApiError`."""
    fields = shared_fields(body, OWN)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields["messages"] = list(messages)
    given = {
        "max_completion_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "response_format": _format(body),
        "verbosity": body.text.verbosity if body.text else None,
        **tools.for_chat(),
        **_logprobs(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
    }
    fields |= present(given)
    return checked(fields, ChatRequest)


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    text_format = body.text.format if body.text else None
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    if text_format.schema_ is None:
        raise bad_value("text.format.schema", None, "required for json_schema")
    schema = present({"name": text_format.name, "strict": text_format.strict, "description": text_format.description})
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema, "schema": text_format.schema_}}


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    if body.top_logprobs is None and LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}


# ----------------------------------------------------------------------------------------------------------- items


def kept_items(given: str | Sequence[Item]) -> list[dict[str, Any] | ReferenceItem]:
    """Return the input items as they are stored, each with an id; the caller must resolve references."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    return [item if isinstance(item, ReferenceItem) else _kept(item) for item in given]


def _kept(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            head = {"type": "message", "id": item.id or new_id("msg"), "status": "completed", "role": item.role}
            return {**head, "content": _parts(item.content, kind)}
        case CallItem() | CustomCallItem() | ShellCallItem() | ShellOutputItem():
            head = {"type": item.type, "id": item.id or new_id(PREFIXES[item.type]), "status": "completed"}
            return {**head, **item.model_dump(exclude={"type", "id"}, exclude_none=True)}
        case OutputItem():
            output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
            head = {"type": item.type, "id": item.id or new_id(PREFIXES[item.type]), "status": "completed"}
            return {**head, "call_id": item.call_id, "output": output}
        case UnreadItem():
            return {**item.model_dump(), "id": item.id or new_id("unread")}
        case ReasoningItem():
            parts = {"summary": item.summary or [], "content": item.content or []}
            shown = {name: [{"type": one.type, "text": one.text} for one in found] for name, found in parts.items()}
            return {"type": "reasoning", "id": item.id or new_id("rs"), **shown}
        case _:
            raise AssertionError(f"a reference is looked up before: {item}")


def _parts(content: Content, kind: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_text_part(kind, content)]
    return [_part(part, kind) for part in content]


def _part(part: ResponsePart | LeftOut, kind: str) -> dict[str, Any]:
    if isinstance(part, LeftOut):
        return part.model_dump(exclude_unset=True)
    return (
        {"type": "refusal", "refusal": part.refusal or ""}
        if part.type == "refusal"
        else _text_part(kind, part.text or "")
    )


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def messages_of(items: Sequence[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """Convert stored items of the Responses API to messages of the chat API. `first`: first item of this request."""
    history = History()
    for i, item in enumerate(items, -first):
        place = f"input.{i}" if i >= 0 else "previous_response_id"
        match item["type"], item.get("role"):
            case "reasoning", _:
                if text := "".join(part["text"] for part in item["content"] or item["summary"]):
                    history.reason(text)
            case "message", "assistant":
                history.say(_content(item["content"], place))
            case "function_call" | "custom_tool_call" | "local_shell_call", _:
                history.call(_call(item))
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output", _:
                call_id = item.get("call_id", item["id"])
                history.add({"role": "tool", "tool_call_id": call_id, "content": _output(item["output"], place)})
            case _, None:
                continue  # an item that the model is not shown
            case _, role:
                history.add({"role": role, "content": plain(_content(item["content"], place))})
    return history.done()


def _call(item: dict[str, Any]) -> dict[str, Any]:
    match item["type"]:
        case "local_shell_call":
            name, arguments = SHELL, json_bytes(item["action"]).decode()
        case "custom_tool_call":
            name, arguments = item["name"], custom_arguments(item["input"])
        case _:
            name, arguments = item["name"], item["arguments"]
    call = {"name": flat_name(name, item.get("namespace")), "arguments": arguments}
    return {"id": item.get("call_id", item["id"]), "type": "function", "function": call}


def _output(given: str | Sequence[dict[str, Any]], place: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    if not all(part["type"] in TEXTS for part in given):
        return _content(given, place, "output")
    return "".join(part["text"] if "text" in part else part["refusal"] for part in given)


def _content(parts: Sequence[dict[str, Any]], place: str, field: str = "content") -> list[dict[str, Any]]:
    """Convert parts to those of the chat API. Parts of other types keep only the type; the chat leaves them out."""

    def of(i: int, part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "input_image":
            has_file = part.get("file_id") is not None
            given = f"{place}.{field}.{i}.{'file_id' if has_file else 'image_url'}"
            at = Place(given if place.startswith("input.") else place)
            return {**part, "place": at, **({"image_url": {"file_id": part["file_id"]}} if has_file else {})}
        if part["type"] not in TEXTS:
            return {"type": part["type"]}
        return {"type": "text", "text": part["text"]} if "text" in part else part

    return list(itertools.starmap(of, enumerate(parts)))


def _check_outputs(items: Sequence[dict[str, Any]], first: int) -> None:
    """Check that every tool output belongs to a call before it. `first`: first new item. Raises `ApiError` 400."""
    calls = set[str]()
    for i, item in enumerate(items):
        call_id = item.get("call_id", item["id"])
        if not item["type"].endswith("_output"):
            calls.update((call_id, item["id"]))
        elif item["type"] in PREFIXES and call_id not in calls:
            name = "call_id" if "call_id" in item else "id"
            raise bad_value(f"input.{i - first}.{name}", call_id, "no call before it has this id")


PREFIXES = {
    "reasoning": "rs",
    "text": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
}
"""Prefixes of item ids, by type."""
CUSTOM = "custom_tool_call"
LENGTH = "max_output_tokens"


class ResponsesFormatter(SectionFormatter):
    """Formatter of a response. `keep`: called with the finished object, to store it; `None`: not stored."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesRequest,
        tools: GivenTools,
        turn: Turn,
        keep: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        super().__init__(context, turn, body.stream, body.priority)
        self._tools = tools.by_name
        self._keep = keep
        self._head = _head(context, body, turn)
        self._items: list[dict[str, Any]] = []  # by section
        self._logprobs: list[list[dict[str, Any]]] = []  # by section
        self._num_events = 0
        self._has_begun = False

    # ------------------------------------------------------------------------------------------------------ object

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        self._take(choices[0])
        return self._finish(generation)

    def _finish(self, generation: Generation) -> dict[str, Any]:
        reason = self._choice.finish_reason
        thought = self._turn.num_thought(self._choice, generation.token_ids(0), self._tokenizer)
        more: dict[str, Any] = {"usage": _usage(generation.usage(), thought), **receipt_field(generation, 0)}
        if reason == "length":
            more |= {"status": "incomplete", "incomplete_details": {"reason": LENGTH}}
        elif reason == "abort":
            more |= {"status": "failed", "error": {"code": "server_error", "message": "the answer was aborted"}}
        else:
            more |= {"status": "completed", "completed_at": int(time.time())}
            more["output"] = [self._items[one.index] for one in self._sections.whole()]
        response = self._object(**more)
        if self._keep is not None:
            self._keep(response)
        return response

    def _object(self, **more: Any) -> dict[str, Any]:
        return {**self._head, "output": self._items, **more}

    def _item(self, section: Section, status: str) -> dict[str, Any]:
        """Return the item of a section; without content while its status is "in_progress"."""
        begun = status == "in_progress"
        if section.kind == "call":
            call = self._call(section, "" if begun else section.text or "{}")
            item_id = new_id(PREFIXES[call["type"]]) if begun else self._items[section.index]["id"]
            return {"id": item_id, **({} if call["type"] == CUSTOM else {"status": status}), **call}
        item_id = new_id(PREFIXES[section.kind]) if begun else self._items[section.index]["id"]
        head = {"id": item_id, "status": status}
        content = [] if begun else [self._part(section, section.text)]
        if section.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _call(self, section: Section, arguments: str) -> dict[str, Any]:
        given = self._tools.get(section.name)
        if given is not None:
            return given.call(section.call_id, arguments)
        head = {"call_id": section.call_id, "name": section.name}
        return {"type": "function_call", **head, "arguments": arguments}

    def _part(self, section: Section, text: str) -> dict[str, Any]:
        if section.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs[section.index] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # ------------------------------------------------------------------------------------------------------- stream

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        return b"".join([*self._begin(), *(frame for delta in deltas for frame in self._take(delta))])

    def _begin(self) -> list[bytes]:
        """Return the events that open a response's stream; none on later calls."""
        if self._has_begun:
            return []
        self._has_begun = True
        begun = self._object(status="in_progress", output=[])
        return [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]

    def end(self, generation: Generation) -> bytes:
        response = self._finish(generation)
        return self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        detail = {"code": "server_error", "message": error.body["error"]["message"]}
        failed = self._object(status="failed", error=detail)
        return b"".join([*self._begin(), self._event("response.failed", response=failed)])

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)

    # -------------------------------------------------------------------------------------------------------- growth

    def _take(self, delta: Delta) -> list[bytes]:
        """Return the server-sent events for new output (a delta)."""
        is_cut = delta.finish_reason == "length"
        return [frame for change in self.changes(delta) for frame in self._frames(change, is_cut)]

    def _frames(self, change: Change, is_cut: bool) -> list[bytes]:
        """Return the events for a section's change. `is_cut`: the token limit ended the output, and its last item."""
        section = change.section
        if isinstance(change, Opened):
            self._items.append(item := self._item(section, "in_progress"))
            self._logprobs.append([])
            frames = [self._event("response.output_item.added", output_index=section.index, item=item)]
            if section.kind != "call":
                frames.append(
                    self._event("response.content_part.added", **self._at(section), part=self._part(section, ""))
                )
            return frames
        is_custom = self._items[section.index]["type"] == CUSTOM
        if isinstance(change, Grown):
            return [] if is_custom else [self._delta(section, change.text)]  # a custom call's text is sent at its end
        assert isinstance(change, Closed)
        is_last = section is self._sections.all[-1]
        is_broken = (is_cut and is_last) or (section.kind == "call" and section.arguments is None)
        self._items[section.index] = item = self._item(section, "incomplete" if is_broken else "completed")
        frames = self._done(section, item)
        return [*frames, self._event("response.output_item.done", output_index=section.index, item=item)]

    def _at(self, section: Section) -> dict[str, Any]:
        place = {"item_id": self._items[section.index]["id"], "output_index": section.index}
        return place if section.kind == "call" else {**place, "content_index": 0}

    def _delta(self, section: Section, text: str) -> bytes:
        if section.kind == "call":
            return self._event("response.function_call_arguments.delta", **self._at(section), delta=text)
        if section.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._at(section), delta=text)
        logprobs, self._new_logprobs = self._new_logprobs, []
        self._logprobs[section.index] += logprobs
        return self._event("response.output_text.delta", **self._at(section), delta=text, logprobs=logprobs)

    def _done(self, section: Section, item: dict[str, Any]) -> list[bytes]:
        at = self._at(section)
        if item["type"] == CUSTOM:
            kind = "response.custom_tool_call_input"
            return [
                self._event(f"{kind}.delta", **at, delta=item["input"]),
                self._event(f"{kind}.done", **at, input=item["input"]),
            ]
        if section.kind == "call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            return [self._event("response.function_call_arguments.done", **at, **call)]
        if section.kind == "reasoning":
            text_done = self._event("response.reasoning_text.done", **at, text=section.text)
        else:
            text = {"text": section.text, "logprobs": self._logprobs[section.index]}
            text_done = self._event("response.output_text.done", **at, **text)
        return [text_done, self._event("response.content_part.done", **at, part=item["content"][0])]


def _usage(given: dict[str, Any], num_thought: int) -> dict[str, Any]:
    return {
        "input_tokens": given["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": given["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": given["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": given["total_tokens"],
    }


MAX_ITEMS_SHOWN = 100


async def responses_endpoint(
    context: ServerContext, body: ResponsesRequest, request: HttpRequest
) -> ResponsesFormatter:
    items, first = await _items(context, body, request)
    tools = GivenTools(body)
    turn = await _turn_of(context, body, tools, items, first, request)
    keep = None
    if body.store is not False:
        has_images = bool(turn.images)  # encoding those would hold the event loop
        kept = await context.prompts.run_work(lambda: msgspec.Raw(json_bytes(items)), request.is_large or has_images)
        keep = partial(context.own(ResponseStore).put, input_items=kept, key=request.key)
    return ResponsesFormatter(context, body, tools, turn, keep)


async def input_tokens_endpoint(context: ServerContext, body: ResponsesRequest, request: HttpRequest) -> Response:
    """Count the input tokens, as POST /v1/responses would."""
    items, first = await _items(context, body, request)
    turn = await _turn_of(context, body, GivenTools(body), items, first, request, only_counts=True)
    return json_response({"object": "response.input_tokens", "input_tokens": len(turn.prompts[0])})


async def _items(
    context: ServerContext, body: ResponsesRequest, request: HttpRequest
) -> tuple[list[dict[str, Any]], int]:
    """Return the previous response's items and the new ones, with references resolved, and the index of the first new
    one. Raises `ApiError`."""
    key, store = request.key, context.own(ResponseStore)
    items: list[dict[str, Any]] = []
    if (before := body.previous_response_id) is not None:
        kept = store.input_items(before, key)
        if kept is None:
            raise _not_found(before, "previous_response_id", status=400)
        items = [*kept, *(store.output(before, key) or ())]
    given, first = body.input, len(items)
    if given is None and before is None:
        raise missing("input")
    for i, item in enumerate(await context.prompts.run_work(lambda: kept_items(given or ()), request.is_large)):
        if isinstance(item, ReferenceItem):
            referred = store.item(item.id, key)
            if referred is None:
                raise bad_value(f"input.{i}.id", item.id, "no item of a stored response has this id")
            items.append(referred)
        else:
            items.append(item)
    _check_outputs(items, first)
    return items, first


async def _turn_of(
    context: ServerContext,
    body: ResponsesRequest,
    tools: GivenTools,
    items: list[dict[str, Any]],
    first: int,
    request: HttpRequest,
    *,
    only_counts: bool = False,
) -> Turn:
    messages = await context.prompts.run_work(lambda: messages_of(items, first), request.is_large)
    if not messages and body.instructions is None:
        raise wrong("input", "must not be empty" if not body.input else "has no item that the model can be shown")
    names = [*tools.names, *NAMES]
    with renamed(names):
        turn = await _turn(context, body, tools, messages, request, only_counts)
    turn.ignored = tuple(renamed_field(names, name) if "." in name else name for name in turn.ignored)
    if left_out := [name for name in request.ignored if name.startswith(("tools.", "input."))]:
        say(f"{request.request_id}: the model is not shown what only OpenAI can run or read: {shown(left_out)}")
    return turn


async def _turn(
    context: ServerContext,
    body: ResponsesRequest,
    tools: GivenTools,
    messages: list[dict[str, Any]],
    request: HttpRequest,
    only_counts: bool,
) -> Turn:
    async def turn_of(some: list[dict[str, Any]], only_counts: bool = False) -> Turn:
        chat = await context.prompts.run_work(lambda: to_chat(body, tools, some), request.is_large)
        return await chat_turn(context, chat, least_tokens=1, only_counts=only_counts)

    try:
        return await turn_of(messages, only_counts and body.truncation != "auto")
    except ApiError as error:
        if body.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    # binary search: the first user message from which the rest fits the context
    places = [i for i, message in enumerate(messages) if i and message["role"] == "user"]
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    fitting: Turn | None = None
    first, last = 0, len(places)
    while first < last:
        middle = (first + last) // 2
        rest = [one for one in messages[places[middle] :] if one not in systems]
        try:
            fitting = await turn_of(systems + rest)
            last = middle
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            first = middle + 1
    if fitting is None and only_counts:
        return await turn_of(messages, True)
    if fitting is None:
        raise too_long
    return fitting


def _head(context: ServerContext, body: ResponsesRequest, turn: Turn) -> dict[str, Any]:
    """Return the fields of the response object that are known before generation starts."""
    choice: Any = body.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice = choice.model_dump(exclude_none=True)
    form: Any = body.text.format if body.text else None
    form = {"type": "text"} if form is None else form.model_dump(exclude_unset=True, by_alias=True)
    effort = body.reasoning.effort if body.reasoning else None
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": ids.created(),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": context.served.check(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": turn.sampling.temperature,
        "text": {"format": form},
        "tool_choice": choice or "auto",
        "tools": [_shown_tool(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": turn.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown_tool(tool: ResponseTool | CustomTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        return {**tool.model_dump(exclude={"tools"}), "tools": [_shown_tool(one) for one in tool.tools]}
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    shown = {name: getattr(tool, name) for name in ("type", "name", "description", "parameters")}
    return {**shown, "strict": bool(tool.strict)}


# ----------------------------------------------------------------------------------------------- answers that are kept


def _not_found(name: str, param: str | None = None, status: int = 404) -> ApiError:
    text = f"no stored response has the id {name[:80]!r}"
    text = text if param is None else f"{param}: {text}"
    return ApiError(status, text, param=param, code="previous_response_not_found" if param else "not_found")


def _key(request: Request) -> int:
    request_state: HttpRequest = request.scope[REQUEST]
    return request_state.key


def add_responses(app: Routes, context: ServerContext) -> None:
    """Add all routes below /v1/responses/."""
    store = context.own(ResponseStore)

    @app.on(f"{RESPONSES}/{{response_id}}", "GET")
    async def get(request: Request, response_id: str) -> Response:
        response = store.response(response_id, _key(request))
        if response is None:
            raise _not_found(response_id)
        if request.query_params.get("stream") in ("true", "1"):
            raise bad_value("stream", True, "a stored response is not streamed", "unsupported_value")
        return Response(response, media_type="application/json")

    @app.on(f"{RESPONSES}/{{response_id}}", "DELETE")
    async def delete(request: Request, response_id: str) -> Response:
        if not store.delete(response_id, _key(request)):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.on(f"{RESPONSES}/{{response_id}}/cancel", "POST")
    async def cancel(request: Request, response_id: str) -> Response:
        if store.response(response_id, _key(request)) is None:
            raise _not_found(response_id)
        raise wrong(
            "background",
            "only background responses can be cancelled, and this server has no background mode: to stop one, "
            "close its connection",
        )

    @app.on(f"{RESPONSES}/{{response_id}}/input_items", "GET")
    async def input_items(request: Request, response_id: str) -> Response:
        items = store.input_items(response_id, _key(request))
        if items is None:
            raise _not_found(response_id)
        return json_response(page_of(items, request, MAX_ITEMS_SHOWN))
