"""Reader of `--models FILE.yaml`, `--models-dir DIR` and repeated `--model` flags: the models of one server.

    models:
      - name: chat
        model: /models/qwen3-4b.gguf
        aliases: [gpt-4o-mini]

Invariants: every error names file, line, entry, field and reason; flags of the command line apply to all models, and
those of an entry win over them.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from minisgl.cli.config_file import line_of, opened
from minisgl.cli.parser import Parser, UsageError
from minisgl.config import ConfigError, ServerConfig
from minisgl.utils import spellings

if TYPE_CHECKING:
    from minisgl.registry.entries import Entry

FLAG = "--models"
OWN_FLAGS = (
    "host",
    "port",
    "models",
    "models-dir",
    "model",
    "model-path",
    "memory",
    "load-timeout",
    "managed",
    "shell",
)
"""Flags of the whole server, which an entry cannot have."""
OF_ALL = (
    "--api-key",
    "--api-key-file",
    "--cors-origin",
    "--allowed-host",
    "--config",
    "--served-model-name",
    "--state-dir",
)
Resolve = Callable[[Sequence[str]], ServerConfig]


def are_several(args: argparse.Namespace) -> bool:
    """Return True if the flags name several models. Raises `ConfigError` if they do so in two ways."""
    ways = {FLAG: args.models, "--models-dir": args.models_dir, "--model": getattr(args, "each_model", ())[1:]}
    given = [flag for flag, value in ways.items() if value]
    if given and given != ["--model"] and hasattr(args, "model_given"):
        given.append("--model")
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: each names the models: give one of them")
    return bool(given)


def entries(args: argparse.Namespace, resolve: Resolve) -> list[Entry]:
    """Return an entry for each model in the flags. `resolve` converts flags to settings. Raises `ConfigError`."""
    from minisgl.registry.entries import models_in

    own = Parser(add_help=False)
    for name in OWN_FLAGS[:-2]:
        own.add_argument(f"--{name}")
    common = own.parse_known_args(args.flags)[1]
    if args.models is not None:
        return _read(args.models, common, resolve)
    named = {name: name for name in getattr(args, "each_model", ())}
    paths = named if args.models_dir is None else models_in(args.models_dir)
    return [
        _entry({"model": path} | ({} if path == name else {"name": name}), f"--model {name}", common, resolve)
        for name, path in paths.items()
    ]


def _read(path: str, common: Sequence[str], resolve: Resolve) -> list[Entry]:
    with opened(path, FLAG) as (loader, root):
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        if len(pairs) != 1 or pairs[0][0].value != "models" or not isinstance(pairs[0][1], yaml.SequenceNode):
            line = 1 if root is None else line_of(root)
            raise ConfigError(f"{path}:{line}: must be one list, `models:`, with an entry `- model: ...` for each")
        models: list[Entry] = []
        for i, node in enumerate(pairs[0][1].value):
            where = f"{path}:{line_of(node)}: models.{i}"
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"{where}: must be fields such as `model: qwen3:4b`")
            given = dict[str, Any]()
            for key, value in node.value:
                name = str(key.value)
                at = f"{path}:{line_of(key)}: models.{i}: {name}"
                if name in given:
                    raise ConfigError(f"{at}: given twice")
                given[name] = _field(at, name, loader.construct_object(value, True))
            models.append(_entry(given, where, common, resolve))
        if not models:
            raise ConfigError(f"{path}:{line_of(pairs[0][1])}: models: is empty")
        return models


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError('must be text (in quotes: "...")')
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("must be a list, such as [A, B]")
    return tuple(map(_text, value))


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError("must be a number of seconds above 0")
    return float(value)


def _flags(value: object) -> list[str]:
    flags = shlex.split(value) if isinstance(value, str) else list(_texts(value))
    for flag in flags:
        name = flag.partition("=")[0]
        if name in OF_ALL or name.removeprefix("--") in OWN_FLAGS:
            raise ValueError(f"{name}: applies to all models: give it on the command line")
    return flags


def _adapters(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping of adapter names to folders")
    return {_text(name): _text(path) for name, path in value.items()}


_FIELDS: Mapping[str, Callable[[object], object]] = {
    "name": _text,
    "model": _text,
    "aliases": _texts,
    "flags": _flags,
    "adapters": _adapters,
    "memory": spellings.size,
    "pin": _switch,
    "preload": _switch,
    "ttl": _seconds,
}


def _field(at: str, name: str, value: object) -> object:
    if name not in _FIELDS:
        raise ConfigError(f"{at}: unknown field: there are {', '.join(_FIELDS)}")
    try:
        return _FIELDS[name](value)
    except ValueError as error:  # `ConfigError` is a ValueError
        raise ConfigError(f"{at}: {error if isinstance(error, ConfigError) else f'{value!r:.80}: {error}'}") from error


def _entry(given: Mapping[str, Any], where: str, common: Sequence[str], resolve: Resolve) -> Entry:
    from minisgl.registry.entries import Entry

    if "model" not in given:
        raise ConfigError(f"{where}: model: missing")
    if given.get("pin") and given.get("ttl"):
        raise ConfigError(f"{where}: pin and ttl: a pinned model is never unloaded: give one of them")
    adapters = [f"{name}={path}" for name, path in given.get("adapters", {}).items()]
    lora = ["--lora", *adapters] if adapters else []
    try:
        config = resolve([*common, "--model", given["model"], *given.get("flags", ()), *lora])
    except UsageError as error:
        raise ConfigError(f"{where}: flags: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    name = given.get("name") or config.model_name
    aliases = given.get("aliases", ())
    return Entry(
        name=name,
        config=_server_config(config, name, bool(aliases)),
        aliases=aliases,
        memory=given.get("memory"),
        pin=given.get("pin", False),
        preload=given.get("preload", False),
        ttl_s=given.get("ttl"),
    )


def _server_config(config: ServerConfig, name: str, has_aliases: bool) -> ServerConfig:
    """Return the configuration of a model's own server, which only the front server connects to."""
    return msgspec.structs.replace(
        config,
        host="127.0.0.1",
        port=0,
        served_model_name=name,
        any_model_name=config.any_model_name or has_aliases,
        managed=True,
    )
