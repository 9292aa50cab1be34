"""What saving states takes of a prompt and of decoding, on models of random weights in known shapes:

    python -m benchmark.states qwen3.5-0.8b --type q8_0 --out OUT

One engine that saves none beside one with the usual interval and one that saves each 64 tokens, all alive at once and
asked in turns, with the same texts. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minisgl.bench.random_models import SHAPES, TYPES, random_model
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import paired_difference, turns
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

FIRST_ID, LAST_ID = 5, 30_000  # as in `minisgl bench model`
SAVING: dict[str, dict[str, int]] = {
    "nothing saved": {"state_memory": 0},
    "saved each 256": {},
    "saved each 64": {"checkpoint_interval": 64},
}
STATE_MEMORY = 2**30  # the KV pools here are too small for a share of them to hold a state
PROMPT, DECODED = 2048, 256  # tokens

Ask = Callable[[Sequence[int], int], float]
"""Milliseconds that token ids and so many tokens of an answer take."""
Samples = dict[str, list[dict[str, float]]]


def speeds(ask: Ask, scale: int, seed: int) -> dict[str, float]:
    """Tokens a second of a prompt and of an answer, whose lengths are divided by `scale`."""
    length, decoded = PROMPT // scale, DECODED // scale
    ids = np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, length).tolist()
    prompt = length / ask(ids, 1) * 1000
    short = ids[::-1][:32]
    began = ask(short, 1)
    return {"prompt": prompt, "decode": decoded / (ask(short, decoded + 1) - began) * 1000}


@contextlib.contextmanager
def engine(model: Path, args: argparse.Namespace, **settings: int) -> Iterator[Ask]:
    common = {"state_memory": STATE_MEMORY, "num_threads": args.threads, "activations": args.activations}
    length = PROMPT + DECODED
    pools = {"num_pages": length // 4, "max_seq_len": length, "max_running_requests": 4}
    with LLM(str(model), engine="cpu", log_level="error", **{**common, **pools, **settings}) as llm:

        def ask(ids: Sequence[int], num_out: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
            began = time.perf_counter()
            llm.generate([list(ids)], params, progress=False)
            return 1000 * (time.perf_counter() - began)

        yield ask


def saving_table(found: Samples) -> str:
    plain, *others = found
    rows = [(plain, *(f"{statistics.median(one[what] for one in found[plain]):.1f} tok/s" for what in found[plain][0]))]
    for name in others:
        differences = []
        for what in found[plain][0]:
            before, now = ([one[what] for one in found[variant]] for variant in (plain, name))
            differences.append(str(paired_difference(before, now)))
        rows.append((name, *differences))
    return table(("", *found[plain][0]), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="benchmark.states", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    with_states = [name for name, shape in SHAPES.items() if shape.attending is not None]
    parser.add_argument("shape", choices=with_states)
    parser.add_argument("--type", choices=TYPES, default="q8_0")
    parser.add_argument("--layers", type=int, help="at most")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="texts are so many times shorter, to try the command")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    args = parser.parse_args(given)
    model, found = random_model(args.shape, args.type, args.layers), Samples()
    with contextlib.ExitStack() as stack:
        alive = {name: stack.enter_context(engine(model, args, **own)) for name, own in SAVING.items()}
        for number, name in turns(list(alive), args.rounds):
            found.setdefault(name, []).append(speeds(alive[name], args.scale, number + 1))
            print(f"round {number + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    text = saving_table(found)
    print(text)
    if args.out is not None:
        report = Report(args.out, "Layers with a state", command=public_command(given, "python -m benchmark.states"))
        report.section("What saving costs", text)
        report.write({"saving": found})
    print_result({"bench": "states", "shape": args.shape, "saving": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
