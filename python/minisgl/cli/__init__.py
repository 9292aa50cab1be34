"""The command line. Each command is a module with `add_parser` and `run`; `minisgl --model X` is `minisgl serve`.

The work of a command is done by other packages; this one has flags and messages about them. Start with `serve.py` and
`flags.py`, the table of settings.
Invariants: a bad setting ends with one line that says what to change and exit code 2; no user error ends with a
traceback; importing this package does not import torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from minisgl import envs
from minisgl.cli import batch, cache, chat, generate, model, models, replay, serve, verify
from minisgl.cli.flags import sources
from minisgl.cli.parser import Parser, UsageError
from minisgl.config import ConfigError, with_source
from minisgl.extension import ExtensionMissing
from minisgl.sampling_params import ParamError
from minisgl.utils.installed import own_version

DESCRIPTION = "A compact LLM inference server."
EXAMPLES = """examples:
  minisgl serve                              the embedded model at http://127.0.0.1:1919
  minisgl serve Qwen/Qwen3-0.6B              from a model hub, a folder or a GGUF file
  minisgl serve unsloth/Qwen3-4B-GGUF:Q4_K_M one GGUF file of a repository; qwen3:4b is short for such a name
  minisgl serve --config server.yaml         flags from a file
  minisgl chat                               talk to a model in this terminal
  minisgl COMMAND --help                     the flags of a command; without a command they are those of serve
"""
OF_ITS_OWN = ("-h", "--help", "-V", "--version")
"""Flags of the program itself, without a command."""


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line: flags win over the `--config` file, and this over defaults. Raises `ConfigError`."""
    parser = Parser(
        prog="minisgl",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="minisgl COMMAND [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"minisgl {own_version()}" if any(flag in arguments for flag in ("-V", "--version")) else ""
    parser.add_argument("-V", "--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="minisgl")
    server = serve.add_parser(commands)
    chat.add_parser(commands)
    generate.add_parser(commands)
    batch.add_parser(commands)
    models.add_parsers(commands)
    model.add_parser(commands)
    cache.add_parser(commands)
    verify.add_parser(commands)
    replay.add_parser(commands)
    commands.add_parser("bench", help="measure: offline throughput and more", add_help=False)
    commands.add_parser("doctor", help="what is installed, what works here, and why not", add_help=False)
    args: argparse.Namespace
    args, rest = parser.parse_known_args(arguments)
    if rest and args.command not in ("chat", "batch"):  # which pass them to their servers
        parser.refuse(rest)
    in_file: dict[str, str] = {}
    if (path := getattr(args, "config", None)) is not None:
        from minisgl.cli import config_file

        in_file = config_file.apply(path, server)
        args = parser.parse_args(arguments)
    args.flags, args.rest, args.sources = arguments[1:], rest, sources(parser.typed(), in_file)
    return args


def _run(args: argparse.Namespace) -> int:
    """Run a parsed command and return its exit code. A `ConfigError` names settings as the user set them."""
    try:
        return int(args.run(args))
    except UsageError:
        raise
    except ConfigError as error:
        raise ConfigError(with_source(str(error), args.sources)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors are printed to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].startswith("-") and arguments[0] not in OF_ITS_OWN:
        arguments.insert(0, "serve")
    try:
        if arguments[:1] == ["doctor"]:
            from minisgl.cli import doctor

            return int(doctor.main(arguments[1:]))
        if arguments[:1] == ["bench"]:
            from minisgl.cli import bench

            return bench.main(arguments[1:])
        if arguments[:1] == ["serve"]:
            envs.set_purge_delay()  # before a flag's check loads the extension
        args = _parse(arguments)
        return _run(args)
    except UsageError as error:
        print(f"{error.prog}: {error}", file=sys.stderr)
        return 2
    except (ConfigError, envs.EnvError, ParamError, ExtensionMissing) as error:
        print(f"minisgl {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of Python
        return 1
    except OSError as error:  # such as a full disk; it names the file
        print(f"minisgl {arguments[0]}: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"minisgl {arguments[0]}: out of memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
