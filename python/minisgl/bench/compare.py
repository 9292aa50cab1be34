"""`minisgl bench compare`: minisgl beside others on the same prompts, in turns, in one table.

A variant that cannot start, or fails, is listed with the reason. A round asks each the same: so many prompts at once
for each `--concurrency`, and one long prompt for a single token; the next round has other prompts, and goes through the
variants the other way round. Figures are medians of the rounds; the first round warms up and is not counted.

A variant gets no prompt twice, so no cache of prefixes helps; what could not be measured is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minisgl.bench.compare_variants import VARIANTS, HttpVariant, Missing, Setup, Times, Variant, start
from minisgl.bench.render import words
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.config import ConfigError

HELP = "minisgl beside transformers, llama.cpp, vLLM, SGLang or any server, in one table"
WARM_UP_OUT = 8  # tokens; the warm-up need not be long


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Sizes in tokens, roughly: a word of the prompts is a token or a little more."""

    variants: tuple[str, ...]
    setup: Setup
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    prefill_len: int
    repeats: int
    seed: int


@dataclass(slots=True)
class Running:
    """A variant that serves until `own` is closed, and what was measured of it, a value a round."""

    variant: Variant
    own: contextlib.ExitStack
    start_s: float
    tok_s: dict[int, list[float]] = field(default_factory=dict)
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    prefill_tok_s: list[float] = field(default_factory=list)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help=HELP,
        description=f"{HELP}. Variants: {', '.join(VARIANTS)}, each --url. What cannot start is listed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    variants = parser.add_argument_group("variants")
    variants.add_argument(
        "--variants", "--arms", nargs="+", choices=tuple(VARIANTS), help="default: each that can start"
    )
    variants.add_argument(
        "--url", action="append", default=[], metavar="NAME=URL", help="an OpenAI-compatible server too"
    )
    variants.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="VARIANT=INTERPRETER",
        help="where that variant's package is installed",
    )
    variants.add_argument("--model", default="smollm2", help="a folder, a hub id or a GGUF file (default: %(default)s)")
    variants.add_argument("--gguf", type=Path, help="the same model for llama.cpp (default: the embedded model's file)")
    variants.add_argument(
        "--dtype", default="auto", help="default: what minisgl takes; llama.cpp computes as its file says"
    )
    variants.add_argument("--threads", type=int, help="compute threads of each (default: all processors)")
    variants.add_argument("flags", nargs="*", metavar="-- FLAG", help="more flags of minisgl serve")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32], help="prompts at once (default: 1 8 32)"
    )
    sizes.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    sizes.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    sizes.add_argument("--prefill-len", type=int, default=1024, help="of the long prompt (default: %(default)s)")
    sizes.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    sizes.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    return parser


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    report = None
    if args.out is not None:
        report = Report(args.out, "minisgl beside others", command=public_command(args.arguments))
    found, missing = measure(settings)
    result = result_of(settings, found, missing)
    shown = [tables for tables in (_table(result), _missing_table(result)) if tables]
    print("\n\n".join(shown))
    if report is not None:
        report.section("Variants", _about(settings), *shown)
        report.write({"result": result})
    print_result(result)
    asked = args.variants or (["minisgl"] if found else VARIANTS)
    return 1 if any(name in missing for name in (*asked, *settings.setup.urls)) else 0


def settings_of(args: argparse.Namespace) -> Compare:
    """Raises `ConfigError`."""
    for flag, values in (
        ("--concurrency", args.concurrency),
        ("--input-len", [args.input_len]),
        ("--output-len", [args.output_len]),
        ("--prefill-len", [args.prefill_len]),
        ("--repeats", [args.repeats]),
        ("--threads", [1 if args.threads is None else args.threads]),
    ):
        if min(values) < 1:
            raise ConfigError(f"{flag} {min(values)}: must be at least 1")
    pythons, urls = _pairs("--python", args.python), _pairs("--url", args.url)
    if unknown := [name for name in pythons if name not in VARIANTS]:
        raise ConfigError(f"--python {unknown[0]}: must be one of {', '.join(VARIANTS)}")
    if taken := [name for name in urls if name in VARIANTS]:
        raise ConfigError(f"--url {taken[0]}: that variant is started here: take another name")
    setup = Setup(
        model=args.model,
        dtype=args.dtype,
        gguf=args.gguf,
        threads=args.threads or os.cpu_count() or 1,
        max_sequences=max(args.concurrency),
        max_len=2 * max(args.input_len + args.output_len, args.prefill_len + 1),  # words may have two tokens
        pythons=pythons,
        urls=urls,
        flags=tuple(args.flags),
    )
    return Compare(
        variants=(*(args.variants or VARIANTS), *urls),
        setup=setup,
        concurrency=tuple(dict.fromkeys(args.concurrency)),
        input_len=args.input_len,
        output_len=args.output_len,
        prefill_len=args.prefill_len,
        repeats=args.repeats,
        seed=args.seed,
    )


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    found = dict(one.partition("=")[::2] for one in given)
    if bad := [one for one in given if not all(one.partition("="))]:
        raise ConfigError(f"{flag} {bad[0]}: must be like NAME=VALUE")
    return found


def measure(settings: Compare) -> tuple[dict[str, Running], dict[str, str]]:
    """What was measured by variant, and why the others were not."""
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running = _started(settings, stack, missing)
        for repeat in range(-1, settings.repeats):
            order = list(running) if repeat % 2 else list(reversed(running))
            for name in order:
                print(f"bench compare: round {repeat + 1} of {settings.repeats}: {name}", file=sys.stderr)
                try:
                    _round(settings, running[name], repeat)
                except Missing as error:
                    missing[name] = str(error)
                    running.pop(name).own.close()  # what hangs would compute beside the others
        return running, missing


def _started(settings: Compare, stack: contextlib.ExitStack, missing: dict[str, str]) -> dict[str, Running]:
    setup, running = settings.setup, dict[str, Running]()
    for name in sorted(settings.variants, key=lambda name: name != "minisgl"):  # whose dtype is everybody's
        began, own = time.monotonic(), stack.enter_context(contextlib.ExitStack())
        try:
            variant = own.enter_context(start(name, setup))
            start_s = time.monotonic() - began
            if name == "minisgl" and setup.dtype == "auto" and isinstance(variant, HttpVariant):
                setup = replace(setup, dtype=variant.dtype())
        except Missing as error:
            missing[name] = str(error)
            own.close()
            continue
        running[name] = Running(variant, own, start_s)
    return running


def _round(settings: Compare, one: Running, repeat: int) -> None:
    """Round -1 is the warm-up. The prompts depend on the round alone."""
    warm = repeat < 0
    for count in settings.concurrency:
        if one.variant.max_sequences is not None and count > one.variant.max_sequences:
            continue
        prompts = [words((settings.seed, repeat, count, i), settings.input_len) for i in range(count)]
        times = one.variant.ask(prompts, min(settings.output_len, WARM_UP_OUT) if warm else settings.output_len)
        if not warm:
            one.tok_s.setdefault(count, []).append(times.num_out / times.total_s)
            if times.first_s is not None:
                one.ttft_ms.setdefault(count, []).append(1e3 * statistics.median(times.first_s))
    times = one.variant.ask([words((settings.seed, repeat, "long"), settings.prefill_len)], 1)
    if not warm:
        one.prefill_tok_s.append(_prefill_tok_s(times))


def _prefill_tok_s(times: Times) -> float:
    """Of one prompt and one token: to its text, or to the end where that is all there is."""
    return times.num_in / (times.first_s[0] if times.first_s else times.total_s)


def result_of(settings: Compare, found: dict[str, Running], missing: dict[str, str]) -> dict[str, Any]:
    return {
        "bench": "compare",
        "model": Path(settings.setup.model).name,
        "threads": settings.setup.threads,
        "concurrency": list(settings.concurrency),
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        "prefill_len": settings.prefill_len,
        "repeats": settings.repeats,
        "variants": {
            name: {
                "version": one.variant.version,
                "start_s": one.start_s,
                "tok_s": {count: statistics.median(values) for count, values in one.tok_s.items()},
                "ttft_ms": {count: statistics.median(values) for count, values in one.ttft_ms.items()},
                "prefill_tok_s": statistics.median(one.prefill_tok_s),
                "rounds": {"tok_s": one.tok_s, "ttft_ms": one.ttft_ms, "prefill_tok_s": one.prefill_tok_s},
            }
            for name, one in found.items()
        },
        "missing": missing,
    }


def _table(result: dict[str, Any]) -> str:
    counts = result["concurrency"]
    head = ("variant", *(f"tok/s, {n}" for n in counts), *(f"TTFT ms, {n}" for n in counts), "prefill tok/s", "start s")
    rows = [
        (
            name,
            *(one["tok_s"].get(count) for count in counts),
            *(one["ttft_ms"].get(count) for count in counts),
            one["prefill_tok_s"],
            one["start_s"],
        )
        for name, one in result["variants"].items()
    ]
    return table(head, rows) if rows else ""


def _missing_table(result: dict[str, Any]) -> str:
    return table(("not measured", "why"), result["missing"].items()) if result["missing"] else ""


def _about(settings: Compare) -> str:
    return (
        f"Median of {settings.repeats} rounds. tok/s, N: tokens out of N answers of {settings.output_len} tokens to "
        f"prompts of about {settings.input_len}, from the first request to the last token, prefill and all. TTFT, N: "
        "median of the N first texts. Prefill: one prompt of about "
        f"{settings.prefill_len} tokens, over the time to its first token. Empty: it cannot tell (generate has no "
        "text before its end, its streamer one sequence). All were alive all the time, one was asked at a time."
    )
