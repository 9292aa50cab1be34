"""The engine that runs real models on the CPU without torch: tensors, kernels and sampling are in Rust
(rust/minisgl-cpu). And its loading: find the model, size the KV pool, load.

Invariants: torch and transformers are not imported; what another engine may be able to run is `Unsupported`; every
other failure to load names the flag to change. A plan's assignments, page-table updates and rows take effect in one
thread, in launch order; forwards run without the GIL; a step with NaN or infinities is an error, and the KV pool is
wiped; a row with a grammar samples what its grammar allows, which is found on the forward's own threads, beside the
logits of all rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig, Unsupported
from minisgl.engine.adapters import find_adapter
from minisgl.engine.api import (
    Embedding,
    EngineInfo,
    EngineStepError,
    ModelKind,
    PromptLogprobs,
    SlotAssignment,
    StepHandle,
    StepLogprobs,
    StepResult,
    StoreCounts,
)
from minisgl.engine.heads import NO_HEADS, read_heads
from minisgl.engine.page_store import adapter_digest, export, open_store
from minisgl.engine.pool_size import cpu_num_checkpoints, cpu_num_pages
from minisgl.engine.worker import ForwardThread
from minisgl.extension import _rust
from minisgl.models.architectures import find_architecture, has_text_half
from minisgl.models.config import ModelConfig, adapter_places, load_config, read_config, tensor_names
from minisgl.models.rope import inverse_frequencies
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepPlan
from minisgl.tokenizer.borrowed import text_folder
from minisgl.utils.progress import Report, counter
from minisgl.weights.packed_blocks import packed_weights
from minisgl.weights.quantized import quantized_weights
from minisgl.weights.sources import find_model
from minisgl.weights.stored import weight_files

_log = logging.getLogger("minisgl.engine")


class CpuEngine:
    def __init__(
        self,
        rust: _rust.CpuEngine,
        info: EngineInfo,
        model: ModelConfig,
        settings: str,
        *,
        threaded: bool = True,
        store: _rust.PageStore | None = None,
        keeper: threading.Thread | None = None,
    ) -> None:
        """`settings`: those that `rust` was made of. `store` has pages of just this model; `keeper` writes panels."""
        self._rust = rust
        self._store = store
        self._keeper = keeper
        self._troubles: set[str] = set()  # with its folder, that were told
        self._digests: dict[int, bytes] = {}  # of adapters
        if store is not None:
            rust.keep(store)
        self._info = info
        self._model = model
        self._settings = settings
        self._thread = ForwardThread("cpu-forward", threaded=threaded)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def rust(self) -> _rust.CpuEngine:
        """For measurements."""
        return self._rust

    @property
    def pool_bytes(self) -> int:
        """How many bytes its pages take, all in use."""
        kv = int(self._rust.about()["kv_bytes"])
        return kv * self._info.page_size * self._info.num_pages

    @property
    def store(self) -> _rust.PageStore | None:
        return self._store

    def store_counts(self) -> StoreCounts | None:
        if self._store is None:
            return None
        if (why := self._store.take_trouble()) is not None and why not in self._troubles:
            self._troubles.add(why)
            _log.warning("--cache-dir: a page was not written or read: %s", why)
        return StoreCounts(*self._store.counts())

    def adapter_digest(self, number: int) -> bytes:
        return self._digests[number]

    def export_pages(self, tokens: Int32Array, path: Path) -> None:
        if self._store is None:
            raise ConfigError(f"{path}: pages come from a folder: cache_dir names it")
        export(self._store, tokens, self._info.page_size, path)

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        return self._thread.submit(lambda: self._run(plan, entry, assigned))

    def read_adapter(self, folder: str) -> tuple[_rust.CpuAdapter, bytes]:
        """With its digest: of what was read, whatever becomes of the files meanwhile."""
        pairs, places = [], adapter_places(self._model)
        for name, (a, b) in find_adapter(folder, self._model).read().items():
            layer, part = places[name]
            for own, rows in _parts_of(self._model, (layer, part), b):
                pairs.append((layer, own, a.tobytes(), rows.tobytes()))
        return _rust.CpuAdapter(self._settings, pairs), adapter_digest(pairs)

    def add_adapter(self, number: int, adapter: tuple[_rust.CpuAdapter, bytes]) -> None:
        made, self._digests[number] = adapter
        self._thread.submit(lambda: self._rust.add_adapter(number, made))

    def remove_adapter(self, number: int) -> None:
        del self._digests[number]
        self._thread.submit(lambda: self._rust.remove_adapter(number))

    def close(self) -> None:
        self._thread.close()
        self._rust.close()
        if self._keeper is not None:  # it takes away what it has begun, which a process that ends at once would leave
            self._keeper.join(FLUSH_S)
        if self._store is not None:
            self._store.flush(FLUSH_S)
            self.store_counts()

    def _run(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> StepResult:
        rows, tokens = plan.num_rows, plan.num_tokens
        try:
            sampled, logprobs, prompts, embedded, failures = self._rust.step(
                entry.input_ids[:tokens],
                entry.positions[:tokens],
                entry.out_loc[:tokens],
                entry.req_slots[:rows],
                entry.seq_lens[:rows],
                entry.extend_lens[:rows],
                entry.sample_rows[: plan.num_samples],
                entry.page_table_updates[: plan.num_page_table_updates].reshape(-1),
                entry.page_ids[: plan.num_page_ids],
                plan.num_decode_rows,
                assignments,
                entry.freed[: plan.num_freed],
                entry.state_begins[: plan.num_state_begins].reshape(-1),
                entry.state_saves[: plan.num_state_saves].reshape(-1),
                entry.page_loads[: plan.num_page_loads].reshape(-1),
            )
        except RuntimeError as error:
            raise EngineStepError(str(error)) from error
        prompted = [PromptLogprobs(*one) for one in prompts]
        embeddings = [Embedding(req_id, np.frombuffer(numbers, np.float32)) for req_id, numbers in embedded]
        return StepResult(sampled, _step_logprobs(logprobs), prompted, failures, embeddings)


def _parts_of(
    model: ModelConfig, place: tuple[int, str], b: npt.NDArray[np.float32]
) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """The rows of B [out, r] by the parts that a fused projection has, in the order that the engine keeps them in."""
    layer, part = place
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if part == "qkv" and find_architecture(model.architecture).grouped:
        by_head = b.reshape(model.num_kv_heads, -1, model.head_dim, b.shape[1])
        parts = by_head[:, :-2], by_head[:, -2], by_head[:, -1]
        own = [np.ascontiguousarray(one.reshape(-1, b.shape[1])) for one in parts]
        return list(zip(("q_proj", "k_proj", "v_proj"), own, strict=True))
    if part == "qkv":
        return list(zip(("q_proj", "k_proj", "v_proj"), np.split(b, (q, q + kv)), strict=True))
    if part == "gate_up":
        return list(zip(("gate_proj", "up_proj"), np.split(b, 2), strict=True))
    turns = find_architecture(model.architecture).interleaved and model.rotary[layer] is not None
    if part in ("q", "k") and turns:
        half = model.rotary_dim // 2
        order = [*range(0, 2 * half, 2), *range(1, 2 * half, 2), *range(2 * half, model.head_dim)]
        b = np.ascontiguousarray(b.reshape(-1, model.head_dim, b.shape[1])[:, order].reshape(b.shape))
    return [("o_proj" if part == "out" else f"{part}_proj", b)]


def _step_logprobs(
    found: tuple[list[int], list[float], list[list[int]], list[list[float]]] | None,
) -> StepLogprobs | None:
    if found is None:
        return None
    rows, own, top_ids, top = found
    return StepLogprobs(np.array(rows, np.int32), own, top_ids, top)


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
"""By whether it gives scores, and whether tokens attend to those behind them, too."""
LEAST_KEPT = 200 * 2**20  # bytes of weights: fewer are packed within a third of a second
SLOW_LOAD_S = 5.0
FLUSH_S = 2.0  # for what is on its way to a disk, at the end
SHARE_OF_16_BITS = {"q8": 34 / 64, "q4": 20 / 64}  # blocks of 32 with their scales
T = TypeVar("T")


def load_cpu_engine(config: EngineConfig, say: Report) -> CpuEngine:
    """Raises `Unsupported` and other `ConfigError`s."""
    began = time.monotonic()
    found = find_model(
        config.model, say, source=config.model_source, revision=config.revision, load_format=config.load_format
    )
    folder, gguf = (found, None) if found.is_dir() else (_folder_of(found, config.tokenizer is None), found)
    model = load_config(folder)
    dummy = config.load_format == "dummy"
    heads = NO_HEADS if dummy else read_heads(folder, model.architecture, read_config(folder)[0])
    kind = KINDS[heads.score is not None, model.both_ways]
    if kind != "decoder" and config.kv_dtype == "f16":  # small differences of vectors and scores are what is asked for
        config = msgspec.structs.replace(config, kv_dtype="f32")
    if has_text_half(model.architecture) or model.other_half:
        say("text only: what sees is not loaded")
    if model.left_out and kind == "decoder":
        say("one token a step: what predicts further ones (MTP) is not loaded")
    texts = text_folder(config, folder, model.vocab_size, say)
    context_len = model.context_len(config.max_seq_len)
    settings = _settings(config, model, gguf or folder, context_len)
    page, in_q8 = (
        _refused(partial(_rust.CpuEngine.page_bytes, _json(settings | {"kv_dtype": dtype})))
        for dtype in (config.kv_dtype, "q8")
    )
    state = _refused(lambda: _rust.CpuEngine.state_bytes(_json(settings)))
    config.check_states(bool(state))
    if model.both_ways and config.cache_dir is not None:
        raise ConfigError(f"--cache-dir {config.cache_dir}: an encoder reads none: leave it out")
    taken = _weight_bytes(config, gguf or folder)
    smaller = in_q8 if in_q8 < page else None
    num_pages = cpu_num_pages(config, page, context_len, taken=taken, one_in_q8=smaller, state=state)
    checkpoints = cpu_num_checkpoints(config, state, num_pages * page, taken) if state else None
    settings["num_checkpoints"] = checkpoints or 0
    settings["num_pages"], settings["max_seq_len"] = num_pages, min(context_len, num_pages * config.page_size + 1)
    if not dummy:
        settings["weights"] = str(_refused(partial(_weights, config, model, gguf or folder, say)))
        if config.weights_cache is not None:
            kept = {"folder": str(envs.cache_dir() / "panels"), "limit": config.weights_cache, "least": LEAST_KEPT}
            settings["panels"] = kept
    rust = _refused(lambda: _rust.CpuEngine(_json(settings), counter(say, "loading weights")))
    _refused(lambda: rust.set_heads(*heads))
    about = rust.about()
    kinds = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in about["kinds"])
    took = time.monotonic() - began
    how = ", from the weights cache" if about["mapped"] else ""
    say(f"loaded {found.name}: {model.architecture}, {kinds}{how}, {took:.1f} s")
    num_bytes = sum(size for _, size in about["kinds"])
    if took > SLOW_LOAD_S and config.weights_cache is None and not dummy and num_bytes >= LEAST_KEPT:
        size = -(-num_bytes // 2**30) + 1
        say(f"--weights-cache {size}GiB would keep the weights as they are now: the next start takes about a second")
    say(f"KV pool: {num_pages} pages of {config.page_size} tokens, {num_pages * page / 2**20:.0f} MiB at most")
    if checkpoints is not None:
        say(f"states: {state / 2**20:.2f} MiB a sequence, {checkpoints} kept at most for later ones")
    if settings["max_seq_len"] < context_len:
        say(
            f"requests of at most {settings['max_seq_len']} tokens, of {context_len} that the model takes: the KV pool "
            "holds no more: --max-seq-len, --num-pages or --memory-ratio asks for a larger one"
        )
    info = EngineInfo(
        name="cpu",
        model_dir=str(texts),
        vocab_size=model.vocab_size,
        context_len=context_len,
        eos_ids=model.eos_ids,
        num_pages=num_pages,
        page_size=config.page_size,
        device="cpu",
        dtype=about["kinds"][0][0],
        details=_details(config, about["isa"], about["threads"]),
        num_checkpoints=checkpoints,
        kind=kind,
    )
    store = None
    if config.cache_dir is not None:
        read = [] if settings["weights"] is None else _files_of(Path(settings["weights"]))
        store = open_store(config, settings, read, about["isa"], (page, state), say)
    keeper = None
    if rust.keeps_panels:
        # no daemon: who comes back from Rust while the interpreter ends aborts the process
        keeper = threading.Thread(target=_keep_panels, args=(rust, found.name), name="weights-cache")
        keeper.start()
    return CpuEngine(rust, info, model, _json(settings), store=store, keeper=keeper)


def operations(found: Path) -> str:
    """Return what a forward of the model in a folder or a GGUF file does, an operation a line. Of its matrices only the
    sizes are read. Raises `ConfigError`."""
    config = EngineConfig(model=str(found))
    folder = found if found.is_dir() else _folder_of(found, own_tokenizer=False)
    model = load_config(folder)
    settings = _settings(config, model, found, model.context_len(None))
    return _refused(partial(_rust.CpuEngine.operations, _json(settings)))


def _keep_panels(rust: _rust.CpuEngine, name: str) -> None:
    """Beside steps, which it leaves nearly all of the processor."""
    try:
        size = _refused(rust.keep_panels)
    except ConfigError as error:
        _log.warning("--weights-cache: the weights of %s are not kept: %s", name, error)
    else:
        if size is not None:
            _log.info("--weights-cache: the weights of %s are kept: %.0f MiB", name, size / 2**20)


def _weights(config: EngineConfig, model: ModelConfig, source: Path, say: Report) -> Path:
    """What the engine reads: `source`, or what is made of it once. Raises `ConfigError`, and the `ValueError`s of
    `_rust.CpuEngine`."""
    if model.packing is not None and source.is_dir():
        if config.quantization is not None:
            flag = f"--quantization {config.quantization}"
            raise ConfigError(f"{flag}: the weights are quantized already ({model.packing}): leave it out")
        if model.packing.form == "mxfp4":
            return source
        if model.packing.rounds_activations:
            say(f"{model.packing}: the checkpoint has activations rounded, too: here --activations says that")
        return packed_weights(weight_files(source), model.packing, say)
    if config.quantization is None:
        return source
    if source.is_dir() and "experts_down_transposed" in tensor_names(model)["checkpoint"]:
        why = "experts that lie transposed are not quantized: use the model's MXFP4 or GGUF files"
        raise ConfigError(f"--quantization {config.quantization}: {model.architecture}: {why}")
    return quantized_weights(source, config.quantization, say)


def _details(config: EngineConfig, isa: str, threads: int) -> str:
    """For people: how it computes."""
    parts = [isa, f"{threads} thread{'s' if threads > 1 else ''}", HOW[config.activations], f"KV {config.kv_dtype}"]
    if config.quantization is not None:
        parts.append(f"weights quantised to {config.quantization}")
    return ", ".join(parts)


def _folder_of(file: Path, own_tokenizer: bool) -> Path:
    """Config and tokenizer of a GGUF file, as a folder."""
    from minisgl.weights.gguf_folder import gguf_folder

    return gguf_folder(file, own_tokenizer=own_tokenizer)


def _settings(config: EngineConfig, model: ModelConfig, weights: Path, context_len: int) -> dict[str, Any]:
    """As rust/minisgl-cpu/src/load.rs reads it."""
    dummy = config.load_format == "dummy"
    dummy_kind = "mxfp4" if model.packing is not None and model.packing.form == "mxfp4" else model.dtype
    return {
        "model": _model(model, context_len),
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


def _model(model: ModelConfig, context_len: int) -> dict[str, Any]:
    moe = model.moe
    return {
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "heads": [
            {
                "kv_heads": one.num_kv_heads,
                "head_dim": one.head_dim,
                "kv_of": one.kv_of,
                "values_are_keys": one.values_are_keys,
            }
            for one in model.layer_heads
        ],
        "attends": model.layer_attends,
        "state": None if model.state is None else {model.state.kind: asdict(model.state)},
        "state_layers": model.layer_has_state,
        "attention_gates": model.attention_gates,
        "value_norm": model.value_norm,
        "intermediate_sizes": model.layer_inner_sizes,
        "layer_scales": model.layer_scales,
        "per_layer": None if model.per_layer is None else asdict(model.per_layer),
        "streams": None if model.streams is None else asdict(model.streams),
        "gate_cuts": model.gate_cuts,
        "vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "layer_norm": model.layer_norm,
        "norm_bias": model.norm_bias,
        "norm_offset": model.norm_offset,
        "norms": model.norms,
        "qk_norm": model.qk_norm,
        "inverse_frequencies": [
            inverse_frequencies(rope, dim, context_len).tolist()
            for rope, dim in zip(model.ropes, model.rotary_dims, strict=True)
        ],
        "rope_scales": [rope.attention_factor for rope in model.ropes],
        "query_growth": None if model.query_growth is None else asdict(model.query_growth),
        "chunked": model.chunked,
        "tie_word_embeddings": model.tie_word_embeddings,
        "qkv_bias": model.qkv_bias,
        "out_bias": model.out_bias,
        "mlp_bias": model.mlp_bias,
        "down_bias": model.down_bias,
        "head_bias": model.head_bias,
        "learned_positions": model.learned_positions,
        "first_position": model.first_position,
        "token_types": model.token_types,
        "pair_types": model.pair_types,
        "embedding_norm": model.embedding_norm,
        "bare_first": model.bare_first,
        "last_norm": model.last_norm,
        "distances": None if model.distances is None else {model.distances.kind: asdict(model.distances)},
        "both_ways": model.both_ways,
        "windows": model.windows,
        "rotary": model.rotary,
        "attention_scale": model.attention_scale,
        "value_scale": model.value_scale,
        "attention_cap": model.attention_cap,
        "sinks": model.sinks,
        "embedding_scale": model.embedding_scale,
        "residual_scale": model.residual_scale,
        "logits_scale": model.logits_scale,
        "logits_cap": model.logits_cap,
        "activation": model.activation
        if isinstance(model.activation, str)
        else {model.activation.kind: asdict(model.activation)},
        "gated": model.gated,
        "left_out": (*model.left_out, *model.other_half),
        "latent": None if model.latent is None else asdict(model.latent),
        "moe": None if moe is None else {**asdict(moe), "layers": sorted(moe.layers)},
    }


def _names(model: ModelConfig) -> dict[str, Any]:
    known, names = find_architecture(model.architecture), tensor_names(model)
    of = {"checkpoint": known.interleaved, "gguf": known.gguf_interleaved}
    as_written = {
        "grouped": known.grouped,
        "transposed": known.transposed,
        "buffers": known.buffers,
        "tiled": False,
    }
    as_converted = {"grouped": False, "transposed": False, "buffers": (), "tiled": known.gguf_tiled}
    return {
        kind: {
            "names": names[kind],
            "interleaved": interleaved,
            "gate_up_in_turns": known.gate_up_in_turns,
            **(as_written if kind == "checkpoint" else as_converted),
        }
        for kind, interleaved in of.items()
    }


def _json(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()


def _refused(call: Callable[[], T]) -> T:
    """What Rust refuses, as the errors of this package."""
    try:
        return call()
    except ValueError as error:
        fault, text = error.args if len(error.args) == 2 else ("", str(error))
        raise (Unsupported if fault == "unsupported" else ConfigError)(text) from error


def _files_of(source: Path) -> list[Path]:
    return _refused(partial(_rust.gguf_parts, source)) if source.is_file() else weight_files(source)


def _weight_bytes(config: EngineConfig, source: Path) -> int:
    """What the weights will take, by the sizes of their files alone. Raises `ConfigError`."""
    if config.load_format == "dummy":
        return 0
    size = sum(file.stat().st_size for file in _files_of(source))
    return int(size * SHARE_OF_16_BITS[config.quantization]) if config.quantization is not None else size
