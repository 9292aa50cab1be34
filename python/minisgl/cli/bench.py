"""`minisgl bench NAME`: finds the module of a benchmark and runs it.

Each is a module with `add_parser(commands)` and `run(args) -> int`, like the other commands, named in `COMMANDS`; one
whose flags are an engine's lies in cli/, the others in bench/. Only the module that is asked for is imported.

Keeps true: every benchmark ends with one line of compact JSON on stdout and an exit code.
Doesn't know: what is measured.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from minisgl.cli import aliases
from minisgl.cli.flags import notices, say

COMMANDS = {
    "ab": "minisgl.bench.ab",
    "compare": "minisgl.bench.compare",
    "control-plane": "minisgl.cli.bench_control_plane",
    "gate": "minisgl.bench.gate",
    "offline": "minisgl.cli.bench_offline",
    "serve": "minisgl.bench.serve",
    "what-if": "minisgl.cli.bench_what_if",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments` begin with; returns its exit code. Raises `ConfigError`."""
    parser = argparse.ArgumentParser(prog="minisgl bench", description="Measure minisgl.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="NAME")
    asked = [name for name in COMMANDS if arguments[:1] == [name]]
    for name in asked or COMMANDS:
        importlib.import_module(COMMANDS[name]).add_parser(commands)
    for parser_of_one in commands.choices.values():
        aliases.add_to(parser_of_one)
    args = parser.parse_args(arguments, argparse.Namespace(arguments=list(arguments)))
    say(notices(args), f"bench {args.bench}")
    return int(args.run(args))
