"""The environment variables of the older engine, none of which is read here, and what replaces them.

Invariant: docs/from-mini-sglang.md has the same table.
"""

from __future__ import annotations

from minisgl import envs

_DTYPE = "use --dtype"
_ONE_CACHE = "the prefix cache keeps whole prompts, too"
_NO_PREFILL_GRAPHS = "only decode steps are captured in CUDA graphs"
_ADAPTIVE = "use --adaptive-max-tokens THRESHOLD:FACTOR"
_ATTENTION = "use --attention-backend, which knows the same words"

OLDER = {
    "MODEL_NAME": "use --model OWNER/REPO",
    "MODEL_LOCAL_DIR": "use --model FOLDER",
    "MODELSCOPE_MODEL_NAME": "use --model-source modelscope with --model: without it ModelScope is asked for the same "
    "name when Hugging Face does not answer",
    "MODEL_DTYPE": _DTYPE,
    "TORCH_DTYPE": _DTYPE,
    "PREFIX_CACHE": "the prefix cache is on; --cache naive turns it off",
    "PREFIX_CACHE_SIZE": "nothing to set: the cache is one tree of pages without entries; --cache-token-budget limits "
    "its tokens",
    "PREFIX_CACHE_MAX_TOKENS": "use --cache-max-prompt",
    "PREFIX_CACHE_TOKEN_BUDGET": "use --cache-token-budget",
    "PREFIX_CACHE_POLICY": "use --cache lru or --cache lfu",
    "PREFILL_CACHE_SIZE": f"nothing to set: {_ONE_CACHE}",
    "PREFILL_CACHE_TOKEN_BUDGET": f"use --cache-token-budget: {_ONE_CACHE}",
    "PAGE_TOKEN_BUDGET": "use --num-pages, in pages; the KV cache always has pages",
    "PAGE_SIZE_TOKENS": "use --page-size",
    "SCHEDULER_MODE": "use --routing, which knows the same words",
    "MAX_INFLIGHT_TOTAL": "use --max-inflight",
    "MAX_INFLIGHT_PER_ENGINE": "use --max-inflight-per-engine",
    "WARM_PREFIXES": "use --warm-prefix once for each text",
    "ASYNC_PREFILL_QUEUE": "nothing to set: POST /v1/cache/prefixes computes a prefix after all other requests",
    "ADAPTIVE_MAX_NEW_TOKENS": _ADAPTIVE,
    "ADAPTIVE_MAX_INFLIGHT_THRESHOLD": _ADAPTIVE,
    "ADAPTIVE_MAX_NEW_TOKENS_FACTOR": _ADAPTIVE,
    "AGGRESSIVE_MAX_NEW_TOKENS": "nothing to set: every answer ends within the context",
    "MAX_CONTEXT_MARGIN": "use --context-margin",
    "CHUNKED_PREFILL": "nothing to set: long prompts are always computed in chunks",
    "PREFILL_CHUNK_SIZE": "use --max-prefill-length",
    "ENABLE_DECODE_CUDA_GRAPH": "decode steps are captured in CUDA graphs; --cuda-graph-max-bs 0 turns that off",
    "ENABLE_CUDA_GRAPH": f"nothing to set: {_NO_PREFILL_GRAPHS}",
    "CUDA_GRAPH_MAX_SEQ_LEN": f"nothing to set: {_NO_PREFILL_GRAPHS}",
    "FORCE_LEGACY_CACHE": "nothing to set: the KV cache has a fixed place in memory, which CUDA graphs need",
    "ATTN_IMPL": _ATTENTION,
    "ATTN_IMPLEMENTATION": _ATTENTION,
    "COMPILE_MODEL": "use --torch-compile; the default is without",
    "COMPILE_MODE": "nothing to set: --torch-compile has one mode",
    "ENGINE_FAST_DECODE": "nothing to set: every engine runs minisgl's own decode loop",
    "TENSOR_PARALLEL_SIZE": "use --tp; --tp auto takes the devices that are there",
    "ENABLE_MULTI_DEVICE": "use --dp auto for an engine on each device",
}
"""Advice by variable: what to use here, or why there is nothing to set."""


def notices() -> list[str]:
    """Return a line for each variable of the table that is set."""
    return [
        f"{name} is a variable of an older engine and is not read here: {OLDER[name]}"
        for name in envs.set_variables(OLDER)
    ]
