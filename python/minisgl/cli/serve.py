"""The command `minisgl serve`: from flags to `ServerConfig`, and the start of the server."""

from __future__ import annotations

import argparse
from functools import partial

import msgspec

from minisgl import envs
from minisgl.cli import aliases, chat
from minisgl.cli.flags import ENGINE, SERVER, Commands, Formatter, add_model, add_settings, engine_config, notices
from minisgl.cli.parser import Parser
from minisgl.config import ImageLimits, Limits, ServerConfig, Silence
from minisgl.utils import older_variables


def add_parser(commands: Commands) -> Parser:
    parser = commands.add_parser("serve", help="run the OpenAI-compatible server", formatter_class=Formatter)
    parser.set_defaults(run=partial(run, parser))
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags by name; flags given here win over it")
    # `minisgl chat`, as mini-sglang calls it
    parser.add_argument("--shell", action="store_true", help=argparse.SUPPRESS)
    # for programs that start the server: one JSON line on stdout when ready; ends when stdin is closed
    parser.add_argument("--managed", action="store_true", help=argparse.SUPPRESS)
    add_settings(parser, ENGINE)
    add_settings(parser, SERVER)
    aliases.add_to(parser)
    return parser


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Build the server's configuration from flags, environment and defaults. Raises `ConfigError` or `EnvError`."""
    fields = {name: getattr(args, name) for name in ServerConfig.__struct_fields__ if hasattr(args, name)}
    fields["engine"] = engine_config(args)  # `args.engine` is the engine's name
    fields["limits"] = Limits(**{name: getattr(args, name) for name in Limits.__struct_fields__})
    images = {name: getattr(args, name) for name in ImageLimits.__struct_fields__}
    fields["images"] = ImageLimits(**{**images, "image_hosts": tuple(args.image_hosts or ())})
    if (head_wait := envs.head_wait()) is not None:
        fields["silence"] = Silence(head_wait=head_wait)
    fields["frontend"] = args.frontend or ("python" if args.resumable else envs.frontend() or "auto")
    fields["api_key"] = args.api_key or envs.api_key()
    if args.api_key_file is not None:
        from minisgl.cli import api_key_file

        fields["api_keys"] = keys = api_key_file.read(args.api_key_file)
        own = tuple((number, api_key_file.digest(one)) for number, one in enumerate(keys, 1) if one.own_cache)
        fields["engine"] = msgspec.structs.replace(fields["engine"], own_cache_keys=own)
    fields["cors_origins"] = tuple(args.cors_origins or ())
    fields["allowed_hosts"] = tuple(args.allowed_hosts or ())
    return ServerConfig(**fields).check()


def run(parser: Parser, args: argparse.Namespace) -> int:
    from minisgl.cli import models_file as models  # it and the file of keys read YAML

    config = server_config(args)
    if args.shell and not args.managed:
        return chat.run_shell(args.flags, config.any_key)
    warnings = [*notices(args), *older_variables.notices()]
    if models.are_several(args):
        from minisgl.registry.start import run_several

        entries = models.entries(args, lambda one: server_config(parser.parse_args(one)))
        return run_several(config, entries, args.load_timeout, *warnings)
    from minisgl.supervisor.start import run_server

    return run_server(config, *warnings)
