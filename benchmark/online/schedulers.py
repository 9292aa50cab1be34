"""The same load through `python` and `rust_hotpath`, on several profiles: what the choice of a scheduler changes.

    python -m benchmark.online.schedulers --out FOLDER [--pairs 6] [--profile NAME ...]

The simulated profiles read a tokenizer: the embedded one, or that of the folder --tokenizer.
"""

from __future__ import annotations

import sys

from benchmark.ab.variants import Variant
from benchmark.online.profiles import Comparison, Profile, simulated

CHAT = "--input-len 200 200 --output-len 128 128"
COMPARISON = Comparison(
    name="schedulers",
    title="Scheduler by scheduler",
    variants=(
        Variant("python", ("--cpu-backend", "python")),
        Variant("rust_hotpath", ("--cpu-backend", "rust_hotpath")),
    ),
    summary=("output_tok_s", "ttft_p99_ms", "itl_p99_ms", "scheduler_us_per_step", "engine_cpu_us_per_token"),
    text="Simulated profiles run no model. Time of the scheduler is that of `schedule` and `commit`.",
    parts=("schedule", "commit", "receive", "launch", "wait", "send"),
    profiles={
        "null, 64 clients": Profile(simulated("null"), f"--concurrency 64 --num-requests 768 {CHAT}"),
        "null, 256 clients": Profile(simulated("null"), f"--concurrency 256 --num-requests 1536 {CHAT}"),
        "null, 256 clients, mixed chats": Profile(
            simulated("null"), "--concurrency 256 --num-requests 1536 --workload chat --warmup-requests 256"
        ),
        "null, 100 requests a second": Profile(simulated("null"), f"--rate 100 --num-requests 600 {CHAT}"),
        "qwen3-0.6b-h200, 256 clients": Profile(
            simulated("qwen3-0.6b-h200"), f"--concurrency 256 --num-requests 1024 --warmup-requests 256 {CHAT}"
        ),
        "qwen3-8b-h200, 256 clients": Profile(
            simulated("qwen3-8b-h200"), f"--concurrency 256 --num-requests 768 --warmup-requests 256 {CHAT}"
        ),
        "qwen3-8b-h200, 40 requests a second": Profile(
            simulated("qwen3-8b-h200"), f"--rate 40 --num-requests 240 {CHAT}"
        ),
        "echo, 32 clients": Profile(
            ("--engine", "echo", "--max-running-requests", "32"),
            "--concurrency 32 --num-requests 96 --input-len 40 40 --output-len 64 64",
        ),
        "smollm2, 8 clients": Profile(
            ("--model", "smollm2", "--max-running-requests", "8"),
            "--concurrency 8 --num-requests 16 --warmup-requests 8 --input-len 40 40 --output-len 24 24",
        ),
    },
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main())
