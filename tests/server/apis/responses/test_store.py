"""Answers that are kept: bounded in number and bytes, the oldest go first, each for its caller."""

from __future__ import annotations

from typing import Any

from minisgl.server.apis.responses.store import ResponseStore


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"item-of-{name}", "text": text}]}


def filled(store: ResponseStore, *names: str, text: str = "", key: int = 1) -> ResponseStore:
    for name in names:
        store.put(response(name, text), [{"id": f"input-of-{name}"}], key=key)
    return store


def kept(store: ResponseStore, names: str) -> str:
    return "".join(name for name in names if store.response(name, 1) is not None)


def test_full_store_evicts_the_oldest() -> None:
    store = filled(ResponseStore(max_responses=3), *"abcde")
    assert (len(store), kept(store, "abcde")) == (3, "cde")
    assert store.item("item-of-a", 1) is None and store.item("item-of-e", 1) == {"id": "item-of-e", "text": ""}


def test_full_store_evicts_from_the_key_with_most() -> None:
    store = filled(ResponseStore(max_responses=5), *"ab", key=2)
    filled(store, *"cdefghi")
    assert kept(store, "cdefghi") == "ghi" and store.response("a", 2) and store.response("b", 2)
    store = filled(ResponseStore(max_bytes=50_000), "a", text="x" * 15_000, key=2)
    filled(store, *"bcdefgh", text="x" * 10_000)
    assert kept(store, "bcdefgh") == "fgh" and store.response("a", 2)


def test_store_stays_within_max_bytes() -> None:
    store = filled(ResponseStore(max_bytes=50_000), *"abcdefgh", text="x" * 10_000)
    assert kept(store, "abcdefgh") == "efgh" and 40_000 < store.num_bytes <= 50_000
    filled(store, "z", text="x" * 60_000)
    assert kept(store, "efghz") == "efgh"


def test_delete_removes_response_and_items() -> None:
    store = filled(ResponseStore(), *"ab", "a")
    assert len(store) == 2
    assert store.delete("a", 1) and not store.delete("a", 1) and store.delete("b", 1)
    assert (len(store), store.num_bytes, store.item("item-of-a", 1)) == (0, 0, None)


def test_responses_of_other_keys_are_not_found() -> None:
    store = filled(ResponseStore(), "a")
    assert store.response("a", 2) is store.input_items("a", 2) is store.output("a", 2) is None
    assert store.item("item-of-a", 2) is None and not store.delete("a", 2) and kept(store, "a") == "a"
    assert store.input_items("a", 1) == [{"id": "input-of-a"}]
