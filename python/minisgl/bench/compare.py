"""The command `minisgl bench compare`: minisgl and other engines on the same prompts, in turns, in one table.

A variant that cannot start, or fails, is listed with the reason. In a round each variant gets the same prompts: as many
at once as each `--concurrency` says, and one long prompt for a single token; the next round has other prompts and
reverses the order of the variants. The first round is a warm-up and is not counted. After the last one each answers a
few more prompts, one at a time and untimed, to compare the texts.
No variant gets a prompt twice, so that no prefix cache helps; a figure that could not be measured is empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minisgl.bench.asked import asked
from minisgl.bench.compare_report import TITLE, Compare, Running, result_of, shown, write
from minisgl.bench.compare_variants import VARIANTS, HttpVariant, Missing, Setup, start
from minisgl.bench.process_usage import Usage
from minisgl.bench.render import words
from minisgl.bench.report import JSON_HELP, Report, plain, print_result, public_command
from minisgl.bench.stats import there_and_back
from minisgl.bench.stopping import Stopped
from minisgl.config import ConfigError

HELP = "minisgl beside transformers, llama.cpp, vLLM, SGLang or any server, in one table"
WARM_UP_OUT = 8  # answer tokens of a warm-up


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
        help="interpreter that has the variant's package; repeatable",
    )
    variants.add_argument(
        "--llama-bin",
        type=Path,
        metavar="DIR",
        help="folder with llama.cpp's llama-server (default: the package xllamacpp)",
    )
    variants.add_argument("--model", default="smollm2", help="a folder, a hub id or a GGUF file (default: %(default)s)")
    variants.add_argument("--gguf", type=Path, help="the same model for llama.cpp (default: the embedded model's file)")
    variants.add_argument(
        "--dtype", default="auto", help="dtype of all but llama.cpp, which follows its file (default: minisgl's)"
    )
    variants.add_argument("--threads", type=int, help="compute threads of each variant (default: all processors)")
    variants.add_argument("flags", nargs="*", metavar="-- FLAG", help="further flags of minisgl serve")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32], help="prompts at once (default: 1 8 32)"
    )
    sizes.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    sizes.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    sizes.add_argument("--prefill-len", type=int, default=1024, help="tokens of the long prompt (default: %(default)s)")
    sizes.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    sizes.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    sizes.add_argument(
        "--agreement-prompts", type=int, default=8, metavar="N", help="answers to compare; 0: none (default: 8)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for raw.json and a report")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    return parser


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    report = None if args.out is None else Report(args.out, TITLE, command=public_command(args.arguments))
    stopped, running, missing = measure(settings)
    if stopped is not None:
        settings = whole_rounds(settings, running)
        what = f"after {settings.repeats} of {args.repeats} rounds" if settings.repeats else "before a round was whole"
        print(f"bench compare: stopped {what}", file=sys.stderr, flush=True)
        if not settings.repeats:
            return stopped.code
    result = plain(result_of(settings, running, missing))
    print("\n\n".join(shown(result)), flush=True)
    if report is not None:
        write(report, result)
    if args.json:
        print_result(result)
    if stopped is not None:
        return stopped.code
    asked = args.variants or (["minisgl"] if running else VARIANTS)
    return 1 if any(name in missing for name in (*asked, *settings.setup.urls)) else 0


def settings_of(args: argparse.Namespace) -> Compare:
    """Build the settings of `bench compare` from flags. Raises `ConfigError`."""
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
    if args.agreement_prompts < 0:
        raise ConfigError(f"--agreement-prompts {args.agreement_prompts}: must be 0 or more")
    pythons, urls = _pairs("--python", args.python), _pairs("--url", args.url)
    if unknown := [name for name in pythons if name not in VARIANTS]:
        raise ConfigError(f"--python {unknown[0]}: must be one of {', '.join(VARIANTS)}")
    if clashes := [name for name in urls if name in VARIANTS]:
        raise ConfigError(f"--url {clashes[0]}: is the name of a built-in variant: choose another name")
    setup = asked(
        Setup,
        args,
        threads=args.threads or os.cpu_count() or 1,
        max_sequences=max(args.concurrency),
        max_len=2 * max(args.input_len + args.output_len, args.prefill_len + 1),  # a word may have two tokens
        pythons=pythons,
        urls=urls,
    )
    return asked(
        Compare,
        args,
        variants=(*(args.variants or VARIANTS), *urls),
        setup=setup,
        concurrency=tuple(dict.fromkeys(args.concurrency)),
    )


def _pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    pairs = dict(text.partition("=")[::2] for text in given)
    if bad := [text for text in given if not all(text.partition("="))]:
        raise ConfigError(f"{flag} {bad[0]}: must be like NAME=VALUE")
    return pairs


def measure(settings: Compare) -> tuple[Stopped | None, dict[str, Running], dict[str, str]]:
    """Return the signal that stopped it (or None), the measured variants, and why each other one is missing."""
    missing: dict[str, str] = {}
    running: dict[str, Running] = {}
    try:
        with contextlib.ExitStack() as stack:
            _measure(settings, stack, running, missing)
    except Stopped as stopped:
        return stopped, running, missing
    return None, running, missing


def whole_rounds(settings: Compare, running: Mapping[str, Running]) -> Compare:
    """Reduce each variant to the rounds that all of them completed, and keep answers only if all have all of them.
    Return the settings with that number of rounds."""
    repeats = min((len(one.prefill_tok_s) for one in running.values()), default=0)
    answered = all(len(one.answers) == settings.agreement_prompts for one in running.values())
    for one in running.values():
        one.keep(repeats)
        if not answered:
            one.answers.clear()
    return replace(settings, repeats=repeats)


def _measure(
    settings: Compare, stack: contextlib.ExitStack, running: dict[str, Running], missing: dict[str, str]
) -> None:
    """Measure all variants into `running`, with reasons in `missing`. What it starts ends with `stack`. Raises
    `Stopped`."""
    _start(settings, stack, running, missing)

    def each(order: Sequence[str], label: str, ask: Any) -> None:
        for name in order:
            bar.set_description(f"{label}: {name}")
            if bar.disable:
                print(f"bench compare: {label}: {name}", file=sys.stderr, flush=True)
            try:
                ask(running[name])
            except Missing as error:
                missing[name] = str(error)
                running.pop(name).own.close()  # if it hangs, it must not compute while others are measured
            bar.update()

    with tqdm(total=len(running) * (settings.repeats + 2), unit="turn", disable=None) as bar:
        for repeat in range(-1, settings.repeats):
            order = there_and_back(list(running), repeat + 1)
            label = f"round {repeat + 1} of {settings.repeats}" if repeat >= 0 else "warm-up"
            each(order, label, lambda one, repeat=repeat: _round(settings, one, repeat))
        each(list(running), "answers", lambda one: _answers(settings, one))


def _start(
    settings: Compare, stack: contextlib.ExitStack, running: dict[str, Running], missing: dict[str, str]
) -> None:
    setup = settings.setup
    for name in sorted(settings.variants, key=lambda name: name != "minisgl"):  # first, as the others use its dtype
        began, own = time.monotonic(), stack.enter_context(contextlib.ExitStack())
        print(f"bench compare: starting {name}", file=sys.stderr, flush=True)
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


def _round(settings: Compare, one: Running, repeat: int) -> None:
    """Measure a round of one variant; round -1 is the warm-up. The prompts depend on the round only."""
    warm = repeat < 0
    for count in settings.concurrency:
        if one.variant.max_sequences is not None and count > one.variant.max_sequences:
            continue
        prompts = [words((settings.seed, repeat, count, i), settings.input_len) for i in range(count)]
        with Usage(one.variant.pid) as used:
            times = one.variant.ask(prompts, min(settings.output_len, WARM_UP_OUT) if warm else settings.output_len)
        if not warm:
            one.take(count, times, used)
    times = one.variant.ask([words((settings.seed, repeat, "long"), settings.prefill_len)], 1)
    if not warm:
        one.take_prefill(times)


def _answers(settings: Compare, one: Running) -> None:
    for i in range(settings.agreement_prompts):
        prompt = words((settings.seed, "agreement", i), settings.input_len)
        one.answers.append(one.variant.answer(prompt, settings.output_len))
