"""Tiny random checkpoints of architectures that are not native, and what an engine makes of them: the logits of every
token that it computes, beside those of transformers alone.

`python -m tests.helpers.their_models` measures all and writes the list of docs/features.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from minisgl.attention import AttentionRows
from minisgl.engine.torch_engine import TorchEngine
from tests.helpers.engines import Collector, assert_greedy, greedy, load
from tests.helpers.models import randomised, save

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
BEGIN, END = "<!-- seen through transformers -->\n", "<!-- end -->\n"
WITHIN = 1e-4
VOCAB = 131
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GPT_J = {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8, "n_positions": 256}
_EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_DEEPSEEK = {**_LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
_DEEPSEEK |= {"moe_intermediate_size": 40, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "original_max_position_embeddings": 128,
}
_WINDOWS = {"sliding_window": 9, "num_hidden_layers": 4}
_MIXED = {**_WINDOWS, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}


@dataclass(frozen=True)
class Case:
    """`seen`: what the settings bring in, beyond the architecture."""

    architecture: str
    seen: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.architecture}: {self.seen}" if self.seen else self.architecture


def _case(architecture: str, seen: str = "", **settings: Any) -> Case:
    return Case(architecture, seen, settings)


CASES = [
    _case("ApertusForCausalLM"),
    _case("ArceeForCausalLM"),
    _case("BioGptForCausalLM", "learned positions"),
    _case("CodeGenForCausalLM", "partial rotary", **_GPT_J),
    _case("CohereForCausalLM", "norms of q and k, scaled logits", use_qk_norm=True, logit_scale=0.3),
    _case("Cohere2ForCausalLM", "mixed windows", **_WINDOWS),
    _case("DeepseekV2ForCausalLM", "heads of K and V of different sizes, experts", topk_method="greedy", **_DEEPSEEK),
    _case("DeepseekV3ForCausalLM", "heads of K and V of different sizes, experts", **_DEEPSEEK),
    _case("DiffLlamaForCausalLM", "attention asked twice a layer"),
    _case("Ernie4_5ForCausalLM", head_dim=16),
    _case("Exaone4ForCausalLM", "mixed windows", **_MIXED),
    _case("FalconForCausalLM", "40b's form", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    _case("FalconForCausalLM", "7b's form, one KV head", alibi=False, multi_query=True, parallel_attn=True),
    _case("FalconForCausalLM", "biases", alibi=False, multi_query=False, parallel_attn=False, bias=True),
    _case("GemmaForCausalLM", head_dim=16),
    _case(
        "Gemma2ForCausalLM",
        "soft caps, mixed windows, scale",
        head_dim=16,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        **_WINDOWS,
    ),
    _case("Gemma3ForCausalLM", "mixed windows with frequencies of their own, scale", head_dim=16,
          query_pre_attn_scalar=10, **_MIXED),
    _case("Gemma3ForConditionalGeneration", "its language model"),
    _case("GlmForCausalLM", "partial rotary, biases", head_dim=16, attention_bias=True),
    _case("Glm4ForCausalLM", "partial rotary", head_dim=16),
    _case("Glm4MoeForCausalLM", "experts", head_dim=16, n_routed_experts=4, n_group=1, topk_group=1,
          num_experts_per_tok=2, moe_intermediate_size=40, first_k_dense_replace=1),
    _case("GPT2LMHeadModel", "learned positions"),
    _case("GPTBigCodeForCausalLM", "learned positions, one KV head"),
    _case("GPTJForCausalLM", "partial rotary", **_GPT_J),
    _case("GPTNeoXForCausalLM", "partial rotary, biases", rotary_pct=0.25),
    _case("GraniteForCausalLM", "scales of embeddings, residuals, attention and logits", attention_multiplier=0.2,
          embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    _case("GraniteMoeForCausalLM", "experts", **_EXPERTS),
    _case("HeliumForCausalLM", head_dim=16),
    _case("HunYuanDenseV1ForCausalLM", "norms of q and k", head_dim=16),
    _case("MixtralForCausalLM", "experts, window", sliding_window=10, **_EXPERTS),
    _case("NemotronForCausalLM", "partial rotary"),
    _case("OlmoForCausalLM"),
    _case("Olmo2ForCausalLM"),
    _case("Olmo3ForCausalLM", "mixed windows", **_MIXED),
    _case("OlmoeForCausalLM", "experts", **_EXPERTS),
    _case("OPTForCausalLM", "learned positions", ffn_dim=112, word_embed_proj_dim=64),
    _case("PersimmonForCausalLM", "partial rotary, norms of q and k"),
    _case("PhiForCausalLM", "partial rotary, biases", partial_rotary_factor=0.5),
    _case("Phi3ForCausalLM", "window", sliding_window=11),
    _case("Phi3ForCausalLM", "partial rotary, longrope up to its original context", sliding_window=None,
          partial_rotary_factor=0.75, original_max_position_embeddings=128, rope_parameters=_LONGROPE),
    _case("PhimoeForCausalLM", "experts, window", sliding_window=9, attention_bias=True, **_EXPERTS),
    _case("Qwen2MoeForCausalLM", "experts", shared_expert_intermediate_size=48, **_EXPERTS),
    _case("SeedOssForCausalLM", head_dim=16),
    _case("SmolLM3ForCausalLM", "a layer without positions", no_rope_layers=[1, 1, 0]),
    _case("StableLmForCausalLM", "partial rotary, biases, norms of q and k", use_qkv_bias=True, qk_layernorm=True),
    _case("Starcoder2ForCausalLM", "window, biases", sliding_window=10),
    _case("LlamaForCausalLM", "native, too; by --model-impl transformers"),
]  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """`why` is for people, `says` is found in the error."""

    architecture: str
    why: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)


_STATE = ("a state of their own", "keep a state of their own")
_ITSELF = ("asks no registry of attention functions", "they ask no registry")
REFUSED = [
    Refused("MambaForCausalLM", *_STATE),
    Refused("FalconMambaForCausalLM", *_STATE),
    Refused("RwkvForCausalLM", *_STATE),
    Refused("RecurrentGemmaForCausalLM", *_STATE),
    Refused("JambaForCausalLM", *_STATE),
    Refused("FalconH1ForCausalLM", *_STATE),
    Refused("GraniteMoeHybridForCausalLM", *_STATE),
    Refused("Qwen3NextForCausalLM", *_STATE),
    Refused("MiniMaxForCausalLM", "linear attention", "layer_types: linear_attention"),
    Refused(
        "Lfm2ForCausalLM", "convolutions", "layer_types: conv", {"layer_types": ["conv", "full_attention", "conv"]}
    ),
    Refused("Llama4ForCausalLM", "attention within chunks", "layer_types: chunked_attention"),
    Refused("FalconForCausalLM", "with ALiBi only", "ALiBi", {"alibi": True}),
    Refused("BloomForCausalLM", "ALiBi", "ALiBi"),
    Refused("MptForCausalLM", "ALiBi", "ALiBi"),
    Refused("XGLMForCausalLM", *_ITSELF),
    Refused("T5ForConditionalGeneration", "an encoder and a decoder", "no decoder that continues a text"),
    Refused("BartForCausalLM", "half of an encoder and a decoder", "an encoder and a decoder"),
    Refused("BertForMaskedLM", "an encoder", "no decoder that continues a text"),
]


def tiny(case: Case) -> Any:
    """A transformers model in float32, eval mode, all random, with its plainest attention."""
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("seen with transformers 5: before it fewer classes ask the registry")
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if case.architecture in ("GPTJForCausalLM", "CodeGenForCausalLM") and release < (5, 24):
        pytest.skip("asks the registry since transformers 5.24")
    if not hasattr(transformers, case.architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {case.architecture}")
    kind = getattr(transformers, case.architecture)
    torch.manual_seed(7)
    plainest = {"attn_implementation": "eager"}  # of others not all know soft caps
    if case.architecture != "Gemma3ForConditionalGeneration":
        return randomised(kind(kind.config_class(**{**TINY, **case.settings, **plainest})))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"image_size": 28, "patch_size": 14, **sizes}
    config = kind.config_class(
        text_config={**TINY, "head_dim": 16}, vision_config=vision, mm_tokens_per_image=4, **plainest
    )
    return randomised(kind(config))


class Watched:
    """An engine that keeps the logits of each token of its steps, by request and position."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.engine, config = load("auto", folder, model_impl="transformers", **settings)
        assert isinstance(self.engine, TorchEngine)
        self.seen: dict[int, dict[int, Tensor]] = {}
        self._slots: dict[int, int] = {}
        self._rows: AttentionRows | None = None
        self.step_shapes: list[tuple[int, int]] = []  # decode rows, others
        self._watch(self.engine)
        self.collector = Collector(self.engine, config)

    def _watch(self, engine: TorchEngine) -> None:
        apply, prepare, forward = engine._apply, engine._attention.prepare, engine._model.forward

        def watched_apply(plan: Any, entry: Any, assignments: Any) -> None:
            self._slots |= {one.slot: one.req_id for one in assignments}
            apply(plan, entry, assignments)

        def watched_prepare(rows: AttentionRows, table: Tensor) -> None:
            self._rows = rows
            prepare(rows, table)

        def watched_forward(ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
            hidden = forward(ids, positions, attend)
            logits, start, rows = engine._model.logits(hidden), 0, self._rows
            assert rows is not None
            self.step_shapes.append((rows.num_decode, len(rows.slots) - rows.num_decode))
            for slot, length in zip(rows.slots.tolist(), rows.extend_lens.tolist(), strict=True):
                at = self.seen.setdefault(self._slots[slot], {})
                at |= zip(positions[start : start + length].tolist(), logits[start : start + length], strict=True)
                start += length
            return hidden

        engine._apply = watched_apply  # type: ignore[method-assign]
        engine._attention.prepare = watched_prepare  # type: ignore[method-assign]
        engine._model.forward = watched_forward  # type: ignore[method-assign]

    def run(self, prompts: dict[int, Sequence[int]], count: int) -> None:
        """`count` greedy tokens for each."""
        self.collector.run({i: (list(prompt), greedy(count)) for i, prompt in prompts.items()})


def compare(model: Any, folder: Path, **settings: object) -> float:
    """Run batches through an engine in every kind of step; the largest difference of a logit from transformers' own.
    Asserts what kinds of steps there were, and that every token that was not cached was seen."""
    random = np.random.default_rng(3)
    prompts = {i: random.integers(3, VOCAB, length).tolist() for i, length in enumerate((41, 5, 23))}
    again = {3: [*prompts[0][:32], *random.integers(3, VOCAB, 9).tolist()], 4: [7], 5: prompts[2]}
    count = 12
    watched = Watched(folder, num_pages=64, page_size=4, max_prefill_length=16, **settings)
    watched.run(prompts, count)
    watched.run(again, count)
    watched.engine.close()
    assert watched.collector.cached[3] == 32 and watched.collector.cached[5] >= 20, "prefix hits"
    assert any(decode and others for decode, others in watched.step_shapes), "steps of both kinds of rows"
    worst = 0.0
    for req_id, prompt in {**prompts, **again}.items():
        tokens, seen = watched.collector.tokens[req_id], watched.seen[req_id]
        assert len(tokens) == count
        whole = [*prompt, *tokens]
        assert sorted(seen) == list(range(watched.collector.cached[req_id], len(whole) - 1))
        with torch.inference_mode():
            expected = model(torch.tensor([whole]), use_cache=False).logits[0]
        worst = max(worst, *(float((logits - expected[at]).abs().max()) for at, logits in seen.items()))
        assert_greedy(model, list(prompt), tokens)
    return worst


def listed(page: str) -> list[tuple[str, str]]:
    """Architecture and what is seen of it, by line of the page's list."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    return [(line.split("`")[1], line.split("|")[2].strip()) for line in lines]


def names() -> list[tuple[str, str]]:
    return [(case.architecture, case.seen) for case in CASES]


def table(figures: Sequence[float]) -> str:
    lines = ["| architecture | with | largest difference of a logit |", "|---|---|---|"]
    for case, worst in zip(CASES, figures, strict=True):
        lines.append(f"| `{case.architecture}` | {case.seen} | {worst:.0e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    figures = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny(case)
            figures.append(compare(model, save(model, Path(folder))))
        assert figures[-1] <= WITHIN, case
        print(f"{figures[-1]:.1e}  {case.name}", flush=True)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(figures) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
    os._exit(0)
