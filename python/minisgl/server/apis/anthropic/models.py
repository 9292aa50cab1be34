"""Model cards in the shape of Anthropic's API, for clients that send its header `anthropic-version`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from minisgl.server.core.errors import FORM, bad_value, is_anthropic

USUAL, MOST = 20, 1000
"""Default and maximum of `limit`, the models on a page of the list."""


def shown_model(card: Mapping[str, Any], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a card of /v1/models in the shape of the requesting API. `scope`: of ASGI."""
    if not is_anthropic(scope[FORM][0]):
        return dict(card)
    created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created}


def shown_models(cards: Iterable[Mapping[str, Any]], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the list of /v1/models in the shape of the requesting API. Raises `ApiError` 400 for bad paging."""
    shown = [shown_model(one, scope) for one in cards]
    if not is_anthropic(scope[FORM][0]):
        return {"object": "list", "data": shown}
    query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    limit = query.get("limit", str(USUAL))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MOST):
        raise bad_value("limit", limit, f"must be between 1 and {MOST}")
    places = {one["id"]: place for place, one in enumerate(shown)}
    for name in ("after_id", "before_id"):
        if (given := query.get(name)) is not None and given not in places:
            raise bad_value(name, given, "no model has this id")
    if (before := query.get("before_id")) is not None:
        rest = shown[: places[before]]
        data = rest[-int(limit) :]
    else:
        after = query.get("after_id")
        rest = shown if after is None else shown[places[after] + 1 :]
        data = rest[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": len(rest) > len(data), **ends}
