"""Building blocks of request bodies (strict types, bounded lists, described fields), and the table of what each API
does with fields that it does not serve.

Invariants: a field whose value would change the meaning of the output is refused by name (`NOT_YET`, `OTHERS`); a field
without effect on it is accepted, and the header `X-Minisgl-Ignored` names it (`IGNORED`), as it does every name that no
API knows. A name that one of our APIs serves is never dropped silently by another: it is served (`ALIASES`), refused or
named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictInt, StrictStr, Tag

from minisgl.sampling_params import BOUNDS, RANGES

Side = Literal["left", "right"] | None
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Int64 = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
T = TypeVar("T")
# stop at the first bad item: a million errors would block the event loop
Items = Annotated[list[T], Field(fail_fast=True)]


TextOr = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[T, Tag("<other>")],
    Discriminator(lambda value: "<other>" if isinstance(value, list | dict) else "<text>"),
]
"""Text, or a list or an object of type T."""
TextOrParts = TextOr[Annotated[list[T], Field(fail_fast=True, max_length=BOUNDS.max_parts)]]


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose value is not `None`."""
    return {name: value for name, value in fields.items() if value is not None}


def described(description: str, **bounds: Any) -> Any:
    return Field(default=None, description=description, json_schema_extra=bounds or None)


def ranged(name: str, description: str) -> Any:
    """Declare an optional numeric field with the range `RANGES[name]`, which `SamplingParams.check` enforces."""
    bounds = RANGES[name]
    least = {"exclusiveMinimum" if bounds.is_open else "minimum": bounds.least if bounds.off is None else bounds.off}
    return described(description, **least, **({} if bounds.most is None else {"maximum": bounds.most}))


ENOUGH_CHARS = 1 << 16  # counting stops here


def chars_of(value: object) -> int:
    """Estimate the characters of a value's JSON. Stops counting beyond `ENOUGH_CHARS`."""
    count, todo = 0, [value]
    while todo and count <= ENOUGH_CHARS:
        one = todo.pop()
        if isinstance(one, dict):
            count += sum(map(len, one)) + 4 * len(one)
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)
        count += len(one) + 2 if isinstance(one, str) else 2
    return count


SERVER_TOOLS = (
    *("web_search", "web_fetch", "code_execution", "code_interpreter", "tool_search", "file_search", "computer"),
    *("image_generation", "programmatic_tool_calling", "mcp", "advisor", "browser_search", "url_context", "x_search"),
)
"""Prefixes of types of tools that a provider's own servers run: every API leaves these out and names them."""


def type_of(value: object) -> object:
    """Return the `type` of an object of a request body, parsed (a model) or not (a dict); `None` if it has none."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def runs_on_servers(kind: object) -> bool:
    return isinstance(kind, str) and kind.startswith(SERVER_TOOLS)


class Body(BaseModel):
    model_config = ConfigDict(
        extra="ignore",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # to the first request, which takes 6 ms longer: a start builds none of 200
    )

    # other servers' names -> our names
    ALIASES: ClassVar[dict[str, str]] = {}
    # unsupported fields -> neutral values; any other value is refused
    NOT_YET: ClassVar[Table] = {}
    # fields of other bodies -> neutral values; refused if this body does not have them
    OTHERS: ClassVar[Table] = {}
    # fields without effect -> neutral values; any other value is named in a header
    IGNORED: ClassVar[Table] = {}
    # such fields on a model that does not see
    UNSEEN: ClassVar[Table] = {}


Table = dict[str, tuple[Any, ...]]
"""Fields, each with the values that ask for nothing; null always asks for nothing."""


class LeftOut(Body):
    """A part, block, item or tool of a type that the model cannot be shown. All its fields are accepted."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), defer_build=True)

    type: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]

    @property
    def text(self) -> str:
        """Return the note that replaces it in the conversation: constant for a type, for the prefix cache."""
        return self.note("text")

    def note(self, reads: str) -> str:
        return f"[{self.type} left out: this model reads {reads} only]"


class Picture(LeftOut):
    """Image in a message of a user or a tool. A model that does not see gets a note in its place."""


class Place(str):
    """Path of a field in a request's body, such as that of an image, as the client wrote it. JSON has no such type."""


_ONE: tuple[Any, ...] = (1, 1.0)

SHARED: Table = {
    # structured output
    "structural_tag": (),
    "stop_regex": ([], ""),
    # sampling
    "use_beam_search": (False,),
    "beam_width": _ONE,
    "length_penalty": _ONE,
    "early_stopping": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    # llama.cpp's samplers
    "typical_p": _ONE,
    "mirostat": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "repeat_last_n": (-1,),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "samplers": ([],),
    # samplers of text-generation-webui and KoboldCpp
    "tfs_z": _ONE,
    "top_a": (0, 0.0),
    "smoothing_factor": (0, 0.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": _ONE,
    "negative_prompt": ("",),
    "num_beams": _ONE,
    # Ollama's and other servers' options
    "options": ({},),
    "format": ("",),
    "think": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "lora_path": (),
    "lora_request": (),
    # response contents
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_meta_info": (False,),
    "logprob_token_ids": ([],),
    "stream_interval": (1,),
    # prompt input
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "session_params": ({},),
    "kv_transfer_params": ({},),
    "cache_salt": ("",),
    "extra_key": ("",),
}

_OTHER_NAMES: Table = {"max_new_tokens": (), "min_new_tokens": (0,), "sampling_seed": ()}

CHAT: Table = {
    **SHARED,
    **_OTHER_NAMES,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "reasoning": ({},),
    "thinking": (),
    "task": (),
    "documents": ([],),
    "chat_template": (),
    "add_special_tokens": (False,),
    "input_ids": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

COMPLETION: Table = {
    **SHARED,
    **_OTHER_NAMES,
    "prompt_embeds": (),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
    "top_logprobs": (),
}

_AS_IDS: Table = {"return_tokens_as_token_ids": (False,)}
_OF_ONE_ANSWER: Table = {**SHARED, **_AS_IDS, "n": _ONE, "response_format": (), "return_token_ids": (False,)}

RESPONSES: Table = {
    **_OF_ONE_ANSWER,
    "max_tokens": (),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "image": (),
}

OF_CONVERSATION: Table = {"thread": ()}
"""Refused fields of both Anthropic bodies. An ignored `thread` would lose its earlier messages and tools."""

MESSAGES: Table = {
    **_OF_ONE_ANSWER,
    **OF_CONVERSATION,
}

GENERATE_SAMPLING: Table = {
    **SHARED,
    **_AS_IDS,
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "best_of": (1,),
}

GENERATE: Table = {
    **GENERATE_SAMPLING,
    "token_ids_logprob": ([],),
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
}

LLAMA_CPP_IGNORED: Table = {
    "samplers": ([],),
    "repeat_last_n": (-1, 0),
    "n_keep": (0, -1),
    "n_indent": (0,),
    "min_keep": (0,),
    "id_slot": (-1,),
    "cache_prompt": (True,),
    "t_max_prompt_ms": (0, -1),
    "t_max_predict_ms": (0, -1),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "lora": ([],),
}
"""Fields that llama.cpp's clients always send: named in a header instead of refused."""

LLAMA_CPP: Table = {
    **{name: nothing for name, nothing in _OF_ONE_ANSWER.items() if name not in LLAMA_CPP_IGNORED},
    "n_cmpl": (1,),
    "image_data": ([],),
    "multimodal_data": ([],),
    "top_logprobs": (0,),
    "logprobs": (0, False),
}

OLLAMA: Table = {"template": ("",), "context": ([],), "images": ([],)}

IGNORED: Table = {
    # caller, priority and service level
    "metadata": ({},),
    "client_metadata": ({},),
    "user": ("",),
    "safety_identifier": ("",),
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "inference_geo": ("",),
    "priority": (0,),
    "rid": ("",),
    # caching: prefixes are found by themselves, and the model stays loaded
    "prompt_cache_key": ("",),
    "prompt_cache_retention": (),
    "cache_control": (),
    "keep_alive": (),
    "prediction": (),
    # context editing: the model is shown the whole conversation
    "context_management": ({}, [], {"edits": []}),
    # tools of a provider's servers
    "web_search_options": (),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "container": (),
    # additional response fields
    "include": ([],),
    "receipt": (False,),
    "betas": ([],),
    "stream_options": ({}, {"include_usage": False}, {"include_usage": True}),
}
"""Fields without effect on the output in any API: accepted, and named in a header."""

_ON: tuple[Any, ...] = (True,)
_OFF: tuple[Any, ...] = (False,)

OTHERS: Table = {
    # conversation
    "messages": ([],),
    "input": ("", []),
    "prompt": ("",),
    "text": ("", {}, {"format": {"type": "text"}}),
    "system": ("", []),
    "instructions": ("",),
    "previous_response_id": ("",),
    "background": _OFF,
    "truncation": ("disabled",),
    "suffix": ("",),
    "raw": _OFF,
    "input_ids": (),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "input_extra": ([],),
    "images": ([],),
    "add_generation_prompt": _ON,
    "continue_final_message": _OFF,
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": _ON,
    "functions": ([],),
    "function_call": ("auto", "none"),
    # output length
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_new_tokens": (),
    "n_predict": (),
    "num_predict": (),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": _OFF,
    # sampling
    "temperature": (),
    "top_p": _ONE,
    "top_k": (-1, 0),
    "min_p": (0, 0.0),
    "seed": (),
    "sampling_seed": (),
    "n": _ONE,
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": _ONE,
    "repeat_penalty": _ONE,
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "sampling_params": ({},),
    # structured output
    "response_format": ({"type": "text"},),
    "output_format": (),
    "output_config": ({},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "verbosity": ("medium",),
    # reasoning
    "reasoning": ({},),
    "reasoning_effort": (),
    "enable_thinking": (),
    "thinking": (),
    "thinking_budget": (),
    "include_reasoning": _ON,
    "separate_reasoning": _ON,
    # additional response fields
    "echo": _OFF,
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "return_logprob": _OFF,
    "top_logprobs_num": (0,),
    "logprob_start_len": (-1,),
    "return_text_in_logprobs": (True, False),
    "return_tokens": _OFF,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "response_fields": ([],),
}
"""Names that one of our APIs serves, and other APIs have under another name, or not at all."""

SAY_INSTEAD: dict[str, tuple[str, ...]] = {
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input", "input_prefix"),
    "system": ("instructions", "messages"),
    "instructions": ("system", "messages"),
    "suffix": ("input_suffix",),
    "images": ("messages",),
    "max_tokens": ("max_output_tokens", "max_tokens", "options.num_predict"),
    "max_new_tokens": ("max_output_tokens", "max_tokens", "options.num_predict"),
    "max_completion_tokens": ("max_output_tokens", "max_tokens", "options.num_predict"),
    "max_output_tokens": ("max_tokens", "options.num_predict"),
    "n_predict": ("options.num_predict",),
    "num_predict": ("options.num_predict",),
    "min_new_tokens": ("min_tokens",),
    "sampling_seed": ("seed", "options.seed"),
    "top_logprobs": ("logprobs",),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "return_logprob": ("logprobs",),
    "logprobs": ("return_logprob", "include"),
    "return_prompt_token_ids": ("return_token_ids",),
    "return_tokens": ("return_token_ids",),
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use",),
    "text": ("response_format", "output_config.format", "format"),
    "format": ("response_format", "text.format", "output_config.format"),
    "response_format": ("text.format", "output_config.format", "format"),
    "output_format": ("response_format", "text.format", "format"),
    "output_config": ("response_format", "text.format", "format"),
    "json_schema": ("format",),
    "guided_json": ("format",),
    "verbosity": ("text.verbosity",),
    "think": ("enable_thinking", "reasoning.effort", "thinking"),
    "reasoning": ("reasoning_effort", "output_config.effort", "think"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort", "think"),
    "enable_thinking": ("reasoning.effort", "thinking", "think"),
    "thinking": ("enable_thinking", "reasoning.effort", "think"),
    "thinking_budget": ("thinking.budget_tokens",),
    "stop_sequences": ("stop", "options.stop"),
    "sampling_params": ("temperature",),
    "repetition_penalty": ("options.repeat_penalty",),
    "repeat_penalty": ("options.repeat_penalty",),
    **{
        name: (f"options.{name}",)
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    },
}
"""Alternatives for refused fields: an error suggests the first one that the request's body has."""
