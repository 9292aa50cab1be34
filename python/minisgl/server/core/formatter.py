"""What clients get: the base of the endpoints' formatters, server-sent events, and log probabilities in OpenAI's two
shapes: chat's list of tokens, completions' parallel lists; and lists, a page at a time.

Invariants: every token has its bytes; a token that is no whole text is shown in a way that no other token shares; an
offset of a token is the place, in the text that is returned, of the character in which it begins.
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
from minisgl.server.core.admission import Wanted
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
    """Return a line of JSON without the characters at which some clients end a line, too."""
    return json_bytes(data).replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029") + b"\n"


def json_response(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def of_its_end(generation: Generation, index: int) -> dict[str, Any]:
    """Fields of a choice that has ended: SGLang's if a stop did it, and its receipt if the request asks for one."""
    matched = generation.ended_by(index)
    return {**({} if matched is None else {"matched_stop": matched}), **receipt_of(generation, index)}


def receipt_of(generation: Generation, index: int) -> dict[str, Any]:
    """The field `receipt` of a choice that has ended, if the request asks for one."""
    found = generation.receipt(index)
    return {} if found is None else {FIELD: found}


NOT_ASKED_FOR: dict[str, None] = {"prompt_logprobs": None, "prompt_token_ids": None}
"""vLLM's clients read these fields of whole answers without looking whether they are there."""


class JsonList:
    """A JSON list that grows and is shown as far as it has come. Its items are made and encoded a slice at a time, so
    that a long one takes little more memory than its text, and a thread that makes it lets others run."""

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
class Shown:
    """How the gateway shows an answer: the fields of `PreparedGeneration` of these names."""

    shape: Literal["chat", "completion", "generate"]
    id: str = ""
    created: int = 0
    model: str = ""
    include_usage: bool = False
    shows_logprobs: bool = False
    parts: AnswerParts | None = None


class Formatter(ABC):
    """What an endpoint makes of a body: what is to be generated, and how that is shown, whole or as a stream."""

    media_type = b"text/event-stream; charset=utf-8"  # of a stream

    def __init__(self, wanted: Wanted, stream: bool | None = False, priority: int | None = None) -> None:
        wanted.priority = priority or 0
        self.wanted = wanted
        self.prompts = wanted.prompts
        self.stream = bool(stream)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        names = shown(self.wanted.ignored).encode()
        return [(IGNORED, names)] if names else []

    def for_gateway(self) -> Shown | None:
        """Return how the gateway shows the answer; None: only this formatter does. It is asked where no field of the
        body needs this formatter (`prepare.py`)."""
        return None

    @abstractmethod
    def whole(self, generation: Generation, choices: Sequence[Delta]) -> Any:
        """The answer, with every choice in one delta."""

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        """The next part of a stream."""
        raise NotImplementedError("this answer comes whole")

    def ping(self) -> bytes:
        """Return what says that the stream lives, and nothing else: it may come at any time between other parts. JSON
        lines have no comments: there it is a part with an empty text."""
        return SSE_PING

    def end(self, generation: Generation) -> bytes:
        """What comes after every choice has ended."""
        raise NotImplementedError("this answer comes whole")

    def error(self, error: ApiError) -> bytes:
        """The last part instead, if a choice fails."""
        return sse(error.body) + SSE_DONE


# --------------------------------------------------------------------------------------------------- log probabilities


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Logprob], *, as_ids: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of chat: {"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""

    return {"content": JsonList(chat_entries(tokenizer, tokens, as_ids=as_ids)).shown(), "refusal": None}


def chat_entries(tokenizer: Tokenizer, tokens: Iterable[Logprob], *, as_ids: bool = False) -> Iterator[dict[str, Any]]:
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = id_text(token_id).encode() if as_ids else tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    for token in tokens:
        yield {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*one) for one in token.top]}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as it is shown before its answer, and where in it each token begins."""

    text: str
    offsets: tuple[int, ...]


def echoed_prompt(
    tokenizer: Tokenizer, given: str | None, ids: Sequence[int], *, with_offsets: bool = True
) -> EchoedPrompt:
    """Special tokens are part of the text. But a text is shown as it was `given`: what its encoding added around it
    (a BOS, sentencepiece's first space) takes no room."""
    decoder = tokenizer.new_decoder(skip_special_tokens=False)
    text, offsets = _placed(decoder, ids, 0) if with_offsets else (decoder.push(ids), [])
    text += decoder.flush()
    if given is None or (found := text.rfind(given)) < 0:  # not found: normalized, and shown as the model read it
        return EchoedPrompt(text, tuple(offsets))
    return EchoedPrompt(given, tuple(min(max(offset - found, 0), len(given)) for offset in offsets))


def _placed(decoder: TextDecoder | ReferenceDecoder, ids: Iterable[int], start: int) -> tuple[str, list[int]]:
    """The new text, which begins at `start`, and the offset of each id."""
    parts, offsets = list[str](), list[int]()
    for token_id in ids:
        before, text = decoder.place(token_id)
        place = start + before
        offsets.append(max(place, offsets[-1]) if offsets else place)  # what is not shown stands where text goes on
        start += len(text)
        parts.append(text)
    return "".join(parts), offsets


class CompletionLogprobs:
    """`choices[].logprobs` of completions, chunk by chunk: text offsets go on from one to the next. What belongs
    to a stop string has the offsets that it would have if the text went on."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._shown = id_text if as_ids else partial(token_text, tokenizer)
        self._decoder = tokenizer.new_decoder()
        self._offset = 0

    def chunk(
        self, tokens: Sequence[Logprob], prompt: EchoedPrompt | None = None, of_prompt: Sequence[Logprob] = ()
    ) -> dict[str, Any]:
        """{tokens, token_logprobs, top_logprobs, text_offset} of these tokens, in characters of the text so far. The
        first chunk may begin with the prompt."""
        before: tuple[int, ...] = ()
        if prompt is not None:
            before, self._offset = prompt.offsets, len(prompt.text)
        text, offsets = _placed(self._decoder, (token.token_id for token in tokens), self._offset)
        self._offset += len(text)
        found = [*of_prompt, *tokens]
        return {
            "tokens": [self._shown(token.token_id) for token in found],
            "token_logprobs": [token.logprob for token in found],
            "top_logprobs": JsonList(map(self._top, found)).shown(),
            "text_offset": [*before, *offsets],
        }

    def _top(self, token: Logprob) -> dict[str, float] | None:
        """The most likely ones and, as OpenAI has it, the token itself."""
        if token.logprob is None:
            return None
        found = {self._shown(token_id): logprob for token_id, logprob in token.top}
        found[self._shown(token.token_id)] = token.logprob
        return found


def prompt_logprobs(tokenizer: Tokenizer, tokens: Iterable[Logprob]) -> msgspec.Raw:
    """vLLM's `prompt_logprobs`: for each prompt token its own entry and the most likely ones, by id; the first has
    none."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    return JsonList(
        None
        if token.logprob is None
        else {str(one): entry(one, logprob) for one, logprob in ((token.token_id, token.logprob), *token.top)}
        for token in tokens
    ).shown()


def id_text(token_id: int) -> str:
    """A token as vLLM shows it with `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text, or its bytes spelled out where they are no whole text, as OpenAI shows them."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that takes its time, when the body is done with."""

    answer: Callable[[], Awaitable[Response]]


def page_of(items: list[dict[str, Any]], request: Request, most: int, usual: int = 20) -> dict[str, Any]:
    """A list as OpenAI shows it: the last ones first, unless `order` is `asc`; `limit` of them, from behind the item
    `after`. Raises `ApiError` 400."""
    asked = request.query_params
    limit, order, after = asked.get("limit", str(usual)), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_value("limit", limit, f"must be between 1 and {most}")
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
