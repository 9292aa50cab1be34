"""Conversion of a benchmark's flags to a settings dataclass."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def asked(kind: type[Kind], args: argparse.Namespace, **own: Any) -> Kind:
    """Build a dataclass with the fields `own`, and the others from the flags of their names; a list becomes a tuple."""
    names = {field.name for field in fields(kind)} & vars(args).keys() - own.keys()  # type: ignore[arg-type]
    given = {name: getattr(args, name) for name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, **own)
