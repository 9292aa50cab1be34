"""POST /v1/responses, and the routes of the answers that are kept.

Invariants: an answer is kept when it has ended, unless `store` is false; only its caller finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minisgl.frontend.output_processor import Delta
from minisgl.parsers import ids
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value, renamed
from minisgl.server.formatter import json_response
from minisgl.server.generation import Generation
from minisgl.server.request import REQUEST, HttpRequest
from minisgl.server.responses.body import ReferenceItem, ResponsesRequest, ResponseTool
from minisgl.server.responses.events import ResponsesFormatter
from minisgl.server.responses.translate import NAMES, kept_items, messages_of, new_id, to_chat
from minisgl.server.turn import Turn, chat_turn

RESPONSES = "/v1/responses"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
MAX_ITEMS_SHOWN = 100


async def responses_endpoint(
    context: ServerContext, asked: ResponsesRequest, request: HttpRequest
) -> ResponsesFormatter:
    items = await _items(context, asked, request)
    turn = await _turn_of(context, asked, items, request)
    head = _head(context, asked, turn)
    if asked.store is False:
        return ResponsesFormatter(context.tokenizer, head, asked, turn)
    return _Kept(context, head, asked, turn, items, request.key)


async def input_tokens_endpoint(context: ServerContext, asked: ResponsesRequest, request: HttpRequest) -> Response:
    """As many as POST /v1/responses says of the same conversation."""
    turn = await _turn_of(context, asked, await _items(context, asked, request), request)
    return json_response({"object": "response.input_tokens", "input_tokens": len(turn.prompts[0])})


class _Kept(ResponsesFormatter):
    """Keeps the answer when it ends."""

    def __init__(
        self,
        context: ServerContext,
        head: dict[str, Any],
        asked: ResponsesRequest,
        turn: Turn,
        items: list[dict[str, Any]],
        key: int,
    ) -> None:
        super().__init__(context.tokenizer, head, asked, turn)
        self._store, self._input_items, self._key = context.responses, items, key

    def _keep(self) -> None:
        if self.finished is not None:
            self._store.put(self.finished, self._input_items, self._key)

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        found = super().whole(generation, choices)
        self._keep()
        return found

    def end(self, generation: Generation) -> bytes:
        frame = super().end(generation)
        self._keep()
        return frame


async def _items(context: ServerContext, asked: ResponsesRequest, request: HttpRequest) -> list[dict[str, Any]]:
    """Those of the conversation before, and the new ones."""
    key = request.key
    found: list[dict[str, Any]] = []
    if (before := asked.previous_response_id) is not None:
        kept = context.responses.input_items(before, key)
        if kept is None:
            raise _not_found(before, "previous_response_id", status=400)
        found = [*kept, *(context.responses.output(before, key) or ())]
    given = asked.input
    if given is None and before is None:
        raise ApiError(400, "input: required", param="input", code="missing_required_parameter")
    for i, item in enumerate(await context.of_body(lambda: kept_items(given or ()), request.is_large)):
        if isinstance(item, ReferenceItem):
            referred = context.responses.item(item.id, key)
            if referred is None:
                raise bad_value(f"input.{i}.id", item.id, "no item of an answer that is kept has this id")
            found.append(referred)
        else:
            found.append(item)
    return found


async def _turn_of(
    context: ServerContext, asked: ResponsesRequest, items: list[dict[str, Any]], request: HttpRequest
) -> Turn:
    messages = await context.of_body(lambda: messages_of(items), request.is_large)
    if not messages and asked.instructions is None:
        raise bad_value("input", asked.input, "must not be empty")
    with renamed(NAMES):
        return await _turn(context, asked, messages, request)


async def _turn(
    context: ServerContext, asked: ResponsesRequest, messages: list[dict[str, Any]], request: HttpRequest
) -> Turn:
    async def turn_of(some: list[dict[str, Any]]) -> Turn:
        return await chat_turn(
            context, await context.of_body(lambda: to_chat(asked, some), request.is_large), least_tokens=1
        )

    try:
        return await turn_of(messages)
    except ApiError as error:
        if asked.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    # of the places where a user begins to speak, the first from which on it fits
    places = [i for i, message in enumerate(messages) if i and message["role"] == "user"]
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    found: Turn | None = None
    first, last = 0, len(places)
    while first < last:
        middle = (first + last) // 2
        rest = [one for one in messages[places[middle] :] if one not in systems]
        try:
            found = await turn_of(systems + rest)
            last = middle
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            first = middle + 1
    if found is None:
        raise too_long
    return found


def _head(context: ServerContext, asked: ResponsesRequest, turn: Turn) -> dict[str, Any]:
    """What an answer says from its beginning on."""
    choice: Any = asked.tool_choice
    if choice is not None and not isinstance(choice, str):
        choice = choice.model_dump(exclude_none=True)
    form: Any = asked.text.format if asked.text else None
    form = {"type": "text"} if form is None else form.model_dump(exclude_unset=True, by_alias=True)
    effort = asked.reasoning.effort if asked.reasoning else None
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": ids.created(),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": context.check_model(asked.model),
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": turn.sampling.temperature,
        "text": {"format": form},
        "tool_choice": choice or "auto",
        "tools": [_shown_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": turn.sampling.top_p,
        "truncation": asked.truncation or "disabled",
        "usage": None,
        "user": asked.user,
    }


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    shown = {name: getattr(tool, name) for name in ("type", "name", "description", "parameters")}
    return {**shown, "strict": bool(tool.strict)}


# ----------------------------------------------------------------------------------------------- answers that are kept


def _not_found(name: str, param: str | None = None, status: int = 404) -> ApiError:
    text = f"no answer with the id {name[:80]!r} is kept here"
    text = text if param is None else f"{param}: {text}"
    return ApiError(status, text, param=param, code="previous_response_not_found" if param else "not_found")


def _key(request: Request) -> int:
    found: HttpRequest = request.scope[REQUEST]
    return found.key


def add_responses(app: FastAPI, context: ServerContext) -> None:
    """The routes beside POST /v1/responses itself."""
    store = context.responses

    @app.get(f"{RESPONSES}/{{response_id}}")
    async def get(request: Request, response_id: str) -> Response:
        found = store.response(response_id, _key(request))
        if found is None:
            raise _not_found(response_id)
        if request.query_params.get("stream") in ("true", "1"):
            raise bad_value("stream", True, "an answer that is kept is not streamed again", "unsupported_value")
        return Response(found, media_type="application/json")

    @app.delete(f"{RESPONSES}/{{response_id}}")
    async def delete(request: Request, response_id: str) -> Response:
        if not store.delete(response_id, _key(request)):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.post(f"{RESPONSES}/{{response_id}}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        if store.response(response_id, _key(request)) is None:
            raise _not_found(response_id)
        raise ApiError(
            400,
            "background: only answers that are made in the background can be cancelled, and this server makes none: "
            "to stop an answer, close its connection",
            param="background",
            code="invalid_value",
        )

    @app.get(f"{RESPONSES}/{{response_id}}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        items = store.input_items(response_id, _key(request))
        if items is None:
            raise _not_found(response_id)
        return json_response(_page(items, request))


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """The last ones first, unless `order` is `asc`; `limit` of them, from behind the item `after`."""
    asked = request.query_params
    limit, order, after = asked.get("limit", "20"), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MAX_ITEMS_SHOWN):
        raise bad_value("limit", limit, f"must be between 1 and {MAX_ITEMS_SHOWN}")
    if order not in ("asc", "desc"):
        raise bad_value("order", order, "must be asc or desc")
    found = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(found) if item["id"] == after]
        if not places:
            raise bad_value("after", after, "no item has this id")
        found = found[places[0] + 1 :]
    data = found[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, **ends, "has_more": len(found) > len(data)}
