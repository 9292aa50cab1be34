"""Memory of compiled kernels: what a model's matrix products keep for each number of rows that they have seen.

    python -m benchmark.offline.kernel_memory [--model smollm2] [--rows 800] [--exact] [--bound-mb 300] [--out FILE]

Runs the MLP and the head of a loaded model with every number of rows from 1 to `--rows`, in a seeded order, twice, and
reads the resident memory. `--exact` leaves out the padding of rows, to show what it is for. Exit code 1 if the memory
grows by more than `--bound-mb`, or in the second round by more than a twentieth of that. The last line of stdout is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import psutil
import torch

from minisgl.config import EngineConfig
from minisgl.engine.loading import load_engine
from minisgl.layers import packing

HEAD_ROWS = 32  # as many as are sampled at once


def resident_mb() -> float:
    return round(psutil.Process().memory_info().rss / 1e6, 1)


def one_round(model: object, hidden: torch.Tensor, order: list[int]) -> list[float]:
    """Resident memory after each tenth of it."""
    found = []
    for i, rows in enumerate(order, 1):
        for layer in model._layers[:1]:  # type: ignore[attr-defined]
            layer._mlp(hidden[:rows])
            layer._attention._qkv(hidden[:rows])
        model.logits(hidden[: min(rows, HEAD_ROWS)])  # type: ignore[attr-defined]
        if i % (len(order) // 10) == 0:
            found.append(resident_mb())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--bound-mb", type=float, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(model=args.model, num_pages=8, max_running_requests=4, max_seq_len=64)
    engine = load_engine(config, lambda *_: None)
    if args.exact:
        packing.padded_rows = lambda rows: rows
    order = list(range(1, args.rows + 1))
    random.Random(0).shuffle(order)
    rounds, seconds = [], []
    with torch.inference_mode():
        hidden = torch.zeros(args.rows, engine._model.config.hidden_size, dtype=torch.bfloat16)
        one_round(engine._model, hidden, [args.rows] * 10)  # activations of the largest size
        start = resident_mb()
        for _ in range(2):
            began = time.monotonic()
            rounds.append(one_round(engine._model, hidden, order))
            seconds.append(round(time.monotonic() - began, 1))
    engine.close()
    growth, later = round(rounds[0][-1] - start, 1), round(rounds[1][-1] - rounds[0][-1], 1)
    ok = growth <= args.bound_mb and later <= args.bound_mb / 20
    report = {
        "ok": ok,
        "model": args.model,
        "padded": not args.exact,
        "rows": args.rows,
        "start_mb": start,
        "growth_mb": {"first round": growth, "second round": later},
        "rss_mb": rounds,
        "seconds": seconds,
    }
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
