"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, a conversation or ids."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from minisgl.server.bodies import DetokenizeRequest, TokenizeRequest
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.formatter import json_response, token_text


async def tokenize_endpoint(context: ServerContext, asked: TokenizeRequest) -> Response:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt", code="invalid_value")
    if asked.messages is not None:
        if not asked.messages:
            raise bad_value("messages", [], "must not be empty")
        ids = await context.encode_conversation(asked)
    else:
        add_special = True if asked.add_special_tokens is None else asked.add_special_tokens
        ids = await context.encode_text(asked.prompt or "", add_special)
    tokens = ids.tolist()
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context.info.max_seq_len, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [token_text(context.tokenizer, token) for token in tokens]
    return json_response(answer)


async def detokenize_endpoint(context: ServerContext, asked: DetokenizeRequest) -> Response:
    """Special tokens are shown unless `skip_special_tokens` is true."""
    if len(asked.tokens) > (most := context.info.max_seq_len):
        raise bad_value("tokens", len(asked.tokens), f"at most {most} tokens, the context")
    vocab_size = context.info.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        raise bad_value("tokens", max(asked.tokens), f"token ids must be below {vocab_size}")
    text = await context.decode(asked.tokens, skip_special_tokens=bool(asked.skip_special_tokens))
    return json_response({"prompt": text})
