"""What a decode step costs when its rows have adapters, beside the same step without, in turns in one process.

    python -m benchmark.adapters [--engine cpu] [--model smollm2] [--rows 32] [--adapters 8] [--rank 16] [--rounds 6]

Each round decodes `--rows` requests for `--steps` tokens: once without adapters, once with all rows on one, once with
the rows dealt out to `--adapters` of them, on all linear layers. A step's time is the CPU time of this process in
`StepLoop.step` without overlap, which others on the machine hardly change; on one thread that is what it computes. The
last line of stdout is JSON: medians of all rounds in ms, and the differences paired by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from minisgl.bench.report import print_result
from minisgl.bench.stats import in_turns, paired_difference
from minisgl.config import EngineConfig
from minisgl.message import AdapterChanged, AddRequest, FromEngine, LoadAdapter
from minisgl.models.config import ModelConfig, adaptable, load_config
from minisgl.runner.build import build_control_plane, build_engine
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.weights.adapter import CONFIG, WEIGHTS

PROMPT_LEN = 8


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> None:
    """Random, on all linear layers, as peft saves it."""
    random = np.random.default_rng(seed)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    head: dict[str, object] = {}
    parts: list[bytes] = []
    at = 0
    for name, (inputs, outputs) in adaptable(model).items():
        for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = random.normal(0.0, 0.01, shape).astype(np.float32)
            end = at + numbers.nbytes
            key = f"base_model.model.{name}.lora_{kind}.weight"
            head[key] = {"dtype": "F32", "shape": shape, "data_offsets": (at, end)}
            parts.append(numbers.tobytes())
            at = end
    text = json.dumps(head).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)


class Decoding:
    """One engine, and its times of steps in which all rows decode."""

    def __init__(self, config: EngineConfig, num_adapters: int, rank: int, folder: Path) -> None:
        self._engine = build_engine(config, lambda text, done=0, total=0: None)
        plane = build_control_plane(config, self._engine.info)
        self._loop = StepLoop(plane, self._engine, self._take, settings=LoopSettings(overlap=False))
        self._refusals: list[str] = []
        self._next_id = 0
        self._vocab_size = self._engine.info.vocab_size
        assert self._engine.info.model_dir is not None
        model = load_config(self._engine.info.model_dir)
        for number in range(1, num_adapters + 1):
            place = folder / str(number)
            place.mkdir()
            write_adapter(place, model, rank, number)
            self._loop.step([LoadAdapter(number, str(number), str(place))])
        if self._refusals:
            raise SystemExit(f"benchmark.adapters: {self._refusals[0]}")

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, AdapterChanged) and message.reason:
                self._refusals.append(message.reason)

    def run(self, adapters: Sequence[int], num_steps: int) -> list[float]:
        """CPU milliseconds of each step in which all rows decode; row i has `adapters[i]`."""
        random = np.random.default_rng(1)
        sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + 1, seed=0, ignore_eos=True)
        requests = []
        for adapter in adapters:
            tokens = random.integers(5, self._vocab_size, PROMPT_LEN, np.int32).tobytes()
            requests.append(AddRequest(self._next_id, tokens, msgspec.structs.replace(sampling, adapter=adapter)))
            self._next_id += 1
        self._loop.step(requests)
        found = []
        while not self._loop.idle:
            began = time.process_time()
            self._loop.step([])
            if self._loop.timers.last_rows == len(adapters):
                found.append(1000 * (time.process_time() - began))
        return found

    def close(self) -> None:
        self._engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.adapters", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--engine", choices=("cpu", "torch"), default="cpu")
    parser.add_argument("--dtype", default="auto", help="of the torch engine")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24, help="of a round")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        engine=args.engine,
        dtype=args.dtype,
        num_threads=args.num_threads,
        cache="naive",
        max_running_requests=args.rows,
        max_prefill_length=args.rows * PROMPT_LEN,
        max_seq_len=512,
        num_pages=args.rows * 512 // 16,
    )
    kinds = {
        "none": [0] * args.rows,
        "one": [1] * args.rows,
        "dealt": [i % args.adapters + 1 for i in range(args.rows)],
    }
    with tempfile.TemporaryDirectory() as folder:
        decoding = Decoding(config, args.adapters, args.rank, Path(folder))
        for adapters in kinds.values():
            decoding.run(adapters, 4)  # warm
        medians = in_turns(
            list(kinds), args.rounds, lambda kind: statistics.median(decoding.run(kinds[kind], args.steps))
        )
        decoding.close()
    result: dict[str, object] = {**vars(args)}
    for kind, found in medians.items():
        result[f"{kind}_ms"] = round(statistics.median(found), 3)
        against = ""
        if kind != "none":
            paired = paired_difference(medians["none"], found)
            result[kind] = paired.as_dict()
            against = f", {paired} against none"
        print(f"{kind:>6}: {result[f'{kind}_ms']} ms a step{against}", file=sys.stderr)
    print_result(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
