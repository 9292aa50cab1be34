"""LoRA adapters that a front end has its engines load, by the names that clients use.

Invariants: every engine gets the same orders; adapter ids are never reused, so cached pages of an unloaded adapter
match no other; a name can be requested once every serving engine has its adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from minisgl.message import AdapterChanged, LoadAdapter, ToEngine, UnloadAdapter

LOADED, REFUSED = "loaded", "refused"


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter by name. `said` has each engine's last report about it."""

    number: int
    name: str
    path: str
    said: dict[int, AdapterChanged] = field(default_factory=dict)
    is_ready: bool = False

    @property
    def refusal(self) -> str | None:
        return next((report.reason for report in self.said.values() if report.state == REFUSED), None)


class AdapterBook:
    """The adapters of a front end. `serving` returns the serving engines' ids; `changed` is called after reports."""

    def __init__(
        self, post: Callable[[ToEngine], None], serving: Callable[[], Collection[int]], changed: Callable[[], None]
    ) -> None:
        self._post = post
        self._serving = serving
        self._changed = changed
        self._next_number = 1
        self.by_name: dict[str, Adapter] = {}  # includes adapters being loaded

    def ready(self) -> list[Adapter]:
        return [adapter for adapter in self.by_name.values() if adapter.is_ready]

    def number(self, name: str) -> int | None:
        """Return the adapter id for requests; `None` if no adapter of this name is ready."""
        adapter = self.by_name.get(name)
        return adapter.number if adapter is not None and adapter.is_ready else None

    def load(self, name: str, path: str) -> Adapter:
        """Have every engine load an adapter. `name` must not be in use."""
        adapter = self.by_name[name] = Adapter(self._next_number, name, path)
        self._next_number += 1
        self._post(LoadAdapter(adapter.number, name, path))
        return adapter

    def is_settled(self, adapter: Adapter) -> bool:
        """Return whether the adapter is ready, or was refused by an engine and so unloaded everywhere."""
        return adapter.is_ready or adapter.refusal is not None

    def unload(self, adapter: Adapter) -> None:
        """Remove the name and have the engines unload the adapter; running requests keep it. Idempotent."""
        if self.by_name.get(adapter.name) is adapter:
            del self.by_name[adapter.name]
            adapter.is_ready = False
            self._post(UnloadAdapter(adapter.number))

    def take(self, engine: int, message: AdapterChanged) -> None:
        """Handle an engine's report about an adapter."""
        for adapter in tuple(self.by_name.values()):
            if adapter.number == message.adapter:
                adapter.said[engine] = message
                self._look(adapter)
        self._changed()

    def lost(self, engine: int) -> None:
        """Forget the reports of a lost engine. When it returns, it gets the adapters before any request."""
        for adapter in tuple(self.by_name.values()):
            adapter.said.pop(engine, None)
            self._look(adapter)

    def _look(self, adapter: Adapter) -> None:
        if adapter.refusal is not None:
            self.unload(adapter)
            return
        serving = self._serving()
        if not adapter.is_ready and serving and all(engine in adapter.said for engine in serving):
            adapter.is_ready = True
