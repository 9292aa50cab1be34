"""Loading of the CPU engine from a configuration: find the model, size the KV pool, load the weights.

Invariants: torch and transformers are not imported; a model that another engine may be able to run raises
`Unsupported`; every other failure names the flag to change.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig, Unsupported
from minisgl.engine.api import EngineInfo, ModelKind
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.heads import NO_HEADS, Heads, read_heads
from minisgl.engine.page_store import open_store
from minisgl.engine.pool_size import cpu_num_checkpoints, cpu_num_pages
from minisgl.engine.sight import described, find_sight, image_fields
from minisgl.extension import _rust
from minisgl.models.architectures import find_architecture
from minisgl.models.config import ModelConfig, computed, load_config, read_config, tensor_names, with_mtp
from minisgl.models.towers import Tower, with_images
from minisgl.tokenizer.borrowed import text_folder
from minisgl.utils.progress import Report, counter
from minisgl.weights.packed_blocks import packed_weights
from minisgl.weights.quantized import quantized_weights
from minisgl.weights.sources import find_model
from minisgl.weights.stored import weight_files

_log = logging.getLogger("minisgl.engine")
HOW = {
    "exact": "exact (float32 activations)",
    "bf16": "activations rounded to bfloat16",
    "int8": "activations rounded to int8 in blocks of 32",
}
KINDS: dict[tuple[bool, bool], ModelKind] = {
    (False, False): "decoder",
    (False, True): "encoder",
    (True, True): "cross_encoder",
    (True, False): "judge",
}
"""Kind of a model by (has a scoring head, has bidirectional attention)."""
MIN_CACHED_BYTES = 200 * 2**20  # bytes of weights: smaller models are packed within a third of a second
SLOW_LOAD_S = 5.0
MAPPED_BYTES_PER_S = 1e9  # of the weights cache from a disk, for an estimate
IMAGE_CACHE_BYTES = 256 * 2**20  # of features of images that no request computes
SHARE_OF_16_BITS = {"q8": 34 / 64, "q4": 20 / 64}  # bytes relative to 16-bit weights: blocks of 32 with their scales
T = TypeVar("T")


class _LocatedModel(NamedTuple):
    """A located model: its files, its configuration and its heads."""

    name: str
    folder: Path  # of config and tokenizer
    source: Path  # of the weights: a GGUF file, or the folder
    model: ModelConfig
    heads: Heads
    kind: ModelKind
    tower: Tower | None
    eyes: Path | None  # of the tower's weights
    eyes_bytes: int  # of them; 0 if they are made up
    table: list[float]  # of the tower: the value of each pixel


class _Sizes(NamedTuple):
    """Bytes of a KV page, of a sequence's recurrent state, and in which the largest image is computed; and how many
    pages and checkpoints fit into memory."""

    page: int
    state: int
    image: int
    num_pages: int
    num_checkpoints: int | None


def load_cpu_engine(config: EngineConfig, say: Report) -> CpuEngine:
    """Find a model, size its pools, load it. Raises `Unsupported` if another engine may run it, else `ConfigError`."""
    began = time.monotonic()
    located = _find(config, say)
    model, dummy = located.model, config.load_format == "dummy"
    if located.kind != "decoder" and config.kv_dtype == "f16":  # small differences of vectors and scores matter
        config = msgspec.structs.replace(config, kv_dtype="f32")
    texts = text_folder(config, located.folder, model.vocab_size, say)
    context_len = model.context_len(config.max_seq_len)
    settings = _settings(config, with_mtp(model) if config.uses_mtp else model, located.source, context_len)
    if located.tower is not None:
        settings["tower"] = located.tower.settings() | {"table": located.table}
        settings["tower_weights"] = None if dummy else str(located.eyes)
        settings["image_cache"] = IMAGE_CACHE_BYTES
    sizes = _sizes(config, located, context_len, settings)
    settings["num_checkpoints"], settings["num_pages"] = sizes.num_checkpoints or 0, sizes.num_pages
    settings["max_seq_len"] = min(context_len, sizes.num_pages * config.page_size + 1)
    if not dummy:
        settings["weights"] = str(_call_rust(partial(_weights, config, model, located.source, say)))
        if located.tower is not None and model.packing is not None:  # the copy has all tensors
            settings["tower_weights"] = settings["weights"]
        if config.weights_cache is not None:
            settings["panels"] = _weights_cache(config.weights_cache)
    step = f"loading weights of {located.name}, {(_weight_bytes(config, located) + located.eyes_bytes) / 2**20:.0f} MiB"
    rust = _call_rust(lambda: _rust.CpuEngine(_json(settings), counter(say, step)))
    _call_rust(lambda: rust.set_heads(*located.heads))
    about = rust.about()
    _report_weights(config, located, about, time.monotonic() - began, say)
    _report_pools(config, located, sizes, context_len, settings["max_seq_len"], say)
    info = EngineInfo(
        name="cpu",
        model_dir=str(texts),
        vocab_size=model.vocab_size,
        context_len=context_len,
        eos_ids=model.eos_ids,
        num_pages=sizes.num_pages,
        page_size=config.page_size,
        device="cpu",
        dtype=about["kinds"][0][0],
        details=_details(config, about["isa"], about["threads"]),
        num_checkpoints=sizes.num_checkpoints,
        kind=located.kind,
        **image_fields(located.tower),
    )
    store = None
    if config.cache_dir is not None:
        sources = {path for name in ("weights", "tower_weights") if (path := settings.get(name)) is not None}
        read = [file for source in sorted(sources) for file in _files_of(Path(source))]
        store = open_store(config, settings, read, about["isa"], (sizes.page, sizes.state), say)
    keeper = None
    if rust.keeps_panels:
        # not a daemon: a thread that returns from Rust while the interpreter ends aborts the process
        keeper = threading.Thread(target=_write_weights_cache, args=(rust, located.name), name="weights-cache")
        keeper.start()
    return CpuEngine(rust, info, model, _json(settings), store=store, keeper=keeper)


def _find(config: EngineConfig, say: Report) -> _LocatedModel:
    """Find the model and read its configuration. Raises `ConfigError`."""
    source = find_model(
        config.model,
        say,
        source=config.model_source,
        revision=config.revision,
        load_format=config.load_format,
        mmproj=config.mmproj is None,
    )
    folder, reason = described(source, config.mmproj, own_tokenizer=config.tokenizer is None)
    model = load_config(folder)
    raw, dummy = read_config(folder)[0], config.load_format == "dummy"
    sight = find_sight(source, folder, raw, model, dummy=dummy, reason=reason)
    if line := sight.line():
        say(line)
    if sight.tower is not None:
        model = with_images(model, raw, sight.tower)
    table = [] if sight.processor is None else sight.processor.table.ravel().tolist()
    heads = NO_HEADS if dummy else read_heads(folder, model.architecture, raw)
    kind = KINDS[heads.score is not None, model.both_ways]
    if model.left_out and kind == "decoder" and not config.uses_mtp:
        hint = ": --speculative mtp drafts with the first" if model.num_mtp else ""
        say(f"one token a step: MTP layers, which predict further tokens, are not loaded{hint}")
    return _LocatedModel(
        source.name, folder, source, model, heads, kind, sight.tower, sight.weights, sight.num_bytes, table
    )


def _sizes(config: EngineConfig, located: _LocatedModel, context_len: int, settings: dict[str, Any]) -> _Sizes:
    """Return the pool sizes that fit into memory next to the weights. Raises `Unsupported` or `ConfigError`."""
    page, in_q8 = (
        _call_rust(partial(_rust.CpuEngine.page_bytes, _json(settings | {"kv_dtype": dtype})))
        for dtype in (config.kv_dtype, "q8")
    )
    state = _call_rust(lambda: _rust.CpuEngine.state_bytes(_json(settings)))
    config.check_states(bool(state))
    if located.model.both_ways and config.cache_dir is not None:
        raise ConfigError(f"--cache-dir {config.cache_dir}: an encoder cannot use stored pages: leave it out")
    weights, tower, image = _weight_bytes(config, located), 0, 0
    if located.tower is not None:
        image = _call_rust(partial(_rust.CpuEngine.image_bytes, _json(settings), config.max_image_tokens))
        tower = located.eyes_bytes + image + IMAGE_CACHE_BYTES
    smaller = in_q8 if in_q8 < page else None
    num_pages = cpu_num_pages(config, page, context_len, taken=weights, tower=tower, one_in_q8=smaller, state=state)
    checkpoints = cpu_num_checkpoints(config, state, num_pages * page, weights + tower) if state else None
    return _Sizes(page, state, image, num_pages, checkpoints)


def _weights_cache(size: int) -> dict[str, Any]:
    """Return the settings of the weights cache: at most `size` bytes, and half of what it and the free disk have."""
    folder = envs.cache_dir() / "panels"
    held = sum(file.lstat().st_size for file in folder.glob("*.panels"))
    free = shutil.disk_usage(next(path for path in folder.parents if path.is_dir())).free
    return {"folder": str(folder), "limit": min(size, (free + held) // 2), "least": MIN_CACHED_BYTES}


def _report_weights(
    config: EngineConfig, located: _LocatedModel, about: dict[str, Any], took: float, say: Report
) -> None:
    kinds = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in about["kinds"])
    how = ", from the weights cache" if about["mapped"] else ""
    say(f"loaded {located.name}: {located.model.architecture}, {kinds}{how}, {took:.1f} s")
    num_bytes, dummy = sum(size for _, size in about["kinds"]), config.load_format == "dummy"
    saved = took - num_bytes / MAPPED_BYTES_PER_S
    if saved > SLOW_LOAD_S and config.weights_cache is None and not dummy and num_bytes >= MIN_CACHED_BYTES:
        size = -(-num_bytes // 2**30) + 1
        written = f"writes the converted weights to disk ({num_bytes / 2**30:.1f} GiB)"
        say(f"--weights-cache {size}GiB {written}: later starts take about {saved:.0f} s less")


def _report_pools(
    config: EngineConfig, located: _LocatedModel, sizes: _Sizes, context_len: int, max_seq_len: int, say: Report
) -> None:
    num_bytes = sizes.num_pages * sizes.page
    if located.tower is not None:
        parts = f"{located.eyes_bytes / 2**20:.0f} MiB of weights", f"{IMAGE_CACHE_BYTES / 2**20:.0f} MiB of features"
        image = f"{sizes.image / 2**20:.0f} MiB for an image of {config.max_image_tokens} tokens"
        say(f"vision tower: {', '.join((*parts, image))}, at most")
    say(f"KV pool: {sizes.num_pages} pages of {config.page_size} tokens, {num_bytes / 2**20:.0f} MiB at most")
    if sizes.num_checkpoints is not None:
        checkpoints = f"{sizes.num_checkpoints} checkpoints at most"
        say(f"states: {sizes.state / 2**20:.2f} MiB a sequence, {checkpoints}")
    if max_seq_len < context_len:
        say(
            f"requests are limited to {max_seq_len} tokens, of {context_len} that the model supports, by the KV pool: "
            "enlarge it by --max-seq-len, --num-pages or --memory-ratio"
        )


def operations(path: Path) -> str:
    """Return a listing of a model's forward, one operation a line, and a line about its vision part. `path` is a model
    folder or a GGUF file; of most matrices only the sizes are read. Raises `ConfigError`, also for a checkpoint with
    packed weights."""
    config = EngineConfig(model=str(path))
    folder, reason = described(path, None, own_tokenizer=False)
    model = load_config(folder)
    if path.is_dir() and model.packing is not None and model.packing.form != "mxfp4":
        raise ConfigError(f"{path}: weights packed as {model.packing} are not supported here: use the unpacked model")
    settings = _settings(config, model, path, model.context_len(None))
    listing = _call_rust(partial(_rust.CpuEngine.operations, _json(settings)))
    line = find_sight(path, folder, read_config(folder)[0], model, dummy=False, reason=reason).line()
    return f"{listing}\n{line}" if line else listing


def _write_weights_cache(rust: _rust.CpuEngine, name: str) -> None:
    """Write the loaded weights to the weights cache, at low priority while steps run. Failures are logged."""
    try:
        size = _call_rust(rust.keep_panels)
    except ConfigError as error:
        _log.warning("--weights-cache: the weights of %s were not cached: %s", name, error)
    else:
        if size is not None:
            _log.info("--weights-cache: the weights of %s are cached: %.0f MiB", name, size / 2**20)


def _weights(config: EngineConfig, model: ModelConfig, source: Path, say: Report) -> Path:
    """Return the path of the weights that the engine reads: `source`, or its converted (quantized, repacked) copy in
    the cache. Raises `ConfigError`, and `ValueError` from `_rust.CpuEngine`."""
    if model.packing is not None and source.is_dir():
        if config.quantization is not None:
            flag = f"--quantization {config.quantization}"
            raise ConfigError(f"{flag}: the weights are quantized already ({model.packing}): leave it out")
        if model.packing.form == "mxfp4":
            return source
        if model.packing.rounds_activations:
            say(f"{model.packing}: the checkpoint rounds activations, too: here --activations decides that")
        return packed_weights(weight_files(source), model.packing, say)
    if config.quantization is None:
        return source
    if source.is_dir() and "experts_down_transposed" in tensor_names(model)["checkpoint"]:
        why = "experts that lie transposed are not quantized: use the model's MXFP4 or GGUF files"
        raise ConfigError(f"--quantization {config.quantization}: {model.architecture}: {why}")
    return quantized_weights(source, config.quantization, say)


def _details(config: EngineConfig, isa: str, threads: int) -> str:
    """Return a description of how the engine computes (instruction set, threads, rounding), for logs."""
    parts = [isa, f"{threads} thread{'s' if threads > 1 else ''}", HOW[config.activations], f"KV {config.kv_dtype}"]
    if config.quantization is not None:
        parts.append(f"weights quantised to {config.quantization}")
    return ", ".join(parts)


def _settings(config: EngineConfig, model: ModelConfig, weights: Path, context_len: int) -> dict[str, Any]:
    """Return the engine settings that rust/minisgl-cpu/src/load.rs parses."""
    dummy = config.load_format == "dummy"
    dummy_kind = "mxfp4" if model.packing is not None and model.packing.form == "mxfp4" else model.dtype
    return {
        "model": computed(model, context_len),
        "names": _names(model),
        "weights": None if dummy else str(weights),
        "seed": config.seed,
        "dummy_kind": dummy_kind if dummy else None,
        "eos_ids": model.eos_ids,
        "num_threads": config.num_threads,
        "isa": envs.cpu_isa(),
        "activations": config.activations,
        "kv_dtype": config.kv_dtype,
        "num_pages": 1,
        "page_size": config.page_size,
        "max_rows": config.rows_on("cpu"),
        "max_seq_len": context_len,
        "num_checkpoints": 0,
        "timed": False,
    }


def _names(model: ModelConfig) -> dict[str, Any]:
    architecture, names = find_architecture(model.architecture), tensor_names(model)
    interleaved_by_kind = {"checkpoint": architecture.interleaved, "gguf": architecture.gguf_interleaved}
    as_written = {
        "grouped": architecture.grouped,
        "transposed": architecture.transposed,
        "buffers": architecture.buffers,
        "tiled": False,
    }
    as_converted = {"grouped": False, "transposed": False, "buffers": (), "tiled": architecture.gguf_tiled}
    return {
        kind: {
            "names": names[kind],
            "interleaved": interleaved,
            "gate_up_in_turns": architecture.gate_up_in_turns,
            **(as_written if kind == "checkpoint" else as_converted),
        }
        for kind, interleaved in interleaved_by_kind.items()
    }


def _json(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()


def _call_rust(call: Callable[[], T]) -> T:
    """Call `call` and convert a `ValueError` of the Rust extension to `Unsupported` or `ConfigError`."""
    try:
        return call()
    except ValueError as error:
        fault, text = error.args if len(error.args) == 2 else ("", str(error))
        raise (Unsupported if fault == "unsupported" else ConfigError)(text) from error


def _files_of(source: Path) -> list[Path]:
    return _call_rust(partial(_rust.gguf_parts, source)) if source.is_file() else weight_files(source)


def _weight_bytes(config: EngineConfig, located: _LocatedModel) -> int:
    """Return the bytes that the weights of the text model will take, estimated from the file sizes alone. Raises
    `ConfigError`."""
    if config.load_format == "dummy":
        return 0
    size = sum(file.stat().st_size for file in _files_of(located.source))
    if located.source.is_dir():
        size -= located.eyes_bytes
    return int(size * SHARE_OF_16_BITS[config.quantization]) if config.quantization is not None else size
