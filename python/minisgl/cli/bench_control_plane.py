"""`minisgl bench control-plane`: the time of a step's scheduling, by `benchmark/control_plane` of the source checkout.

Keeps true: without the checkout one line says so, whatever flags are given.
Doesn't know: what is measured, and with which flags; that code brings them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from minisgl.cli.flags import Commands, Formatter
from minisgl.config import ConfigError

HELP = "time of a step's scheduling, both control planes"
CODE = Path("benchmark") / "control_plane" / "__main__.py"
PLACES = (Path(__file__).resolve().parents[3], Path.cwd())
"""Where the checkout may be: around an editable install, or here."""


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    module = _benchmark()
    if module is None:
        # Without prefix characters every flag is an argument, and `run` tells what is wrong.
        parser = commands.add_parser("control-plane", help=HELP, add_help=False, prefix_chars="\0")
        parser.add_argument("flags", nargs="*")
        parser.set_defaults(run=_run_nothing)
        return parser
    parser = commands.add_parser(
        "control-plane",
        help=HELP,
        description=(module.__doc__ or "").rpartition("\n\n")[2],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def _benchmark() -> ModuleType | None:
    for place in PLACES:
        if (place / CODE).is_file():
            sys.path.insert(0, str(place))
            return importlib.import_module("benchmark.control_plane.__main__")
    return None


def _run_nothing(args: argparse.Namespace) -> int:
    raise ConfigError(f"control-plane: needs the source checkout ({CODE.parent.as_posix()}); run it there")
