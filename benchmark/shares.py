"""What the shares of API keys do: a trace whose requests several callers send, one of them most, in virtual time.

    python -m benchmark.shares --out benchmark/runs/DATE-shares     # minutes; MINISGL_DATA has the trace

Shares are kept where requests are dealt out to engines, which take twice as many as they have rows (as a key file sets
it). *Backlog*: all of the trace waits from the beginning; of what was served until the first caller has nothing left,
each gets its part. *Flood*: the trace at 1.2 times what the engine can do; who asks for less than its part waits for
nobody. Fairness is Jain's index of tokens, prompts and answers, over shares.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.bench.report import Report, public_command, table
from minisgl.bench.stats import jain
from minisgl.bench.traces import TraceRequest, read_trace
from minisgl.bench.virtual_fleet import Callers, VirtualFleet
from minisgl.bench.virtual_run import Floats, VirtualRun
from minisgl.config import EngineConfig
from minisgl.routing.api import KeyShare

PROFILE, TRACE = "qwen3-8b-h200", "azure-conversation"
PARTS = (0.7, 0.1, 0.1, 0.1)
"""Of the requests, by caller."""
SHARES = {"no key file": None, "equal shares": (1, 1, 1, 1), "shares 3, 1, 1, 1": (3, 1, 1, 1)}
ROWS = 256
FLOOD = 1.2


def callers_of(count: int, seed: int = 5) -> list[int]:
    """From 1 on."""
    draw = random.Random(seed)
    return draw.choices(range(1, len(PARTS) + 1), PARTS, k=count)


def served(run: VirtualRun, key_of: list[int]) -> list[float]:
    """Tokens by caller until the first has nothing left."""
    keys, tokens = np.array(key_of), run.num_prompt + run.num_tokens
    numbers = range(1, len(PARTS) + 1)
    until = min(float(run.last_token_s[keys == key].max()) for key in numbers)
    done = run.last_token_s <= until
    return [float(tokens[done & (keys == key)].sum()) for key in numbers]


def simulated(trace: list[TraceRequest], arrivals: Floats, shares: tuple[int, ...] | None) -> VirtualRun:
    config = EngineConfig(
        engine="sim",
        sim_profile=PROFILE,
        max_running_requests=ROWS,
        max_prefill_length=8192,
        max_seq_len=131_072,
    )
    callers = None
    if shares is not None:
        callers = Callers(tuple(map(KeyShare, shares)), callers_of(len(trace)), 2 * ROWS)
    fleet = VirtualFleet(config, 1, "cache_aware", len(trace), callers=callers)
    return fleet.run(trace, arrivals.copy(), 0)


def measure(trace: list[TraceRequest]) -> list[dict[str, Any]]:
    key_of = callers_of(len(trace))
    arrivals = np.array([one.arrival_s for one in trace])
    capacity_s = simulated(trace, np.zeros(len(trace)), None).end_s
    flood = arrivals / arrivals[-1] * capacity_s / FLOOD
    rows = []
    for name, shares in SHARES.items():
        weights = np.array(shares or (1,) * len(PARTS), float)
        tokens = served(simulated(trace, np.zeros(len(trace)), shares), key_of)
        run = simulated(trace, flood, shares)
        ttft = run.first_token_s - run.arrival_s
        of = [ttft[np.array(key_of) == key] for key in range(1, len(PARTS) + 1)]
        small = np.concatenate(of[1:])
        rows.append(
            {
                "shares": name,
                "served": tokens,
                "parts": [one / sum(tokens) for one in tokens],
                "jain": jain((np.array(tokens) / weights).tolist()),
                "ttft_p50_s": [float(np.percentile(one, 50)) for one in (of[0], small)],
                "ttft_p99_s": [float(np.percentile(one, 99)) for one in (of[0], small)],
                "end_s": run.end_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    program = "python -m benchmark.shares"
    report = Report(args.out, "Shares of API keys on a trace", command=public_command(sys.argv[1:], program))
    rows = measure(read_trace(TRACE))
    about = f"{TRACE}, simulated {PROFILE}: four callers, who send {', '.join(f'{one:.0%}' for one in PARTS)} of it."
    backlog = [(row["shares"], ", ".join(f"{part:.3f}" for part in row["parts"]), row["jain"]) for row in rows]
    report.section("Backlog", about, table(("", "part of the tokens, by caller", "Jain's index"), backlog))
    flood = [(row["shares"], *row["ttft_p50_s"], *row["ttft_p99_s"], row["end_s"]) for row in rows]
    head = (
        "",
        "TTFT p50 of the first, s",
        "of the others",
        "p99 of the first, s",
        "of the others",
        "all done after, s",
    )
    report.section(f"Flood: {FLOOD:g} times what the engine can do", table(head, flood))
    report.write({"rows": rows})
    print(table(head, flood), table(("", "parts", "Jain"), backlog), sep="\n\n")


if __name__ == "__main__":
    main()
