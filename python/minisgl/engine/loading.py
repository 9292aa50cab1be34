"""Loading of a torch engine from a configuration: find the model, load it, size the KV pool, warm up.

Every failure names the flag to change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from minisgl.attention import KVPool
from minisgl.attention.kv_pool import page_bytes
from minisgl.config import ConfigError, EngineConfig, ModelImpl
from minisgl.distributed import ALONE, Group
from minisgl.engine import dtypes
from minisgl.engine.api import EngineInfo
from minisgl.engine.building import INLINE, build_torch_engine, check_device, choose_backend, out_of_memory
from minisgl.engine.building import num_pages as cuda_num_pages
from minisgl.engine.dtypes import DTYPES
from minisgl.engine.pool_size import check_weights, cpu_num_pages, free_for
from minisgl.engine.sight import Sight, described, find_sight, image_fields
from minisgl.engine.torch_engine import TorchEngine
from minisgl.engine.torch_sight import load_tower
from minisgl.engine.worker import ForwardThread
from minisgl.models import ModelConfig, is_native, load_config, own_name
from minisgl.models.api import LoadedModel
from minisgl.models.config import read_config
from minisgl.models.decoder import Decoder, build_model
from minisgl.models.towers import with_images
from minisgl.tokenizer.borrowed import text_folder
from minisgl.utils.installed import how_to_get, missing, need, need_extension
from minisgl.utils.memory import Free
from minisgl.utils.progress import Report, counter
from minisgl.weights.checkpoint import HEAD, TABLE, dummy_weights, has_other_head, load_weights
from minisgl.weights.quantization import Packing
from minisgl.weights.sources import A_GGUF_FILE, find_model, resolve_model
from minisgl.weights.stored import weight_files

SEEING = ("Qwen3VLForConditionalGeneration",)
"""Architectures whose images this engine computes."""


def load_engine(config: EngineConfig, say: Report, group: Group = ALONE) -> TorchEngine:
    """Load the engine in the thread that will run its forwards; on a CUDA device that thread ends after loading, and
    the caller's thread launches. Raises `ConfigError` that says what to change."""
    thread = ForwardThread("torch-forward", threaded=group.rank == 0)
    try:
        engine = thread.submit(lambda: _load(config, say, thread, group)).wait()
    except BaseException as error:
        thread.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise out_of_memory(
                error, "loading", "a smaller model, or a lower --memory-ratio or --num-pages"
            ) from error
        raise
    if engine.thread is None:
        thread.close()
        if engine.info.device != "cpu":
            torch.cuda.set_device(engine.info.device)  # the calling thread will launch
    return engine


def _load(config: EngineConfig, say: Report, thread: ForwardThread, group: Group) -> TorchEngine:
    began = time.monotonic()
    device = device_of(config, group.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folder = folder_of(config, say)
    native = is_native(folder, config.model_impl)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif device.type == "cpu" and group.size > 1:  # ranks share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // group.size))
    sight = _find_sight(config, folder, native, group)
    if line := sight.line():
        say(line)
    loaded = (
        _load_native(config, folder, device, say, group, sight)
        if native
        else _load_transformers(config, folder, device, say)
    )
    layers, dtype = loaded.model.attention, DTYPES[loaded.dtype]
    tower = None
    if sight.tower is not None:
        raw = read_config(folder)[0]
        tower = load_tower(folder, raw, sight, dtype, device, dummy=config.load_format == "dummy")
    page_size = page_bytes(layers, config.page_size, dtype)
    with torch.inference_mode():
        group.all_reduce_min(0)  # a barrier: free memory is known when all ranks have loaded
        num_pages = group.all_reduce_min(_num_pages(config, page_size, loaded.context_len, group.size, device))
        pool = KVPool(layers, num_pages=num_pages, page_size=config.page_size, dtype=dtype, device=device)
    took = time.monotonic() - began
    say(f"loaded {folder.name}: {loaded.architecture}, {loaded.dtype} ({loaded.why}), {took:.1f} s")
    each = "" if group.size == 1 else " on each rank"
    say(f"KV pool: {num_pages} pages of {config.page_size} tokens, {num_pages * page_size / 2**20:.0f} MiB{each}")
    info = EngineInfo(
        name="torch",
        model_dir=str(text_folder(config, folder, loaded.vocab_size, say)),
        vocab_size=loaded.vocab_size,
        context_len=loaded.context_len,
        eos_ids=loaded.eos_ids,
        num_pages=num_pages,
        page_size=config.page_size,
        device=str(device),
        dtype=loaded.dtype,
        details=loaded.details,
        **image_fields(sight.tower),
    )
    runs_here = device.type == "cpu" and config.device != INLINE
    return build_torch_engine(config, loaded.model, info, pool, say, group, thread if runs_here else None, tower)


def _find_sight(config: EngineConfig, folder: Path, native: bool, group: Group) -> Sight:
    """Find the tower of the model in `folder`, or why this engine reads text only. Raises `ConfigError`."""
    raw, model = read_config(folder)[0], load_config(folder) if native else None
    if not isinstance(raw.get("vision_config"), Mapping):
        return Sight()
    if model is None or model.architecture not in SEEING:
        return Sight(reason="--engine torch sees with Qwen3-VL alone: --engine cpu sees with more models")
    if group.size > 1:
        return Sight(reason=f"--tp {group.size}: only one rank sees")
    if not any(folder.glob("*.safetensors")) and config.load_format != "dummy":
        return Sight(reason="--engine torch reads towers of safetensors folders alone")
    _, reason = described(folder, config.mmproj)
    if absent := missing("transformers"):
        reason = reason or f"{absent[0]}, whose tower it is, is not installed: {how_to_get('torch')}"
    return find_sight(folder, folder, raw, model, dummy=config.load_format == "dummy", reason=reason)


def _load_native(
    config: EngineConfig, folder: Path, device: torch.device, say: Report, group: Group, sight: Sight
) -> LoadedModel:
    model_config = _with_untied_head(load_config(folder), folder, config, say)
    if sight.tower is not None:
        model_config = with_images(model_config, read_config(folder)[0], sight.tower)
    dtype_name, why = dtypes.choose(config.dtype, model_config.dtype, device)
    context_len = model_config.context_len(config.max_seq_len)
    _check_weights(config, folder, (model_config.dtype, dtype_name), device, group)
    with torch.inference_mode():
        model = build_model(
            model_config, dtype=DTYPES[dtype_name], device=device, max_position=context_len, group=group
        )
        config.check_states(False)
        choose_backend(config, model.attention, DTYPES[dtype_name], device)  # raises before the weights are read
        _fill(model, folder, config, model_config.packing, say)
        model.pack()
    return LoadedModel(
        model=model,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        context_len=context_len,
        eos_ids=model_config.eos_ids,
        dtype=dtype_name,
        why=why,
    )


def _check_weights(
    config: EngineConfig, folder: Path, stored_and_computed: tuple[str, str], device: torch.device, group: Group
) -> None:
    """Raise `ConfigError`, before any weight is read, if the weights in their computed dtype do not fit into memory."""
    if config.load_format == "dummy":
        return
    stored, computed = (DTYPES[name].itemsize if name in DTYPES else 2 for name in stored_and_computed)
    num_bytes = sum(file.stat().st_size for file in weight_files(folder)) * computed // stored
    if device.type == "cuda":
        free = Free(torch.cuda.mem_get_info(device)[0], f"on {device}")
        check_weights(config, num_bytes // group.size, free)
    else:
        check_weights(config, num_bytes, free_for(config))


def _load_transformers(config: EngineConfig, folder: Path, device: torch.device, say: Report) -> LoadedModel:
    need(f"--model-impl {config.model_impl}: this model, whose layers are not native ones,", "transformers")
    from minisgl.engine.transformers_loading import load_transformers_model

    return load_transformers_model(config, folder, device, say)


def _with_untied_head(model_config: ModelConfig, folder: Path, config: EngineConfig, say: Report) -> ModelConfig:
    """Return the configuration with an untied head if the checkpoint has a distinct one, whatever config.json says."""
    if not model_config.tie_word_embeddings or config.load_format == "dummy":
        return model_config
    if not has_other_head(folder, partial(own_name, model_config.architecture)):
        return model_config
    say(f"{folder.name}: config.json says tie_word_embeddings, but {HEAD} differs from {TABLE}: both are used")
    return replace(model_config, tie_word_embeddings=False)


def check_ranks(model_dir: Path, ranks: int, impl: ModelImpl = "auto") -> None:
    """Raise `ConfigError` if the model cannot be sharded over `ranks` tensor-parallel ranks."""
    if not is_native(model_dir, impl):
        raise ConfigError(
            f"--tp {ranks}: this model uses transformers' layers, which cannot be sharded: leave it out, or "
            f"use --dp {ranks}"
        )
    config = load_config(model_dir)
    if problem := _indivisible_size(config, ranks):
        good = ", ".join(str(n) for n in range(1, config.num_heads + 1) if not _indivisible_size(config, n))
        raise ConfigError(f"--tp {ranks}: config.json: {problem} cannot be divided by {ranks}: choose --tp {good}")


def fitting_ranks(config: EngineConfig, say: Report) -> tuple[int, str]:
    """Return the largest power of two of CUDA devices that the model can be sharded over, and the reason. Raises
    `ConfigError`."""
    kind, _, first = config.device.partition(":")
    uses_cuda = kind in ("auto", "cuda") and torch.cuda.is_available()
    count = max(0, torch.cuda.device_count() - (int(first) if first.isdecimal() else 0)) if uses_cuda else 0
    if count < 2:
        return 1, "there is one CUDA device to use" if count else "there is no CUDA device to use"
    if config.torch_compile:
        return 1, "--torch-compile cannot compile collectives"
    folder = folder_of(config, say)
    if not is_native(folder, config.model_impl):
        return 1, "this model uses transformers' layers, which cannot be sharded"
    sizes = load_config(folder)
    ranks = max(n for n in (2**i for i in range(count.bit_length())) if n <= count and not _indivisible_size(sizes, n))
    return ranks, f"there are {count} CUDA devices, and the model's sizes come in {ranks} equal parts"


def _indivisible_size(config: ModelConfig, ranks: int) -> str:
    """Return the first size that `ranks` does not divide, else an empty string. KV heads may also divide `ranks`."""
    moe = config.moe
    sizes = {"num_attention_heads": config.num_heads}
    if moe is None or len(moe.layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if moe is not None:
        sizes["moe_intermediate_size"] = moe.intermediate_size
    for name, size in sizes.items():
        if size % ranks:
            return f"{name}: {size}"
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        return f"num_key_value_heads: {config.num_kv_heads}"
    return ""


def folder_of(config: EngineConfig, say: Report) -> Path:
    """Find (or download) the model and return its folder. Raises `ConfigError`."""
    path = find_model(
        config.model, say, source=config.model_source, revision=config.revision, load_format=config.load_format
    )
    if path.is_file():
        need_extension(f"--model {config.model}: {A_GGUF_FILE}")
    if path.is_file() and config.model_impl == "transformers":
        raise ConfigError(
            f"--model-impl transformers: --model {config.model} is a GGUF file, which only native layers can load: "
            "give a folder of safetensors"
        )
    return resolve_model(str(path), say, own_tokenizer=config.tokenizer is None)


def device_of(config: EngineConfig, rank: int = 0, say: Report = lambda text, done=0, total=0: None) -> torch.device:
    """Return a rank's device, counted from `cuda:K`. Reports why `auto` leaves devices unused. Raises `ConfigError`."""
    kind = config.device.split(":", 1)[0]
    num_devices = torch.cuda.device_count() if kind == "auto" and torch.cuda.is_available() else 0
    if 0 < num_devices < config.num_ranks:
        say(f"device: cpu: --tp {config.num_ranks} needs as many CUDA devices, there are {num_devices}")
    if kind in ("cpu", INLINE) or (kind == "auto" and num_devices < config.num_ranks):
        return torch.device("cpu")
    if config.torch_compile and config.num_ranks > 1:
        raise ConfigError(
            f"--torch-compile: not supported with --tp {config.num_ranks}: collectives cannot be compiled"
        )
    return check_device("cuda" if kind == "auto" else config.device, rank, config.num_ranks)


def _fill(model: Decoder, folder: Path, config: EngineConfig, packing: Packing | None, say: Report) -> None:
    if config.load_format == "dummy":
        dummy_weights(model.checkpoint(), config.seed, model.shards())
    else:
        left_out = load_weights(
            model.checkpoint(),
            folder,
            counter(say, "loading weights"),
            stacked=model.stacked(),
            shards=model.shards(),
            own_name=model.own_name,
            packing=packing,
        )
        if packing is not None:
            say(f"{folder.name}: {packing}: the weights are dequantized when loaded")
        if left_out and not read_config(folder)[0].get("vision_config"):
            parts = ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in left_out}))
            say(f"text only: {len(left_out)} tensors are not loaded: {parts}")


def _num_pages(config: EngineConfig, page_size_bytes: int, context_len: int, ranks: int, device: torch.device) -> int:
    """Return the number of KV pages as configured, or as many as fit into the memory share. A page takes
    `page_size_bytes` on each rank; `ranks` share the memory of a CPU."""
    if device.type == "cuda":
        return cuda_num_pages(config, page_size_bytes, context_len, torch.cuda.mem_get_info(device)[0])
    return cpu_num_pages(config, page_size_bytes, context_len, ranks=ranks)
