"""Request and response bodies of Ollama's API.

Invariants: unsupported `options` are named in the response's `warning`; other unsupported fields are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictStr

from minisgl.sampling_params import BOUNDS
from minisgl.server.core import fields
from minisgl.server.core.answers import Answer, ContentLogprob
from minisgl.server.core.bodies import Receipted, Texts
from minisgl.server.core.fields import Body, Int64, Items, described, ranged
from minisgl.server.core.sampling_fields import Schema


class OllamaRequest(Body):
    model: StrictStr | None = described("The served model's name, with or without `:latest`.")
    options: dict[StrictStr, Any] | None = described(
        "`temperature`, `top_p`, `top_k`, `min_p`, `seed`, `stop`, `num_predict`, `repeat_penalty`, "
        "`presence_penalty`, `frequency_penalty`. The answer's `warning` names others."
    )
    keep_alive: float | StrictStr | None = described("Without effect: the model stays. 0 is named in the `warning`.")


class OllamaGenerating(OllamaRequest, Receipted):
    NOT_YET: ClassVar[fields.Table] = fields.OLLAMA
    OTHERS: ClassVar[fields.Table] = fields.OTHERS

    stream: StrictBool | None = described("Send the answer as it is generated, a JSON object a line; true by default.")
    format: Schema | None = described("`json`, or a JSON schema.")
    think: StrictBool | StrictStr | None = described(
        "False turns thinking off if the chat template can; true needs a model that thinks; a text is "
        "`reasoning_effort` of the chat API."
    )
    logprobs: StrictBool | None = described("Report the log probability of each token.")
    top_logprobs: Int64 | None = ranged("logprobs", "Report this many most likely tokens at each position.")


class OllamaFunction(Body):
    name: StrictStr
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    id: StrictStr | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    UNSEEN: ClassVar[fields.Table] = {"images": ([],)}

    role: Literal["system", "user", "assistant", "tool"]
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: list[Any] | None = described("Images in base64, of a user or a tool, for a model that sees.")
    tool_calls: Items[OllamaCall] | None = None
    tool_name: StrictStr | None = None
    tool_call_id: StrictStr | None = None


class OllamaChatRequest(OllamaGenerating):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=BOUNDS.max_messages)] | None = described(
        "The conversation. Without messages the answer says that the model is there."
    )
    tools: Items[dict[str, Any]] | None = described("Functions that the model may call.")


class OllamaGenerateRequest(OllamaGenerating):
    NOT_YET: ClassVar[fields.Table] = {name: one for name, one in fields.OLLAMA.items() if name != "images"}

    images: list[Any] | None = described("Images in base64, before the prompt, for a model that sees.")
    prompt: StrictStr | None = described(
        "A message of the user. Without a prompt the answer says that the model is there."
    )
    system: StrictStr | None = described("A system message before it.")
    raw: StrictBool | None = described("Continue the prompt without the chat template.")
    suffix: StrictStr | None = described("The text after a gap that the answer fills, `prompt` being before it.")


class OllamaEmbedRequest(OllamaRequest):
    input: Texts = Field(description="A text, or several; each gets one embedding.")
    truncate: StrictBool | None = described("Keep the beginning of an input that is too long; true by default.")
    dimensions: Int64 | None = described("Keep only this many of the first numbers.", minimum=1)


class OllamaEmbeddingsRequest(OllamaRequest):
    prompt: StrictStr = Field(description="A text; an empty one has an empty vector.")


class OllamaShowRequest(Body):
    model: StrictStr | None = described("The served model's name.")
    name: StrictStr | None = described("The older name of `model`.")


class OllamaAnswer(Answer):
    """Final object of a response; durations are nanoseconds. A stream's JSON lines before it have `done` false."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ContentLogprob] | None = None
    receipt: dict[str, Any] | None = None  # only with receipt
    warning: str | None = None


class OllamaAnswerMessage(Answer):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatAnswer(OllamaAnswer):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer):
    response: str
    thinking: str | None = None


class OllamaEmbedAnswer(Answer):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    warning: str | None = None


class OllamaEmbeddingsAnswer(Answer):
    embedding: list[float]


class OllamaDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    """Models. Those of `/api/ps` also have `expires_at`, `size_vram` and `context_length`."""

    models: list[OllamaModel]


class OllamaShown(Answer):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer):
    version: str
    minisgl: str


class OllamaError(Answer):
    error: str
