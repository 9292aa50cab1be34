"""The commands `minisgl pull`, `list` and `rm`: models in the hub cache that `serve --model OWNER/REPO` uses."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from minisgl.cli.flags import MODEL, Commands, Formatter
from minisgl.config import ConfigError, ModelSource
from minisgl.utils.progress import Display

_WANTED = ("--model-source", "--revision")


def add_parsers(commands: Commands) -> None:
    pull = commands.add_parser(
        "pull", help="fetch a model from a hub", formatter_class=Formatter, allow_abbrev=False, description=_PULL
    )
    pull.set_defaults(run=_pull)
    pull.add_argument(
        "name", metavar="MODEL", help="OWNER/REPO, OWNER/REPO:QUANT, OWNER/REPO/FILE.gguf or a short name"
    )
    for row in MODEL:
        if row.flags[0] in _WANTED:
            row.add_to(pull, shown=True)
    listing = commands.add_parser("list", help="models of hubs that are here", allow_abbrev=False, description=_LIST)
    listing.set_defaults(run=_list)
    remove = commands.add_parser("rm", help="remove models that list shows", allow_abbrev=False, description=_RM)
    remove.set_defaults(run=_remove)
    remove.add_argument("names", metavar="MODEL", nargs="+", help="a name as minisgl list shows it, or its short name")


_PULL = "Fetch a model, or the rest of one whose download was cut, and check it. Serving it does the same."
_LIST = "Models in the caches of hubs, each by the name that --model and minisgl rm take, and unfinished downloads."
_RM = "Remove models from the cache. What another model's files share stays, and so does all that list does not show."


def _pull(args: argparse.Namespace) -> int:
    print(find(args.name, args.model_source, args.revision))
    return 0


def find(name: str, source: ModelSource | None = None, revision: str | None = None) -> Path:
    """Return the folder or GGUF file of a model, after downloading it if it is missing."""
    from minisgl.weights.sources import find_model

    display = Display(
        lambda line: print(line, file=sys.stderr, flush=True), sys.stderr if sys.stderr.isatty() else None
    )
    path = find_model(name, display, source=source or "auto", revision=revision, mmproj=True)
    display.close()
    return path


def _list(args: argparse.Namespace) -> int:
    from minisgl.weights.hub_cache import entries

    models = entries()
    rows = [("NAME", "SIZE", "LAST USED", "HUB")]
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used_ns / 1e9))
        rows.append((model.name, size(model.num_bytes), used, model.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if not models:
        print("no models of hubs here: minisgl pull MODEL fetches one", file=sys.stderr)
    return 0


def _remove(args: argparse.Namespace) -> int:
    """Remove the named models. Raises `ConfigError`, and removes nothing, if one of them is not listed."""
    from minisgl.weights.hub_cache import Entry, entries, remove
    from minisgl.weights.hub_names import full_name

    there = entries()
    chosen: dict[str, list[Entry]] = {}
    for name in args.names:
        full = full_name(name)
        chosen[full] = [model for model in there if model.name == full]
        if not chosen[full]:
            same = [model.name for model in there if model.repo == full.partition(":")[0]]
            raise ConfigError(
                f"{name}: is not listed: " + (f"there are {', '.join(same)}" if same else "see minisgl list")
            )
    for name, models in chosen.items():
        print(f"removed {name}: {size(sum(map(remove, models)))} freed")
    return 0


def size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
