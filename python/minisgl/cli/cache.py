"""`minisgl cache info|clear|verify DIR`: the folder of `--cache-dir`, whoever uses it meanwhile."""

from __future__ import annotations

import argparse
from pathlib import Path

from minisgl.cli.flags import Commands
from minisgl.cli.models import size
from minisgl.config import ConfigError

_ORDERS = {
    "info": "how many pages it holds",
    "clear": "remove its pages",
    "verify": "read its pages, and remove those that are damaged",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "cache",
        help="the folder of --cache-dir: what it holds; empty or check it",
        allow_abbrev=False,
        description="The folder with pages of KV that --cache-dir keeps. Servers may use it meanwhile.",
    )
    orders = parser.add_subparsers(dest="order", required=True, metavar="ORDER")
    for order, text in _ORDERS.items():
        one = orders.add_parser(order, help=text, allow_abbrev=False, description=text.capitalize() + ".")
        one.add_argument("folder", metavar="DIR", help="what --cache-dir names")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from minisgl._rust import PageStore

    folder = Path(args.folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{args.folder}: no such folder: name that of --cache-dir")
    order = {"info": PageStore.totals, "clear": PageStore.clear, "verify": PageStore.verify}[args.order]
    try:
        num_pages, num_bytes, num_damaged = order(str(folder))
    except OSError as error:
        raise ConfigError(f"{args.folder}: {error}") from error
    said = {"info": "", "clear": "removed ", "verify": "whole: "}[args.order]
    print(f"{args.folder}: {said}{_count(num_pages)}, {size(num_bytes)}")
    if num_damaged:
        print(f"{args.folder}: damaged, and removed: {_count(num_damaged)}")
    return int(num_damaged > 0)


def _count(pages: int) -> str:
    return f"{pages} page{'' if pages == 1 else 's'}"
