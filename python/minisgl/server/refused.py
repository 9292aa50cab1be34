"""Request fields that other servers know and this one does not do, with the values that ask for nothing.

Keeps true: a field stands here if its value could change the answer there; what only labels a request does not.
Doesn't know: how a request is refused (request.py), the fields that are done (bodies.py).
"""

from __future__ import annotations

from typing import Any

Table = dict[str, tuple[Any, ...]]
"""Field -> values that ask for nothing; null asks for nothing in any case."""

_ONE: tuple[Any, ...] = (1, 1.0)

SHARED: Table = {
    # what the text must look like
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structural_tag": (),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "grammar": ("",),
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
    "return_tokens_as_token_ids": (False,),
    "return_prompt_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_meta_info": (False,),
    "logprob_token_ids": ([],),
    "stream_interval": (1,),
    # where the prompt comes from
    "truncation_side": ("left",),
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
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "reasoning": ({},),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "enable_thinking": (),
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
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
    "max_completion_tokens": (),
    "top_logprobs": (),
}

GENERATE_SAMPLING: Table = {
    **SHARED,
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "best_of": (1,),
}

GENERATE: Table = {
    **GENERATE_SAMPLING,
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
    "input_embeds": (),
    "image_data": ([],),
    "audio_data": ([],),
    "video_data": ([],),
}

SAY_INSTEAD: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs": "logprobs",
    "return_prompt_token_ids": "return_token_ids",
    "enable_thinking": "chat_template_kwargs",
    "thinking": "chat_template_kwargs",
}
"""Another field of the same request that does it."""
