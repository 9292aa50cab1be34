"""Lists as OpenAI shows them, a page at a time."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from minisgl.server.core.errors import bad_value


def page_of(items: list[dict[str, Any]], request: Request, most: int, usual: int = 20) -> dict[str, Any]:
    """A list as OpenAI shows it: the last ones first, unless `order` is `asc`; `limit` of them, from behind the item
    `after`. Raises `ApiError` 400."""
    asked = request.query_params
    limit, order, after = asked.get("limit", str(usual)), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise bad_value("limit", limit, f"must be between 1 and {most}")
    if order not in ("asc", "desc"):
        raise bad_value("order", order, "must be asc or desc")
    found = items if order == "asc" else items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(found) if item["id"] == after]
        if not places:
            raise bad_value("after", after, "no item has this id")
        found = found[places[0] + 1 :]
    data = found[: int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, **ends, "has_more": len(found) > len(data)}
