"""Encodes prompts to token ids that fit the model, off the event loop; other long work of requests runs there, too.

Invariants: requests that are being encoded count as waiting; the result is within the vocabulary and the context.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from minisgl.config import ImageLimits
from minisgl.frontend.engine_client import ProcessClient
from minisgl.frontend.output_processor import with_bad_words
from minisgl.frontend.pairs import JUDGED, SCORING, Pairs, judged, judging
from minisgl.grammar.check import Made, grammar_of
from minisgl.grammar.sources import GrammarSource
from minisgl.message import EngineReady
from minisgl.metrics.meters import Meter
from minisgl.sampling_params import BOUNDS, SCORE, SamplingParams
from minisgl.server.core.api_keys import CALLER
from minisgl.server.core.bodies import TEMPLATE_NAMES, ChatMessage, Conversation
from minisgl.server.core.errors import ApiError, TooLong, bad_value, engine_gone, param_errors, wrong
from minisgl.server.core.fields import ENOUGH_CHARS, Side, chars_of
from minisgl.server.core.sight import GivenImage, Seen, Sight, images_of
from minisgl.server.core.tools import Parsing, explained
from minisgl.server.core.waiting import Queue
from minisgl.step import Int32Array
from minisgl.tokenizer import ChatTemplateError, FillIn, NotEncodable, Tokenizer, TooManyTokens
from minisgl.tokenizer.pictures import Images
from minisgl.tokenizer.pool import TokenizePool
from minisgl.utils.memory import MAPPED_BYTES, give_back

CONTEXTS_BEFORE_CUT = 8  # maximum length, in contexts, of a prompt that is truncated: it is encoded whole
OF_AN_ENCODER = 128  # maximum length for encoders, in contexts, which are short
T = TypeVar("T")


class Prompts:
    """Encoder of prompts. `meter` measures encoding time; `queue` counts requests that are being encoded."""

    def __init__(
        self,
        client: ProcessClient,
        tokenizer: Tokenizer,
        parsing: Parsing,
        queue: Queue,
        meter: Meter,
        images: ImageLimits,
    ) -> None:
        self._client = client
        self.tokenizer = tokenizer
        self.parsing = parsing
        self._queue = queue
        self._pool = TokenizePool(tokenizer, meter, (ApiError,))
        self._grammars = ThreadPoolExecutor(1, "grammars")  # its thread starts on first use
        self._sight = Sight(images)

    @property
    def info(self) -> EngineReady:
        """Properties of the loaded model and engine. Raises `ApiError` 503 while no engine is ready."""
        if self._client.failure is not None or self._client.info is None:
            raise engine_gone(self._client.failure or "the engine is loading")
        return self._client.info

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread pool; the request counts as waiting meanwhile."""
        with self._counted():
            return await self._pool.run(work)

    async def run_work(self, work: Callable[[], T], is_large: bool) -> T:
        """Run `work` on a body: in the thread pool if it `is_large`, else on the event loop."""
        return await self.run(work) if is_large else work()

    async def with_grammar(
        self, sampling: SamplingParams, source: GrammarSource | Callable[[], Made] | None
    ) -> tuple[SamplingParams, tuple[str, ...]]:
        """Return `sampling` with the grammar of `source` (if any), and the names of schema parts that are not enforced.
        Raises `ParamError` for fields that cannot be combined with a grammar, `ApiError` for an invalid one."""
        if source is None:
            return sampling, ()
        work = (lambda: grammar_of(source)) if isinstance(source, GrammarSource) else source
        msgspec.structs.replace(sampling, grammar="").check()
        made = await self.grammar(work)
        return msgspec.structs.replace(sampling, grammar=made.text), made.named()

    async def grammar(self, work: Callable[[], T]) -> T:
        """Run `work`, which compiles a grammar, in a thread of its own: one at a time, so that slow grammars delay no
        encoding. Its `ParamError` becomes an `ApiError`."""
        with self._counted(), param_errors():
            return await asyncio.get_running_loop().run_in_executor(self._grammars, work)

    def give_back(self, num_bytes: int) -> None:
        if num_bytes >= MAPPED_BYTES:
            self._pool.run_later(give_back)

    @property
    def _encodes(self) -> bool:
        return self.info.kind != "decoder"

    @property
    def judges(self) -> bool:
        """True if the model is a judge: it reads an instruction and two texts and gives a score."""
        return self.info.kind == "judge"

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the request as waiting (its prompt is being encoded) inside the block."""
        key = CALLER.get()
        self._queue.encodes(1, key)
        try:
            yield
        finally:
            self._queue.encodes(-1, key)

    def _fits(self, field: str) -> _EncodingErrors:
        return _EncodingErrors(self._too_long, field)

    def _num_kept(self, truncate: int | None, max_tokens: int | None, name: str) -> int | None:
        """Return how many tokens of a prompt to keep; `None` if it must not be truncated. Raises `ApiError` 400."""
        longest = self.info.max_seq_len - 1
        if truncate is None:
            return None
        if truncate == -1:
            return max(1, longest + 1 - max(1, max_tokens or 1))
        if not 1 <= truncate <= longest:
            raise bad_value(name, truncate, f"must be -1 or between 1 and {longest}")
        return truncate

    def _max_encoded(self, keep: int | None) -> int:
        """Return how many tokens an encoded prompt may have before it is truncated to `keep`."""
        contexts = OF_AN_ENCODER if self._encodes and not self.judges else CONTEXTS_BEFORE_CUT
        return self.info.max_seq_len * (1 if keep is None else contexts)

    async def see(self, given: Sequence[GivenImage]) -> Seen | None:
        """Prepare the images of one prompt; `None` if there are none. Raises `ApiError` 400."""
        if not given:
            return None
        with self._counted():
            return await self._sight.see(given, self.info.model_dir)

    async def encode(
        self,
        prompt: Conversation | Sequence[str | list[int]],
        sampling: SamplingParams,
        truncate: int | None,
        field: str = "prompt",
        names: Mapping[str, str] | None = None,
        *,
        side: Side = None,
        only_counts: bool = False,
        seen: Sequence[Seen | None] = (),
    ) -> tuple[list[Int32Array], SamplingParams]:
        """Encode prompts; each result has at least one token, fits the context, and keeps the last `truncate` tokens
        (the first ones with the `side` "right", an encoder's default). Also return `sampling` with bad words as ids.
        `names`: the client's names of fields, where they differ. `only_counts`: a conversation may have any length.
        `seen`: images by prompt. Raises `ApiError` if a prompt does not fit the model."""
        written = names or {}
        self._check_vocabulary(sampling, written)
        name = written.get("truncate_prompt_tokens", "truncate_prompt_tokens")
        if any(seen):
            _check_images(sampling, truncate, name)
        keep = self._num_kept(truncate, sampling.max_tokens, name)
        if sampling.bad_words:
            given, vocab_size = sampling, self.info.vocab_size
            with self._fits("bad_words"):
                sampling = await self.run(lambda: with_bad_words(given, self.tokenizer, vocab_size))
        if isinstance(prompt, Conversation):
            images = seen[0] if seen else None
            ids = await self.encode_conversation(prompt, keep, side, only_counts=only_counts, images=images)
            if only_counts:
                return [ids], sampling
            field, encoded = "messages", [ids]
        else:
            encoded = await self._encode_prompts(prompt, field, keep, side)
            encoded = [
                ids if images is None else images.expand(ids, field)
                for ids, images in zip(encoded, seen or [None] * len(encoded), strict=True)
            ]
        for ids, images in zip(encoded, seen or [None] * len(encoded), strict=True):
            self._check_length(ids, field, 0 if images is None else images.num_tokens)
        return encoded, sampling

    async def render(self, request: Conversation) -> str:
        """Return the text that the chat template renders for a conversation."""
        shaped, variables = conversation(self.parsing, request, sees=self.info.sees)
        try:
            return str(await self.run(lambda: self.tokenizer.apply_chat_template(shaped(), **variables)))
        except ChatTemplateError as error:
            raise _no_prompt(error) from error

    async def encode_conversation(
        self,
        request: Conversation,
        keep: int | None = None,
        side: Side = None,
        *,
        only_counts: bool = False,
        images: Seen | None = None,
    ) -> Int32Array:
        """Encode a conversation. The result may be empty or fill the context; with `only_counts` it has any length.
        `images` are those of `images_of`. Raises `ApiError`."""
        messages = request.messages or ()
        shaped, variables = conversation(self.parsing, request, sees=self.info.sees)
        if images is not None:
            variables["images"] = images.template
        elif "images" in variables:
            raise wrong("messages", "images are not possible here", "unsupported_value")
        try:
            with self._counted(), self._fits("messages"):
                ids = await self._pool.encode_chat(
                    shaped,
                    _about_chars(messages, variables.get("tools", ())),
                    variables,
                    most=None if only_counts else self._max_encoded(keep),
                )
        except ChatTemplateError as error:
            raise _no_prompt(error) from error
        return _truncated(ids, keep, side) if images is None else images.expand(ids, "messages")

    async def encode_text(self, text: str, add_special_tokens: bool) -> Int32Array:
        """Encode a text of any length."""
        with self._counted(), self._fits("prompt"):
            return await self._pool.encode(lambda: text, len(text), add_special_tokens=add_special_tokens)

    @functools.cached_property
    def _pairs(self) -> Pairs:
        try:
            return Pairs.of(self.tokenizer)
        except ValueError as error:
            raise wrong("model", str(error), "unsupported_value") from error

    @functools.cached_property
    def _judge_suffix(self) -> Int32Array:
        return self.tokenizer.encode(JUDGED, add_special_tokens=False)

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        fields: tuple[str, str],
        *,
        cut: bool,
        most: int | None = None,
        instruction: str | None = None,
    ) -> list[Int32Array]:
        """Encode pairs of texts for a model that gives scores. `cut`: truncate the second text if both do not fit;
        `most`: its maximum tokens; `instruction`: for a judge. Raises `ApiError` if a pair does not fit the model."""
        self._check_vocabulary(SCORING, {})
        if self.judges:
            form = Pairs(await self._encode_plain(judging(instruction), "instruction"), (), self._judge_suffix)
            pairs = [judged(*pair) for pair in pairs]
        else:
            form = self._pairs
        longest, num_special = self.info.max_seq_len - 1, form.num_special
        if num_special >= longest:
            raise self._too_long(num_special, "instruction" if self.judges else fields[0])
        texts = dict.fromkeys((at, text) for pair in pairs for at, text in enumerate(pair))
        ids = await asyncio.gather(*(self._encode_plain(text, fields[at]) for at, text in texts))
        encoded = dict(zip(texts, ids, strict=True))
        prompts = []
        for one, other in pairs:
            first, second = encoded[0, one], encoded[1, other][:most]
            if len(first) + num_special >= longest:
                raise self._too_long(len(first) + num_special, fields[0])
            prompt = form.prompt(first, second, longest if cut else None)
            self._check_length(prompt, fields[1])
            prompts.append(prompt)
        return prompts

    async def _encode_plain(self, text: str, field: str) -> Int32Array:
        """Encode a text without special tokens."""
        most = self._max_encoded(-1)
        with self._counted(), self._fits(field):
            return await self._pool.encode(lambda: text, len(text), add_special_tokens=False, most=most)

    @functools.cached_property
    def _fill_in_tokens(self) -> FillIn | None:
        """Fill-in-the-middle tokens of the model, or `None`. Cached: computing takes 50 ms with 1000 special tokens."""
        return FillIn.of(self.tokenizer)

    @property
    def fills_in(self) -> bool:
        """True if the model has fill-in-the-middle tokens."""
        return self._fill_in_tokens is not None and self._fill_in_tokens.last_marker < self.info.vocab_size

    async def fill_in(self, texts: Sequence[str], suffix: str) -> tuple[list[list[int]], tuple[int, ...]]:
        """Return the ids of prompts with a gap before `suffix`, and the token ids that end the filling of a gap."""
        with self._fits("prompt"):
            return await self.run(lambda: self._fill_in(texts, suffix))

    def _fill_in(self, texts: Sequence[str], suffix: str) -> tuple[list[list[int]], tuple[int, ...]]:
        most, vocab_size = self.info.max_seq_len, self.info.vocab_size
        if (fill_in := self._fill_in_tokens) is None or not self.fills_in:
            raise bad_value("suffix", suffix, "this model has no fill-in-the-middle tokens: leave it out")
        prompts = [fill_in.encode(text, suffix, most=most).tolist() for text in texts]
        return prompts, tuple(token for token in fill_in.end_ids if token < vocab_size)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self.run(lambda: self.tokenizer.decode(ids, skip_special_tokens))

    async def _encode_all(self, texts: list[str], most: int, beginning: int | None) -> list[Int32Array]:
        """Encode texts. With `beginning`, a text of any length is accepted, of which at least the first `beginning` ids
        are returned; without, more than `most` tokens raise `TooManyTokens`."""
        with self._counted():
            try:
                if len(texts) == 1:
                    text = texts[0]
                    ids = await self._pool.encode(lambda: text, len(text), add_special_tokens=True, most=most)
                    return [ids]
                return await self._pool.run(lambda: self.tokenizer.encode_batch(texts, most=most))
            except TooManyTokens:
                if beginning is None:
                    raise
            return await self._pool.run(lambda: [self._first_ids(text, most, beginning) for text in texts])

    def _first_ids(self, text: str, most: int, num: int) -> Int32Array:
        """Encode a prefix of a text that has at most `most` tokens and, if the text is long enough, at least `num`."""
        too_little, too_much, end = 0, len(text), len(text)
        while True:
            try:
                ids = self.tokenizer.encode(text[:end], most=most)
            except TooManyTokens:
                too_much = end
            else:
                if len(ids) >= num or end == len(text) or too_much - end <= 1:
                    return ids
                too_little = end
            end = (too_little + too_much) // 2

    async def _encode_prompts(
        self, prompts: Sequence[str | list[int]], field: str, keep: int | None, side: Side
    ) -> list[Int32Array]:
        """Encode texts, check token ids against the vocabulary, and truncate each prompt to `keep` tokens."""
        most = self._max_encoded(keep)
        if not prompts:
            raise bad_value(field, [], "must not be empty")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            with self._fits(field):
                of_beginning = side == "right" or (self._encodes and side is None)
                batch = await self._encode_all(texts, most, keep if of_beginning else None)
            encoded = iter(batch)
        whole = (next(encoded) if isinstance(p, str) else self._checked_ids(p, field, most) for p in prompts)
        if self._encodes:
            return [_truncated_between(ids, keep, side, self.tokenizer.special_ids) for ids in whole]
        return [_truncated(ids, keep, side) for ids in whole]

    def _checked_ids(self, ids: list[int], field: str, most: int) -> Int32Array:
        if len(ids) >= most:
            raise self._too_long(len(ids), field)
        array = np.array(ids, np.int32)
        vocab_size = self.info.vocab_size
        if len(array) and int(array.max()) >= vocab_size:
            raise bad_value(field, int(array.max()), f"token ids must be below {vocab_size}")
        return array

    def _check_length(self, ids: Int32Array, field: str, of_images: int = 0) -> None:
        if not len(ids):
            raise bad_value(field, "", "must have at least one token")
        if len(ids) >= self.info.max_seq_len:
            raise self._too_long(len(ids), field, of_images=of_images)

    def _too_long(self, count: int, field: str, *, at_least: bool = False, of_images: int = 0) -> ApiError:
        return TooLong(field, count, self.info.max_seq_len, at_least=at_least, of_images=of_images)

    def _check_vocabulary(self, sampling: SamplingParams, written: Mapping[str, str]) -> None:
        """Check parameters against the model: kind, stop strings, log probabilities, ids. Raises `ApiError` 400."""
        if self._encodes and sampling.embedding is None:
            what = "is an encoder, which gives embeddings (POST /v1/embeddings)"
            if self.info.gives_scores:
                what = "gives scores (POST /v1/rerank, /v1/score, /v1/classify)"
            raise wrong("model", f"it {what} and no text", "unsupported_value")
        if sampling.embedding == SCORE and not self.info.gives_scores:
            raise wrong("model", "it gives no scores: a cross encoder or a classifier does", "unsupported_value")
        _check_stop(sampling.stop, written.get("stop", "stop"))
        if self.info.simulated:
            for name in ("logprobs", "prompt_logprobs"):
                if (requested := getattr(sampling, name)) is not None:
                    raise bad_value(written.get(name, name), requested, "a simulated engine has none: leave it out")
        vocab_size = self.info.vocab_size
        if beyond := sampling.beyond(vocab_size):
            name, token = beyond
            raise bad_value(written.get(name, name), token, f"token ids must be below {vocab_size}")


def conversation(
    parsing: Parsing, request: Conversation, *, sees: bool = False
) -> tuple[Callable[[], list[dict[str, Any]]], dict[str, Any]]:
    """Return a function that builds the chat template's messages, and the template's variables. `sees`: the messages
    keep their images."""
    messages, variables = request.messages or (), request.template_variables()
    tools = request.tools_for_template()
    continues = bool(request.continue_final_message)
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    for name in variables:
        if name in TEMPLATE_NAMES:
            raise bad_value("chat_template_kwargs", name, "must be left out here: the request's own fields set it")

    for message in messages:
        message.leave_out(sees=sees)
        message.mend_arguments()

    def shaped() -> list[dict[str, Any]]:
        return [message.for_template() for message in messages]

    if sees and images_of(messages):
        variables = {**variables, "images": Images()}
    if tools:
        variables = {**variables, "tools": tools}
        if not parsing.shows_tools:
            variables["explain"] = lambda messages, tools: explained(messages, tools, parsing.tool_format)
    return shaped, {**variables, "add_generation_prompt": begins, "continue_final_message": continues}


def _check_images(sampling: SamplingParams, truncate: int | None, name: str) -> None:
    """Check that nothing is requested that a prompt with images cannot have. Raises `ApiError` 400."""
    for field, value in (("prompt_logprobs", sampling.prompt_logprobs), (name, truncate)):
        if value is not None:
            raise bad_value(field, value, "cannot be used with images", "unsupported_value")


def _no_prompt(error: ChatTemplateError) -> ApiError:
    return ApiError(400, str(error), param="messages", code="invalid_messages")


def _about_chars(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> int:
    """Estimate the characters that a chat template renders; stops counting when they are clearly many."""
    count = chars_of(tools) if tools else 0
    for message in messages:
        if count > ENOUGH_CHARS:
            break
        count += message.num_chars()
    return count


def _truncated(ids: Int32Array, keep: int | None, side: Side) -> Int32Array:
    if keep is None or len(ids) <= keep:
        return ids
    return (ids[:keep] if side == "right" else ids[-keep:]).copy()


def _truncated_between(ids: Int32Array, keep: int | None, side: Side, special: Container[int]) -> Int32Array:
    """Truncate an encoder's prompt to `keep` tokens (by default the first), keeping the special tokens around it."""
    if keep is None or len(ids) <= keep:
        return ids
    before, after = int(ids[0]) in special, int(ids[-1]) in special
    if keep <= before + after:
        return ids[:keep].copy()
    inside = _truncated(ids[before : len(ids) - after], keep - before - after, side or "right")
    return np.concatenate([ids[:before], inside, ids[len(ids) - after :]])


def _check_stop(stop: tuple[str, ...], name: str) -> None:
    for text in stop:
        if len(text) > BOUNDS.max_stop_chars:
            raise bad_value(name, text, f"must have at most {BOUNDS.max_stop_chars} characters")


class _EncodingErrors:
    """Context manager that converts encoding errors of `field` into `ApiError`. A class, since `contextmanager` keeps
    the replaced error, and so the text, until a full garbage collection: in Python 3.12 its frame leads to both."""

    __slots__ = ("_field", "_too_long")

    def __init__(self, too_long: Callable[..., ApiError], field: str) -> None:
        self._too_long, self._field = too_long, field

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TooManyTokens):
            raise self._too_long(error.count, self._field, at_least=error.at_least) from None
        if isinstance(error, NotEncodable):
            raise wrong(self._field, str(error)) from None
