"""CUDA graphs of steps whose rows all have one token: the sizes to capture, and the captured forwards by size.

Invariants: a step runs as a graph only at exactly its padded size; a captured forward reads and writes the same
addresses each time; graphs share memory, so the largest is captured first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.utils.progress import Report

DEFAULT_MAX_BS = 256
_STEP = 16


def graph_sizes(max_bs: int | None, max_rows: int) -> tuple[int, ...]:
    """Return the padded row counts to capture, ascending: 1, 2, 4, 8, then multiples of 16 up to the smaller of
    `max_bs` (None: a default) and `max_rows`. Empty if `max_bs` is 0. Raises `ConfigError` if it is negative."""
    if max_bs is not None and max_bs < 0:
        raise ConfigError(f"--cuda-graph-max-bs {max_bs}: must be at least 0 (0: no graphs)")
    top = min(DEFAULT_MAX_BS if max_bs is None else max_bs, max_rows)
    if top == 0:
        return ()
    return tuple(sorted({size for size in (1, 2, 4, 8, *range(_STEP, top, _STEP)) if size < top} | {top}))


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The result of a forward: logits [rows, vocab], and whether each row is finite, [rows] bool."""

    logits: Tensor
    finite: Tensor


class Graph(Protocol):
    outputs: Outputs

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Outputs]], Graph]


class CudaCapture:
    """Captures graphs with torch; all graphs share one memory pool, whose size the largest one decides."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Outputs]) -> Graph:
        with torch.cuda.stream(self._stream):
            forward()  # lets libraries choose and load their kernels before the capture
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may use CUDA during the capture
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = forward()
        return _CudaGraph(graph, outputs)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


class RunAgain:
    """Replacement for CUDA graphs on other devices: `replay` reruns the forward and copies into the first outputs."""

    def __init__(self, forward: Callable[[], Outputs]) -> None:
        self._forward = forward
        self.outputs = forward()
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        with torch.inference_mode():
            again = self._forward()
            if all(self.outputs.logits.stride()):  # ranks without logits have a stride-0 view of one element
                self.outputs.logits.copy_(again.logits)
            self.outputs.finite.copy_(again.finite)


def capture_all(
    sizes: tuple[int, ...],
    forward_of: Callable[[int], Callable[[], Outputs]],
    capture: Capture,
    say: Report,
    free_bytes: Callable[[], int] = lambda: 0,
) -> dict[int, Graph]:
    """Capture the forward of each size, largest first; return the graphs by size. Reports progress and memory use."""
    began, before = time.monotonic(), free_bytes()
    graphs: dict[int, Graph] = {}
    for done, size in enumerate(sorted(sizes, reverse=True), 1):
        graphs[size] = capture(forward_of(size))
        say("capturing CUDA graphs", done, len(sizes))
    if sizes:
        used_mib = max(0, before - free_bytes()) / 2**20
        say(f"CUDA graphs: {len(sizes)} sizes up to {max(sizes)}, {used_mib:.0f} MiB, {time.monotonic() - began:.1f} s")
    return graphs
