"""What guessed tokens gain, and what they cost where nothing repeats: `--speculative` on and off in one process.

    MINISGL_DATA=... python -m benchmark.speculative --out FOLDER

MT-Bench's questions, in chat form, to SmolLM2 on the CPU engine: texts to be summarised, texts to be corrected, code to
be edited (the model's own first answer), chats, and chats sampled at temperature 1, whose text repeats least. Each
prompt is answered with and without, in turns, there and back, from an empty prefix cache: what is guessed comes from
the text alone. "asked again" is chats whose answers the cache still has.

Answers must be the same, token by token: the program stops where they are not. Ratios are of tokens a second: from the
first text on; with the prefill; and by CPU time, prefill included, which others on the machine disturb least. Those of
a kind are joined by their geometric mean, with Student's t interval at 95 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.bench.prompts import mt_bench
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import geometric_interval, turns
from minisgl.config import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

TITLE = "Guessed tokens"
COMMAND = "python -m benchmark.speculative"
WRITING, CODING, EXTRACTION = slice(0, 10), slice(40, 50), slice(50, 60)  # of MT-Bench's 80 questions
SUMMARISE = "Summarise this text. Use its own sentences where you can.\n\n"
CORRECT = "Correct the spelling of this text. Write all of it again.\n\n"
EDIT = "Write the whole program again, with a comment above each function."
PLAIN, GUESSING = "off", "on"
TIMES = DECODE, WHOLE, CPU = "decode", "whole", "cpu"
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one kind; `again`: the cache keeps their answers."""

    name: str
    prompts: list[Ids]
    temperature: float = 0.0
    again: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Of all clients of one call together."""

    seconds: dict[str, float]
    num_tokens: int
    tokens: list[Ids]
    num_drafted: int
    num_accepted: int


def chat(llm: LLM, *texts: str) -> Ids:
    """A conversation whose first turn is the user's."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    rendered = llm.tokenizer.apply_chat_template(turns)
    return [int(i) for i in llm.tokenizer.encode(rendered, add_special_tokens=False)]


def kinds(llm: LLM, count: int) -> list[Kind]:
    questions = mt_bench()
    chats = [chat(llm, first) for first, _ in questions[WRITING][:count]]
    texts = [chat(llm, SUMMARISE + first) for first, _ in questions[EXTRACTION][:count]]
    corrections = [chat(llm, CORRECT + first) for first, _ in questions[EXTRACTION][:count]]
    edits = []
    for first, _ in questions[CODING][:count]:
        [answer] = llm.generate([chat(llm, first)], SamplingParams(temperature=0, max_tokens=160), progress=False)
        edits.append(chat(llm, first, answer.text, EDIT))
    return [
        Kind("summarising", texts),
        Kind("correcting", corrections),
        Kind("code editing", edits),
        Kind("chat", chats),
        Kind("chat, sampled", chats, temperature=1.0),
        Kind("chat, asked again", chats, again=True),
    ]


def answer(llm: LLM, prompts: Sequence[Ids], kind: Kind, num_out: int) -> Run:
    """`prompts` at once."""
    params = [
        SamplingParams(temperature=kind.temperature, seed=i, max_tokens=num_out, ignore_eos=True)
        for i in range(len(prompts))
    ]
    before, texts = llm._control_plane.stats(), list[float]()
    began, cpu = time.perf_counter(), time.process_time()
    found = llm.generate(list(prompts), params, progress=False, on_text=lambda *_: texts.append(time.perf_counter()))
    ended = time.perf_counter()
    seconds = {DECODE: ended - texts[0], WHOLE: ended - began, CPU: time.process_time() - cpu}
    after = llm._control_plane.stats()
    tokens = [one.token_ids for one in found]
    return Run(
        seconds,
        sum(map(len, tokens)),
        tokens,
        after.num_drafted_total - before.num_drafted_total,
        after.num_accepted_total - before.num_accepted_total,
    )


def measure(
    llms: dict[str, LLM], kind: Kind, clients: int, rounds: int, num_out: int, done: Callable[[], object]
) -> Iterator[dict[str, Any]]:
    """The runs of each group of prompts that are answered at once. Raises `AssertionError` where answers differ."""
    for at in range(0, len(kind.prompts), clients):
        prompts = kind.prompts[at : at + clients]
        runs: dict[str, list[Run]] = {PLAIN: [], GUESSING: []}
        for _, name in turns((PLAIN, GUESSING), rounds):
            llms[name].clear_cache()
            if kind.again:
                answer(llms[name], prompts, kind, num_out)
            runs[name].append(answer(llms[name], prompts, kind, num_out))
            done()
        first = runs[PLAIN][0].tokens
        assert all(run.tokens == first for several in runs.values() for run in several), "the answers differ"
        yield {
            "kind": kind.name,
            "prompts": len(prompts),
            "seconds": {name: {of: [run.seconds[of] for run in runs[name]] for of in TIMES} for name in runs},
            "drafted": runs[GUESSING][0].num_drafted,
            "accepted": runs[GUESSING][0].num_accepted,
            "tokens": runs[GUESSING][0].num_tokens,
        }


def rows(measured: Sequence[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for name in dict.fromkeys(one["kind"] for one in measured):
        those = [one for one in measured if one["kind"] == name]
        ratios = []
        for of in TIMES:
            both = [zip(one["seconds"][PLAIN][of], one["seconds"][GUESSING][of], strict=True) for one in those]
            found = geometric_interval([plain / guessing for pairs in both for plain, guessing in pairs])
            ratios.append(f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]")
        drafted, accepted, tokens = (sum(one[key] for one in those) for key in ("drafted", "accepted", "tokens"))
        yield (
            name,
            *ratios,
            f"{accepted / drafted:.0%} of {drafted}" if drafted else "none drafted",
            f"{accepted / tokens:.0%}",
        )


HEAD = (
    "text",
    "on / off: after the first text",
    "with its prefill",
    "by CPU time",
    "drafted tokens that were right",
    "share of all tokens",
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="benchmark.speculative", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for raw.json and a report")
    parser.add_argument("--speculative", default="ngram:8", metavar="ngram:K")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, at most (default: 10)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1], help="prompts answered at once (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    parser.add_argument("--num-out", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--activations", choices=("exact", "int8"), default="exact")
    args = parser.parse_args(arguments)
    settings: dict[str, Any] = {"engine": "cpu", "num_pages": 2048, "log_level": "error"}
    settings["activations"] = args.activations
    report = Report(args.out, TITLE, command=public_command(arguments, COMMAND))
    try:
        llms = {PLAIN: LLM("smollm2", **settings), GUESSING: LLM("smollm2", speculative=args.speculative, **settings)}
        chosen = kinds(llms[PLAIN], args.prompts)
    except ConfigError as error:
        parser.error(str(error))
    found: dict[int, list[dict[str, Any]]] = {}
    groups = sum(-(-len(kind.prompts) // clients) for kind in chosen for clients in args.clients)
    with tqdm(total=2 * args.rounds * groups, unit="answer", disable=None) as bar:
        for clients in args.clients:
            found[clients] = [
                one for kind in chosen for one in measure(llms, kind, clients, args.rounds, args.num_out, bar.update)
            ]
    for llm in llms.values():
        llm.close()
    for clients, measured in found.items():
        text = table(HEAD, rows(measured))
        print(text)
        report.section(f"{clients} at once, {args.speculative}, activations {args.activations}", text)
    raw = {"clients": {str(clients): measured for clients, measured in found.items()}}
    report.write({**raw, "load_average": round(os.getloadavg()[0], 2)})
    print_result({"bench": "speculative", "kinds": len(chosen)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
