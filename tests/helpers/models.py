"""Tiny checkpoints made by transformers from the table in tests/helpers/variants.py, and a dense attention to run our
models one sequence at a time, without an engine, its attention or its scheduling."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl.models import load_config
from minisgl.models.decoder import Decoder, build_model
from minisgl.tokenizer.echo import echo_json
from minisgl.weights.checkpoint import load_weights
from tests.helpers.variants import MODELS, TINY, TINY_THEIRS, Config, Model

CPU = torch.device("cpu")
LOGITS_WITHIN = 1e-4
TIE_WITHIN = 1e-3  # a differing greedy token is allowed only if the reference's top logits lie this close
_NORM = re.compile(
    r"(?i:norm)(_\d)?\.weight$|\.norms\.|\bln_\w+\.weight$|router\.scale$|per_expert_scale$|layer_scalar$|output_scale$"
)


def tiny_model(variant: str, **changes: Any) -> Any:
    """Return a tiny transformers model of a variant. `changes`: settings of its (text model's) config."""
    return made(MODELS[variant], TINY, **changes)


def tiny_case(case: Model) -> Any:
    """Return a model for transformers' layers, with eager attention; skips the test where transformers lacks it."""
    import transformers

    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if release < (5,):
        pytest.skip("seen with transformers 5: before it fewer classes ask the registry")
    if case.architecture in ("GPTJForCausalLM", "CodeGenForCausalLM") and release < (5, 24):
        pytest.skip("asks the registry since transformers 5.24")
    if not hasattr(transformers, case.architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {case.architecture}")
    return made(case, TINY_THEIRS, whole={"attn_implementation": "eager"})  # other implementations may lack soft caps


def made(model: Model, base: Config, *, own: Any = None, whole: Config | None = None, **changes: Any) -> Any:
    """Return the model in float32, eval mode; all parameters are random, norms and biases too. `own`: a class to use
    instead of transformers'. `whole`: further settings of the top-level config."""
    import transformers

    kind = own or getattr(transformers, model.architecture)
    settings = {**base, **model.config, **changes}
    whole = {**model.whole, **(whole or {})}
    torch.manual_seed(7)
    if model.vision is not None:
        return _with_vision(kind, model.vision, whole, {"tie_word_embeddings": False, **settings})
    if transformers.__version__.startswith("4.") and "rope_parameters" in settings:  # as it was called before 5.0
        rope = dict(settings.pop("rope_parameters"))
        if local := rope.get("sliding_attention"):
            settings["rope_local_base_freq"], rope = local["rope_theta"], dict(rope["full_attention"])
        settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    return randomised(kind(kind.config_class(**settings, **whole)))


def _with_vision(kind: Any, vision: Config, whole: Config, text: Config) -> Any:
    import transformers

    tower: Any = {name: text["hidden_size"] if value is None else value for name, value in vision.items()}
    whole = {**whole, "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    if kind.config_class is transformers.Gemma3nConfig:  # its own tower is of a package that is not needed here
        config = kind.config_class(**whole)
        config.__dict__["vision_config"] = transformers.SiglipVisionConfig(**tower)  # past the check of its type
    else:
        config = kind.config_class(**whole, vision_config=tower)
    model = randomised(kind(config))
    if kind.__name__.startswith("Llama4"):
        model.forward = model.language_model.forward  # its own fails without a picture
    return model


def randomised(model: Any) -> Any:
    """Make norms and biases random, too; return the model in float32, eval mode."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            unscaled = model.config.model_type.startswith(("gemma4", "gemma3n"))
            if unscaled and name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.uniform_(0.3, 0.7)  # nothing else keeps its scores small
            elif _NORM.search(name):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                parameter.normal_(0.0, 0.3)
            elif name.endswith((".D", "mamba.A_log", "mixer.A_log")):
                parameter.uniform_(-0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # integer buffers are masks
                buffer.normal_(0.0, 0.3)
            elif _NORM.search(name):
                buffer.uniform_(0.5, 1.5)
    return model.float().eval()


def save(
    model: Any, folder: Path, *, shards: bool = False, original_names: bool = True, tokenizer: bool = False
) -> Path:
    """Save a checkpoint. `original_names` false: tensor names of transformers 5 (experts in one tensor). `tokenizer`:
    with the echo engine's, of 258 tokens."""
    size = "40KB" if shards else "1GB"
    model.save_pretrained(folder, max_shard_size=size, save_original_format=original_names)
    assert (folder / "model.safetensors.index.json").exists() == shards
    if model.config.model_type == "qwen3_vl_moe":  # as published: transformers turns experts when it loads them
        for file in folder.glob("*.safetensors"):
            stored = {n: one.mT.contiguous() if ".experts." in n else one for n, one in load_file(file).items()}
            save_file(stored, file, {"format": "pt"})
    if tokenizer:
        (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    return folder


def flatten(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint without the `model.` prefix of names, like embedding models, and with tensors alternating
    between three dtypes; return their values in float32 by the usual names."""
    kinds, found = itertools.cycle((torch.bfloat16, torch.float16, torch.float32)), dict[str, torch.Tensor]()
    renamed: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored = {name: tensor.to(next(kinds)) for name, tensor in sorted(load_file(file).items())}
        found |= {name: tensor.float() for name, tensor in stored.items()}
        renamed |= {name.removeprefix("model."): file.name for name in stored}
        save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": renamed}))
    return found


def published(reference: Any, folder: Path) -> int:
    """Save a checkpoint in OpenAI's format for gpt-oss, with random MXFP4 experts, and load their decoded weights into
    `reference`. Return the experts' bytes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors as convert

    generator = torch.Generator().manual_seed(5)
    packed = {}
    for name, parameter in reference.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 125, shape, generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert(blocks, scales, dtype=torch.float32))
            packed[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(reference, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, parts in packed.items():
        del tensors[name]
        tensors |= parts
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.numel() for parts in packed.values() for tensor in parts.values())


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
    """Load our model of a checkpoint."""
    with torch.inference_mode():
        config = load_config(folder)
        model = build_model(config, dtype=dtype, device=device)
        load_weights(
            model.checkpoint(), folder, stacked=model.stacked(), own_name=model.own_name, packing=config.packing
        )
    return model


class DenseSequence:
    """Sequence with all its K and V, extended chunk by chunk; attention is a plain masked softmax in float32."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0

    @torch.inference_mode()
    def extend(self, ids: Sequence[int]) -> Tensor:
        """Append n ids; return the logits [n, vocab_size] after each."""
        positions = torch.arange(self.length, self.length + len(ids))
        hidden = self._model.forward(torch.tensor(ids), positions, self._attend)
        self.length += len(ids)
        return self._model.logits(hidden)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._keys:
            k, v = torch.cat((self._keys[layer], k)), torch.cat((self._values[layer], v))
        self._keys[layer], self._values[layer] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
        scale = self._model.attention[layer].scale or q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        behind = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
        hidden = (behind < 0) | (behind >= (self._model.config.windows[layer] or len(k)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def greedy(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Generate `count` greedy tokens."""
    sequence, tokens = DenseSequence(model), list[int]()
    logits = sequence.extend(prompt)[-1]
    while len(tokens) < count:
        tokens.append(int(logits.argmax()))
        logits = sequence.extend(tokens[-1:])[-1]
    return tokens


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [n, vocab_size] of a transformers model."""
    logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def assert_greedy(reference: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Assert that each token is the reference's own greedy choice, except for ties within `TIE_WITHIN`."""
    logits = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    behind = logits.max(1).values - chosen
    assert behind.max() <= TIE_WITHIN, f"token {int(behind.argmax())} lies {float(behind.max()):.5f} behind the best"
