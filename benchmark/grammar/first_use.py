"""What the first grammars cost a server: `python -m benchmark.grammar.first_use`.

Of a server with the embedded model: memory of its processes before and after the first grammar, and the time to the
first token of a schema's first and second use, beside that of a request without one.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import httpx
import psutil

from minisgl.bench.server_process import Launch, ServerProcess

SECONDS = 120.0


def schema(number: int) -> dict[str, Any]:
    properties = {f"field_{number}_{i}": {"type": "string" if i % 2 else "integer"} for i in range(20)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def ttft_ms(client: httpx.Client, number: int | None) -> float:
    body: dict[str, Any] = {"prompt": "A JSON object:", "max_tokens": 4, "temperature": 0, "stream": True}
    if number is not None:
        body["structured_outputs"] = {"json": schema(number)}
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        next(answer.iter_raw())
    return (time.perf_counter() - began) * 1000


def resident_mib(http: psutil.Process) -> list[float]:
    """Of the HTTP process and of the engine process."""
    engine = max(http.children(), key=lambda one: one.memory_info().rss)
    return [one.memory_info().rss / 2**20 for one in (http, engine)]


def measure(url: str, http: psutil.Process) -> dict[str, float]:
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        plain = [ttft_ms(client, None) for _ in range(20)]
        before = resident_mib(http)
        very_first = ttft_ms(client, 0)
        after = resident_mib(http)
        first = [ttft_ms(client, number) for number in range(1, 21)]
        second = [ttft_ms(client, number) for number in range(1, 21)]
        later = resident_mib(http)
    return {
        "TTFT without, ms": statistics.median(plain),
        "TTFT of the first grammar of all, ms": very_first,
        "TTFT of a schema's first use, ms": statistics.median(first),
        "TTFT of its second use, ms": statistics.median(second),
        "HTTP process, MiB more after the first": after[0] - before[0],
        "engine process, MiB more after the first": after[1] - before[1],
        "HTTP process, MiB more after 41": later[0] - before[0],
        "engine process, MiB more after 41": later[1] - before[1],
    }


def main() -> None:
    with ServerProcess(Launch(("--model", "smollm2", "--frontend", "python"))) as server:
        http = next(one for one in psutil.Process().children() if one.children())
        print(json.dumps({name: round(value, 2) for name, value in measure(server.url, http).items()}, indent=2))


if __name__ == "__main__":
    main()
