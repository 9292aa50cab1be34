"""The command `minisgl bench model`: flags of the benchmark of a model's kernels."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from minisgl.bench.model import VARIANTS, BenchModel, llama_folders, points_of, run_model
from minisgl.bench.random_models import SHAPES, TYPES, random_model
from minisgl.bench.report import public_command
from minisgl.cli.flags import ENGINE, Commands, add_settings, command, engine_config
from minisgl.config import ConfigError

RANDOM_TYPE = "q4_k_m"


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(
        commands,
        "model",
        run,
        help="speed of a model without a server, beside the machine's limits",
        description="Prompts (pp) and answers (tg) of a model on this machine without a server, as llama-bench names "
        "them, with the share of what memory and multiplying allow at most.",
    )
    parser.set_defaults(command="bench")
    job = parser.add_argument_group("what is measured")
    job.add_argument(
        "--prompt", type=int, default=512, metavar="N", help="tokens of the prompt; 0: no prefill (default: 512)"
    )
    job.add_argument(
        "--generate", type=int, default=128, metavar="N", help="tokens of each answer; 0: no decoding (default: 128)"
    )
    job.add_argument("--depth", type=int, nargs="+", default=[0], metavar="N", help="tokens cached before (default: 0)")
    job.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="N", help="sequences that decode (default: 1)"
    )
    job.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    job.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=["exact", "int8"], help="default: exact int8"
    )
    job.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="DIR",
        help="also llama.cpp: a folder with its programs or the package xllamacpp; NAME=DIR: another build",
    )
    job.add_argument(
        "--model-config", choices=tuple(SHAPES), help="random weights in the shape of this model, instead of --model"
    )
    job.add_argument("--type", choices=TYPES, help=f"quantization of the random weights (default: {RANDOM_TYPE})")
    job.add_argument("--layers", type=int, metavar="N", help="layers of the random model at most")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for raw.json and a report (default: none)")
    add_settings(parser, ENGINE)
    return parser


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--repeats", args.repeats), ("--layers", 1 if args.layers is None else args.layers)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    points = points_of(args.prompt, args.generate, args.depth, args.batch)
    engine, beside = engine_config(args), llama_folders(args.beside)
    if args.model_config is not None:
        model = random_model(args.model_config, args.type or RANDOM_TYPE, args.layers)
        # The file's weights are random already; dummy weights would have another type.
        engine = msgspec.structs.replace(engine, model=str(model), load_format="auto")
    else:
        for flag, value in (("--type", args.type), ("--layers", args.layers)):
            if value is not None:
                raise ConfigError(f"{flag} {value}: only with --model-config")
    settings = BenchModel(
        engine=engine, variants=tuple(args.variants), points=points, repeats=args.repeats, beside=beside
    )
    return run_model(settings, args.out, command=public_command(args.arguments))
