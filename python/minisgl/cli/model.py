"""The command `minisgl model`, which shows what the CPU engine computes for a model."""

from __future__ import annotations

import argparse

from minisgl.cli.flags import Commands
from minisgl.cli.models import find

_MODEL = "The operations that the CPU engine computes for a model, in order, with the sizes of their matrices."


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("model", help="what a model's layers compute", allow_abbrev=False, description=_MODEL)
    parser.set_defaults(run=_run)
    parser.add_argument("name", metavar="MODEL", help="a folder, a GGUF file or a name, as --model takes it")
    parser.add_argument("--operations", action="store_true", required=True, help="list each operation of a forward")


def _run(args: argparse.Namespace) -> int:
    from minisgl.engine.cpu_loading import operations

    print(operations(find(args.name)))
    return 0
