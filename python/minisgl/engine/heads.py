"""Heads on top of pooled hidden states: the dense layers that sentence-transformers stores in folders of their own, and
the scoring heads of cross encoders, classifiers and rerankers.

Invariants: an unsupported layer is an error that names its file or tensor; torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minisgl.config import ConfigError
from minisgl.weights.stored import Stored, stored_tensors, weight_files

Step = tuple[str, bytes, bytes, float]
"""A layer of a head: kind, weight, bias and epsilon, as for `CpuEngine.set_heads`; values are float32 bytes."""
Raw = Mapping[str, Any]
CLASSIFIES = "ForSequenceClassification"
JUDGES = "Qwen3ForCausalLM"
"""Architecture that may be a yes-or-no reranker: only the prompt format of Qwen3-Reranker is supported."""
_ACTIVATIONS: dict[str, list[Step]] = {
    "identity": [],
    "tanh": [("tanh", b"", b"", 0.0)],
    "gelu": [("gelu", b"", b"", 0.0)],
}


class Heads(NamedTuple):
    """The heads of a model: steps after pooling, and pooling kind and steps of the scoring head (None: no scores)."""

    embedding: list[Step]
    score: tuple[str, list[Step]] | None


NO_HEADS = Heads([], None)


class _Tensors:
    """The tensors of one model folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Stored] = {
            tensor.name: tensor for file in weight_files(folder) for tensor in stored_tensors(file)
        }

    def linear(self, name: str) -> Step:
        return ("linear", self.data(f"{name}.weight"), self.data(f"{name}.bias", missing=b""), 0.0)

    def data(self, name: str, missing: bytes | None = None) -> bytes:
        """Return the tensor as little-endian float32 bytes, else `missing`. Raises `ConfigError` without either."""
        if (tensor := self._known.get(name)) is None:
            if missing is None:
                raise ConfigError(f"{self._folder.name}: no tensor {name}: its head is incomplete")
            return missing
        return bytes(np.ascontiguousarray(tensor.read(), "<f4").tobytes())

    def rows(self, *names: str) -> Stored:
        """Return the first of `names` that the folder has, [rows, inputs]. Raises `ConfigError` if it has none."""
        if tensor := next((self._known[name] for name in names if name in self._known), None):
            return tensor
        raise ConfigError(f"{self._folder.name}: no tensor {names[-1]}: its head is incomplete")


def read_heads(folder: Path, architecture: str, raw: Raw) -> Heads:
    """Read the heads of the model in `folder` with config.json `raw`. Raises `ConfigError` if one is not supported."""
    make = next((make for name, make in _SCORES.items() if architecture == f"{name}{CLASSIFIES}"), None)
    if make is not None:
        return Heads(_dense_layers(folder), make(_Tensors(folder), raw))
    return Heads(_dense_layers(folder), _yes_or_no(folder, raw) if architecture == JUDGES else None)


def _dense_layers(folder: Path) -> list[Step]:
    """Return the steps of the dense layers that modules.json lists after the pooling."""
    steps: list[Step] = []
    for path, raw in _modules(folder, "Dense"):
        name = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh"))
        if (then := _ACTIVATIONS.get(name.rpartition(".")[2].lower())) is None:
            raise ConfigError(f"{path}/config.json: activation_function: {name} is not supported")
        steps += [_Tensors(folder / path).linear("linear"), *then]
    return steps


def _modules(folder: Path, kind: str) -> list[tuple[str, Raw]]:
    """Return path and config of each module of type `kind` in modules.json; empty if there is no such file."""
    file, configs = folder / "modules.json", list[tuple[str, Raw]]()
    if not file.is_file():
        return configs
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        paths = [str(module["path"]) for module in modules if str(module["type"]).rpartition(".")[2] == kind]
        for path in paths:
            file = folder / path / "config.json"
            configs.append((path, dict(json.loads(file.read_text(encoding="utf-8")))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file.relative_to(folder)}: {error!r}") from error
    return configs


def _yes_or_no(folder: Path, config: Raw) -> tuple[str, list[Step]] | None:
    """Return the scoring head of a language model that answers with one of two tokens, as the `LogitScore` module of
    sentence-transformers' cross encoders defines it: the difference of their logits, whose sigmoid is the softmax
    probability of the first token. None without such a module, or if it names one token, which gives no probability."""
    for path, raw in _modules(folder, "LogitScore"):
        ids: list[Any] = [raw.get(name) for name in ("true_token_id", "false_token_id")]
        if None in ids:
            continue
        tied = ["model.embed_tokens.weight"] if config.get("tie_word_embeddings") else []
        table = _Tensors(folder).rows("lm_head.weight", *tied)
        if not all(isinstance(token, int) and 0 <= token < table.shape[0] for token in ids):
            raise ConfigError(f"{path}/config.json: token ids {ids}: must be below {table.shape[0]}")
        row = table.nbytes // table.shape[0]
        yes, no = (replace(table, shape=table.shape[1:], start=table.start + row * token).read() for token in ids)
        return "last", [("linear", (yes - no).astype("<f4").tobytes(), b"", 0.0)]
    return None


def _bert(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    return "cls", [tensors.linear("bert.pooler.dense"), *_ACTIVATIONS["tanh"], tensors.linear("classifier")]


def _roberta(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    first, last = tensors.linear("classifier.dense"), tensors.linear("classifier.out_proj")
    return "cls", [first, *_ACTIVATIONS["tanh"], last]


def _qwen3(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    return "last", [tensors.linear("score")]


def _modern_bert(tensors: _Tensors, raw: Raw) -> tuple[str, list[Step]]:
    if (name := raw.get("classifier_activation") or "gelu") != "gelu":
        raise ConfigError(f"config.json: classifier_activation: {name!r} is not supported: only gelu")
    if (pooling := raw.get("classifier_pooling") or "cls") not in ("cls", "mean"):
        raise ConfigError(f"config.json: classifier_pooling: {pooling!r} is not supported: only cls and mean")
    weight, bias = tensors.data("head.norm.weight"), tensors.data("head.norm.bias", missing=b"")
    norm: Step = ("layer_norm", weight, bias, float(raw.get("norm_eps", 1e-5)))
    return pooling, [tensors.linear("head.dense"), *_ACTIVATIONS["gelu"], norm, tensors.linear("classifier")]


_SCORES: dict[str, Callable[[_Tensors, Raw], tuple[str, list[Step]]]] = {
    "Bert": _bert,
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
    "MPNet": _roberta,
    "ModernBert": _modern_bert,
    "Qwen3": _qwen3,
}
"""Scoring heads by the prefix of an architecture before `CLASSIFIES`."""
