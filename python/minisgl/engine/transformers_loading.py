"""Loading of a model with transformers' own layers and this package's attention.

Invariants: a checkpoint that does not fill the model exactly is an error with the tensor names; nothing is downloaded;
nothing is printed to the terminal.
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
from minisgl.models.architectures import is_other_half
from minisgl.models.transformers_config import TheirModel, find_their_model
from minisgl.models.transformers_model import TransformersModel
from minisgl.models.transformers_probe import look
from minisgl.utils.progress import Report
from minisgl.weights.stored import weight_files

_SHOWN = 8
# names of a whole model to those of its text model, as transformers 4 and 5 write them
_TEXT_NAMES = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def load_their_model(config: EngineConfig, folder: Path, device: torch.device, say: Report) -> LoadedModel:
    """Load the model in `folder` with transformers' layers on `device`. Raises `ConfigError`."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if config.torch_compile and device.type == "cuda":
        raise ConfigError(
            "--torch-compile: not with the layers of transformers, which keep it from seeing a whole forward"
        )
    found = find_their_model(folder)
    dtype_name, why = dtypes.choose(config.dtype, found.dtype, device)
    say(f"{found.architecture}: the layers are those of transformers {transformers.__version__}")
    if found.limited_by:
        say(f"context: {found.context_len} tokens at most: {found.limited_by}")
    limit = config.max_seq_len
    if limit is not None and limit > found.context_len:
        reason = f", because {found.limited_by}" if found.limited_by else ""
        raise ConfigError(f"--max-seq-len {limit}: the model's context is {found.context_len}{reason}")
    with torch.inference_mode():
        theirs = _weights(config, found, folder, dtypes.DTYPES[dtype_name], say)
        model = TransformersModel(theirs.to(device).eval())
        look(model, found.architecture, found.vocab_size)
    return LoadedModel(
        model=model,
        architecture=found.architecture,
        vocab_size=found.vocab_size,
        context_len=found.context_len if limit is None else limit,
        eos_ids=found.eos_ids,
        dtype=dtype_name,
        why=why,
        details=f"layers of transformers {transformers.__version__}",
    )


def _weights(config: EngineConfig, found: TheirModel, folder: Path, dtype: torch.dtype, say: Report) -> Any:
    if config.load_format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            return found.kind._from_config(found.config, dtype=dtype)
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
    try:
        model, about = found.kind.from_pretrained(
            folder,
            config=found.config,
            dtype=dtype,
            key_mapping=_TEXT_NAMES if found.text_half else None,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are an error below
        )
    except (RuntimeError, ValueError, OSError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(f"{folder.name}: transformers cannot load the weights: {error}") from error
    _check(folder, about, found, say)
    return model


def _check(folder: Path, about: Mapping[str, Iterable[Any]], found: TheirModel, say: Report) -> None:
    """Raise `ConfigError` if tensors are missing, unknown or misshaped: transformers would fill them randomly."""
    surplus = sorted(map(str, about["unexpected_keys"]))
    left_out = [name for name in surplus if found.text_half and is_other_half(name)]
    problems = {
        "missing": sorted(map(str, about["missing_keys"])),
        "unknown": [name for name in surplus if name not in left_out and not re.search(r"rotary_emb\.inv_freq$", name)],
        "of the wrong shape": sorted(str(one) for one in about["mismatched_keys"]),
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
