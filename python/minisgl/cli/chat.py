"""The command `minisgl chat`, and `minisgl serve --shell`: flags, and the choice of the server.

Invariants: without `--base-url`, a flag that is not the chat's is one of `minisgl serve`, for a server of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from minisgl import envs
from minisgl.cli import aliases
from minisgl.cli.flags import Commands, command, notices, say
from minisgl.cli.parser import Parser
from minisgl.config import ConfigError
from minisgl.sampling_params import ParamError, SamplingParams

if TYPE_CHECKING:
    import asyncio

SETTINGS = ("temperature", "top_p", "top_k", "max_tokens")


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = command(
        commands,
        "chat",
        run,
        help="talk to a model in this terminal",
        usage="minisgl chat [MODEL] [flags]",
        description="Talk to a model in this terminal: to a running server with --base-url, else to one of its own, "
        "which takes every flag of `minisgl serve` and ends with the chat.",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="URL of a running server (default: start one on a free port)")
    server.add_argument("--api-key", help="API key of the running server (default: MINISGL_API_KEY)")
    server.add_argument("--model", help="model to request, or to serve (default: the server's first, or smollm2)")
    add_answer_arguments(parser)
    return aliases.add_to(parser)


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    answers = parser.add_argument_group(
        "answers",
        "MINISGL_SHELL_TEMPERATURE, _TOP_P, _TOP_K and _MAX_TOKENS stand in for flags that are not given.",
    )
    answers.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="image for the first message; may be repeated"
    )
    answers.add_argument("--system", metavar="TEXT", help="system prompt (default: none)")
    answers.add_argument("--temperature", type=float, help="0: always the most likely token (default: the server's)")
    answers.add_argument(
        "--top-p", type=float, help="sample from tokens of this total probability (default: the server's)"
    )
    answers.add_argument("--top-k", type=int, help="sample from this many most likely tokens (default: the server's)")
    answers.add_argument("--max-tokens", type=int, help="generated tokens of an answer at most (default: the server's)")
    answers.add_argument("--sampling-seed", type=int, help="seed of sampling, for repeatable answers (default: random)")
    answers.add_argument("--stats", action="store_true", help="show TTFT and tokens per second after each answer")


def run(args: argparse.Namespace) -> int:
    rest: list[str] = args.rest
    if args.base_url is not None and args.model is None and rest and not rest[0].startswith("-"):
        args.model = rest.pop(0)
    if args.base_url is None:
        if args.api_key is not None:
            raise ConfigError("--api-key: needs --base-url, the running server that takes it")
        model = [] if args.model is None else ["--model", args.model]
        flags = ["--host", "127.0.0.1", "--port", "0", *model, *rest]
        return _run(_with_own_server(flags, envs.api_key(), args))
    if rest:
        raise ConfigError(f"{rest[0]}: cannot be used with --base-url, which starts no server")
    say(notices(args), "chat")  # otherwise the chat's own server prints them
    return _run(_converse(args.base_url, args.api_key or envs.api_key(), args.model, args))


def _run(conversation: Coroutine[None, None, int]) -> int:
    import asyncio

    return asyncio.run(conversation)


def run_shell(flags: Sequence[str], api_key: str | None) -> int:
    """Start `minisgl serve` with these flags and chat with it. Return the exit code."""
    answers = Parser()
    add_answer_arguments(answers)
    return _run(_with_own_server(flags, api_key, answers.parse_args([])))


async def _with_own_server(flags: Sequence[str], api_key: str | None, args: argparse.Namespace) -> int:
    from minisgl.chat.own_server import ServerFailed, own_server

    settings_of(args)  # raises errors before a server is started
    images_of(args)
    try:
        async with own_server(flags) as server:
            return await _converse(server.url, api_key, server.model, args, server.ended)
    except ServerFailed as failure:
        return failure.code or 1


def settings_of(args: argparse.Namespace) -> dict[str, int | float]:
    """Return the sampling fields of each request, from flags and then variables; the server decides the rest. Raises
    `ConfigError` or `EnvError`."""
    given = {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}
    seed = {} if args.sampling_seed is None else {"seed": args.sampling_seed}
    fields = {**envs.shell_settings(), **given, **seed}
    try:
        SamplingParams(**fields).check()
    except ParamError as error:
        flag = "--sampling-seed" if error.field == "seed" else f"--{error.field.replace('_', '-')}"
        variable = f"MINISGL_SHELL_{error.field.upper()}="
        name = f"{flag} " if error.field not in SETTINGS or error.field in given else variable
        raise ConfigError(f"{name}{fields[error.field]}: {error.reason}") from error
    return fields


def images_of(args: argparse.Namespace) -> list[str]:
    """Return the data URLs of the flag's images. Raises `ConfigError`."""
    from minisgl.chat.pictures import PictureError, data_url

    try:
        return [data_url(file) for file in args.image]
    except PictureError as error:
        raise ConfigError(f"--image {error}") from error


async def _converse(
    url: str, api_key: str | None, model: str | None, args: argparse.Namespace, gone: asyncio.Future[int] | None = None
) -> int:
    from minisgl.chat.client import ChatClient, ChatError
    from minisgl.chat.session import Session
    from minisgl.chat.terminal import Chat, Piped, Typed, file_history

    settings, images = settings_of(args), images_of(args)
    try:
        client = ChatClient(url, api_key)
        try:
            models = await client.models()
            if model is not None and model not in models:
                raise ChatError(f"--model {model}: must be a model of the server: {', '.join(models)}")
            name, said = model or models[0], args.system
            session = Session(client, name, system=said, settings=settings, show_stats=args.stats, images=images)
            if sys.stdin.isatty():
                _write(f"{session.model} at {client.base_url}. /help lists the commands, Ctrl-D leaves.\n")
                lines: Typed | Piped = Typed(file_history(envs.state_dir() / "chat_history"))
            else:
                lines = Piped(sys.stdin.fileno())
            return await Chat(session, lines, _write, gone).run()
        finally:
            await client.close()
    except ChatError as error:
        print(f"minisgl chat: {error}", file=sys.stderr)
        return 1


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
