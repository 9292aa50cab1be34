"""llama.cpp's own routes: bodies become completion requests, with a gap for /infill; properties of the server have
llama.cpp's shape.

Invariants: there is one slot per request that can run at once; slots have no identity, and none can be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from minisgl.frontend.output_processor import Delta
from minisgl.sampling_params import SamplingParams
from minisgl.server.apis.llama_cpp.body import (
    MEDIA,
    InfillRequest,
    LlamaCppCompletion,
    LlamaCppSampling,
    MediaPrompt,
)
from minisgl.server.core.bodies import CompletionRequest, TokenizeRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.continuation import Continuation, continuation
from minisgl.server.core.errors import ApiError, Names, bad_value, missing, renamed
from minisgl.server.core.formatter import Formatter, json_response
from minisgl.server.core.generation import Generation
from minisgl.server.core.lengths import TO_THE_END
from minisgl.server.core.request import HttpRequest, checked
from minisgl.server.core.sampling_fields import shared_fields
from minisgl.server.core.sight import GivenImage, Seen
from minisgl.server.core.streams import sse
from minisgl.utils.installed import own_version

NO_SLOT = -1
RANDOM_SEEDS = (-1, 2**32 - 1)
OF_GAPS: Names = ((r"suffix", "input_suffix"), (r"prompt", "input_prefix"))


async def completion_endpoint(
    context: ServerContext, body: LlamaCppCompletion, request: HttpRequest
) -> LlamaCppFormatter:
    given = body.prompt
    media = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, MediaPrompt)]
    if not media:
        completion = _completion(body, prompt=given)
        return LlamaCppFormatter(context, body, completion, await continuation(context, completion))
    count, most = sum(len(one.multimodal_data or ()) for one in media), context.config.images.max_images
    if count > most:
        raise bad_value("prompt", count, f"a request has at most {most} images (--max-images)")
    places = [f"prompt.{i}" for i in range(len(media))] if isinstance(given, list) else ["prompt"]
    seen = [await _seen(context, one, place) for one, place in zip(media, places, strict=True)]
    image_text = context.tokenizer.image_text()
    texts = [
        one.prompt_string.replace(MEDIA, image_text) if one.multimodal_data else one.prompt_string for one in media
    ]
    texts = [text if one is None else one.template.rewritten(text) for text, one in zip(texts, seen, strict=True)]
    completion = _completion(body, prompt=texts if isinstance(given, list) else texts[0])
    return LlamaCppFormatter(context, body, completion, await continuation(context, completion, seen=seen))


async def _seen(context: ServerContext, prompt: MediaPrompt, place: str) -> Seen | None:
    """Prepare the images of a prompt; `None` if it has none. Raises `ApiError` 400."""
    data, count = prompt.multimodal_data or [], prompt.prompt_string.count(MEDIA)
    if data and not context.info.sees:
        raise bad_value(f"{place}.multimodal_data", data, context.text_only, "unsupported_value")
    if data and not context.tokenizer.image_text():
        reason = "the model's chat template shows no images"
        raise bad_value(f"{place}.multimodal_data", data, reason, "unsupported_value")
    if data and len(data) != count:
        raise bad_value(f"{place}.prompt_string", count, f"must have {MEDIA} once for each image, {len(data)} in all")
    seen = await context.prompts.see([GivenImage(f"{place}.multimodal_data.{i}", one) for i, one in enumerate(data)])
    if seen is not None:
        seen.template.order = [*range(count)]
    return seen


async def infill_endpoint(context: ServerContext, body: InfillRequest, request: HttpRequest) -> LlamaCppFormatter:
    completion = _completion(body, prompt=body.before(), suffix=body.input_suffix)
    with renamed(OF_GAPS):
        wanted = await continuation(context, completion, has_gap=True)
    return LlamaCppFormatter(context, body, completion, wanted)


def _completion(body: LlamaCppSampling, **given: Any) -> CompletionRequest:
    """Convert a llama.cpp body into a completion request. Raises `ApiError`."""
    if body.stream_options is not None:
        raise bad_value(
            "stream_options", body.stream_options.model_dump(exclude_none=True), "not supported here: leave it out"
        )
    fields = {"max_tokens": TO_THE_END, **shared_fields(body, ()), **given}
    if fields.get("seed") in RANDOM_SEEDS:
        del fields["seed"]
    return checked(fields, CompletionRequest)


class LlamaCppFormatter(Formatter):
    def __init__(
        self, context: ServerContext, body: LlamaCppSampling, completion: CompletionRequest, wanted: Continuation
    ) -> None:
        super().__init__(wanted, completion.stream, completion.priority)
        self._model = context.served.check(body.model)
        self._given = wanted.given
        self._is_list = completion.prompt is not wanted.given[0]
        self._settings = _settings(wanted.sampling, context.info.max_seq_len)
        self._fields = body.response_fields
        self._with_tokens = bool(body.return_tokens)
        self._has_new_line = [False] * len(wanted.prompts)

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> Any:
        results = [self._last(generation, choice, choice.text) for choice in choices]
        return results if self._is_list else results[0]

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        for delta in deltas:
            if delta.text:
                self._has_new_line[delta.index] |= "\n" in delta.text
                frames.append(sse(self._shown({**self._head(generation, delta.index, delta.text), "stop": False})))
            if delta.finish_reason is not None:
                frames.append(sse(self._last(generation, delta, "")))
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return sse(error.body)

    def _head(self, generation: Generation, index: int, text: str) -> dict[str, Any]:
        usage = generation.usage_of(index)
        return {
            "index": index,
            "content": text,
            "tokens": generation.new_token_ids(index) if self._with_tokens else [],
            "id_slot": NO_SLOT,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }

    def _last(self, generation: Generation, delta: Delta, text: str) -> dict[str, Any]:
        matched = generation.matched_stop(delta.index)
        ended = "word" if isinstance(matched, str) else "eos"
        return self._shown(
            {
                **self._head(generation, delta.index, text),
                "stop": True,
                "model": self._model,
                "tokens_cached": generation.usage_of(delta.index)["prompt_tokens_details"]["cached_tokens"],
                "generation_settings": self._settings,
                "prompt": self._given[delta.index],
                "has_new_line": self._has_new_line[delta.index] or "\n" in text,
                "truncated": False,
                "stop_type": {"stop": ended, "length": "limit"}.get(str(delta.finish_reason), "none"),
                "stopping_word": matched if isinstance(matched, str) else "",
                "timings": _timings(generation, delta.index),
            }
        )

    def _shown(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the requested fields of the response (`response_fields`); all of them by default."""
        if not self._fields:
            return answer
        selected = {path: _value_at(answer, path.split("/")) for path in self._fields}
        return {path: value for path, value in selected.items() if value is not None}


def _value_at(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of nested objects, or `None` if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _settings(sampling: SamplingParams, n_ctx: int) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "seed")
    return {
        "n_ctx": n_ctx,
        "n_predict": TO_THE_END if sampling.max_tokens is None else sampling.max_tokens,
        "repeat_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        **{name: getattr(sampling, name) for name in names},
    }


def _timings(generation: Generation, index: int) -> dict[str, Any]:
    usage = generation.usage_of(index)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    timings: dict[str, Any] = {"cache_n": cached}
    counts = (("prompt", usage["prompt_tokens"] - cached), ("predicted", usage["completion_tokens"]))
    for (name, count), time_s in zip(counts, generation.times_s(index), strict=True):
        timings |= {
            f"{name}_n": count,
            f"{name}_ms": time_s * 1000,
            f"{name}_per_token_ms": time_s * 1000 / count if count else 0.0,
            f"{name}_per_second": count / time_s if time_s else 0.0,
        }
    return timings


# --------------------------------------------------------------------------------------- what the server says of itself


async def template_endpoint(context: ServerContext, body: TokenizeRequest, request: HttpRequest) -> Response:
    if not body.messages:
        raise missing("messages")
    return json_response({"prompt": await context.prompts.render(body)})


def _num_slots(context: ServerContext) -> int:
    return context.config.engine.rows_on(context.info.device) * max(1, len(context.client.engines))


def props(context: ServerContext) -> dict[str, Any]:
    tokenizer, info = context.tokenizer, context.info
    first, last = tokenizer.leading_ids.tolist()[:1], info.eos_ids[:1]
    bos, eos = (b"".join(map(tokenizer.token_bytes, some)).decode(errors="replace") for some in (first, last))
    defaults = SamplingParams(**{"max_tokens": None, **context.served.defaults})
    return {
        "default_generation_settings": {"n_ctx": info.max_seq_len, "params": _settings(defaults, info.max_seq_len)},
        "total_slots": _num_slots(context),
        "model_alias": context.served.name,
        "model_path": context.config.engine.shown_model,
        "modalities": {"vision": info.sees, "audio": False},
        "chat_template": tokenizer.template_source(),
        "bos_token": bos,
        "eos_token": eos,
        "build_info": f"minisgl {own_version()}",
    }


def slots(context: ServerContext) -> list[dict[str, Any]]:
    """Return llama.cpp's slots. As many are marked as processing as requests run."""
    running = sum(view.stats.num_running for view in context.client.engines if view.stats is not None)
    n_ctx = context.info.max_seq_len
    return [{"id": i, "n_ctx": n_ctx, "is_processing": i < running} for i in range(_num_slots(context))]
