"""Request bodies: known fields with their types, defaults and descriptions. The OpenAPI page is generated from them.

Invariants: strict types (no "1" for 1, no true for 1); null means the default; unknown fields are ignored, but fields
that change the output of other servers are refused (fields.py); each field has a description.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.config import MAX_PRIORITY
from minisgl.sampling_params import BOUNDS, RANGES, ParamError
from minisgl.server.core import fields
from minisgl.server.core.fields import (
    Body,
    Int64,
    Items,
    LeftOut,
    Picture,
    Side,
    TextOr,
    TextOrParts,
    TokenId,
    chars_of,
    described,
    ranged,
    type_of,
)
from minisgl.server.core.sampling_fields import Sampling
from minisgl.server.core.surrogates import arguments_without_halves
from minisgl.server.core.tools import Choice, Tool, Tools

_AS_IDS = "vLLM's: tokens in log probabilities are shown as `token_id:ID`."
TEMPLATE_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "explain",
        "images",
        "self",
        "kwargs",
    }
)
"""Template variables that are set by the request's own fields."""


def prompt_kind(value: object) -> str:
    """Return the tag of a prompt's type, by its first element, so that an error names what later ones should be."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else None
    return "<texts>" if isinstance(first, str) else "<id_lists>" if isinstance(first, list) else "<ids>"


Prompt = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_prompts), Tag("<texts>")]
    | Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=BOUNDS.max_prompts), Tag("<id_lists>")],
    Discriminator(prompt_kind),
]


Texts = TextOr[Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_prompts)]]


TEXT_KINDS = ("text", "input_text", "output_text")
"""Types of text parts, in the chat API and the Responses API."""


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: StrictStr


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: StrictStr

    @property
    def text(self) -> str:
        return self.refusal


class ImagePart(Picture):
    type: Literal["image_url", "input_image", "image"]
    image_url: Any = described(
        "A data URL or base64, or an object with it as `url` and with `detail`. Other URLs need `--image-hosts`.",
        anyOf=[{"type": "string"}, {"type": "object"}],
    )
    detail: Any = described(
        "`low`: few tokens for the image; `high`, `auto`: as many as the model takes.", type="string"
    )


IMAGE_KINDS = get_args(ImagePart.model_fields["type"].annotation)


def part_kind(value: object) -> str:
    kind = type_of(value)
    if kind in TEXT_KINDS or not isinstance(kind, str):
        return "<text>"
    return "<refusal>" if kind == "refusal" else "<image>" if kind in IMAGE_KINDS else "<left out>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(part_kind),
]
Content = TextOrParts[Part]
SEEN = ("user", "tool")
"""Roles whose images a model that sees is shown."""


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` is rendered as `system`."
    )
    content: Content | None = described(
        "A text, or a list of text parts and, of a user or a tool, images. An assistant's may be missing or have "
        "refusals, too. In the place of parts that the model does not read (files; for most models images) stands a "
        "note, and the header `X-Minisgl-Ignored` names them."
    )
    refusal: StrictStr | None = described("An assistant's refusal, rendered as text after the content.")
    name: StrictStr | None = described("Used by templates that show names.")
    tool_calls: Items[dict[str, Any]] | None = described("An assistant's calls, used by templates that show them.")
    tool_call_id: StrictStr | None = described("The call that a tool's message answers.")
    reasoning_content: StrictStr | None = described("An assistant's reasoning, used by templates that show it.")
    reasoning: StrictStr | None = described("Another name of `reasoning_content`.")

    @property
    def has_refusal(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return self.refusal is not None or any(isinstance(part, RefusalPart) for part in parts)

    def images(self) -> list[tuple[int, Picture]]:
        """Return the images with their indices in the content. The model is shown those of the roles in `SEEN`."""
        parts = self.content if isinstance(self.content, list) else ()
        return [(i, part) for i, part in enumerate(parts) if isinstance(part, Picture)]

    def leave_out(self, *, sees: bool) -> None:
        """Replace each part that the model cannot read with a note. In an assistant's message such parts are removed
        instead: the model would imitate the notes. Idempotent."""
        if not isinstance(self.content, list) or not any(isinstance(part, LeftOut) for part in self.content):
            return
        if self.role == "assistant":
            self.content = [part for part in self.content if not isinstance(part, LeftOut)] or None
            return
        reads, shown = ("text, and images of users and tools,", Picture) if sees and self.role in SEEN else ("text", ())
        parts: list[TextPart | RefusalPart | ImagePart | LeftOut] = [
            TextPart(type="text", text=part.note(reads))
            if isinstance(part, LeftOut) and not isinstance(part, shown)
            else part
            for part in self.content
        ]
        self.content = parts if shown and self.images() else "\n".join(part.text for part in parts)

    def mend_arguments(self) -> None:
        """Replace lone surrogates that the JSON arguments of tool calls escape with U+FFFD. Idempotent."""
        for call in self.tool_calls or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = arguments_without_halves(arguments)

    def num_chars(self) -> int:
        """Return roughly how many characters a chat template may render of this message."""
        texts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content]
        texts += [self.refusal, self.name, self.tool_call_id, self.reasoning_content, self.reasoning]
        of_calls = chars_of(self.tool_calls) if self.tool_calls else 0
        return sum(len(text or "") for text in texts) + of_calls

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it. The role `developer` becomes `system`, its older name."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        if isinstance(self.content, list):
            parts = [*self.content, *([RefusalPart(type="refusal", refusal=self.refusal)] if self.refusal else [])]
            message["content"] = [
                {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part.text}
                for part in parts
            ]
        else:
            message["content"] = (self.content or "") + (self.refusal or "")
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        return message


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=BOUNDS.max_messages)]


class Conversation(Body):
    messages: Messages | None = described("A conversation, rendered by the chat template.")
    add_generation_prompt: StrictBool | None = described(
        "End the prompt with the beginning of an assistant message; true by default, unless `continue_final_message`."
    )
    continue_final_message: StrictBool | None = described("The answer continues the last message.")
    chat_template_kwargs: dict[str, Any] | None = described(
        "More variables for the chat template, such as Qwen's `enable_thinking`."
    )

    tools: Tools | None = described("Functions that the model may call; the chat template renders them.")

    def template_variables(self) -> dict[str, Any]:
        """Return the variables that the request passes to the chat template."""
        return self.chat_template_kwargs or {}

    def functions(self) -> dict[int, Tool]:
        """Return the function tools that the model is shown, by their index in `tools`."""
        return {i: tool for i, tool in enumerate(self.tools or ()) if isinstance(tool, Tool)}

    def tools_for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.functions().values()]


class Receipted(Body):
    receipt: StrictBool | None = described("Report, with the end of each choice, all that its tokens depend on.")


class ChatRequest(Sampling, Receipted, Conversation):
    NOT_YET: ClassVar[fields.Table] = fields.CHAT
    ALIASES: ClassVar[dict[str, str]] = {**Sampling.ALIASES, "max_output_tokens": "max_completion_tokens"}

    messages: Messages | None = described("The conversation.")
    prompt: StrictStr | None = described(
        "Instead of `messages`: a text that the model continues, without the chat template."
    )
    tool_choice: Choice | None = described(
        "`auto`, the default: the model decides; `none`: it does not get the tools; `required`: it "
        'calls; `{"type": "function", "function": {"name": ...}}`: a call of that tool; `{"type": '
        '"allowed_tools", ...}`: it gets only these tools.'
    )
    parallel_tool_calls: StrictBool | None = described(
        "Allow several calls in one answer; true by default, but with the choice `required`."
    )
    enable_thinking: StrictBool | None = described(
        "The chat template's variable, for models that can think before they answer."
    )
    thinking_budget: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)] | None = described(
        "Tokens of reasoning, after which it is ended. The header `X-Minisgl-Ignored` names it where no token of the "
        "model ends its reasoning."
    )
    include_reasoning: StrictBool | None = described("Report reasoning as `reasoning_content`; true by default.")
    separate_reasoning: StrictBool | None = described("False: reasoning stays in the content, with its markers.")
    verbosity: Literal["low", "medium", "high"] | None = described(
        "Accepted, without effect; the header `X-Minisgl-Ignored` names values other than `medium`."
    )
    reasoning_effort: StrictStr | None = described(
        "The chat template's variable. `none` sets `enable_thinking` to false, other values set it to true; a given "
        "`enable_thinking` wins. The header `X-Minisgl-Ignored` names it where the template has neither variable."
    )
    max_completion_tokens: Int64 | None = described(
        "The newer name of `max_tokens`, and wins over it. Default: the model's `max_new_tokens`, else "
        "the rest of the context.",
        minimum=1,
    )
    logprobs: StrictBool | None = described("Report the log probability of each token of the answer.")
    top_logprobs: Int64 | None = ranged(
        "logprobs", "Report this many most likely tokens at each position; needs `logprobs`."
    )

    return_tokens_as_token_ids: StrictBool | None = described(_AS_IDS)
    prompt_logprobs: Int64 | None = ranged(
        "logprobs", "The same for the prompt's tokens, as `prompt_logprobs` of the answer or of its first chunk."
    )

    def num_logprobs(self) -> int | None:
        """Return how many alternatives to report at each token; `None`: no log probabilities. Raises `ParamError`."""
        count = self.top_logprobs
        if count is not None and not RANGES["logprobs"].has(count):
            raise ParamError("top_logprobs", count, RANGES["logprobs"].words)
        if not self.logprobs:
            if count:
                raise ParamError("top_logprobs", count, "needs logprobs to be true")
            return None
        return count or 0

    def template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["enable_thinking"] = self.reasoning_effort != "none"
            if self.reasoning_effort != "none":
                variables["reasoning_effort"] = self.reasoning_effort
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return {**variables, **super().template_variables()}

    def tools_for_template(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().tools_for_template()

    def continued_text(self) -> str | None:
        """Return the text of the final message that the output continues, or `None` if it continues none."""
        if not self.continue_final_message or not self.messages:
            return None
        content = self.messages[-1].for_template()["content"]
        return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)

    def limit(self) -> int | None:
        """Return the maximum number of tokens to generate; `max_completion_tokens`, the newer name, wins over
        `max_tokens`. `None`: the model's default, else the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampling, Receipted):
    NOT_YET: ClassVar[fields.Table] = fields.COMPLETION

    prompt: Prompt = Field(description="A text, several texts, token ids, or several lists of token ids.")
    suffix: StrictStr | None = described(
        "The text after the gap that the answer fills; `prompt`, a text or texts, is before it. Needs a "
        "tokenizer with fill-in-the-middle tokens; not with `echo` or `truncate_prompt_tokens`."
    )
    echo: StrictBool | None = described(
        "Begin the answer with the prompt, including special tokens; `logprobs` then reports its tokens, "
        "too. Allows `max_tokens` 0."
    )
    logprobs: Int64 | None = ranged(
        "logprobs",
        "Report the log probability of each token, and this many most likely tokens at its position; "
        "`top_logprobs` has the token itself, too. `text_offset` is the position in the returned text of "
        "the character in which a token begins.",
    )
    prompt_logprobs: Int64 | None = ranged(
        "logprobs", "The same for the prompt's tokens, as `prompt_logprobs` of each choice."
    )
    return_tokens_as_token_ids: StrictBool | None = described(_AS_IDS)
    best_of: Int64 | None = ranged(
        "n", "Generate this many and return the `n` with the highest log probability per token; not in a stream."
    )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, each a text or a list of token ids."""
        return inputs_of(self.prompt)


class ModelBody(Body):
    model: StrictStr | None = described("The served model's name.")


class TokenizeRequest(ModelBody, Conversation):
    """Body with exactly one of `prompt`, `messages` and `content`."""

    prompt: StrictStr | None = described("A text.")
    add_special_tokens: StrictBool | None = described("Add the tokenizer's special tokens to a text; true by default.")
    return_token_strs: StrictBool | None = described("Report each token's text, too.")
    content: StrictStr | None = described("llama.cpp's: a text, without special tokens around it.")
    add_special: StrictBool | None = described("llama.cpp's: add them to `content`; false by default.")
    with_pieces: StrictBool | None = described(
        "llama.cpp's: `tokens` are objects with the `id` and the `piece`, a text, or bytes that are none."
    )


class DetokenizeRequest(ModelBody):
    tokens: Items[TokenId] = Field(description="Token ids.")
    skip_special_tokens: StrictBool | None = described("Omit special tokens from the text; false by default.")


EmbeddingInput = Annotated[
    Annotated[StrictStr, Tag("<text>")]
    | Annotated[list[StrictStr], Field(fail_fast=True, max_length=BOUNDS.max_inputs), Tag("<texts>")]
    | Annotated[Items[TokenId], Tag("<ids>")]
    | Annotated[list[Items[TokenId]], Field(fail_fast=True, max_length=BOUNDS.max_inputs), Tag("<id_lists>")],
    Discriminator(prompt_kind),
]


class PoolingBody(Body):
    """Fields common to requests that generate no text (embeddings, rerank, score, classify)."""

    model: StrictStr | None = described("The served model's name. Default: the served model.")
    priority: Int64 | None = described(
        "Smaller numbers go first; 0 by default.", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY
    )
    user: StrictStr | None = described("Accepted, without effect.")


class EmbeddingRequest(PoolingBody):
    ALIASES: ClassVar[dict[str, str]] = {"input_type": "prompt_name"}

    input: EmbeddingInput = Field(
        description=f"A text, up to {BOUNDS.max_inputs} texts, token ids, or lists of token ids; each gets one "
        "embedding."
    )
    encoding_format: Literal["float", "base64"] | None = described(
        "`float` (default): lists of numbers. `base64`: their bytes as little-endian float32."
    )
    dimensions: Int64 | None = described(
        "Keep only this many of the first numbers, normalized to length 1 again. Default: all.", minimum=1
    )
    pooling: Literal["mean", "last", "cls"] | None = described(
        "`mean`: the mean of all tokens' hidden states. `last`, `cls`: the last and the first token's, for models that "
        "are trained for it. Default: as the model's files say, else `mean`."
    )
    prompt_name: StrictStr | None = described(
        "The prompt of the model's `config_sentence_transformers.json` that each text begins with, such as `query`. "
        "Default: the one that the file says, if any."
    )
    truncate_prompt_tokens: Int64 | None = described(
        "Keep only this many of the last tokens of each input; -1: as many as fit. Of an input to an encoder: of the "
        "first ones, between the special tokens around it.",
        minimum=-1,
    )
    truncation_side: Side = described("`right` keeps the first tokens, `left` the last ones.")


def inputs_of(given: EmbeddingInput) -> list[Any]:
    """Return the inputs as a list, each a text or a list of token ids."""
    if isinstance(given, str):
        return [given]
    return [given] if given and isinstance(given[0], int) else list(given)
