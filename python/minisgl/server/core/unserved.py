"""Finds the fields of a body that its endpoint does not serve, before the body is validated, by the tables of
`fields.py`.

Invariants: every name in a body is served, refused, or listed as without effect; a null value asks for nothing. Only
names of ordinary characters reach a header.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from minisgl.server.core.errors import bad_value
from minisgl.server.core.fields import IGNORED as IGNORED_BY_ALL
from minisgl.server.core.fields import SAY_INSTEAD, Body, LeftOut, Picture, Table

MAX_NAMED = 32
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_DATE = re.compile(r"_2\d{7}\Z")  # date suffix of a versioned tool type
_LABELS = frozenset({"id", "status", "index", "signature", "annotations", "citations", "logprobs", "caller", "phase"})
"""Fields of earlier responses in a history that mean nothing to the model."""


def shown(names: Iterable[str]) -> str:
    """Return `names` as a header value: each once, unsafe ones as "?", at most `MAX_NAMED`."""
    safe = dict.fromkeys(name if _NAME.fullmatch(name) else "?" for name in names)
    return ", ".join([*safe][:MAX_NAMED])


@dataclass(frozen=True, slots=True)
class AllowedFields:
    """Fields that an object may have: `served` ones with the body types of their values, tables of others, and `plain`
    ones (aliases, too), whose values are not inspected."""

    plain: set[str] = field(default_factory=set)
    served: dict[str, tuple[type[Body], ...]] = field(default_factory=dict)
    refused: Table = field(default_factory=dict)
    others: Table = field(default_factory=dict)
    ignored: Table = field(default_factory=dict)


FieldsByType = dict[str | None, AllowedFields | None]
"""Allowed fields by an object's `type`, if it has one; a value of `None`: the object is left out as a whole."""


def unserved(data: Mapping[str, Any], model: type[Body], *, sees: bool = False) -> list[str]:
    """Return the names in `data` that have no effect, as dotted paths without list indices. `sees`: the model sees
    images. Raises `ApiError` 400 for one that would change the output."""
    ignored: dict[str, None] = {}
    _check(data, (model,), (), ignored, sees)
    return [*ignored]


def _check(
    data: Mapping[str, Any],
    bodies: tuple[type[Body], ...],
    path: tuple[str | int, ...],
    ignored: dict[str, None],
    sees: bool,
) -> None:
    """Add the names in the object at `path` that have no effect to `ignored`. Raises `ApiError` 400."""
    kinds = _fields_by_type(bodies, sees)
    kind = data.get("type")
    allowed = kinds.get(kind, kinds[_OTHER]) if isinstance(kind, str) else kinds[None]
    if allowed is None:
        _name(_DATE.sub("", str(kind)), path, ignored)
        return
    for name, value in data.items():
        if name in allowed.plain or value is None:
            continue
        if name in allowed.refused and not is_neutral(value, allowed.refused[name]):
            raise _not_supported(name, value, allowed, path)
        if (inner := allowed.served.get(name)) is not None:
            if name in allowed.ignored and not is_neutral(value, allowed.ignored[name]):
                _name(name, path, ignored)
            if inner and isinstance(value, list):
                for i, one in enumerate(value):
                    if isinstance(one, dict):
                        _check(one, inner, (*path, name, i), ignored, sees)
            elif inner and isinstance(value, dict):
                _check(value, inner, (*path, name), ignored, sees)
        elif name in allowed.refused or (path and name in _LABELS):
            continue
        elif name in allowed.others:
            if not is_neutral(value, allowed.others[name]):
                raise _not_supported(name, value, allowed, path)
        elif not is_neutral(value, allowed.ignored.get(name, IGNORED_BY_ALL.get(name, ()))):
            _name(name, path, ignored)


def _name(name: str, path: Sequence[str | int], ignored: dict[str, None]) -> None:
    if len(ignored) < MAX_NAMED:
        ignored[".".join([*(part for part in path if isinstance(part, str)), name])] = None


def is_neutral(value: Any, nothing: Sequence[Any]) -> bool:
    return any(value == one and type(value) is type(one) for one in nothing)


def _not_supported(name: str, value: Any, allowed: AllowedFields, path: Sequence[str | int]) -> Exception:
    reason = "not supported by this version"
    for instead in SAY_INSTEAD.get(name, ()):
        first = instead.partition(".")[0]
        if first in allowed.served and first not in allowed.refused:
            reason += f": use {instead}"
            break
    return bad_value(".".join(map(str, (*path, name))), value, reason, "unsupported_value")


_OTHER = "<other>"  # no valid type has these characters


@functools.cache
def _fields_by_type(models: tuple[type[Body], ...], sees: bool) -> FieldsByType:
    """Return the fields that an object may have, by its `type`, where any of `models` is allowed."""
    kinds: dict[str | None, list[type[Body]]] = {None: []}
    is_open = False
    for model in models:
        if issubclass(model, LeftOut):
            is_open = True
            if not (sees and issubclass(model, Picture)):
                continue
        names = _literals(model)
        for name in names:
            kinds.setdefault(name, []).append(model)
        if not names or not model.model_fields["type"].is_required():
            kinds[None].append(model)
    fields_by_type: FieldsByType = {name: _joined(some, sees) for name, some in kinds.items() if some}
    fields_by_type.setdefault(None, None if is_open else _joined(models, sees))
    fields_by_type[_OTHER] = None if is_open else fields_by_type[None]
    return fields_by_type


def _literals(model: type[Body]) -> list[str]:
    of_type = model.model_fields.get("type")
    return [] if of_type is None else [one for one in _types_in(of_type.annotation) if isinstance(one, str)]


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the types in a type annotation, and the values of its literals."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    yield annotation
    for one in get_args(annotation):
        yield from _types_in(one)


def _joined(models: Sequence[type[Body]], sees: bool) -> AllowedFields:
    allowed = AllowedFields()
    for model in models:
        for name, one in model.model_fields.items():
            bodies = [kind for kind in _types_in(one.annotation) if isinstance(kind, type) and _is_body(kind)]
            written = one.alias or name
            allowed.served[written] = tuple(dict.fromkeys((*allowed.served.get(written, ()), *bodies)))
        allowed.refused.update(model.NOT_YET)
        allowed.others.update(model.OTHERS)
        allowed.ignored.update(model.IGNORED if sees else {**model.IGNORED, **model.UNSEEN})
    special = allowed.refused.keys() | allowed.ignored.keys()
    allowed.plain.update(name for name, bodies in allowed.served.items() if not bodies and name not in special)
    allowed.plain.update(name for model in models for name in model.ALIASES)
    return allowed


def _is_body(kind: type[Any]) -> bool:
    return issubclass(kind, Body)
