"""Request and response bodies of llama.cpp's own routes.

Invariants: unsupported fields that its clients always send are named in a header; any other unsupported field is
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, RootModel, StrictBool, StrictStr, Tag

from minisgl.sampling_params import BOUNDS
from minisgl.server.core import fields
from minisgl.server.core.answers import Answer
from minisgl.server.core.bodies import Prompt
from minisgl.server.core.fields import Body, described
from minisgl.server.core.sampling_fields import Sampling

MEDIA = "<__media__>"
"""Marker of an image in a text."""


class LlamaCppSampling(Sampling):
    """Sampling fields under llama.cpp's names or those of the other APIs."""

    NOT_YET: ClassVar[fields.Table] = fields.LLAMA_CPP
    IGNORED: ClassVar[fields.Table] = {**Sampling.IGNORED, **fields.LLAMA_CPP_IGNORED}

    return_tokens: StrictBool | None = described("Report the generated ids as `tokens`.")
    response_fields: list[StrictStr] | None = described(
        "Report only these fields; `a/b` is the field `b` of `a`, and is named so in the answer."
    )


class MediaPrompt(Body):
    prompt_string: StrictStr = Field(description=f"A text with `{MEDIA}` in the place of each image.")
    multimodal_data: Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_parts)] | None = described(
        "Images in base64, for a model that sees."
    )


def _kind(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else value
    return ("<media list>" if isinstance(value, list) else "<media>") if isinstance(first, dict) else "<prompt>"


class LlamaCppCompletion(LlamaCppSampling):
    prompt: Annotated[
        Annotated[Prompt, Tag("<prompt>")]
        | Annotated[MediaPrompt, Tag("<media>")]
        | Annotated[list[MediaPrompt], Field(fail_fast=True, max_length=BOUNDS.max_prompts), Tag("<media list>")],
        Discriminator(_kind),
    ] = Field(
        description="A text, several texts, token ids, several lists of token ids, or one or several texts with images."
    )


class ExtraText(Body):
    text: StrictStr
    filename: StrictStr | None = None


class InfillRequest(LlamaCppSampling):
    input_prefix: StrictStr = Field(description="The text before the gap that the answer fills.")
    input_suffix: StrictStr = Field(description="The text after the gap.")
    prompt: StrictStr | None = described("More text directly before the gap.")
    input_extra: Annotated[list[ExtraText], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = described(
        "Other texts, shown to the model before the prefix."
    )

    def before(self) -> str:
        """Return all text before the gap: extra texts, prefix and prompt."""
        extra = [f"--- {one.filename or 'snippet'} ---\n{one.text}\n\n" for one in self.input_extra or ()]
        return "".join([*extra, self.input_prefix, self.prompt or ""])


class Timings(Answer):
    """Timings of a request in milliseconds; `prompt_ms` is from the request's arrival to its first token."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaCppAnswer(Answer):
    """Completion of a prompt. A stream has events with `content`, and one of these at the end, without `[DONE]`."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    prompt: str | list[int]
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    timings: Timings


class LlamaCppAnswers(RootModel[LlamaCppAnswer | list[LlamaCppAnswer]]):
    """Completion, or a list of completions if the prompt is a list."""


class RenderedTemplate(Answer):
    prompt: str


class Props(Answer):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(Answer):
    id: int
    n_ctx: int
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """Slots. As many are processing as requests run; which one a request has is not known."""
