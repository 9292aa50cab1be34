"""The command `minisgl bench NAME`, which finds the module of a benchmark and runs it.

Each is a module with `add_parser(commands)` and `run(args) -> int`, like the other commands, named in `COMMANDS`; those
with the flags of an engine are in cli/, the others in bench/. Only the requested module is imported.
A benchmark ends with an exit code and, unless standard output is a terminal, prints one line of compact JSON there
(`ab` and `compare` only with `--json`). Ctrl-C and SIGTERM also end the processes that it started.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from minisgl import envs
from minisgl.bench.stopping import Stopped, stoppable
from minisgl.cli import aliases
from minisgl.cli.flags import notices, say, sources
from minisgl.cli.parser import Parser
from minisgl.config import ConfigError, with_source

COMMANDS = {
    "ab": "minisgl.bench.ab",
    "compare": "minisgl.bench.compare",
    "model": "minisgl.cli.bench_model",
    "offline": "minisgl.cli.bench_offline",
    "scheduler": "minisgl.bench.scheduler",
    "serve": "minisgl.bench.serve",
}
FORMER = {"control-plane": "scheduler"}
"""Former names of commands, not shown in help."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names, and return its exit code. Raises `ConfigError`."""
    if arguments and arguments[0] in FORMER:
        arguments = [FORMER[arguments[0]], *arguments[1:]]
    parser = Parser(prog="minisgl bench", description="Measure minisgl.")
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    names = [name for name in COMMANDS if arguments[:1] == [name]]
    for name in names or COMMANDS:
        importlib.import_module(COMMANDS[name]).add_parser(commands)
    for parser_of_one in commands.choices.values():
        aliases.add_to(parser_of_one)
    args = parser.parse_args(arguments, argparse.Namespace(arguments=list(arguments)))
    if (out := getattr(args, "out", None)) is not None:
        _check_out(out, is_file=args.bench == "scheduler")
    envs.check()
    say(notices(args), f"bench {args.bench}")
    try:
        with stoppable():
            return int(args.run(args))
    except Stopped as stopped:
        return stopped.code
    except ConfigError as error:
        raise ConfigError(with_source(str(error), sources(parser.typed(), {}))) from error


def _check_out(out: Path, *, is_file: bool) -> None:
    """Raise `ConfigError` if `--out` cannot be written, before anything is measured."""
    if is_file and out.is_dir():
        raise ConfigError(f"--out {out}: is a folder: name a file")
    folder = out.absolute().parent if is_file else out.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"--out {out}: {folder.name} is not a folder")
