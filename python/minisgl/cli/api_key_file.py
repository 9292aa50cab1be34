"""Reader of `--api-key-file FILE.yaml`: several API keys, each with a name, a share and limits.

    keys:
      - name: team-a
        key: sk-...
        share: 3

Invariants: every error names file, line, entry, field and reason; no key is ever shown.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import pbkdf2_hmac
from typing import Any

import yaml

from minisgl.cli.config_file import line_of, opened
from minisgl.config import ApiKey, ConfigError

FLAG = "--api-key-file"
DEFAULT = "default"
"""Name of the caller with the key of --api-key."""
MAX_KEYS = 256
MAX_SHARE = 1000
DIGEST_ROUNDS = 20_000
MAX_NUMBER = 10**9
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")
_NUMBERS = {
    "share": (1, MAX_SHARE),
    "max_inflight": (0, MAX_NUMBER),
    "max_queued_requests": (0, MAX_NUMBER),
    "tokens_per_minute": (0, MAX_NUMBER),
    "max_priority": (0, MAX_SHARE),
}
_SWITCHES = ("own_cache", "cache", "lora", "models")


@cache
def digest(key: ApiKey) -> bytes:
    """Return the digest that names an API key in a page store; it depends on the key's name and secret. It is slow
    (PBKDF2), so that secrets cannot be found by trying."""
    return pbkdf2_hmac("sha256", key.key.encode(), f"minisgl own_cache {key.name}".encode(), DIGEST_ROUNDS)


def read(path: str) -> tuple[ApiKey, ...]:
    """Read the API keys of the file `path`, in its order. Raises `ConfigError`."""
    with opened(path, FLAG, shows=False) as (loader, root):
        where = f"{path}:{1 if root is None else line_of(root)}"
        entries = _list_of_keys(root, where)
        if not 1 <= len(entries) <= MAX_KEYS:
            raise ConfigError(f"{where}: keys: must have 1 to {MAX_KEYS} entries, not {len(entries)}")
        keys: list[ApiKey] = []
        for i, node in enumerate(entries):
            key = _entry(loader, node, path, i)
            for other in keys:
                for field in ("name", "key"):
                    if getattr(key, field) == getattr(other, field):
                        shown = "" if field == "key" else f" {key.name}"
                        raise ConfigError(
                            f"{path}:{line_of(node)}: keys.{i} ({key.name}): {field}:{shown} is that of {other.name} "
                            "already: give each its own"
                        )
            keys.append(key)
    return tuple(keys)


def _list_of_keys(root: yaml.Node | None, where: str) -> list[yaml.Node]:
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    if len(pairs) != 1 or pairs[0][0].value != "keys" or not isinstance(pairs[0][1], yaml.SequenceNode):
        raise ConfigError(f"{where}: must be one list, `keys:`, with an entry `- name: ...` for each key")
    entries: list[yaml.Node] = pairs[0][1].value
    return entries


def _entry(loader: yaml.SafeLoader, node: yaml.Node, path: str, i: int) -> ApiKey:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{line_of(node)}: keys.{i}: must be fields such as `name: team-a`")
    about, values = f"keys.{i}", dict[str, Any]()
    for key, value in node.value:
        name, given = str(key.value), loader.construct_object(value, True)
        problem = "given twice" if name in values else _problem(name, given)
        if problem:
            raise ConfigError(f"{path}:{line_of(key)}: {about}: {name}: {problem}")
        values[name] = given
        if name == "name":
            about = f"keys.{i} ({given})"
    for name in ("name", "key"):
        if name not in values:
            raise ConfigError(f"{path}:{line_of(node)}: {about}: {name}: missing")
    return ApiKey(**values)


def _problem(name: str, given: object) -> str:
    """Return what is wrong with the value of a key's field, or "" if it is valid."""
    if name == "name":
        if not (isinstance(given, str) and _NAME.fullmatch(given)):
            return f"{given!r:.80}: must be text of 1 to 64 letters, digits, dots, dashes and underscores"
        return f"{given}: that is how the key of --api-key is called" if given == DEFAULT else ""
    if name == "key":
        fits = isinstance(given, str) and _KEY.fullmatch(given)
        return "" if fits else "must be text of 1 to 512 printable ASCII characters without spaces (in quotes)"
    if name in _SWITCHES:
        return "" if isinstance(given, bool) else f"{given!r:.80}: must be true or false"
    if (bounds := _NUMBERS.get(name)) is None:
        return f"unknown field: there are name, key, {', '.join((*_NUMBERS, *_SWITCHES))}"
    low, high = bounds
    if not isinstance(given, int) or isinstance(given, bool) or not low <= given <= high:
        return f"{given!r:.80}: must be a whole number from {low} to {high}"
    return ""
