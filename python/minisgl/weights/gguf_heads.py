"""Heads in a GGUF file, converted to the files of transformers and sentence-transformers: the classes of cross
encoders, Qwen3-Reranker's two tokens, dense layers. These are small, so they are copied into the folder.

Invariants: a head with a missing part is an error, because its scores would not be the model's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.weights.gguf_config import Fields, Shapes
from minisgl.weights.stored import write_tensors

Floats = npt.NDArray[np.float32]
SCORE, DENSE, POOLED = "cls.output", ("dense_2", "dense_3"), "cls"
_CLASSES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "bert": ("BertForSequenceClassification", {POOLED: "bert.pooler.dense", SCORE: "classifier"}),
    "modern-bert": (
        "ModernBertForSequenceClassification",
        {POOLED: "head.dense", "cls.norm": "head.norm", SCORE: "classifier"},
    ),
    "qwen3": ("Qwen3ForSequenceClassification", {SCORE: "score"}),
}
"""Classifier of a file by `general.architecture`: its transformers class, and the checkpoint names of its parts."""
_YES_NO = ["yes", "no"]
_IDENTITY = "torch.nn.modules.linear.Identity"
_MODULES = "sentence_transformers.models"


def with_head(config: dict[str, Any], fields: Fields, shapes: Shapes) -> dict[str, Any]:
    """Return `config` with the file's classification head, if it has one. Raises `ConfigError` if it is unsupported."""
    if f"{SCORE}.weight" not in shapes:
        return config
    if (classifier := _CLASSES.get(fields.architecture)) is None:
        raise ConfigError(f"tensor {SCORE}.weight: scores of this architecture are not imported")
    named, parts = classifier
    if missing := [part for part in parts if f"{part}.weight" not in shapes]:
        why = "scores without it are not the model's (converters leave BERT's pooler out): use its safetensors"
        raise ConfigError(f"tensor {missing[0]}.weight is missing: {why}")
    labels = fields.texts(key) if fields.has(key := fields.own("classifier.output_labels")) else []
    if fields.architecture == "qwen3":
        _check_judge(fields, shapes, labels)
        labels = []
    with_classes = {**config, "architectures": [named], "classifier_pooling": "mean"}
    return {**with_classes, "id2label": {str(i): label for i, label in enumerate(labels)}} if labels else with_classes


def _check_judge(fields: Fields, shapes: Shapes, labels: Sequence[str]) -> None:
    """Raise `ConfigError` unless labels and prompt template are those of Qwen3-Reranker."""
    if list(labels) != _YES_NO or shapes[f"{SCORE}.weight"][0] != len(_YES_NO):
        raise ConfigError(f"{fields.own('classifier.output_labels')}: {labels}: only {_YES_NO} are imported")
    form = fields.text("tokenizer.chat_template.rerank", "")
    if "<Instruct>: " not in form or "\n<Query>: {query}\n<Document>: {document}<|im_end|>\n" not in form:
        raise ConfigError("tokenizer.chat_template.rerank: is not the prompt template of Qwen3-Reranker")


def write_heads(header: _rust.GgufHeader, folder: Path) -> None:
    """Write the heads of a GGUF file to `folder`. Raises `ConfigError`."""
    tensors, architecture = header["tensors"], header["metadata"]["general.architecture"]
    if f"{SCORE}.weight" in tensors:
        own = {
            f"{theirs}.{what}": _read(header, name)
            for part, theirs in _CLASSES[architecture][1].items()
            for what in ("weight", "bias")
            if (name := f"{part}.{what}") in tensors
        }
        if architecture == "qwen3":  # the difference of both logits, whose sigmoid is the probability of "yes"
            yes, no = own.pop("score.weight")
            own = {"score.weight": (yes - no)[None]}
        write_tensors(folder / "heads.safetensors", own)
    if dense := [name for name in DENSE if f"{name}.weight" in tensors]:
        _write_dense(header, folder, dense)


def _write_dense(header: _rust.GgufHeader, folder: Path, dense: Sequence[str]) -> None:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"{name[-1]}_Dense", "Dense") for name in dense)]
    modules.append(("4_Normalize", "Normalize"))
    listed = [{"path": path, "type": f"{_MODULES}.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    for name in dense:
        subfolder = folder / f"{name[-1]}_Dense"
        subfolder.mkdir()
        (subfolder / "config.json").write_text(json.dumps({"activation_function": _IDENTITY}), encoding="utf-8")
        write_tensors(subfolder / "model.safetensors", {"linear.weight": _read(header, f"{name}.weight")})


def _read(header: _rust.GgufHeader, name: str) -> Floats:
    kind, shape = header["tensors"][name]
    file, start, end = header["places"][name]
    with file.open("rb") as opened:
        opened.seek(start)
        data = opened.read(end - start)
    try:
        values: Floats = np.frombuffer(_rust.decode_blocks(kind, data), "<f4").astype(np.float32)
    except ValueError as error:
        raise ConfigError(f"tensor {name}: {error}") from error
    if values.size != math.prod(shape):
        raise ConfigError(f"tensor {name}: the file was truncated")
    return values.reshape(shape)
