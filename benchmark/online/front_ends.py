"""The same load through the Python front end and the gateway: what `--frontend` changes.

    python -m benchmark.online.front_ends --out FOLDER [--pairs 6] [--profile NAME ...]

The simulated profiles read a tokenizer: the embedded one, or that of the folder --tokenizer.
"""

from __future__ import annotations

import sys

from benchmark.ab.variants import Variant
from benchmark.online.moments import MESSAGES, cold_and_idle, long_chat, port_open
from benchmark.online.profiles import Comparison, Profile, simulated

CHAT = "--input-len 200 200 --output-len 128 128"
LONG = ("--max-seq-len", "65536", "--num-pages", "16384")
COMPARISON = Comparison(
    name="front_ends",
    title="Front end by front end",
    variants=(Variant("python", ("--frontend", "python")), Variant("rust", ("--frontend", "rust"))),
    summary=("output_tok_s", "http_cpu_us_per_token", "ttft_p99_ms", "itl_p99_ms", "longest_pause_ms"),
    text="Simulated profiles run no model. The client runs on the same cores.",
    profiles={
        "null, 64 clients": Profile(simulated("null"), f"--concurrency 64 --num-requests 2048 {CHAT}"),
        "null, 256 clients": Profile(simulated("null"), f"--concurrency 256 --num-requests 4096 {CHAT}"),
        "null, 256 clients, mixed chats": Profile(
            simulated("null"), "--concurrency 256 --num-requests 1536 --workload chat --warmup-requests 256"
        ),
        "qwen3-8b-h200, 256 clients": Profile(
            simulated("qwen3-8b-h200"), f"--concurrency 256 --num-requests 768 --warmup-requests 256 {CHAT}"
        ),
        "qwen3-8b-h200, 40 requests a second": Profile(
            simulated("qwen3-8b-h200"), f"--rate 40 --num-requests 240 {CHAT}"
        ),
        "smollm2, 8 clients": Profile(
            ("--model", "smollm2", "--max-running-requests", "8"),
            "--concurrency 8 --num-requests 16 --warmup-requests 8 --input-len 40 40 --output-len 24 24",
        ),
        f"a chat of {MESSAGES} messages, its next turns": Profile(simulated("null", *LONG), "", long_chat),
        "256 cold connections, and idle": Profile(simulated("null"), "", cold_and_idle),
        "port open": Profile(simulated("null"), "", port_open),
    },
)

if __name__ == "__main__":
    sys.exit(COMPARISON.main())
