"""The load of `minisgl serve --demo-load`: `python -m minisgl.bench.demo_load`, an ordinary client in its own process.
It reads {url, model, api_key, seed} as one JSON line from stdin and runs until stdin is closed.

Invariants: the same seed sends the same requests; only a few requests at once, so that a laptop keeps up; it ends with
the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from minisgl.bench.load import Server, calibrate, generator, model_facts
from minisgl.bench.render import PATHS, Renderer
from minisgl.bench.workloads import Workload, WorkloadSettings, fitted, make_workload
from minisgl.config import ConfigError

NUM_CLIENTS = 5
BURST = 8
PAUSE_S = 1.0
TROUBLE_S = 5.0  # pause after a round without a response
USUAL_CONTEXT = 4096


def rounds(seed: int, context: int) -> Iterator[tuple[Workload, bool]]:
    """Yield workloads without an end, alternately: a mix of chats, questions after a shared prefix and a long prompt,
    for a few clients (False); and a burst of short questions, all at once (True)."""
    size = min(context, USUAL_CONTEXT)
    run = 0
    while True:
        base = WorkloadSettings(seed=seed, run=run, num_prefixes=3, prefix_len=size // 16, turns=4)
        chats = replace(base, num_requests=12, input_len=(10, 40), output_len=(20, 60))
        shared = replace(base, num_requests=8, input_len=(8, 40), output_len=(20, 60), run=0)
        long_ = replace(base, num_requests=1, input_len=(size // 4, size // 2), output_len=(20, 40))
        burst = replace(base, num_requests=BURST, input_len=(8, 60), output_len=(10, 30))
        order = np.random.default_rng((seed, run))
        parts = [make_workload(*one) for one in (("multi-turn", chats), ("shared-prefix", shared), ("random", long_))]
        yield fitted(_mixed(parts, order), context), False
        yield fitted(make_workload("random", burst), context), True
        run += 1


def _mixed(parts: list[Workload], order: np.random.Generator) -> Workload:
    """Merge workloads with their chains shuffled."""
    chains = []
    for part in parts:
        at = 0
        for length in part.chains:
            chains.append(part.requests[at : at + length])
            at += length
    shuffled = [chains[i] for i in order.permutation(len(chains))]
    return Workload("demo", tuple(one for chain in shuffled for one in chain), tuple(map(len, shuffled)))


def run(server: Server, seed: int) -> None:
    """Send the demonstration load until the process ends. Raises `ConfigError` if the server cannot be used."""
    context = model_facts(server).get("max_model_len")
    renderer = Renderer(server.model, "chat", calibrate(server, "chat", {}), {"temperature": 0.8, "seed": seed})
    send = generator()
    for workload, is_burst in rounds(seed, context if isinstance(context, int) else USUAL_CONTEXT):
        result = send(
            server.url + PATHS["chat"],
            [renderer.body(request) for request in workload.requests],
            chains=workload.chains,
            arrivals=[0.0] * len(workload.chains) if is_burst else None,
            concurrency=0 if is_burst else NUM_CLIENTS,
            headers=server.headers(),
        )
        time.sleep(PAUSE_S if (result["status"] == 200).any() else TROUBLE_S)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)  # requests in flight end with their connections


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        given = json.loads(stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        run(Server(given["url"], given["model"], given["api_key"]), given["seed"])
    except ConfigError as error:
        print(f"minisgl: --demo-load: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
