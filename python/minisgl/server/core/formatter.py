"""Base class of the endpoints' formatters, JSON lines and lists, paged lists, and log probabilities in OpenAI's two
shapes (chat: a list of tokens; completions: parallel lists).

Invariants: every token has its bytes; a token that is no valid UTF-8 is shown in a way that no other token shares; a
token's offset is the position, in the returned text, of the character in which it begins.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.message.prepared import AnswerParts
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.errors import ApiError, bad_value
from minisgl.server.core.generation import Generation
from minisgl.server.core.receipts import FIELD
from minisgl.server.core.streams import SSE_DONE, SSE_PING, sse
from minisgl.server.core.unserved import shown
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import TextDecoder
    from minisgl.tokenizer.reference import ReferenceDecoder

json_bytes = msgspec.json.Encoder().encode


def json_line(data: object) -> bytes:
    """Return a line of JSON, with U+2028 and U+2029 escaped: some clients end a line there, too."""
    return json_bytes(data).replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029") + b"\n"


def json_response(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def final_fields(generation: Generation, index: int) -> dict[str, Any]:
    """Return the final fields of a choice: SGLang's `matched_stop` if a stop ended it, and `receipt` if requested."""
    matched = generation.ended_by(index)
    return {**({} if matched is None else {"matched_stop": matched}), **receipt_field(generation, index)}


def receipt_field(generation: Generation, index: int) -> dict[str, Any]:
    """Return the field `receipt` of a finished choice, or no field if the request wants none."""
    receipt = generation.receipt(index)
    return {} if receipt is None else {FIELD: receipt}


NOT_ASKED_FOR: dict[str, None] = {"prompt_logprobs": None, "prompt_token_ids": None}
"""Fields that vLLM's clients expect in every complete response."""


class JsonList:
    """JSON list that is encoded while it grows. Items are created and encoded `SLICE` at a time, so that a long list
    takes little more memory than its text, and other threads may run in between."""

    SLICE = 64

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._data = bytearray(b"[")
        self.add(items)

    def add(self, items: Iterable[Any]) -> None:
        rest = iter(items)
        while some := list(itertools.islice(rest, self.SLICE)):
            self._data += b"," if len(self._data) > 1 else b""
            self._data += json_bytes(some)[1:-1]

    def shown(self) -> msgspec.Raw:
        return msgspec.Raw(bytes(self._data) + b"]")


IGNORED = b"x-minisgl-ignored"


@dataclass(frozen=True, slots=True)
class GatewayFormat:
    """Settings by which the gateway formats a response: the fields of the same names of `PreparedGeneration`."""

    shape: Literal["chat", "completion", "generate"]
    id: str = ""
    created: int = 0
    model: str = ""
    include_usage: bool = False
    shows_logprobs: bool = False
    parts: AnswerParts | None = None


class Formatter(ABC):
    """Result of an endpoint for one body: what is to be generated, and how to format it, whole or as a stream."""

    media_type = b"text/event-stream; charset=utf-8"  # content type of streams

    def __init__(self, wanted: GenerationInput, stream: bool | None = False, priority: int | None = None) -> None:
        wanted.priority = priority or 0
        self.wanted = wanted
        self.prompts = wanted.prompts
        self.stream = bool(stream)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        names = shown(self.wanted.ignored).encode()
        return [(IGNORED, names)] if names else []

    def for_gateway(self) -> GatewayFormat | None:
        """Return how the gateway formats the response; `None`: only this formatter can. Called if no field of the body
        needs this formatter (`prepare.py`)."""
        return None

    @abstractmethod
    def whole(self, generation: Generation, choices: Sequence[Delta]) -> Any:
        """Return the complete response. `choices`: one delta per choice with all its output."""

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        """Return the bytes of a stream for new output (one delta per choice that has some)."""
        raise NotImplementedError("this response is not streamed")

    def ping(self) -> bytes:
        """Return the bytes that show that an idle stream is alive; they may be sent between any two chunks. JSON lines
        have no comments: there it is an object with an empty text."""
        return SSE_PING

    def end(self, generation: Generation) -> bytes:
        """Return the last bytes of the stream, after every choice has ended."""
        raise NotImplementedError("this response is not streamed")

    def error(self, error: ApiError) -> bytes:
        """Return the last bytes of the stream if a choice fails."""
        return sse(error.body) + SSE_DONE


# --------------------------------------------------------------------------------------------------- log probabilities


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Logprob], *, as_ids: bool = False) -> dict[str, Any]:
    """Return `choices[].logprobs` of chat: {"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""

    return {"content": JsonList(chat_entries(tokenizer, tokens, as_ids=as_ids)).shown(), "refusal": None}


def chat_entries(tokenizer: Tokenizer, tokens: Iterable[Logprob], *, as_ids: bool = False) -> Iterator[dict[str, Any]]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = id_text(token_id).encode() if as_ids else tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    for token in tokens:
        yield {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*one) for one in token.top]}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt text to show before its completion, and the offset of each token in it, in characters."""

    text: str
    offsets: tuple[int, ...]


def echoed_prompt(
    tokenizer: Tokenizer, given: str | None, ids: Sequence[int], *, with_offsets: bool = True
) -> EchoedPrompt:
    """Return the prompt of `ids` as text, special tokens included. If the client wrote it as the text `given`, that is
    shown: tokens that encoding added (a BOS, sentencepiece's first space) have no width."""
    decoder = tokenizer.new_decoder(skip_special_tokens=False)
    text, offsets = _decode_each(decoder, ids, 0) if with_offsets else (decoder.push(ids), [])
    text += decoder.flush()
    if given is None or (found := text.rfind(given)) < 0:  # not found: the tokenizer normalized it
        return EchoedPrompt(text, tuple(offsets))
    return EchoedPrompt(given, tuple(min(max(offset - found, 0), len(given)) for offset in offsets))


def _decode_each(decoder: TextDecoder | ReferenceDecoder, ids: Iterable[int], start: int) -> tuple[str, list[int]]:
    """Decode `ids` one by one; return the text and each id's offset in characters, counted from `start`."""
    parts, offsets = list[str](), list[int]()
    for token_id in ids:
        before, text = decoder.place(token_id)
        place = start + before
        offsets.append(
            max(place, offsets[-1]) if offsets else place
        )  # invisible tokens: the offset of the text that follows
        start += len(text)
        parts.append(text)
    return "".join(parts), offsets


class CompletionLogprobs:
    """`choices[].logprobs` of completions, chunk by chunk, with text offsets that continue from chunk to chunk. Tokens
    of a stop string get the offsets that they would have if the text continued."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._shown = id_text if as_ids else partial(token_text, tokenizer)
        self._decoder = tokenizer.new_decoder()
        self._offset = 0

    def chunk(
        self, tokens: Sequence[Logprob], prompt: EchoedPrompt | None = None, of_prompt: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        """Return {tokens, token_logprobs, top_logprobs, text_offset} for these tokens; offsets count characters of the
        whole text. The first chunk may include the prompt."""
        before: tuple[int, ...] = ()
        if prompt is not None:
            before, self._offset = prompt.offsets, len(prompt.text)
        text, offsets = _decode_each(self._decoder, (token.token_id for token in tokens), self._offset)
        self._offset += len(text)
        all_tokens = [*of_prompt, *tokens]
        return {
            "tokens": [self._shown(token.token_id) for token in all_tokens],
            "token_logprobs": [token.logprob for token in all_tokens],
            "top_logprobs": JsonList(map(self._top, all_tokens)).shown(),
            "text_offset": [*before, *offsets],
        }

    def _top(self, token: Logprob) -> dict[str, float] | None:
        """Return the most likely tokens and, as OpenAI does, the token itself, with their log probabilities."""
        if token.logprob is None:
            return None
        logprobs = {self._shown(token_id): logprob for token_id, logprob in token.top}
        logprobs[self._shown(token.token_id)] = token.logprob
        return logprobs


def prompt_logprobs(tokenizer: Tokenizer, tokens: Iterable[Logprob]) -> msgspec.Raw:
    """Return vLLM's `prompt_logprobs`: by prompt token (`None` for the first) its own and the top entries, by id."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    return JsonList(
        None
        if token.logprob is None
        else {str(one): entry(one, logprob) for one, logprob in ((token.token_id, token.logprob), *token.top)}
        for token in tokens
    ).shown()


def id_text(token_id: int) -> str:
    """Return a token as vLLM shows it with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the token's text, or its bytes in hex if they are no valid UTF-8, as OpenAI shows them."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class Deferred:
    """Response to be computed by `answer()` after the request's body has been released."""

    answer: Callable[[], Awaitable[Response]]


def page_of(items: list[dict[str, Any]], request: Request, most: int, usual: int = 20) -> dict[str, Any]:
    """Return one page of a list as OpenAI's API does: newest first unless `order` is `asc`, at most `limit` items,
    starting after the item `after`. `most`: the highest allowed limit; `usual`: the default. Raises `ApiError` 400."""
    query = request.query_params
    limit, order, after = query.get("limit", str(usual)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_value("limit", limit, f"must be between 1 and {most}")
    if order not in ("asc", "desc"):
        raise bad_value("order", order, "must be asc or desc")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise bad_value("after", after, "no item has this id")
        listed = listed[places[0] + 1 :]
    data = listed[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, **ends, "has_more": len(listed) > len(data)}
