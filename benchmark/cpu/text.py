"""`python -m benchmark.cpu text`: greedy answers beside llama.cpp's, on the same file and the same token ids.

MT-Bench's first questions in chat form. An answer is compared token by token; at its first difference the margin is
what our exact logits say between our token and llama.cpp's there: a near tie says rounding, a wide gap would say a bug.

Both continue the same ids; a margin is computed after what both have in common.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark.cpu import http
from benchmark.cpu.sidebyside import missing_table
from benchmark.cpu.variants import LLAMA, EngineVariant, Point, Setup
from benchmark.cpu.variants import start as start_variant
from minisgl.bench.compare_variants import Missing
from minisgl.bench.prompts import mt_bench
from minisgl.bench.report import Report, print_result, table
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.sources import resolve_model

QUESTIONS = 20
NUM_OUT = 64
DEFAULT_VARIANTS = ("exact", "int8", "torch")
Generate = Callable[[Sequence[int]], list[int]]


def questions(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(resolve_model("smollm2", lambda text, done=0, total=0: None))
    found = []
    for first, _ in mt_bench()[:count]:
        text = tokenizer.apply_chat_template([{"role": "user", "content": first}])
        found.append([int(i) for i in tokenizer.encode(text, add_special_tokens=False)])
    return found


@contextlib.contextmanager
def llama(settings: http.Settings) -> Iterator[Generate]:
    """Greedy ids of llama.cpp's server. Raises `Missing`."""
    with http.start(LLAMA, settings) as server:

        def generate(ids: Sequence[int]) -> list[int]:
            asked = {"prompt": list(ids), "n_predict": NUM_OUT, "temperature": 0, "ignore_eos": True}
            body = {**asked, "return_tokens": True, "cache_prompt": False}
            answer = httpx.post(server.url + "/completion", json=body, timeout=300)
            return list(answer.raise_for_status().json()["tokens"])

        yield generate


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Its place; None: as far as both go they are the same."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


def margin(logits: Callable[[Sequence[int]], Any], ids: Sequence[int], ours: int, theirs: int) -> float:
    last = np.asarray(logits(ids))[-1]
    return float(last[ours] - last[theirs])


def run(
    names: Sequence[str], settings: http.Settings, out: Path | None, command: str, count: int = QUESTIONS
) -> dict[str, Any]:
    given = questions(count)
    answers: dict[str, list[list[int]]] = {}
    missing: dict[str, str] = {}
    try:
        with llama(settings) as generate:
            answers[LLAMA] = [generate(ids) for ids in given]
    except (Missing, httpx.HTTPError) as error:
        missing[LLAMA] = str(error)
    longest = max(map(len, given))
    setup = Setup(model="smollm2", threads=settings.threads, points=[Point("decode", 4, longest, NUM_OUT)])
    for name in names:
        try:
            with start_variant(name, setup) as variant:
                assert isinstance(variant, EngineVariant)
                answers[name] = [variant.generate([ids], NUM_OUT)[0] for ids in given]
        except Missing as error:
            missing[name] = str(error)
    found = {
        name: compared(given, answers[name], answers[LLAMA], settings.threads)
        for name in names
        if name in answers and LLAMA in answers
    }
    text = _table(found)
    print("\n\n".join(one for one in (text, missing_table(missing)) if one))
    raw = {"questions": count, "num_out": NUM_OUT, "variants": found, "missing": missing}
    if out is not None:
        report = Report(out, "Greedy answers beside llama.cpp's", command=command)
        report.section(f"{count} questions of MT-Bench, {NUM_OUT} tokens each", text, missing_table(missing))
        report.write(raw)
    print_result({"bench": "cpu text", "differ": {name: one["differ"] for name, one in found.items()}})
    return raw


def compared(
    given: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], threads: int
) -> dict[str, Any]:
    """Where each answer first differs, and by how much our exact logits prefer our token there."""
    places = [first_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    differing = [i for i, place in enumerate(places) if place is not None]
    margins: list[float] = []
    try:
        from benchmark.cpu.quality import make

        judge = make("exact", threads)
        for i in differing:
            place = places[i]
            assert place is not None
            margins.append(margin(judge, [*given[i], *ours[i][:place]], ours[i][place], theirs[i][place]))
        judge.close()
    except (Missing, AttributeError) as error:
        print(f"text: no margins: {error}", file=sys.stderr)
    return {"differ": len(differing), "same": len(places) - len(differing), "places": places, "margins": margins}


def _table(found: dict[str, Any]) -> str:
    rows = []
    for name, one in found.items():
        places = [place for place in one["places"] if place is not None]
        margins = [abs(value) for value in one["margins"]]
        rows.append(
            (
                name,
                one["same"],
                one["differ"],
                statistics.median(places) if places else None,
                statistics.median(margins) if margins else None,
                max(margins) if margins else None,
            )
        )
    head = (
        "variant",
        "same answers",
        "others",
        "first difference, median token",
        "margin there, median logit",
        "largest",
    )
    return table(head, rows) if rows else ""
