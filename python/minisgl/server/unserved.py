"""What a body has that its endpoint does not serve: looked for before the body is checked, by the tables of
`fields.py`.

Invariants: every name in a body is served, refused, or in the list of what has no effect; a name whose value is null
asks for nothing. Of a client's own words only names of usual characters reach a header.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from minisgl.server.errors import bad_value
from minisgl.server.fields import IGNORED as IGNORED_BY_ALL
from minisgl.server.fields import SAY_INSTEAD, Body, LeftOut, Table

MAX_NAMED = 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_DATE = re.compile(r"_2\d{7}\Z")  # of a tool's version
_LABELS = frozenset({"id", "status", "index", "signature", "annotations", "citations", "logprobs", "caller", "phase"})
"""What answers have beside their contents, in histories: it says nothing to a model."""


def shown(names: Iterable[str]) -> str:
    """Return `names` for a header, each once, at most so many."""
    safe = dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in names)
    return ", ".join([*safe][:MAX_NAMED])


@dataclass(frozen=True, slots=True)
class Known:
    """What may stand in an object: `served` names with the bodies that may stand in each, `aliases` of them, and the
    tables."""

    served: dict[str, tuple[type[Body], ...]] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    refused: Table = field(default_factory=dict)
    others: Table = field(default_factory=dict)
    ignored: Table = field(default_factory=dict)


def unserved(data: Mapping[str, Any], model: type[Body]) -> list[str]:
    """Return the names in `data` that have no effect, without places in lists. Raises `ApiError` 400 for one that would
    change the answer."""
    found: dict[str, None] = {}
    for name in _look(data, (model,), ()):
        found[name] = None
        if len(found) >= MAX_NAMED:
            break
    return [*found]


def _look(data: Mapping[str, Any], models: tuple[type[Body], ...], path: tuple[str | int, ...]) -> Iterator[str]:
    known = _known(models, kind := data.get("type"))
    if known is None:  # it is left out
        yield _place(path, _DATE.sub("", str(kind)))
        return
    for name, value in data.items():
        if value is None:
            continue
        if name in known.refused and not asks_for_nothing(value, known.refused[name]):
            raise _refusal(name, value, known, path)
        if (inner := known.served.get(name)) is not None:
            if name in known.ignored and not asks_for_nothing(value, known.ignored[name]):
                yield _place(path, name)
            if inner and isinstance(value, list):
                for i, one in enumerate(value):
                    if isinstance(one, dict):
                        yield from _look(one, inner, (*path, name, i))
            elif inner and isinstance(value, dict):
                yield from _look(value, inner, (*path, name))
        elif name in known.aliases or name in known.refused or (path and name in _LABELS):
            continue
        elif name in known.others:
            if not asks_for_nothing(value, known.others[name]):
                raise _refusal(name, value, known, path)
        elif not asks_for_nothing(value, known.ignored.get(name, IGNORED_BY_ALL.get(name, ()))):
            yield _place(path, name)


def asks_for_nothing(value: Any, nothing: Sequence[Any]) -> bool:
    return any(value == one and type(value) is type(one) for one in nothing)


def _place(path: Sequence[str | int], name: str) -> str:
    return ".".join([*(part for part in path if isinstance(part, str)), name])


def _refusal(name: str, value: Any, known: Known, path: Sequence[str | int]) -> Exception:
    reason = "not supported by this version"
    for instead in SAY_INSTEAD.get(name, ()):
        first = instead.partition(".")[0]
        if first in known.served and first not in known.refused:
            reason += f": use {instead}"
            break
    return bad_value(".".join(map(str, (*path, name))), value, reason, "unsupported_value")


def _known(models: tuple[type[Body], ...], kind: object) -> Known | None:
    """Return what an object of the `type` `kind` may have, where one of `models` stands; None: anything."""
    by_kind = _by_kind(models)
    return by_kind.get(kind, by_kind[_OTHER]) if isinstance(kind, str) else by_kind[None]


_OTHER = "<other>"  # no type has such signs


@functools.cache
def _by_kind(models: tuple[type[Body], ...]) -> dict[str | None, Known | None]:
    kinds: dict[str | None, list[type[Body]]] = {None: []}
    is_open = False
    for model in models:
        if issubclass(model, LeftOut):
            is_open = True
            continue
        names = _literals(model)
        for name in names:
            kinds.setdefault(name, []).append(model)
        if not names or not model.model_fields["type"].is_required():
            kinds[None].append(model)
    found: dict[str | None, Known | None] = {name: _joined(some) for name, some in kinds.items() if some}
    found.setdefault(None, None if is_open else _joined(models))
    found[_OTHER] = None if is_open else found[None]
    return found


def _literals(model: type[Body]) -> list[str]:
    of_type = model.model_fields.get("type")
    return [] if of_type is None else [one for one in _flat(of_type.annotation) if isinstance(one, str)]


def _flat(annotation: Any) -> Iterator[Any]:
    """The bodies in it, and the values of its literals."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    yield annotation
    for one in get_args(annotation):
        yield from _flat(one)


def _joined(models: Iterable[type[Body]]) -> Known:
    known = Known()
    for model in models:
        for name, one in model.model_fields.items():
            bodies = [found for found in _flat(one.annotation) if isinstance(found, type) and _is_body(found)]
            written = one.alias or name
            known.served[written] = tuple(dict.fromkeys((*known.served.get(written, ()), *bodies)))
        known.aliases.update(model.ALIASES)
        known.refused.update(model.NOT_YET)
        known.others.update(model.OTHERS)
        known.ignored.update(model.IGNORED)
    return known


def _is_body(found: type[Any]) -> bool:
    return issubclass(found, Body | LeftOut)
