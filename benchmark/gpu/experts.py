"""Benchmark the routed experts of one layer on a GPU, in one command: `python benchmark/gpu/experts.py --out FOLDER`.

Compares, by the number of tokens: the fused Triton form, eager and as a CUDA graph; the grouped form in torch; and
torch's own grouped matmul where it supports the dtype; with the lower bound set by reading the weights in use or by
arithmetic. `--sweep` tries other tiles and names the fastest for each number of tokens.

Forms take turns, forwards and backwards; the weights of several layers alternate, so that they come from memory;
results are written after each line, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmark.gpu.shapes import SHAPES  # noqa: E402
from benchmark.gpu.watch import BYTES_PER_S, copy_speed  # noqa: E402
from minisgl.bench.report import table  # noqa: E402
from minisgl.bench.stats import in_turns  # noqa: E402
from minisgl.kernels import experts, experts_tiles  # noqa: E402
from minisgl.kernels.experts_tiles import Tile  # noqa: E402
from minisgl.layers.experts import grouped  # noqa: E402

FLOPS_PER_S = 790e12  # of an H200's tensor cores, as reached by a large bfloat16 product
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
REHEARSAL_SHAPE = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
Form = Callable[..., Tensor]


class Work:
    """Expert weights of several layers, and random inputs for any number of tokens."""

    def __init__(self, shape: dict[str, Any], dtype: torch.dtype, device: str, layers: int) -> None:
        self.device, self.dtype = device, dtype
        self.bytes_per_s = copy_speed() if device == "cuda" else BYTES_PER_S
        self.hidden, self.inner = shape["hidden_size"], shape["moe_intermediate_size"]
        self.num_experts, self.per_token = shape["num_experts"], shape["num_experts_per_tok"]
        self.layers = [
            (self._noise(self.num_experts, 2 * self.inner, self.hidden), self._noise(*self._down_shape()))
            for _ in range(layers)
        ]

    def _down_shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.hidden, self.inner

    def _noise(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, 0.05)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        liking = torch.rand(tokens, self.num_experts, device=self.device)
        shares, chosen = liking.softmax(-1).topk(self.per_token, -1)
        return self._noise(tokens, self.hidden), chosen, shares.to(self.dtype)

    def best_s(self, chosen: Tensor) -> float:
        """Return the lower bound in seconds: memory bandwidth or tensor cores, whichever takes longer."""
        per_expert = 3 * self.hidden * self.inner
        in_use = len(chosen.unique())
        read_s = in_use * per_expert * self.dtype.itemsize / self.bytes_per_s
        return max(read_s, chosen.numel() * per_expert * 2 / FLOPS_PER_S)


def library(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Compute the experts through torch's grouped matmul, which needs no host synchronization either."""
    (num_tokens, per_token), inner = chosen.shape, down.shape[2]
    flat = chosen.flatten()
    ordered, order = flat.sort(stable=True)
    every = torch.arange(1, len(down) + 1, device=x.device)
    ends = torch.searchsorted(ordered, every).to(torch.int32)
    both = F.grouped_mm(x[order // per_token], gate_up.transpose(1, 2), offs=ends)
    between = F.silu(both[:, :inner]) * both[:, inner:]
    rows = F.grouped_mm(between, down.transpose(1, 2), offs=ends)
    out = torch.empty_like(rows).index_copy_(0, order, rows)
    return (out.view(num_tokens, per_token, -1) * shares.unsqueeze(-1)).sum(1)


def through(form: Form, work: Work, tokens: int, **settings: Any) -> Callable[[], Tensor]:
    """Return a call that runs all layers in sequence."""
    x, chosen, shares = work.inputs(tokens)

    def run() -> Tensor:
        out = x
        for gate_up, down in work.layers:
            out = form(x, gate_up, down, chosen, shares, **settings)
        return out

    return run


def captured(run: Callable[[], Tensor]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(run: Callable[[], object], device: str, least_s: float) -> float:
    """Return the seconds per call, over enough calls to take `least_s`."""

    def once(calls: int) -> float:
        if device == "cpu":
            began = time.perf_counter()
            for _ in range(calls):
                run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    calls = 1 + int(least_s / max(once(2) / 2, 1e-6))
    return once(calls) / calls


def side_by_side(work: Work, tokens: int, repeats: int, least_s: float) -> dict[str, Any]:
    forms: dict[str, Callable[[], object]] = {"grouped": through(grouped, work, tokens)}
    if experts.serves(work.layers[0][0]):
        forms["fused"] = through(experts.run, work, tokens)
        forms["fused_graph"] = captured(forms["fused"])  # type: ignore[arg-type]
    with_library = through(library, work, tokens)
    failed = {}
    try:
        with_library()
        forms["library"] = with_library
    except (RuntimeError, AttributeError) as error:
        failed["library"] = str(error).splitlines()[0][:200]
    for form in forms.values():
        form()
    layers = len(work.layers)
    seconds = in_turns(list(forms), repeats, lambda name: timed(forms[name], work.device, least_s) / layers)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = work.best_s(work.inputs(tokens)[1])
    tile = experts_tiles.tile_for(tokens * work.per_token, work.num_experts, work.dtype)
    return {
        "tokens": tokens,
        "block_m": tile.block_m,
        "us": {name: value * 1e6 for name, value in medians.items()},
        "raw_us": {name: [value * 1e6 for value in values] for name, values in seconds.items()},
        "best_us": best * 1e6,
        "of_best": {name: best / value for name, value in medians.items()},
        "failed": failed,
    }


def candidates(dtype: torch.dtype, rows: float) -> list[Tile]:
    """Return tiles to try for experts with `rows` rows on average, those in use first."""
    least, most = min(64, rows / 2), max(16, 2 * rows)
    tiles = [tile for tile in experts_tiles.tiles(dtype) if least <= tile.block_m <= most]
    for block_m, n, k, warps, stages in itertools.product((16, 32, 64, 128), (64, 32, 128), (64, 128), (4, 8), (4, 3)):
        shared = stages * (block_m + 2 * n) * k * dtype.itemsize
        registers = block_m * 2 * n // (warps * 32)  # a thread's, for sums
        if least <= block_m <= most and shared <= 220 * 1024 and 8 <= registers <= 128:
            tiles.append(Tile(block_m, n, 2 * n, k, warps, stages))
    return list(dict.fromkeys(tiles))


def sweep(work: Work, tokens: int, least_s: float, until: float) -> dict[str, Any]:
    """Time CUDA graphs of the fused form, tile by tile. Most of the time goes to Triton's compiler, once a tile."""
    from triton.runtime.errors import OutOfResources

    us: dict[str, float] = {}
    for tile in candidates(work.dtype, tokens * work.per_token / work.num_experts):
        if time.monotonic() > until:
            break
        try:
            run = captured(through(experts.run, work, tokens, tile=tile))
        except OutOfResources:
            continue
        us[repr(tile)] = timed(run, work.device, least_s) / len(work.layers) * 1e6
    fastest = sorted(us, key=us.__getitem__)[:3]
    chosen = repr(experts_tiles.tile_for(tokens * work.per_token, work.num_experts, work.dtype))
    return {"tokens": tokens, "in_use_us": us.get(chosen), "fastest": {name: us[name] for name in fastest}, "us": us}


HEAD = ("tokens", "rows a block", "grouped, us", "library, us", "fused, us", "fused in a graph, us",
        "grouped / fused", "library / fused", "fused at best pace, %")  # fmt: skip


def row(found: dict[str, Any]) -> tuple[float | None, ...]:
    us = found["us"]

    def over(name: str, other: str) -> float | None:
        return us[name] / us[other] if {name, other} <= us.keys() else None

    fastest = us.get("fused_graph", us.get("fused"))
    times = (us.get(name) for name in ("grouped", "library", "fused", "fused_graph"))
    share = 100 * found["best_us"] / fastest if fastest else None
    return (found["tokens"], found["block_m"], *times, over("grouped", "fused"), over("library", "fused"), share)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write experts.json and experts.md into this folder")
    parser.add_argument("--model", choices=sorted(n for n in SHAPES if "num_experts" in SHAPES[n]))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=400.0, help="start nothing after so many (default: 400)")
    parser.add_argument("--sweep", action="store_true", help="also try other tiles")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, with a tiny shape and no kernel")
    return parser


def main() -> int:
    args = parser().parse_args()
    until = time.monotonic() + args.seconds
    if not args.rehearse and not torch.cuda.is_available():
        print("benchmark/gpu/experts.py: torch finds no CUDA device", file=sys.stderr)
        return 1
    device, least_s = ("cpu", 1e-3) if args.rehearse else ("cuda", 0.02)
    shape = REHEARSAL_SHAPE if args.rehearse else SHAPES[args.model or "qwen3-30b-a3b"]
    kept: dict[str, Any] = {
        "device": "cpu, rehearsed" if args.rehearse else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_s": None,
        "shape": {key: shape[key] for key in REHEARSAL_SHAPE},
        "side_by_side": [],
        "sweep": [],
    }
    with torch.inference_mode():
        work = Work(shape, torch.bfloat16, device, args.layers)
        kept["copy_bytes_per_s"] = work.bytes_per_s if device == "cuda" else None
        for tokens in args.tokens:
            if time.monotonic() > until:
                break
            kept["side_by_side"].append(side_by_side(work, tokens, args.repeats, least_s))
            print(dict(zip(HEAD, row(kept["side_by_side"][-1]), strict=True)), flush=True)
            write(args.out, kept)
        for tokens in args.tokens if args.sweep and not args.rehearse else []:
            share = (until - time.monotonic()) / (len(args.tokens) - len(kept["sweep"]))
            found = sweep(work, tokens, least_s / 4, time.monotonic() + share)
            kept["sweep"].append(found)
            print(f"{tokens} tokens: in use {found['in_use_us']} us; fastest {found['fastest']}", flush=True)
            write(args.out, kept)
    return 0


def write(folder: Path | None, kept: dict[str, Any]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experts.json").write_text(json.dumps(kept, indent=1))
    (folder / "experts.md").write_text(table(HEAD, map(row, kept["side_by_side"])) + "\n")


if __name__ == "__main__":
    sys.exit(main())
