"""What every handler needs, and the checks that need the model: names, vocabulary, context length.

Keeps true: what waits is bounded; turns are taken in order, and given back by whoever is cancelled; text is encoded off
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from minisgl.config import Limits
from minisgl.frontend.engine_client import ProcessClient
from minisgl.frontend.memory import MAPPED_BYTES, give_back
from minisgl.frontend.output_processor import with_bad_words
from minisgl.frontend.tokenize_pool import TokenizePool
from minisgl.message import EngineReady
from minisgl.metrics.server_metrics import Metrics
from minisgl.sampling_params import SamplingParams
from minisgl.server.bodies import Conversation
from minisgl.server.errors import ApiError, bad_value, draining, engine_gone, queue_full
from minisgl.step import Int32Array
from minisgl.tokenizer import ChatTemplateError, NotEncodable, Tokenizer, TooManyTokens

MAX_STOP_CHARS = 4096  # of one stop string
MAX_CHOICES = 1024  # answers of one request: prompts times n
MAX_MESSAGES_HERE = 16  # of a conversation that is rendered on the event loop
CONTEXTS_BEFORE_CUT = 8  # of a prompt of which only the end is kept: it is encoded whole
T = TypeVar("T")
TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self", "kwargs"}
)


class Turns:
    """`most` bytes in hand at once, first come, first served. What is larger than that goes alone. When nothing is in
    hand any more, `when_idle` is called with the bytes that were."""

    def __init__(self, most: int, when_idle: Callable[[int], None]) -> None:
        self._most = most
        self._when_idle = when_idle
        self._held = 0
        self._given = 0  # since it was idle
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """In hand."""
        return self._held

    async def take(self, size: int) -> int:
        """Returns what is to be given back."""
        size = min(size, self._most)
        if not self._waiting and self._held + size <= self._most:
            self._held += size
            return size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same moment
                self.give(size)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._go_on()
            raise
        return size

    def give(self, size: int) -> None:
        self._held -= size
        self._given += size
        self._go_on()
        if not self._held:
            given, self._given = self._given, 0
            self._when_idle(given)

    def _go_on(self) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._held + self._waiting[0][1] <= self._most):
            turn, size = self._waiting.popleft()
            if not turn.done():  # else cancelled
                self._held += size
                turn.set_result(None)


class Queue:
    """What waits: requests whose bodies wait for their turn, whose prompts are being encoded here, or that have no row
    in the engine."""

    def __init__(self, client: ProcessClient, turns: Turns, limits: Limits) -> None:
        self._client = client
        self._turns = turns
        self._limits = limits
        self.num_encoding = 0

    @property
    def num_requests(self) -> int:
        return self._turns.num_waiting + self.num_encoding + self._client.processor.num_waiting

    def check_room(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise `ApiError` 429 unless as many more may wait. What is larger than the whole queue may wait alone."""
        waiting, tokens = self.num_requests, self._client.processor.num_waiting_tokens
        most, most_tokens = self._limits.max_queued_requests, self._limits.max_queued_tokens
        if waiting >= most or (waiting and waiting + num_requests > most):
            raise queue_full(f"{waiting} requests wait already, the limit is {most} (--max-queued-requests)")
        if tokens and tokens + num_tokens > most_tokens:
            raise queue_full(
                f"prompts of {tokens} tokens wait already, the limit is {most_tokens} (--max-queued-tokens)"
            )


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
        self.pool = TokenizePool(tokenizer, metrics.tokenize, (ApiError,))

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

    def check_room(self, num_prompts: int, num_tokens: int, n: int) -> None:
        """Whether as many prompts, of as many tokens together, `n` times, may be submitted. Raises `ApiError` 400 or
        429."""
        if num_prompts * n > MAX_CHOICES:
            raise bad_value("n", n, f"at most {MAX_CHOICES} answers in one request")
        self.queue.check_room(num_prompts * n, num_tokens * n)

    async def run(self, work: Callable[[], T]) -> T:
        """What may take long, off the event loop."""
        with self._counted():
            return await self.pool.run(work)

    def _give_back(self, num_bytes: int) -> None:
        if num_bytes >= MAPPED_BYTES:
            self.pool.run_later(give_back)

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

    def _num_kept(self, asked: int | None, max_tokens: int | None, name: str) -> int | None:
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

    async def encode(
        self,
        prompt: Conversation | Sequence[str | list[int]],
        sampling: SamplingParams,
        truncate: int | None,
        field: str = "prompt",
        names: Mapping[str, str] | None = None,
    ) -> tuple[list[Int32Array], SamplingParams]:
        """The token ids of `prompt`, each at least one and within the context, of each the last `truncate`; and
        `sampling` as the engine knows it. `names`: how the client wrote a field, where that differs. Raises `ApiError`
        for what does not fit the model."""
        written = names or {}
        self._check_vocabulary(sampling, written)
        name = written.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        keep = self._num_kept(truncate, sampling.max_tokens, name)
        if sampling.bad_words:
            given, vocab_size = sampling, self.info.vocab_size
            with self._fits("bad_words"):
                sampling = await self.run(lambda: with_bad_words(given, self.tokenizer, vocab_size))
        if isinstance(prompt, Conversation):
            field, found = "messages", [await self.encode_conversation(prompt, keep)]
        else:
            found = await self._encode_prompts(prompt, field, keep)
        for ids in found:
            self._check_length(ids, field)
        return found, sampling

    async def encode_conversation(self, asked: Conversation, keep: int | None = None) -> Int32Array:
        """The prompt of a conversation, also of no tokens or of as many as the context has."""
        messages, variables = asked.messages or (), asked.template_variables()
        continues = bool(asked.continue_final_message)
        begins = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
        for name in variables:
            if name in TEMPLATE_NAMES:
                raise bad_value("chat_template_kwargs", name, "this name is set by the request's own fields")
        try:
            with self._counted(), self._fits("messages"):
                ids = await self.pool.encode_chat(
                    lambda: [message.for_template() for message in messages],
                    sum(message.num_chars() for message in messages),
                    {**variables, "add_generation_prompt": begins, "continue_final_message": continues},
                    here=len(messages) <= MAX_MESSAGES_HERE and not variables,
                    most=self._most(keep),
                )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_messages") from error
        return _last(ids, keep)

    async def encode_text(self, text: str, add_special_tokens: bool) -> Int32Array:
        """As many tokens as the context has, at most."""
        most = self.info.max_seq_len
        with self._counted(), self._fits("prompt"):
            return await self.pool.encode(lambda: text, len(text), add_special_tokens=add_special_tokens, most=most)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self.run(lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def _encode_all(self, texts: list[str], most: int) -> list[Int32Array]:
        with self._counted():
            if len(texts) == 1:
                text = texts[0]
                ids = await self.pool.encode(lambda: text, len(text), add_special_tokens=True, most=most)
                return [ids]
            return await self.pool.run(lambda: self.tokenizer.encode_batch(texts, most=most))

    async def _encode_prompts(
        self, prompts: Sequence[str | list[int]], field: str, keep: int | None
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
        return [_last(ids, keep) for ids in whole]

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

    def _check_vocabulary(self, sampling: SamplingParams, written: Mapping[str, str]) -> None:
        """What only the model knows."""
        _check_stop(sampling.stop, written.get("stop", "stop"))
        if self.info.simulated:
            for name in ("logprobs", "prompt_logprobs"):
                if (asked := getattr(sampling, name)) is not None:
                    raise bad_value(written.get(name, name), asked, "a simulated engine computes no probabilities")
        vocab_size = self.info.vocab_size
        if found := sampling.beyond(vocab_size):
            name, token = found
            raise bad_value(written.get(name, name), token, f"token ids must be below {vocab_size}")


def _last(ids: Int32Array, keep: int | None) -> Int32Array:
    return ids if keep is None or len(ids) <= keep else ids[-keep:].copy()


def _check_stop(stop: tuple[str, ...], name: str) -> None:
    for text in stop:
        if len(text) > MAX_STOP_CHARS:
            raise bad_value(name, text, f"at most {MAX_STOP_CHARS} characters in a stop string")
