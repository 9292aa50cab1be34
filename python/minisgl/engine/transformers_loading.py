"""Loading of a model with transformers' own layers and this package's attention.

Invariants: a checkpoint that does not fill the model exactly is an error with the tensor names; nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import dtypes
from minisgl.models.api import LoadedModel
from minisgl.models.architectures import is_vision_tensor
from minisgl.models.transformers_config import TransformersSource, find_transformers_source
from minisgl.models.transformers_model import TransformersModel
from minisgl.models.transformers_probe import probe
from minisgl.utils.progress import Report
from minisgl.weights.stored import weight_files

_SHOWN = 8
# names of a whole model to those of its text model, as transformers 4 and 5 write them
_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def load_transformers_model(config: EngineConfig, folder: Path, device: torch.device, say: Report) -> LoadedModel:
    """Load the model in `folder` with transformers' layers on `device`. Raises `ConfigError`."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if config.torch_compile and device.type == "cuda":
        raise ConfigError(
            "--torch-compile: not supported with transformers' layers, which keep it from compiling a whole forward"
        )
    source = find_transformers_source(folder)
    dtype_name, why = dtypes.choose(config.dtype, source.dtype, device)
    say(f"{source.architecture}: the layers are those of transformers {transformers.__version__}")
    if source.limited_by:
        say(f"context: {source.context_len} tokens at most: {source.limited_by}")
    limit = config.max_seq_len
    if limit is not None and limit > source.context_len:
        reason = f", because {source.limited_by}" if source.limited_by else ""
        raise ConfigError(f"--max-seq-len {limit}: must be at most {source.context_len}, the context{reason}")
    with torch.inference_mode():
        module = _weights(config, source, folder, dtypes.DTYPES[dtype_name], say)
        model = TransformersModel(module.to(device).eval())
        probe(model, source.architecture, source.vocab_size)
    return LoadedModel(
        model=model,
        architecture=source.architecture,
        vocab_size=source.vocab_size,
        context_len=source.context_len if limit is None else limit,
        eos_ids=source.eos_ids,
        dtype=dtype_name,
        why=why,
        details=f"layers of transformers {transformers.__version__}",
    )


def _weights(config: EngineConfig, source: TransformersSource, folder: Path, dtype: torch.dtype, say: Report) -> Any:
    if config.load_format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return source.kind._from_config(source.config, dtype=dtype)
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
    try:
        model, about = source.kind.from_pretrained(
            folder,
            config=source.config,
            dtype=dtype,
            key_mapping=_TEXT_NAMES if source.text_half else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are an error below
        )
    except (RuntimeError, ValueError, OSError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(f"{folder.name}: transformers cannot load the weights: {error}") from error
    _check(folder, about, source, say)
    return model


def _check(folder: Path, about: Mapping[str, Iterable[Any]], source: TransformersSource, say: Report) -> None:
    """Raise `ConfigError` if tensors are missing, unknown or misshaped: transformers would fill them randomly."""
    surplus = sorted(map(str, about["unexpected_keys"]))
    left_out = [name for name in surplus if source.text_half and is_vision_tensor(name)]
    problems = {
        "missing": sorted(map(str, about["missing_keys"])),
        "unknown": [name for name in surplus if name not in left_out and not re.search(r"rotary_emb\.inv_freq$", name)],
        "of the wrong shape": sorted(str(mismatch) for mismatch in about["mismatched_keys"]),
    }
    named = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in problems.items()
        if names
    ]
    if named:
        raise ConfigError(f"{folder.name}: the weights do not fit the model: {'; '.join(named)}")
    if left_out:
        say(f"text only: {len(left_out)} tensors are not loaded")
