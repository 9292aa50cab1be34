"""What every handler needs, and the checks that need the model: names, vocabulary, context length.

Keeps true: immutable after start; tokenization happens off the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from starlette.requests import Request

from minisgl.config import Limits
from minisgl.frontend.engine_client import ProcessClient
from minisgl.frontend.memory import MAPPED_BYTES, give_back
from minisgl.frontend.output_processor import with_bad_words
from minisgl.frontend.tokenize_pool import TokenizePool
from minisgl.message import EngineReady
from minisgl.metrics.server_metrics import Metrics
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.server.bodies import Body, ChatMessage
from minisgl.server.errors import ApiError, bad_value, engine_gone, from_param_error
from minisgl.server.generation import Generation
from minisgl.server.intake import Payload, Turns, read_body
from minisgl.server.json_shape import check_shape
from minisgl.server.limits import MAX_CHOICES, Queue, check_stop, draining
from minisgl.server.protocol import parse
from minisgl.server.record import RequestRecord
from minisgl.step import Int32Array
from minisgl.tokenizer import ChatTemplateError, NotEncodable, Tokenizer, TooManyTokens

# A conversation as short as this is rendered on the event loop: 40 us there are less than what another thread waits for
# its turn at the interpreter.
MAX_CHARS_HERE = 4096
MAX_MESSAGES_HERE = 16
CONTEXTS_BEFORE_CUT = 8  # of a prompt of which only the end is kept: it is encoded whole
B = TypeVar("B", bound=Body)
TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self", "kwargs"}
)


class ChatOptions(Protocol):
    """How a request wants its conversation rendered; fields of its body."""

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class ServerContext:
    def __init__(
        self,
        client: ProcessClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        model_name: str,
        created: int,
        limits: Limits,
        *,
        log_prompts: bool = False,
        any_model_name: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.model_name = model_name
        self.created = created
        self.limits = limits
        self.log_prompts = log_prompts
        self._any_model_name = any_model_name
        self.defaults = dict(defaults or {})  # of the model, by the names of `SamplingParams`
        self.turns = Turns(limits.max_encoding_bytes, self._give_back)
        self.queue = Queue(client, self.turns, limits)
        self.draining = False
        tokenizer.prepare()
        self._pool = TokenizePool(tokenizer, metrics.tokenize, (ApiError,))

    @property
    def info(self) -> EngineReady:
        if self.client.failure is not None or self.client.info is None:
            raise engine_gone(self.client.failure or "the engine is loading")
        return self.client.info

    def check_accepts(self) -> None:
        """Whether a request may come in at all, before any work is done for it. Raises `ApiError` 429 or 503."""
        if self.draining:
            raise draining()
        _ = self.info
        self.queue.check_room()

    async def read_body(self, request: Request, body: Payload) -> None:
        """Raises `ApiError` and `ClientGone`."""
        await read_body(request, body, self.turns, self.limits)

    async def parse(self, body: Payload, model: type[B]) -> B:
        """Raises `ApiError` 400."""
        is_large, data = body.is_large, body.take()
        if not is_large:
            return parse(data, model)

        def work() -> B:
            check_shape(data, self.info.max_seq_len)
            return parse(data, model)

        with self._counted():
            return await self._pool.run(work)

    def _give_back(self, num_bytes: int) -> None:
        if num_bytes >= MAPPED_BYTES:
            self._pool.run_later(give_back)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """What is being encoded counts as waiting."""
        self.queue.num_encoding += 1
        try:
            yield
        finally:
            self.queue.num_encoding -= 1

    @contextlib.contextmanager
    def _fits(self, field: str) -> Iterator[None]:
        """What is wrong with a text is an answer."""
        try:
            yield
        except TooManyTokens as error:
            raise self._too_long(error.count, field, at_least=error.at_least) from None
        except NotEncodable as error:
            raise ApiError(400, f"{field}: {error}", param=field, code="invalid_value") from None

    def check_model(self, name: str | None) -> None:
        """A request may leave the model out; another name than ours is 404, unless all are taken for it."""
        if name is not None and name != self.model_name and not self._any_model_name:
            raise ApiError(
                404,
                f"model: {name[:80]!r} does not exist here: this server serves {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def num_kept(self, asked: int | None, max_tokens: int | None, name: str = "truncate_prompt_tokens") -> int | None:
        """How many of a prompt's last tokens are kept; None: all, if they fit."""
        longest = self.info.max_seq_len - 1
        if asked is None:
            return None
        if asked == -1:
            return max(1, longest + 1 - max(1, max_tokens or 1))
        if not 1 <= asked <= longest:
            raise bad_value(name, asked, f"must be -1 or between 1 and {longest}")
        return asked

    def _most(self, keep: int | None) -> int:
        """How many tokens a prompt may have before it is cut."""
        return self.info.max_seq_len * (1 if keep is None else CONTEXTS_BEFORE_CUT)

    async def encode_chat(
        self, messages: Sequence[ChatMessage], options: ChatOptions, keep: int | None = None
    ) -> Int32Array:
        """The prompt of a conversation, at least one token and within the context."""
        ids = await self.encode_messages(messages, options, keep)
        self._check_length(ids, "messages")
        return ids

    async def encode_messages(
        self, messages: Sequence[ChatMessage], options: ChatOptions, keep: int | None = None
    ) -> Int32Array:
        """The same, also of no tokens or of as many as the context has."""
        continues = bool(options.continue_final_message)
        begins = not continues if options.add_generation_prompt is None else options.add_generation_prompt
        variables = options.chat_template_kwargs or {}
        for name in variables:
            if name in TEMPLATE_NAMES:
                raise bad_value("chat_template_kwargs", name, "this name is set by the request's own fields")

        def text() -> str:
            shaped = [message.for_template() for message in messages]
            return self.tokenizer.apply_chat_template(
                shaped, **variables, add_generation_prompt=begins, continue_final_message=continues
            )

        num_chars = sum(message.num_chars() for message in messages)
        try:
            render = text
            if num_chars <= MAX_CHARS_HERE and len(messages) <= MAX_MESSAGES_HERE and not variables:
                rendered = text()
                render = lambda: rendered  # noqa: E731
            with self._counted(), self._fits("messages"):
                most = self._most(keep)
                return _last(await self._pool.encode(render, num_chars, add_special_tokens=False, most=most), keep)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_messages") from error

    async def encode_text(self, text: str, add_special_tokens: bool) -> Int32Array:
        """As many tokens as the context has, at most."""
        most = self.info.max_seq_len
        with self._counted(), self._fits("prompt"):
            return await self._pool.encode(lambda: text, len(text), add_special_tokens=add_special_tokens, most=most)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with self._counted():
            return await self._pool.run(lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def _encode_all(self, texts: list[str], most: int) -> list[Int32Array]:
        with self._counted():
            if len(texts) == 1:
                text = texts[0]
                ids = await self._pool.encode(lambda: text, len(text), add_special_tokens=True, most=most)
                return [ids]
            return await self._pool.run(lambda: self.tokenizer.encode_batch(texts, most=most))

    async def encode_prompts(
        self, prompts: Sequence[str | list[int]], field: str, keep: int | None = None
    ) -> list[Int32Array]:
        """Texts through the tokenizer, ids checked against the vocabulary; of each the last `keep`."""
        most = self._most(keep)
        if not prompts:
            raise bad_value(field, [], "must not be empty")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            with self._fits(field):
                batch = await self._encode_all(texts, most)
            encoded = iter(batch)
        whole = (next(encoded) if isinstance(p, str) else self._checked_ids(p, field, most) for p in prompts)
        found = [_last(ids, keep) for ids in whole]
        for ids in found:
            self._check_length(ids, field)
        return found

    def _checked_ids(self, ids: list[int], field: str, most: int) -> Int32Array:
        if len(ids) >= most:
            raise self._too_long(len(ids), field)
        array = np.array(ids, np.int32)
        vocab_size = self.info.vocab_size
        if len(array) and int(array.max()) >= vocab_size:
            raise bad_value(field, int(array.max()), f"token ids must be below {vocab_size}")
        return array

    def _check_length(self, ids: Int32Array, field: str) -> None:
        if not len(ids):
            raise bad_value(field, "", "must have at least one token")
        if len(ids) >= self.info.max_seq_len:
            raise self._too_long(len(ids), field)

    def _too_long(self, count: int, field: str, *, at_least: bool = False) -> ApiError:
        """It begins as OpenAI's error does: clients such as LiteLLM know it by these words. `at_least`: there may be
        more than `count`."""
        limit = self.info.max_seq_len
        tokens = f"at least {count}" if at_least else str(count)
        text = (
            f"This model's maximum context length is {limit} tokens. However, {field} has {tokens} tokens and the "
            f"answer needs at least one: shorten {field}."
        )
        return ApiError(400, text, param=field, code="context_length_exceeded")

    async def with_bad_token_ids(self, sampling: SamplingParams) -> SamplingParams:
        """Its `bad_words` as the engine knows them."""
        if not sampling.bad_words:
            return sampling
        vocab_size = self.info.vocab_size
        with self._counted(), self._fits("bad_words"):
            return await self._pool.run(lambda: with_bad_words(sampling, self.tokenizer, vocab_size))

    def check_vocabulary(self, sampling: SamplingParams, names: Mapping[str, str] | None = None) -> None:
        """What the model alone can tell. `names`: how the client wrote a field, where that differs."""
        written = names or {}
        check_stop(sampling.stop, written.get("stop", "stop"))
        if self.info.simulated:
            for name in ("logprobs", "prompt_logprobs"):
                if (asked := getattr(sampling, name)) is not None:
                    raise bad_value(written.get(name, name), asked, "a simulated engine computes no probabilities")
        vocab_size = self.info.vocab_size
        if found := sampling.beyond(vocab_size):
            name, token = found
            raise bad_value(written.get(name, name), token, f"token ids must be below {vocab_size}")

    def generation(
        self, prompts: Sequence[Int32Array], sampling: SamplingParams, record: RequestRecord, *, priority: int = 0
    ) -> Generation:
        """Submit to the engine. Raises `ApiError` 429 if too much waits already."""
        if len(prompts) * sampling.n > MAX_CHOICES:
            raise bad_value("n", sampling.n, f"at most {MAX_CHOICES} answers in one request")
        self.queue.check_room(len(prompts) * sampling.n, sum(map(len, prompts)) * sampling.n)
        return Generation(
            self.client,
            self.tokenizer,
            self.metrics,
            prompts,
            sampling,
            max_seq_len=self.info.max_seq_len,
            record=record,
            timeout_s=self.limits.request_timeout,
            priority=priority,
        )


def _last(ids: Int32Array, keep: int | None) -> Int32Array:
    return ids if keep is None or len(ids) <= keep else ids[-keep:].copy()


def checked(make: Callable[[], SamplingParams]) -> SamplingParams:
    """What `make` returns, its `ParamError` as an answer."""
    try:
        return make()
    except ParamError as error:
        raise from_param_error(error) from error
