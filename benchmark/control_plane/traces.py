"""Production traces through both control planes, with an engine that returns at once.

    MINISGL_DATA=FOLDER python -m benchmark.control_plane.traces [--requests N] [--out FILE]

Two questions. Does any decision differ: requests of the Mooncake conversation trace at the concurrency that its times
give (a step stands for `STEP_MS` of the trace), a pool that evicts and retracts, every plan, array and output compared.
And is the prefix hit rate that of the trace itself: page size 512, a pool for everything, one request at a time. The
trace's own rate counts whole blocks seen before; this cache recomputes the last page of a full hit, and a block that is
not whole is no page. The last line of stdout is JSON; exit code 1 if a decision differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minisgl import envs
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Arrival, Events, Int32Array
from tests.helpers_parity import Pair

BLOCK = 512
STEP_MS = 30
Trace = list[dict[str, Any]]


def read(count: int | None) -> Trace:
    folder = envs.data_dir()
    if folder is None:
        raise SystemExit("MINISGL_DATA: not set: the folder with traces/mooncake_conversation.jsonl")
    lines = (folder / "traces" / "mooncake_conversation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def block(hash_id: int, cache: dict[int, Int32Array]) -> Int32Array:
    """The tokens of a block, drawn from a generator seeded with its id."""
    if (found := cache.get(hash_id)) is None:
        found = cache[hash_id] = np.random.default_rng(hash_id).integers(0, 100_000, BLOCK, dtype=np.int32)
    return found


def prompt(request: dict[str, Any], cache: dict[int, Int32Array]) -> Int32Array:
    whole = np.concatenate([block(one, cache) for one in request["hash_ids"]])
    return np.ascontiguousarray(whole[: request["input_length"]])


def arrivals(trace: Trace, max_output: int) -> Iterator[tuple[int, Arrival]]:
    """(step, arrival); outputs are capped so that the run stays short."""
    cache: dict[int, Int32Array] = {}
    for req_id, request in enumerate(trace):
        tokens = prompt(request, cache)
        output = max(1, min(request["output_length"], max_output))
        yield request["timestamp"] // STEP_MS, Arrival(req_id, tokens, len(tokens), output)


def parity(trace: Trace) -> dict[str, Any]:
    """Raises `Divergence`."""
    config = ControlPlaneConfig(
        num_pages=16_384, page_size=16, max_running_requests=64, max_prefill_length=8192, context_len=131_072
    )
    pair = Pair(config)
    pending = list(arrivals(trace, max_output=64))[::-1]
    step = ended = 0
    while ended < len(trace):
        due = []
        while pending and pending[-1][0] <= step:
            due.append(pending.pop()[1])
        plan = pair.schedule(step, due)  # type: ignore[arg-type]
        ended += len(pair.commit(step, np.full(plan.num_rows, 100_001, np.int32)))
        pair.log.clear()
        step += 1
    pair.check()
    stats = pair.theirs.stats()
    return {
        "steps": step,
        "retracted": stats.num_retracted_total,
        "hit_rate": stats.num_cached_tokens_total / stats.num_prompt_tokens_total,
    }


def hit_rate(trace: Trace) -> dict[str, float]:
    """Of prompt tokens: as this cache finds them one at a time, and by whole blocks seen before. Of blocks, the last of
    a prompt counted as one however short it is: the rate that the trace is published with."""
    seen: set[int] = set()
    ever: set[int] = set()
    total = by_blocks = recomputed = blocks = blocks_found = 0
    for request in trace:
        ids, length = request["hash_ids"], request["input_length"]
        blocks += len(ids)
        blocks_found += next((i for i, one in enumerate(ids) if one not in ever), len(ids))
        ever.update(ids)
        known = 0
        while known < min(len(ids), length // BLOCK) and ids[known] in seen:
            known += 1
        seen.update(ids[: length // BLOCK])
        total += length
        by_blocks += known * BLOCK
        recomputed += BLOCK if known * BLOCK == length else 0
    pages = len({one for request in trace for one in request["hash_ids"]}) + 3 * len(trace) + 512
    plane = make_control_plane(
        "rust_hotpath",
        ControlPlaneConfig(
            num_pages=pages, page_size=BLOCK, max_running_requests=1, max_prefill_length=10**6, context_len=10**6
        ),
    )
    step = 0
    for _, arrival in arrivals(trace, max_output=1):
        events = Events([arrival])
        while plane.stats().num_live or len(events):
            plan = plane.schedule(step, events)
            plane.commit(step, np.full(plan.num_rows, 100_001, np.int32))
            events, step = Events(), step + 1
    found = plane.stats().num_cached_tokens_total
    return {
        "found": found / total,
        "by_whole_blocks": by_blocks / total,
        "blocks_by_blocks": blocks_found / blocks,
        "recomputed_last_pages": recomputed / total,
        "unaccounted_tokens": by_blocks - recomputed - found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, help="the first N (default: all)")
    parser.add_argument("--only", choices=("hit-rate", "parity"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trace = read(args.requests)
    report: dict[str, Any] = {"requests": len(trace)}
    if args.only != "parity":
        report["hit_rate"] = hit_rate(trace)
    if args.only != "hit-rate":
        report["parity"] = parity(trace)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
