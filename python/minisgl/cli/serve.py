"""`minisgl serve`: the server's own flags, and from flags to `ServerConfig`.

Doesn't know: sockets, processes.
"""

from __future__ import annotations

import argparse

from minisgl.cli.flags import Commands, Formatter, add_engine_arguments, engine_config
from minisgl.config import ConfigError, ServerConfig


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve", help="run the OpenAI-compatible server", formatter_class=Formatter, allow_abbrev=False
    )
    parser.set_defaults(run=run)
    add_server_arguments(parser)
    add_engine_arguments(parser)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags behind `ServerConfig`; the destinations are its field names."""
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every interface")
    http.add_argument("--port", type=int, default=1919, help="0: any free port")
    http.add_argument("--served-model-name", help="the name clients ask for (default: the value of --model)")


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Every field of `ServerConfig` that has a flag. Raises `ConfigError`, `EnvError`."""
    fields = {name: getattr(args, name) for name in ServerConfig.__struct_fields__ if hasattr(args, name)}
    fields["engine"] = engine_config(args)  # `args.engine` is the engine's name
    config = ServerConfig(**fields)
    if not 0 <= config.port < 65536:
        raise ConfigError(f"--port {config.port}: must be between 0 and 65535")
    return config


def run(args: argparse.Namespace) -> int:
    from minisgl.supervisor import run_server

    return run_server(server_config(args))
