"""What all request bodies are made of: strict types, bounded lists, described fields; and the fields that other servers
know and this one does not do, with the values that ask for nothing.

Invariants: a field is refused if its value could change the answer there; one that only labels a request is not.
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
# the first bad item is enough: to list a million findings takes long, and the event loop stands still meanwhile
Items = Annotated[list[T], Field(fail_fast=True)]


TextOr = Annotated[
    Annotated[StrictStr, Tag("<text>")] | Annotated[T, Tag("<other>")],
    Discriminator(lambda value: "<other>" if isinstance(value, list | dict) else "<text>"),
]
"""A text, or a list or an object."""
TextOrParts = TextOr[Annotated[list[T], Field(fail_fast=True, max_length=BOUNDS.max_parts)]]


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def described(description: str, **bounds: Any) -> Any:
    return Field(default=None, description=description, json_schema_extra=bounds or None)


def ranged(name: str, description: str) -> Any:
    """A number that `SamplingParams.check` looks at."""
    found = RANGES[name]
    least = {"exclusiveMinimum" if found.is_open else "minimum": found.least if found.off is None else found.off}
    return described(description, **least, **({} if found.most is None else {"maximum": found.most}))


ENOUGH_CHARS = 1 << 16  # more are not counted


def chars_of(value: object) -> int:
    """About as many as its JSON has."""
    found, todo = 0, [value]
    while todo and found <= ENOUGH_CHARS:
        one = todo.pop()
        if isinstance(one, dict):
            found += sum(map(len, one)) + 4 * len(one)
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)
        found += len(one) + 2 if isinstance(one, str) else 2
    return found


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    # other servers' names -> those of the fields that do the same
    ALIASES: ClassVar[dict[str, str]] = {}
    # field -> values that ask for nothing; anything else is refused until a later version can do it
    NOT_YET: ClassVar[Table] = {}


Table = dict[str, tuple[Any, ...]]
"""Field -> values that ask for nothing; null asks for nothing in any case."""

_ONE: tuple[Any, ...] = (1, 1.0)

SHARED: Table = {
    # what the text must look like
    "structural_tag": (),
    "stop_regex": ([], ""),
    # how tokens are chosen
    "use_beam_search": (False,),
    "beam_width": _ONE,
    "length_penalty": _ONE,
    "early_stopping": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    # llama.cpp's samplers, off unless these say otherwise
    "typical_p": _ONE,
    "mirostat": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "repeat_last_n": (-1,),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "samplers": ([],),
    # those of text-generation-webui and KoboldCpp
    "tfs_z": _ONE,
    "top_a": (0, 0.0),
    "smoothing_factor": (0, 0.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": _ONE,
    "negative_prompt": ("",),
    "num_beams": _ONE,
    # Ollama's
    "options": ({},),
    "format": ("",),
    "think": (),
    "keep_alive": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "lora_path": (),
    "lora_request": (),
    # what is shown
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
    # where the prompt comes from
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "session_params": ({},),
    "kv_transfer_params": ({},),
    "cache_salt": ("",),
    "extra_key": ("",),
    "service_tier": ("auto", "default"),
}

_OTHER_NAMES: Table = {"max_new_tokens": (), "min_new_tokens": (0,), "sampling_seed": ()}

CHAT: Table = {
    **SHARED,
    **_OTHER_NAMES,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
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
    "context_management": ([],),
    "moderation": (),
    "image": (),
}

OF_CONVERSATION: Table = {"thread": ()}
"""Fields of Anthropic's API, whether a body is answered or counted. Ignored, a thread's earlier messages and tools
would be lost."""

MESSAGES: Table = {
    **_OF_ONE_ANSWER,
    **OF_CONVERSATION,
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
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
    "t_max_prompt_ms": (0, -1),
    "t_max_predict_ms": (0, -1),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "lora": ([],),
}
"""What llama.cpp's clients send whether or not it matters to them: named in a header instead of refused."""

LLAMA_CPP: Table = {
    **{name: nothing for name, nothing in _OF_ONE_ANSWER.items() if name not in LLAMA_CPP_IGNORED},
    "n_cmpl": (1,),
    "image_data": ([],),
    "multimodal_data": ([],),
    "top_logprobs": (0,),
    "logprobs": (0, False),
}

OLLAMA: Table = {"template": ("",), "context": ([],), "images": ([],)}

SAY_INSTEAD: dict[str, str] = {
    "max_tokens": "max_output_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "return_prompt_token_ids": "return_token_ids",
    "functions": "tools",
    "function_call": "tool_choice",
    "thinking": "chat_template_kwargs",
    "think": "enable_thinking",
    "format": "response_format",
}
"""Another field of the same request that does it."""
