"""What guessed tokens gain, and what they cost where nothing repeats: `--speculative` on and off in one process.

    MINISGL_DATA=... python -m benchmark.speculative --out FOLDER

MT-Bench's questions, in chat form, to SmolLM2 on the CPU engine: texts to be summarised, texts to be corrected, code to
be edited (the model's own first answer), chats, and chats sampled at temperature 1, whose text repeats least. Each
prompt is answered with and without, in turns, there and back, from an empty prefix cache: what is guessed comes from
the text alone. "asked again" is chats whose answers the cache still has.

    python -m benchmark.speculative --out FOLDER --speculative model:smollm2:4 --agree 0.8 0

A small model that drafts for a large one: here a shape with random weights, of which no large file need be at hand. It
agrees with nothing, so agreement is staged: the small model computes what it always does, and then the tokens that the
large one will say take the place of its own, each wrong with a probability of one minus the share. Texts are sampled
at temperature 1: nothing repeats in them.

Answers must be the same, token by token: the program stops where they are not. Ratios are of tokens a second: from the
first text on; with the prefill; and by CPU time, prefill included, which others on the machine disturb least. Those of
a kind are joined by their geometric mean, with Student's t interval at 95 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.bench.prompts import mt_bench
from minisgl.bench.random_models import SHAPES, random_model
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.stats import geometric_interval, turns
from minisgl.config import ConfigError
from minisgl.llm import LLM
from minisgl.runner.drafting import Asked, Guesses
from minisgl.sampling_params import SamplingParams
from minisgl.step import Draft

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
    before, texts = llm._loop.control_plane.stats(), list[float]()
    began, cpu = time.perf_counter(), time.process_time()
    found = llm.generate(list(prompts), params, progress=False, on_text=lambda *_: texts.append(time.perf_counter()))
    ended = time.perf_counter()
    seconds = {DECODE: ended - texts[0], WHOLE: ended - began, CPU: time.process_time() - cpu}
    after = llm._loop.control_plane.stats()
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


class Staged:
    """What `inner` computes, with other tokens: of `texts`, each right with a probability of `share`, the same one
    whenever it is asked."""

    def __init__(self, inner: Guesses, texts: Sequence[Ids], share: float) -> None:
        self._inner = inner
        self._texts = texts
        self._right = [np.random.default_rng((i, 5)).random(len(text)) < share for i, text in enumerate(texts)]

    def guess(self, asked: Sequence[Asked]) -> list[Draft]:
        return [self._staged(one, draft) for draft in self._inner.guess(asked) for one in asked if _is_of(draft, one)]

    def _staged(self, asked: Asked, draft: Draft) -> Draft:
        known, start, end = asked.tokens.tolist(), draft.length, draft.length + len(draft.tokens)
        for text, right in zip(self._texts, self._right, strict=True):
            if text[:start] == known:
                told = zip(text[start:end], right[start:end], strict=True)
                return dataclasses.replace(draft, tokens=tuple(token ^ (not is_right) for token, is_right in told))
        return draft

    def close(self) -> None:
        self._inner.close()


def _is_of(draft: Draft, asked: Asked) -> bool:
    return draft.req_id == asked.req_id


def staged(
    llms: dict[str, LLM], share: float, prompts: list[Ids], clients: int, rounds: int, num_out: int
) -> list[dict[str, Any]]:
    """As `measure`, of a small model that agrees with so many tokens."""
    kind = Kind(f"agreement of {share:.0%}, staged", prompts, temperature=1.0)
    loop = llms[GUESSING]._loop
    real = loop.guesses
    assert real is not None
    found = []
    for at in range(0, len(prompts), clients):
        some = prompts[at : at + clients]
        said = answer(llms[PLAIN], some, kind, num_out).tokens
        loop.guesses = Staged(real, [[*one, *other] for one, other in zip(some, said, strict=True)], share)
        found += measure(llms, dataclasses.replace(kind, prompts=some), clients, rounds, num_out, lambda: None)
    loop.guesses = real
    return found


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
    parser.add_argument("--speculative", default="ngram:8", metavar="ngram:K|model:FILE[:K]")
    parser.add_argument("--agree", type=float, nargs="+", metavar="SHARE", help="stage the agreement of a small model")
    parser.add_argument(
        "--model-config", choices=tuple(SHAPES), default="smollm2-1.7b", help="the large one, with that"
    )
    parser.add_argument("--type", default="q4_k_m", help="of its weights (default: q4_k_m)")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, at most (default: 10)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1], help="prompts answered at once (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    parser.add_argument("--num-out", type=int, default=128, help="tokens of an answer (default: 128)")
    parser.add_argument("--activations", choices=("exact", "int8"), default="exact")
    args = parser.parse_args(arguments)
    settings: dict[str, Any] = {"engine": "cpu", "num_pages": 256 if args.agree else 2048, "log_level": "error"}
    settings["activations"] = args.activations
    report = Report(args.out, TITLE, command=public_command(arguments, COMMAND))
    try:
        model = str(random_model(args.model_config, args.type)) if args.agree else "smollm2"
        llms = {PLAIN: LLM(model, **settings), GUESSING: LLM(model, speculative=args.speculative, **settings)}
        chosen = [] if args.agree else kinds(llms[PLAIN], args.prompts)
    except ConfigError as error:
        parser.error(str(error))
    found: dict[int, list[dict[str, Any]]] = {}
    if args.agree:
        prompts = [llms[PLAIN].tokenizer.encode(first).tolist() for first, _ in mt_bench()[WRITING][: args.prompts]]
        for clients in args.clients:
            found[clients] = [
                one for share in args.agree for one in staged(llms, share, prompts, clients, args.rounds, args.num_out)
            ]
    groups = sum(-(-len(kind.prompts) // clients) for kind in chosen for clients in args.clients)
    with tqdm(total=2 * args.rounds * groups, unit="answer", disable=None) as bar:
        for clients in args.clients if chosen else ():
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
    print_result({"bench": "speculative", "kinds": len(args.agree or chosen)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
