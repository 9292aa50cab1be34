"""Reader of `--config FILE.yaml`: flags from a file, with file and line in every error.

Invariants: a key is any spelling of a flag without the leading dashes (`-` or `_` between words); nothing is guessed:
an unknown key, a repeated key or a value of a wrong type is an error with file, line, key and value.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from minisgl.cli.parser import Number, did_you_mean, must_be, one_of
from minisgl.config import ConfigError

NOT_IN_A_FILE = frozenset({"help", "config"})
SECRETS = ("key", "token", "password")


def apply(path: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """Make the file's values the defaults of `parser`, so that flags win over them. Return where each is set, by its
    flag's destination, such as `server.yaml:3: tp: `. Raises `ConfigError`."""
    defaults, places = values(path, parser)
    parser.set_defaults(**defaults)
    return places


def values(path: str, parser: argparse.ArgumentParser) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the file's values by flag destination, and the place where each is set. Raises `ConfigError`."""
    actions = dict(_actions(parser))
    defaults: dict[str, Any] = {}
    first_lines: dict[str, tuple[str, int]] = {}
    for line, key, value in _entries(path):
        where = f"{path}:{line}"
        name = key.replace("_", "-") if isinstance(key, str) else ""
        action = actions.get(name)
        if action is None:
            hint = did_you_mean(name, actions, "the keys are the flags of `minisgl serve --help`")
            raise ConfigError(f"{where}: {key}: unknown key{hint}")
        try:
            converted = _converted(action, value)
        except ValueError as error:
            shown = "(not shown)" if any(word in name for word in SECRETS) else _shown(value)
            raise ConfigError(f"{where}: {key}: {shown}: {error}") from error
        if converted is argparse.SUPPRESS:  # an alias of a fixed value that is false
            continue
        if action.dest in first_lines:
            other, at = first_lines[action.dest]
            raise ConfigError(f"{where}: {key}: set already by {other} in line {at}: remove one of them")
        first_lines[action.dest] = (str(key), line)
        defaults[action.dest] = converted
    return defaults, {dest: f"{path}:{line}: {key}: " for dest, (key, line) in first_lines.items()}


def _actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:  # argparse has no public list of them
        for option in action.option_strings:
            if option.startswith("--") and action.dest not in NOT_IN_A_FILE:
                yield option[2:], action


def _entries(path: str) -> list[tuple[int, Any, Any]]:
    """Return the line (from 1), key and value of each entry, including repeated keys."""
    with opened(path, "--config") as (loader, node):
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{line_of(node)}: must be lines of `flag: value`")
        return [
            (line_of(key), loader.construct_object(key, True), loader.construct_object(value, True))
            for key, value in node.value
        ]


def line_of(node: yaml.Node) -> int:
    """Return the line of a YAML node, counted from 1."""
    return int(node.start_mark.line) + 1


@contextlib.contextmanager
def opened(path: str, flag: str, *, shows: bool = True) -> Iterator[tuple[yaml.SafeLoader, yaml.Node | None]]:
    """Yield the loader and the root node of a YAML file (None if it is empty). Raises `ConfigError` for an unreadable
    file, which names `flag`, and for YAML errors, also within the `with`. Unless `shows`, no error quotes the file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not UTF-8 text: {error}") from error
    try:
        loader = yaml.SafeLoader(text)
        try:
            yield loader, loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML{_why(error.problem or error.context, shows)}") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise ConfigError(f"{path}: not valid YAML{_why(error, shows)}") from error


def _why(reason: object, shows: bool) -> str:
    return f": {reason}" if shows else " (put what has special characters in quotes)"


def _converted(action: argparse.Action, value: Any) -> Any:
    """Convert a YAML value to what the flag would give. Raises `ValueError`, which says what it must be."""
    if value is None:
        raise ValueError("has no value: give one or remove the line")
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            return value
        return action.const if value else action.default
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        if not isinstance(value, list):
            raise ValueError("must be a list, such as [A, B]")
        return [_one(action, item) for item in value]
    return _one(action, value)


def _one(action: argparse.Action, value: Any) -> Any:
    kind = action.type.kind if isinstance(action.type, Number) else action.type
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise ValueError(must_be(kind))
        value = _typed(action, value)
    elif isinstance(value, (bool, list, dict)) or (kind is None and not isinstance(value, str)):
        raise ValueError('must be text: write it in quotes ("...")')
    else:
        value = _typed(action, value)
    if action.choices is not None and value not in action.choices:
        raise ValueError(one_of(action.choices))
    return value


def _typed(action: argparse.Action, value: Any) -> Any:
    """Convert `value` with the flag's argparse type. Raises `ValueError`."""
    if not callable(action.type):
        return value
    try:
        return action.type(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error).removeprefix(f"{value}: ")) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
