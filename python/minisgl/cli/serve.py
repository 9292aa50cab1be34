"""`minisgl serve`: the server's own flags, and from flags to `ServerConfig`."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from typing import Any, get_args

import msgspec

from minisgl import envs
from minisgl.cli import aliases, api_key_file, chat
from minisgl.cli.flags import Commands, Formatter, add_engine_arguments, add_log_level, checked, engine_config, notices
from minisgl.config import AdaptiveMaxTokens, ConfigError, Limits, ReasoningParser, ServerConfig, ToolCallParser
from minisgl.utils import spellings

_ADAPTIVE = re.compile(r"([0-9]{1,9}):([0-9]*\.?[0-9]{1,6}|[0-9]+\.)")


def add_parser(commands: Commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "serve", help="run the OpenAI-compatible server", formatter_class=Formatter, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    add_server_arguments(parser)
    add_engine_arguments(parser)
    return aliases.add_to(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags behind `ServerConfig`; the destinations are its field names."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags by name; flags given here win over it")
    parser.add_argument("--shell", action="store_true", help="open a chat with the server in this terminal")
    # for a program that starts the server: one JSON line on stdout when it is ready; it ends when its stdin does
    parser.add_argument("--managed", action="store_true", help=argparse.SUPPRESS)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    http.add_argument("--port", type=int, default=1919, help="0: any free port")
    http.add_argument(
        "--frontend",
        choices=("rust", "python"),
        help="who owns the port; rust: a gateway, which answers usual requests by itself and passes on the others "
        "(default: MINISGL_FRONTEND, else rust if the extension loads)",
    )
    http.add_argument("--served-model-name", help="the name clients ask for (default: the value of --model)")
    http.add_argument(
        "--any-model-name", action="store_true", help="requests may ask for any name; answers say the served one"
    )
    http.add_argument(
        "--api-key", help="clients must show it, but for /livez and /readyz (default: MINISGL_API_KEY, else none)"
    )
    http.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="YAML file of several API keys, each with a name, a share of the engines and limits (default: none)",
    )
    http.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        metavar="ORIGIN",
        help="a web page from there may use the server, *: any; may be given several times (default: none)",
    )
    http.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="clients may call the server by this name, *: by any; may be given several times (default: on loopback "
        "only localhost and the address, else any)",
    )
    http.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParser),
        default="auto",
        help="the format in which the model writes calls of tools; auto: as its chat template and tokenizer have it",
    )
    http.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParser),
        default="auto",
        help="the markers around what the model thinks before it answers, which becomes reasoning_content; auto: those "
        "of its chat template; none: it is content",
    )
    http.add_argument(
        "--resumable",
        action="store_true",
        help="for a server that only a router reaches: streams tell it what another server needs to go on with them, "
        "and the Python front end answers",
    )
    add_engines(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queued-requests",
        type=int,
        default=_limit("max_queued_requests"),
        help="answers that may wait for their first step; beyond it 429",
    )
    limits.add_argument(
        "--max-queued-tokens",
        type=int,
        default=_limit("max_queued_tokens"),
        help="prompt tokens that may wait for their first step; beyond it 429",
    )
    limits.add_argument("--max-body-bytes", type=int, default=_limit("max_body_bytes"), help="beyond it 413")
    limits.add_argument(
        "--max-encoding-bytes",
        type=int,
        default=_limit("max_encoding_bytes"),
        help="of large bodies that are read, parsed and encoded at once; others wait, in order",
    )
    limits.add_argument("--request-timeout", type=float, help="seconds for one request; then 504 (default: none)")
    limits.add_argument(
        "--slow-client-timeout",
        type=float,
        default=_limit("slow_client_timeout"),
        help="seconds that a client may take to read what is sent of its stream, or to send its request",
    )
    limits.add_argument(
        "--keep-alive-timeout",
        type=int,
        default=_limit("keep_alive_timeout"),
        help="whole seconds that a connection without a request stays open",
    )
    limits.add_argument(
        "--step-timeout",
        type=float,
        default=_limit("step_timeout"),
        help="seconds that one forward may take before /livez says no; a rank of --tp that hangs for longer ends the "
        "server",
    )
    limits.add_argument(
        "--drain-timeout",
        type=float,
        default=_limit("drain_timeout"),
        help="seconds that open requests have to end after SIGTERM",
    )
    limits.add_argument(
        "--adaptive-max-tokens",
        type=checked(adaptive_max_tokens),
        metavar="THRESHOLD:FACTOR",
        help="while more than THRESHOLD answers are in flight, the length of an answer whose request names none is "
        "FACTOR of what it is else, such as 64:0.5 (default: never)",
    )
    limits.add_argument(
        "--context-margin",
        type=int,
        default=_limit("context_margin"),
        metavar="N",
        help="tokens of the context that an answer leaves free if its request names no length",
    )
    limits.add_argument(
        "--demo-load",
        action="store_true",
        help="let the server send itself a small load until it ends (chats, shared prefixes, long prompts, bursts), to "
        "watch what it does",
    )
    logs = parser.add_argument_group("logs")
    add_log_level(logs)
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="json: an object a line")
    logs.add_argument(
        "--access-log", action=argparse.BooleanOptionalAction, default=True, help="a line for each request"
    )
    logs.add_argument(
        "--access-log-probes",
        action="store_true",
        help="a line for each /health, /livez, /readyz and /metrics, too",
    )
    logs.add_argument(
        "--metrics-aliases",
        choices=("none", "vllm"),
        default="none",
        help="vllm: /metrics also has the names that dashboards for vLLM ask for",
    )
    logs.add_argument("--log-prompts", action="store_true", help="prompts and answers in the access lines")


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Flags of several engines behind one server."""
    several = parser.add_argument_group("several engines")
    several.add_argument(
        "--dp",
        "--dp-size",
        "--data-parallel-size",
        type=checked(spellings.number_of_engines),
        default=1,
        metavar="N|auto",
        help="engine processes, each with the whole model, or with --tp that many devices; one that dies is started "
        "again, and its requests go on in another; auto: as many as there are CUDA devices for",
    )
    several.add_argument(
        "--routing",
        type=spellings.routing,
        choices=("round_robin", "least_load", "random", "cache_aware"),
        default="cache_aware",
        help="which engine gets a request; cache_aware: whose prefix cache has the most of its prompt, unless it is "
        "much busier than others; short: rr, fsfs (least_load)",
    )
    several.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="requests that all engines together have at once; others wait (default: any number)",
    )
    several.add_argument(
        "--max-inflight-per-engine",
        type=int,
        metavar="N",
        help="requests that one engine has at once; others wait (default: any number; with --api-key-file twice "
        "--max-running-requests)",
    )


def _limit(name: str) -> Any:
    return getattr(Limits(), name)


def adaptive_max_tokens(text: str) -> AdaptiveMaxTokens:
    """From `THRESHOLD:FACTOR`. Raises `ConfigError`."""
    found = _ADAPTIVE.fullmatch(text)
    millionths = 0 if found is None else int(Decimal(found[2]) * 1_000_000)
    if found is None or not 0 < millionths <= 1_000_000:
        raise ConfigError(
            f"{text!r}: must be THRESHOLD:FACTOR, a number of answers and a number above 0 and at most 1 of at most 6 "
            'decimals, such as 64:0.5 (in a file in quotes: "64:0.5")'
        )
    return AdaptiveMaxTokens(int(found[1]), millionths)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Every field of `ServerConfig` that has a flag. Raises `ConfigError`, `EnvError`."""
    fields = {name: getattr(args, name) for name in ServerConfig.__struct_fields__ if hasattr(args, name)}
    fields["engine"] = engine_config(args)  # `args.engine` is the engine's name
    fields["limits"] = Limits(**{name: getattr(args, name) for name in Limits.__struct_fields__})
    fields["frontend"] = args.frontend or ("python" if args.resumable else envs.frontend() or "auto")
    fields["api_key"] = args.api_key or envs.api_key()
    fields["api_keys"] = api_key_file.read(args.api_key_file) if args.api_key_file is not None else ()
    own = tuple(number for number, one in enumerate(fields["api_keys"], 1) if one.own_cache)
    fields["engine"] = msgspec.structs.replace(fields["engine"], own_cache_keys=own)
    fields["cors_origins"] = tuple(args.cors_origins or ())
    fields["allowed_hosts"] = tuple(args.allowed_hosts or ())
    return ServerConfig(**fields).check()


def run(args: argparse.Namespace) -> int:
    config = server_config(args)
    if args.shell and not args.managed:
        return chat.run_shell(args.flags, config.any_key)
    warnings = notices(args)
    from minisgl.supervisor.start import run_server

    return run_server(config, *warnings)
