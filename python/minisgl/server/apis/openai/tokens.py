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
from minisgl.server.core.sight import images_of, leave_out_oldest, shown_ids
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

SLICE = 4096  # in tokens


async def tokenize_endpoint(context: ServerContext, body: TokenizeRequest, request: HttpRequest) -> Response:
    if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
        raise wrong("prompt", "give one of prompt, messages and content")
    if body.messages is not None:
        if not body.messages:
            raise bad_value("messages", [], "must not be empty")
        if context.info.sees:
            leave_out_oldest(body.messages, context.config.images.max_images)
        seen = await context.prompts.see(images_of(body.messages)) if context.info.sees else None
        ids = await context.prompts.encode_conversation(body, only_counts=True, images=seen)
        if seen is not None:
            ids = shown_ids(ids, seen.marker_id)
    else:
        add_special = body.add_special_tokens
        if add_special is None:
            add_special = body.content is None or bool(body.add_special)
        ids = await context.prompts.encode_text(body.prompt or body.content or "", add_special)
    return await context.prompts.run_work(lambda: _tokens(context, body, ids), request.is_large)


def _tokens(context: ServerContext, body: TokenizeRequest, ids: Int32Array) -> Response:
    """Return the response with the token ids, encoded in slices: as objects they would take much more memory."""
    tokenizer = context.tokenizer

    def listed(show: Callable[[int], Any]) -> Any:
        return JsonList(
            show(token) for at in range(0, len(ids), SLICE) for token in ids[at : at + SLICE].tolist()
        ).shown()

    with_piece = partial(_with_piece, tokenizer)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": context.info.max_seq_len}
    answer["tokens"] = listed(with_piece if body.with_pieces else int)
    if body.return_token_strs:
        answer["token_strs"] = listed(partial(token_text, tokenizer))
    return json_response(answer)


def _with_piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    return {"id": token, "piece": _piece(tokenizer.token_bytes(token))}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize_endpoint(context: ServerContext, body: DetokenizeRequest, request: HttpRequest) -> Response:
    """Decode token ids to text. Special tokens are shown unless `skip_special_tokens` is true."""
    if len(body.tokens) > (most := context.info.max_seq_len):
        raise bad_value("tokens", len(body.tokens), f"must be at most {most} tokens, the model's context")
    vocab_size = context.info.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise bad_value("tokens", max(body.tokens), f"token ids must be below {vocab_size}")
    text = await context.prompts.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response({"prompt": text, "content": text})
