"""The command `minisgl cache info|clear|verify|export|import`: manages the folder of `--cache-dir`, also while servers
use it, and copies prefixes between folders as files."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from minisgl.cli import request_body
from minisgl.cli.flags import ENGINE, LOG_LEVEL, Commands, Formatter, add_settings, engine_config, loaded
from minisgl.cli.models import size
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.utils import prefix_file, spellings

_ORDERS = {
    "info": "how many pages and states it holds",
    "clear": "remove them",
    "verify": "read them, and remove what is damaged",
}
_NO_LIMIT = 2**63  # a server that uses the folder applies its own limit


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="the folder of --cache-dir: what it holds; empty or check it; prefixes as files",
        allow_abbrev=False,
        description="The folder with pages of KV that --cache-dir keeps. Servers may use it meanwhile.",
    )
    orders = parser.add_subparsers(dest="order", required=True, metavar="ORDER")
    for order, text in _ORDERS.items():
        order_parser = orders.add_parser(order, help=text, allow_abbrev=False, description=text.capitalize() + ".")
        order_parser.add_argument("folder", metavar="DIR", help="what --cache-dir names")
        order_parser.set_defaults(run=_run)
    text = "write a prefix with its pages to a file, for import or --warm-prefix @FILE elsewhere"
    export = orders.add_parser(
        "export", help=text, allow_abbrev=False, description=text.capitalize() + ".", formatter_class=Formatter
    )
    export.add_argument(
        "prefix",
        metavar="TEXT|@FILE",
        help="the prefix as text, or a file of it; *.json: token ids, or a body with text, prompt or messages",
    )
    export.add_argument("file", metavar="FILE", help="what is made; who can read it can read the prefix")
    add_settings(export, {**ENGINE, "logs": (LOG_LEVEL,)})
    export.set_defaults(run=_export)
    text = "put an exported prefix into a folder"
    importing = orders.add_parser("import", help=text, allow_abbrev=False, description=text.capitalize() + ".")
    importing.add_argument("file", metavar="FILE", help="of minisgl cache export, by somebody whom you trust")
    importing.add_argument("folder", metavar="DIR", help="what --cache-dir names; it is made if it is not there")
    importing.set_defaults(run=_import)


def _run(args: argparse.Namespace) -> int:
    folder = Path(args.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{args.folder}: no such folder: name that of --cache-dir")
    order = {"info": _rust.PageStore.totals, "clear": _rust.PageStore.clear, "verify": _rust.PageStore.verify}[
        args.order
    ]
    try:
        num_pages, num_states, num_bytes, num_damaged = order(str(folder))
    except OSError as error:
        raise ConfigError(f"{args.folder}: {error}") from error
    said = {"info": "", "clear": "removed ", "verify": "whole: "}[args.order]
    states = f", {_count(num_states, 'state')}" if num_states else ""
    print(f"{args.folder}: {said}{_count(num_pages)}{states}, {size(num_bytes)}")
    if num_damaged:
        print(f"{args.folder}: damaged, and removed: {_count(num_damaged, 'file')}")
    return int(num_damaged > 0)


def _count(number: int, what: str = "page") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _import(args: argparse.Namespace) -> int:
    folder = Path(args.folder).expanduser()

    def store_for(head: prefix_file.Head) -> _rust.PageStore:
        try:
            sizes = head.page_size, head.page_bytes, head.state_bytes
            return _rust.PageStore(str(folder), _NO_LIMIT, head.identity, *sizes)
        except OSError as error:
            raise ConfigError(f"{args.folder}: {error}") from error

    head = prefix_file.take_in(args.file, store_for)
    print(f"{args.folder}: {_count(head.num_pages)} of a prefix of {len(head.tokens)} tokens")
    return 0


def _export(args: argparse.Namespace) -> int:
    body = _read(args.prefix)
    config = engine_config(args)
    with tempfile.TemporaryDirectory() as folder, loaded(config, cache_dir=config.cache_dir or folder) as llm:
        ids = request_body.ids_of(llm, body, args.prefix, is_prefix=True)
        num_tokens = llm.export_prefix(ids, Path(args.file).expanduser())
    print(f"{args.file}: a prefix of {num_tokens} tokens, {size(Path(args.file).expanduser().stat().st_size)}")
    return 0


def _read(said: str) -> dict[str, Any]:
    """Return the prefix argument as a request body: text, or the JSON of an @FILE.json. Raises `ConfigError`."""
    text = spellings.text_or_file(said)
    if not isinstance(text, str):
        raise ConfigError(f"{said}: is an exported prefix already: give a text, or @FILE with one")
    is_body = said.startswith("@") and said.endswith(".json")
    return request_body.read(text.encode(), said) if is_body else {"text": text}
