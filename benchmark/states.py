"""What layers with a state cost and spare, on models of random weights in known shapes:

    python -m benchmark.states qwen3.5-0.8b --type q8_0 --beside DIR --out OUT

The first token of a talk of 4,096 tokens, of its second turn, and of three visitors who share 2,000 tokens; then what
saving states takes of a prompt and of decoding: one engine that saves none beside one with the usual interval and one
that saves each 64 tokens. `--beside`: a folder with xllamacpp, whose server is asked the same with its own cache.

All variants are alive at once and asked in turns, with the same texts. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.bench import compare_llama_cpp
from minisgl.bench.compare_variants import Child
from minisgl.bench.random_models import SHAPES, TYPES, random_model
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import paired_difference, turns
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

FIRST_ID, LAST_ID = 5, 30_000  # as in `minisgl bench model`
LLAMA = "llama.cpp"
SAVING: dict[str, dict[str, int]] = {
    "nothing saved": {"state_memory": 0},
    "saved each 256": {},
    "saved each 64": {"checkpoint_interval": 64},
}
STATE_MEMORY = 2**30  # the KV pools here are too small for a share of them to hold a state
START_S, RUN_S = 600.0, 900.0

Begin = Callable[[Sequence[int], int], Mapping[str, Any]]
"""By token ids and the tokens of the answer: `ms`, `computed` (tokens of the prompt), `answer`."""
Samples = dict[str, list[dict[str, float]]]


def sizes(scale: int) -> dict[str, int]:
    """Tokens, divided by `scale`."""
    whole = {"talk": 4096, "answer": 32, "more": 32, "shared": 2000, "own": 64, "prompt": 2048, "decoded": 256}
    return {name: max(1, count // scale) for name, count in whole.items()}


def talk(begin: Begin, of: Mapping[str, int], seed: Sequence[int]) -> dict[str, Mapping[str, float]]:
    """By what is asked: milliseconds to its first token, and tokens that were computed."""
    rng = np.random.default_rng(list(seed))

    def some(count: int) -> list[int]:
        return [int(one) for one in rng.integers(FIRST_ID, LAST_ID, count)]

    def first(ids: Sequence[int]) -> Mapping[str, float]:
        found = begin(ids, 1)
        return {"ms": found["ms"], "computed": found["computed"]}

    text = some(of["talk"])
    found = {f"a talk of {of['talk']:,} tokens": first(text)}
    answer = begin(text, of["answer"])["answer"]
    found["its second turn"] = first([*text, *answer, *some(of["more"])])
    shared = some(of["shared"])
    for visitor in ("first", "second", "third"):
        found[f"{visitor} visitor of {of['shared']:,} tokens"] = first(shared + some(of["own"]))
    return found


def speeds(begin: Begin, of: Mapping[str, int], seed: Sequence[int]) -> dict[str, float]:
    """Tokens a second of a prompt and of an answer."""
    ids = np.random.default_rng(list(seed)).integers(FIRST_ID, LAST_ID, of["prompt"]).tolist()
    prompt = of["prompt"] / begin(ids, 1)["ms"] * 1000
    short = ids[::-1][:32]
    began, count = begin(short, 1)["ms"], of["decoded"]
    return {"prompt": prompt, "decode": count / (begin(short, count + 1)["ms"] - began) * 1000}


@contextlib.contextmanager
def ours(model: Path, length: int, args: argparse.Namespace, **settings: int) -> Iterator[Begin]:
    common = {"state_memory": STATE_MEMORY, "num_threads": args.threads, "activations": args.activations}
    pools = {"num_pages": 4 * -(-length // 16), "max_seq_len": length, "max_running_requests": 4}
    with LLM(str(model), engine="cpu", log_level="error", **{**common, **pools, **settings}) as llm:

        def begin(ids: Sequence[int], num_out: int) -> Mapping[str, Any]:
            params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
            began = time.perf_counter()
            [found] = llm.generate([list(ids)], params, progress=False)
            ms = 1000 * (time.perf_counter() - began)
            return {"ms": ms, "computed": len(ids) - found.num_cached_tokens, "answer": found.token_ids}

        yield begin


@contextlib.contextmanager
def theirs(folder: Path, model: Path, length: int, threads: int) -> Iterator[Begin]:
    """What its server says that a prompt took."""
    program = (sys.executable, "-P", compare_llama_cpp.__file__, str(model), str(threads), "1", str(length))
    with Child(("env", f"PYTHONPATH={folder}", *program)) as process:
        url = process.line(START_S)["url"]

        def begin(ids: Sequence[int], num_out: int) -> Mapping[str, Any]:
            body = {"prompt": list(ids), "n_predict": num_out, "temperature": 0, "ignore_eos": True}
            data = json.dumps({**body, "cache_prompt": True, "return_tokens": True}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/completion", data), timeout=RUN_S) as answer:
                found = json.load(answer)
            times = found["timings"]
            return {"ms": times["prompt_ms"], "computed": times["prompt_n"], "answer": found["tokens"]}

        yield begin


def in_turns(alive: Mapping[str, Begin], ask: Callable[[Begin, Sequence[int]], Any], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, name in turns(list(alive), rounds):
        found.setdefault(name, []).append(ask(alive[name], (number + 1,)))
        print(f"round {number + 1}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def talks_table(found: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> str:
    def cell(name: str, variant: str) -> str:
        times = [one[name]["ms"] for one in found[variant]]
        computed = ", ".join(map(str, sorted({round(one[name]["computed"]) for one in found[variant]})))
        return f"{statistics.median(times):,.0f} ms ({min(times):,.0f} to {max(times):,.0f}), {computed} computed"

    names = dict.fromkeys(name for of in found.values() for name in of[0])
    return table(("first token", *found), [(name, *(cell(name, one) for one in found)) for name in names])


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
    parser.add_argument("--parts", nargs="+", choices=("talk", "saving"), default=["talk", "saving"])
    parser.add_argument("--beside", type=Path, metavar="DIR", help="with xllamacpp in it")
    parser.add_argument("--scale", type=int, default=1, help="texts are so many times shorter, to try the command")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    args = parser.parse_args(given)
    of = sizes(args.scale)
    model = random_model(args.shape, args.type, args.layers)
    length = 256 * -(-(sum(of[name] for name in ("talk", "answer", "more")) + 64) // 256)
    report, raw = None, dict[str, Any]()
    if args.out is not None:
        report = Report(args.out, "Layers with a state", command=public_command(given, "python -m benchmark.states"))
    for part in args.parts:
        with contextlib.ExitStack() as stack:
            if part == "talk":
                alive = {"minisgl": stack.enter_context(ours(model, length, args))}
                if args.beside is not None:
                    alive[LLAMA] = stack.enter_context(theirs(args.beside, model, length, args.threads))
                found = in_turns(alive, lambda begin, seed: talk(begin, of, seed), args.rounds)
                text = talks_table(found)
            else:
                alive = {one: stack.enter_context(ours(model, length, args, **own)) for one, own in SAVING.items()}
                found = in_turns(alive, lambda begin, seed: speeds(begin, of, seed), args.rounds)
                text = saving_table(found)
        print(f"\n{part}\n\n{text}\n", flush=True)
        raw[part] = found
        if report is not None:
            report.section({"talk": "Found again", "saving": "What saving costs"}[part], text)
            report.write(raw)
    print_result({"bench": "states", "shape": args.shape, **raw})
    return 0


if __name__ == "__main__":
    sys.exit(main())
