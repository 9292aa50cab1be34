"""What chats of a model that thinks cost in the gateway and in the Python front end, without tools and with eight.

    python -m benchmark.agents [--pairs 3]

A chat template after Qwen3's, an engine that returns at once, 256 clients; pairs of fresh servers (`benchmark.ab`).
Exit code 0 if the gateway gives at least twice the tokens a second, with at most 0.4 of the CPU per token and half of
the TTFT p99.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

TEMPLATE = "tests/gateway/templates/thoughts_and_calls.jinja"
LOAD = "--concurrency 256 --num-requests 2048 --input-len 200 200 --output-len 128 128"
SERVER = ("--engine", "sim", "--sim-profile", "null", "--max-running-requests", "512", "--max-seq-len", "8192")
BARS = {"output_tok_s": (2.0, True), "http_cpu_us_per_token": (0.4, False), "ttft_p99_ms": (0.5, False)}
NUM_TOOLS = 8


def tools() -> list[dict[str, Any]]:
    """As agents have them."""
    text = {"type": "string", "description": "A path, relative to the root of the project."}
    schema = {"type": "object", "properties": {"path": text, "limit": {"type": "integer"}}, "required": ["path"]}
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{i}", "description": f"Does {i} to a file.", "parameters": schema},
        }
        for i in range(NUM_TOOLS)
    ]


def ratios(body: dict[str, Any], pairs: int) -> dict[str, float]:
    """Of the gateway's figures to the Python front end's."""
    load = f"{LOAD} --extra-body '{json.dumps({'ignore_eos': True, **body})}'"
    command = [sys.executable, "-m", "benchmark.ab", "--pairs", str(pairs), "--a-flags=--frontend python"]
    command += ["--b-flags=--frontend rust", f"--load={load}", "--", *SERVER, "--chat-template", TEMPLATE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    return {name: 1 + metrics[name]["ratio"]["estimate"] for name in BARS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    pairs = parser.parse_args().pairs
    missed = 0
    for name, body in {"thinks": {}, f"{NUM_TOOLS} tools": {"tools": tools()}}.items():
        for figure, ratio in ratios(body, pairs).items():
            bar, at_least = BARS[figure]
            held = ratio >= bar if at_least else ratio <= bar
            missed += not held
            print(f"{name}: {figure} {ratio:.2f} of Python's, {'at least' if at_least else 'at most'} {bar}: {held}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
