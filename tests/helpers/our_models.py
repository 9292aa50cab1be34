"""The models that are native: what people call them, and what was seen of their tiny random checkpoints. The figures
are those of a run, which `our_models.json` keeps; docs/features.md has them as a table.

`python -m tests.helpers.our_models NAME...` measures variants of tests/helpers/models.py from safetensors, and rows of
tests/weights/test_gguf_folder_llama_cpp.py beside llama.cpp, or `all`, besides what was never measured; then it writes
the table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl import envs
from minisgl.config import EngineConfig
from minisgl.engine.cpu_engine import load_cpu_engine
from minisgl.models.architectures import find_architecture
from minisgl.models.config import parse_config
from tests.helpers.models import (
    LOGITS_WITHIN,
    ON_CPU,
    VARIANTS,
    reference_logits,
    save,
    tiny,
)
from tests.helpers.their_models import CASES, END, PAGE

RECORD = Path(__file__).with_suffix(".json")
BEGIN = "<!-- native models -->\n"
IDS = torch.randint(3, 131, (100,), generator=torch.Generator().manual_seed(3)).tolist()
Figures = Mapping[str, Mapping[str, Any]]
"""`architectures`, `on_torch`, `safetensors`: by variant, the last the largest difference of a logit. `gguf`: by row,
its `variant`, what the `file` says that it is, and by type of its tensors that of a log probability."""


class Model(NamedTuple):
    """A row of the table. `seen`: what the tiny checkpoint brings in, beyond a Llama."""

    called: str
    seen: str = ""


MODELS: dict[str, Model] = {
    "llama3-tied": Model("Llama 2 to 3.3, SmolLM2, DeepSeek-R1-Distill-Llama", "scaling of 3.1"),
    "mistral": Model("Mistral 7B, Nemo, Devstral", "heads of a size of their own"),
    "mistral3": Model("Mistral Small 3.1 and 3.2", "its language model"),
    "qwen2-tied": Model("Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen", "biases"),
    "qwen3-untied": Model("Qwen3-0.6B to 32B", "norms of q and k"),
    "qwen3-moe": Model("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", "the same, experts"),
    "smollm3-tied": Model("SmolLM3", "layers without positions"),
    "gemma3-tied": Model("Gemma 3 270M, 1B", "mixed windows, two bases, norms before and behind"),
    "gemma3": Model("Gemma 3 4B to 27B", "its language model"),
    "phi3-window": Model("Phi-3, Phi-4", "fused projections, window"),
    "phi3-longrope": Model("Phi-3.5, Phi-4-mini", "partial rotary, longrope beyond its original context"),
    "granite": Model("Granite 3 and 4.1", "scales of embeddings, residuals, attention and logits; biases"),
    "granite-moe": Model("Granite 3 MoE", "the same, experts"),
    "granite-moe-shared": Model("Granite 3 MoE with a shared expert", "the same, an expert that all tokens go through"),
    "olmo2": Model("OLMo 2", "norms behind, norms of q and k over all heads"),
    "olmo3-yarn": Model("OLMo 3", "the same, mixed windows, YaRN in full layers beyond its original context"),
    "olmoe": Model("OLMoE", "norms of q and k over all heads, experts"),
    "gemma": Model("Gemma"),
    "gemma2-caps": Model("Gemma 2", "soft caps, mixed windows, norms before and behind, scale"),
    "mixtral-window": Model("Mixtral", "experts, window"),
    "qwen2-moe": Model("Qwen1.5-MoE, Qwen2-57B-A14B", "experts, a shared one with its gate, a dense layer"),
    "stablelm": Model("StableLM 2 12B", "LayerNorm, by head too, partial rotary, biases"),
    "stablelm-parallel": Model("StableLM", "attention beside MLP"),
    "starcoder2-window": Model("StarCoder 2", "LayerNorm, biases, an MLP without gate, window"),
    "cohere": Model(
        "Command-R+, Aya",
        "LayerNorm, by head too, attention beside MLP, interleaved rotary, scaled logits, biases",
    ),
    "cohere2": Model("Command-R7B", "the same, mixed windows, layers without positions"),
    "glm": Model("GLM-4-9B", "interleaved partial rotary, fused gate and up, biases"),
    "glm4": Model("GLM-4-0414", "the same, norms before and behind"),
    "ernie4.5": Model("Ernie 4.5 0.3B", "interleaved rotary, biases"),
    "exaone4": Model("Exaone 4 32B", "norms behind, mixed windows, layers without positions"),
    "exaone4-everywhere": Model("Exaone 4 1.2B", "norms behind, no window"),
    "seed-oss": Model("Seed-OSS 36B", "biases"),
    "arcee": Model("AFM 4.5B", "squared ReLU without gate, biases"),
    "ministral3": Model(
        "Ministral 3, by itself", "YaRN beyond its original context, queries that grow with their position"
    ),
    "ministral3-that-sees": Model("Ministral 3", "its language model"),
    "hunyuan-dense": Model("Hunyuan 0.5B to 7B", "norms behind rotation, alpha"),
    "glm4-moe": Model(
        "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        "experts chosen by sigmoids with a bias, in groups, shared ones, a dense layer, partial rotary",
    ),
    "deepseek2": Model(
        "DeepSeek V2 Lite",
        "attention over latents, which pages hold, experts, shared ones, a dense layer, interleaved rotary",
    ),
    "deepseek2-groups": Model("DeepSeek V2", "the same, queries of a latent, groups of experts"),
    "deepseek3-yarn": Model(
        "DeepSeek V3 and R1", "the same, experts chosen by sigmoids with a bias, YaRN with its scales of attention"
    ),
    "glm4-moe-lite": Model("GLM-4.7-Flash", "the same"),
    "minicpm3": Model("MiniCPM 3", "attention over latents, longrope, scales of embeddings, residuals and logits"),
    "llama4": Model(
        "Llama 4, by itself",
        "chunks, layers without positions whose queries grow, norms without weights behind rotation, experts that read "
        "weighted",
    ),
    "llama4-that-sees": Model("Llama 4 Scout and Maverick", "its language model"),
    "dots1-window": Model("dots.llm1", "the same routing, window in the last layers"),
    "ernie4.5-moe": Model(
        "Ernie 4.5 21B-A3B, 300B-A47B",
        "experts in some layers, chosen with a bias, shared ones, interleaved rotary",
    ),
    "hunyuan-moe": Model("Hunyuan A13B", "experts, a shared one, norms behind rotation, alpha"),
    "gpt-oss": Model(
        "gpt-oss-20b, gpt-oss-120b",
        "sinks, mixed windows, biases of all projections, of the router and of experts, a clamped SwiGLU, YaRN; "
        "experts in full, or in MXFP4 as published",
    ),
    "gemma3n": Model(
        "Gemma 3n E2B, E4B",
        "hidden numbers in several streams, a residual of low rank, gates that are cut, embeddings by layer, layers "
        "that attend to what an earlier one keeps",
    ),
    "gemma3n-that-sees": Model("Gemma 3n, as published", "its language model"),
    "gemma4": Model(
        "Gemma 4 E2B, E4B",
        "heads of two sizes, scores without a scale, p-RoPE, normalised values, embeddings by layer, layers that "
        "attend to what an earlier one keeps, scales of layers",
    ),
    "gemma4-large": Model("Gemma 4 31B", "the same without those embeddings; KV heads by layer, values that are keys"),
    "gemma4-moe": Model("Gemma 4 26B-A4B", "the same, experts beside a dense MLP, capped logits"),
    "gemma4-that-sees": Model("Gemma 4, as published", "its language model"),
    "nemotron": Model("Nemotron 4, Minitron", "LayerNorm whose weights lack 1, squared ReLU, partial rotary"),
    "phi": Model("Phi-1, Phi-1.5, Phi-2", "attention beside MLP, partial rotary, biases, of the head, too"),
    "falcon-7b": Model(
        "Falcon 7B", "one KV head, a fused projection, attention beside MLP, GELU by the error function"
    ),
    "falcon-40b": Model(
        "Falcon 40B, 180B; Falcon 2 11B",
        "projections fused by KV head, a norm each, or one, for attention beside MLP; `alibi` is refused",
    ),
    "gpt2": Model("GPT-2", "learned positions, matrices with inputs first, a fused projection"),
    "gpt-bigcode": Model("StarCoder, SantaCoder", "learned positions, one KV head"),
    "gpt-neox": Model(
        "Pythia, GPT-NeoX 20B",
        "projections fused by head, partial rotary, attention beside MLP with a norm each, or before it",
    ),
    "lfm2": Model("LFM2, LFM2.5", "short convolutions, whose states are kept and found as pages are; norms of q and k"),
    "lfm2-moe": Model("LFM2-8B-A1B", "the same, experts chosen by sigmoids with a bias, dense layers"),
    "granite-hybrid": Model("Granite 4.0 H 350M, 1B, Micro", "Mamba-2 layers, a few of attention without positions"),
    "granite-hybrid-moe": Model("Granite 4.0 H Tiny and Small", "the same, experts and one that all tokens go through"),
    "falcon-h1": Model("Falcon H1", "attention and Mamba-2 side by side, numbers that much is multiplied by"),
    "falcon-h1-norm": Model("Falcon H1, `mamba_rms_norm`", "the same, a norm behind the gate"),
    "nemotron-h": Model("Nemotron-H, Nemotron Nano 2", "a layer is Mamba-2, attention without positions, or an MLP"),
    "nemotron-h-moe": Model("Nemotron 3 Nano", "the same, experts without gates"),
    "mamba2": Model("Mamba-2, Codestral Mamba", "Mamba-2 alone: no keys and values"),
    "qwen2-vl": Model("Qwen2-VL", "its language model"),
    "qwen2.5-vl": Model("Qwen2.5-VL", "its language model"),
    "qwen3-vl": Model("Qwen3-VL", "its language model"),
    "qwen3.5": Model("Qwen3.5-0.8B to 27B, their text models", "gated delta nets with states, gated attention"),
    "qwen3.5-that-sees": Model("Qwen3.5-0.8B to 27B", "their language models"),
    "qwen3.5-moe": Model("Qwen3.5-35B-A3B to 397B-A17B, their text models", "the same, experts"),
    "qwen3.5-moe-that-sees": Model("Qwen3.5-35B-A3B to 397B-A17B", "their language models"),
    "qwen3-next": Model("Qwen3-Next-80B-A3B", "the same, projections by head of keys"),
}


def architecture_of(variant: str) -> str:
    if variant in {**VARIANTS, **ON_CPU}:
        return {**VARIANTS, **ON_CPU}[variant][0]
    return type(tiny(variant)).__name__


def is_on_torch(variant: str) -> bool:
    """Whether the native layers for torch compute it."""
    architecture = architecture_of(variant)
    config = parse_config(tiny(variant).config.to_dict() | {"architectures": [architecture]})
    return find_architecture(architecture).on_torch and config.query_growth is None


def by_safetensors(variant: str) -> float:
    """The largest difference of a logit of the CPU engine's from transformers' own."""
    reference = tiny(variant)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=str(save(reference, Path(folder))), num_pages=64, kv_dtype="f32")
        engine = load_cpu_engine(config, lambda text, done=0, total=0: None)
        found = np.frombuffer(engine.rust.prompt_logits(np.array(IDS, np.int32)), np.float32)
        engine.close()
    worst = float((torch.from_numpy(found.reshape(len(IDS), -1).copy()) - reference_logits(reference, IDS)).abs().max())
    assert worst <= LOGITS_WITHIN, variant
    return float(f"{worst:.1e}")


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def table(figures: Figures) -> str:
    head = ("models", "architecture", "with", "safetensors", "GGUF", "torch")
    lines = [head, ("---",) * len(head)]
    theirs = {case.architecture for case in CASES}
    for variant, (called, seen) in MODELS.items():
        architecture = figures["architectures"][variant]
        torch_cell = (
            "native" if figures["on_torch"][variant] else "transformers' layers" if architecture in theirs else "no"
        )
        rows = [row for row in figures["gguf"].values() if row["variant"] == variant]
        cells = [f"`{kind}`: {_types(rows, kind)}" for kind in dict.fromkeys(row["file"] for row in rows)]
        logit = f"{figures['safetensors'][variant]:.0e}"
        lines.append((called, f"`{architecture}`", seen, logit, "; ".join(cells), torch_cell))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _types(rows: Iterable[Mapping[str, Any]], kind: str) -> str:
    """The largest differences of rows whose files say that they are `kind`."""
    worst = dict[str, float]()
    for row in rows:
        for name, difference in row["types"].items() if row["file"] == kind else ():
            worst[name] = max(worst.get(name, 0.0), difference)
    return ", ".join(f"{name} {difference:.0e}" for name, difference in worst.items())


def written(page: str, content: str, begin: str = BEGIN) -> str:
    before, _, rest = page.partition(begin)
    return before + begin + content + END + rest.partition(END)[2]


def main() -> None:
    from tests.weights.test_gguf_folder_llama_cpp import ROWS, seen_of

    figures: dict[str, dict[str, Any]] = recorded() if RECORD.exists() else {"safetensors": {}, "gguf": {}}
    for kind, known in (("safetensors", MODELS), ("gguf", ROWS)):
        old = figures[kind]
        figures[kind] = {name: old[name] for name in known if name in old}
        for name in known:
            if old.get(name) is not None and not {name, "all"} & set(sys.argv[1:]):
                continue
            with tempfile.TemporaryDirectory() as folder:
                os.environ[envs.CACHE] = folder
                seen = by_safetensors(name) if kind == "safetensors" else seen_of(name, Path(folder))
            print(name, seen, flush=True)
            now = figures[kind] | {name: seen}
            figures[kind] = {one: now[one] for one in known if one in now}
            RECORD.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    figures["architectures"] = {variant: architecture_of(variant) for variant in MODELS}
    figures["on_torch"] = {variant: is_on_torch(variant) for variant in MODELS}
    RECORD.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table(figures)), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
