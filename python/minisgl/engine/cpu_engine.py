"""The engine that runs real models on the CPU without torch; tensors, kernels and sampling are in rust/minisgl-cpu.

Invariants: torch and transformers are not imported; a plan's assignments, page-table updates and rows take effect in
one thread, in launch order; forwards run without the GIL; a step with NaN or infinities is an error, and the KV pool is
wiped; a row with a grammar samples only tokens that the grammar allows, and its mask is computed on the forward's own
threads, in parallel with the logits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minisgl.config import ConfigError
from minisgl.engine.adapters import find_adapter
from minisgl.engine.api import (
    Embedding,
    EngineInfo,
    EngineStepError,
    ImageCounts,
    ImageRun,
    PromptLogprobs,
    SlotAssignment,
    StepHandle,
    StepLogprobs,
    StepResult,
    StoreCounts,
)
from minisgl.engine.page_store import adapter_digest, export
from minisgl.engine.worker import ForwardThread
from minisgl.extension import _rust
from minisgl.models.adaptable import adapter_layers
from minisgl.models.architectures import find_architecture
from minisgl.models.config import ModelConfig
from minisgl.prompt_image import PromptImage
from minisgl.step import Int32Array, RingEntry, StepBuffers, StepPlan

_log = logging.getLogger("minisgl.engine")
FLUSH_S = 2.0  # at close: time limit in seconds for pending writes to disk


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
        """Wrap the loaded engine `rust`, which was built from `settings` (JSON). `store` holds pages of this model and
        configuration; `keeper` is the thread that writes the weights cache."""
        self._rust = rust
        self._store = store
        self._keeper = keeper
        self._troubles: set[str] = set()  # disk errors that were logged already
        self._image_counts = ImageCounts()  # after the last step
        self._digests: dict[int, bytes] = {}  # by adapter id
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
        """The engine of the Rust extension, for benchmarks."""
        return self._rust

    @property
    def pool_bytes(self) -> int:
        """Return the size of the KV pool in bytes if all pages are in use."""
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
            _log.warning("--cache-dir: a page could not be written or read: %s", why)
        return StoreCounts(*self._store.counts())

    def see_ahead(self, image: PromptImage, begins: bool, slice_s: float, wake: Callable[[], None] | None) -> ImageRun:
        def see() -> tuple[bool, object]:
            try:
                return self._rust.see_ahead(image, begins, slice_s)
            finally:
                if wake is not None:
                    wake()

        return self._thread.submit(see)

    def give_up_image(self) -> None:
        self._thread.submit(self._rust.give_up_image)

    def image_counts(self) -> ImageCounts:
        return self._image_counts

    def adapter_digest(self, number: int) -> bytes:
        return self._digests[number]

    def draft_tokens(self, sequences: Sequence[tuple[int, int]]) -> list[int]:
        """Return the MTP layer's draft tokens after sequences, given as (request id, length), as of the last step; -1
        where there is none. Waits for the step in progress."""
        return self._rust.draft_tokens(sequences)

    def export_pages(self, tokens: Int32Array, path: Path) -> None:
        if self._store is None:
            raise ConfigError(f"{path}: exporting pages needs a folder of pages: set cache_dir")
        export(self._store, tokens, self._info.page_size, path)

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        entry, assigned = buffers.ring[plan.ring_index], list(assignments)
        return self._thread.submit(lambda: self._run(plan, entry, assigned))

    def read_adapter(self, folder: str) -> tuple[_rust.CpuAdapter, bytes]:
        """Read an adapter, and compute the digest of the weights as read, whatever happens to the files later."""
        pairs, places = [], adapter_layers(self._model)
        for name, (a, b) in find_adapter(folder, self._model).read().items():
            layer, part = places[name]
            for projection, rows in _parts_of(self._model, (layer, part), b):
                pairs.append((layer, projection, a.tobytes(), rows.tobytes()))
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
        # the thread removes its unfinished files, which a process that ends at once would leave
        if self._keeper is not None:
            self._keeper.join(FLUSH_S)
        if self._store is not None:
            self._store.flush(FLUSH_S)
            self.store_counts()

    def _run(self, plan: StepPlan, entry: RingEntry, assignments: list[SlotAssignment]) -> StepResult:
        """Run a step, and then clear `assignments`: an error's traceback holds them until garbage collection, and with
        them the features of images."""
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
        finally:
            assignments.clear()
        if (counts := self._rust.image_counts()) is not None:  # asking later would wait for the step in progress
            self._image_counts = ImageCounts(*counts)
        prompted = [PromptLogprobs(*scored) for scored in prompts]
        embeddings = [Embedding(req_id, np.frombuffer(numbers, np.float32)) for req_id, numbers in embedded]
        return StepResult(sampled, _step_logprobs(logprobs), prompted, failures, embeddings)


def _parts_of(
    model: ModelConfig, layer_and_part: tuple[int, str], b: npt.NDArray[np.float32]
) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Split B [out, r] of a fused projection into (projection name, rows), with the rows in the engine's order."""
    layer, part = layer_and_part
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if part == "qkv" and find_architecture(model.architecture).grouped:
        by_head = b.reshape(model.num_kv_heads, -1, model.head_dim, b.shape[1])
        parts = by_head[:, :-2], by_head[:, -2], by_head[:, -1]
        arrays = [np.ascontiguousarray(array.reshape(-1, b.shape[1])) for array in parts]
        return list(zip(("q_proj", "k_proj", "v_proj"), arrays, strict=True))
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
    scored: tuple[list[int], list[float], list[list[int]], list[list[float]]] | None,
) -> StepLogprobs | None:
    if scored is None:
        return None
    rows, token_logprobs, top_ids, top = scored
    return StepLogprobs(np.array(rows, np.int32), token_logprobs, top_ids, top)
