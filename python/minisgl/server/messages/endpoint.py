"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.responses import Response

from minisgl.server.context import ServerContext
from minisgl.server.errors import MESSAGES, renamed
from minisgl.server.formatter import json_response
from minisgl.server.messages.body import AnthropicConversation, CountTokensRequest, MessagesRequest
from minisgl.server.messages.events import MessagesFormatter
from minisgl.server.messages.translate import NAMES, to_chat
from minisgl.server.request import HttpRequest
from minisgl.server.turn import Turn, chat_turn

COUNT_TOKENS = f"{MESSAGES}/count_tokens"


async def messages_endpoint(context: ServerContext, asked: MessagesRequest, request: HttpRequest) -> MessagesFormatter:
    return MessagesFormatter(context.check_model(asked.model), asked, await _turn(context, asked, request))


async def count_tokens_endpoint(context: ServerContext, asked: CountTokensRequest, request: HttpRequest) -> Response:
    """As many as POST /v1/messages says of the same conversation, those in the cache included."""
    turn = await _turn(context, asked, request)
    return json_response({"input_tokens": len(turn.prompts[0])})


async def _turn(context: ServerContext, asked: AnthropicConversation, request: HttpRequest) -> Turn:
    with renamed(NAMES):
        return await chat_turn(context, await context.of_body(lambda: to_chat(asked), request.is_large), least_tokens=1)
