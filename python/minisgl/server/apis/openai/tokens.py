"""POST /tokenize and /detokenize: texts to token ids and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.responses import Response

from minisgl.server.core.bodies import DetokenizeRequest, TokenizeRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import bad_value, wrong
from minisgl.server.core.formatter import JsonList, json_response, token_text
from minisgl.server.core.request import HttpRequest
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

SLICE = 4096  # in tokens


async def tokenize_endpoint(context: ServerContext, asked: TokenizeRequest, request: HttpRequest) -> Response:
    if sum(one is not None for one in (asked.prompt, asked.messages, asked.content)) != 1:
        raise wrong("prompt", "give one of prompt, messages and content")
    if asked.messages is not None:
        if not asked.messages:
            raise bad_value("messages", [], "must not be empty")
        ids = await context.prompts.encode_conversation(asked, only_counts=True)
    else:
        add_special = asked.add_special_tokens
        if add_special is None:
            add_special = asked.content is None or bool(asked.add_special)
        ids = await context.prompts.encode_text(asked.prompt or asked.content or "", add_special)
    return await context.prompts.run_work(lambda: _tokens(context, asked, ids), request.is_large)


def _tokens(context: ServerContext, asked: TokenizeRequest, ids: Int32Array) -> Response:
    """Return the response with the token ids, encoded in slices: as objects they would take much more memory."""
    tokenizer = context.tokenizer

    def listed(show: Callable[[int], Any]) -> Any:
        return JsonList(
            show(token) for at in range(0, len(ids), SLICE) for token in ids[at : at + SLICE].tolist()
        ).shown()

    with_piece = partial(_with_piece, tokenizer)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": context.info.max_seq_len}
    answer["tokens"] = listed(with_piece if asked.with_pieces else int)
    if asked.return_token_strs:
        answer["token_strs"] = listed(partial(token_text, tokenizer))
    return json_response(answer)


def _with_piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    return {"id": token, "piece": _piece(tokenizer.token_bytes(token))}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize_endpoint(context: ServerContext, asked: DetokenizeRequest, request: HttpRequest) -> Response:
    """Decode token ids to text. Special tokens are shown unless `skip_special_tokens` is true."""
    if len(asked.tokens) > (most := context.info.max_seq_len):
        raise bad_value("tokens", len(asked.tokens), f"at most {most} tokens, the context")
    vocab_size = context.info.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        raise bad_value("tokens", max(asked.tokens), f"token ids must be below {vocab_size}")
    text = await context.prompts.decode(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return json_response({"prompt": text, "content": text})
