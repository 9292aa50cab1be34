"""Prefixes that front ends keep in the prefix cache: handles `AddPrefix`, `RemovePrefix` and `ClearCache` in the step
loop. A prefix is computed by a request of its own that generates one token, which is discarded.

Invariants: such a request has low priority and a negative id, which no front end's request has; a prefix is reported
ready once it is computed, and is computed again when the cache was lost (failed forward, other scheduler); each pin
belongs to an existing prefix; without prefixes nothing here costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.message import AddPrefix, CacheCleared, ClearCache, FromEngine, PrefixChanged, PrefixState, RemovePrefix
from minisgl.runner.request_tracker import RequestTracker, TrackedRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import Abort, Event, FinishReason, Int32Array, StepLimits, StepOutput, Unpin
from minisgl.step import ClearCache as ClearCacheEvent

MAX_PREFIXES = 1024
MAX_TRIES = 3  # attempts for a prefix whose forward fails
Order = AddPrefix | RemovePrefix | ClearCache
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, seed=0)


@dataclass(slots=True, eq=False)
class _Prefix:
    prefix_id: int
    tokens: Int32Array
    pin: bool
    req_id: int = 0  # request that computes it, or did
    is_ready: bool = False
    num_tries: int = 0
    num_hits: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    """Node in a tree of pages, with the prefixes that end at this page or less than a page after it."""

    children: dict[bytes, _Node] = field(default_factory=dict)
    prefixes: list[_Prefix] = field(default_factory=list)


class Prefixes:
    """Registered prefixes and their requests, which are in the loop's tracker `requests`. `keeps`: there is a cache."""

    def __init__(
        self,
        requests: RequestTracker,
        limits: StepLimits,
        send: Callable[[Sequence[FromEngine]], None],
        *,
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self._requests = requests
        self._limits = limits
        self._send = send
        self._by_id: dict[int, _Prefix] = {}
        self.computed: dict[int, _Prefix | None] = {}
        """Prefixes being computed, by request id; `None` for removed ones."""
        self._num_tokens = 0
        self._last_req_id = 0
        self._root = _Node()
        self.events: list[Event] = []
        """Events for the next step, in addition to those that `take` returned."""

    def states(self) -> tuple[PrefixState, ...]:
        """Return the states of all prefixes, in the order of their arrival."""
        return tuple(
            PrefixState(prefix.prefix_id, len(prefix.tokens), prefix.is_ready, prefix.pin, prefix.num_hits)
            for prefix in self._by_id.values()
        )

    # --------------------------------------------------------------------------------------------------------- orders

    def take(self, order: Order, num_evictable_pages: int) -> list[Event]:
        """Handle a message and return the events for the scheduler. `num_evictable_pages` is the count before them."""
        match order:
            case AddPrefix():
                return self._add(order)
            case RemovePrefix(prefix_id):
                return self._remove(prefix_id)
            case ClearCache():
                self._send([CacheCleared(num_evictable_pages)])
                return [ClearCacheEvent()]

    def _add(self, order: AddPrefix) -> list[Event]:
        tokens = np.frombuffer(order.tokens, np.int32)
        if (existing := self._by_id.get(order.prefix_id)) is not None:
            same = existing.pin == order.pin and np.array_equal(existing.tokens, tokens)
            if same:
                self._say(existing, "ready" if existing.is_ready else "warming")
            else:
                self._send([PrefixChanged(order.prefix_id, "refused", "prefix_id: there is another prefix of this id")])
            return []
        if refusal := self._refusal(tokens):
            reason, is_full = refusal
            self._send([PrefixChanged(order.prefix_id, "refused", reason, is_full)])
            return []
        prefix = self._by_id[order.prefix_id] = _Prefix(order.prefix_id, tokens, order.pin)
        self._num_tokens += len(tokens)
        self._node(prefix).prefixes.append(prefix)
        self._say(prefix, "warming")
        return [self._request(prefix)]

    def _refusal(self, tokens: Int32Array) -> tuple[str, bool] | None:
        """Return the reason why a prefix is refused and whether only space is lacking; `None` if it is accepted."""
        page_size, longest = self._limits.page_size, self._limits.max_seq_len - 1
        if not self._keeps:
            return "the cache is naive: it keeps no prefixes", False
        if len(tokens) < page_size:
            return f"tokens: {len(tokens)}: must be at least {page_size}: only whole pages are cached", False
        if len(tokens) > longest:
            return f"tokens: {len(tokens)}: at most {longest} fit", False
        if len(self._by_id) >= MAX_PREFIXES:
            return f"there are {MAX_PREFIXES} prefixes already: remove one", True
        room = self._limits.num_pages * page_size - self._num_tokens
        if len(tokens) > room:
            return f"tokens: {len(tokens)}: the other prefixes leave room for {room} in the cache: remove some", True
        return None

    def _remove(self, prefix_id: int) -> list[Event]:
        prefix = self._by_id.get(prefix_id)
        if prefix is None:
            self._send([PrefixChanged(prefix_id, "unknown")])
            return []
        self._forget(prefix)
        self._say(prefix, "removed")
        events: list[Event] = []
        if not prefix.is_ready:
            events.append(Abort(prefix.req_id))
        if prefix.pin:
            events.append(Unpin(prefix.req_id))
        return events

    def _forget(self, prefix: _Prefix) -> None:
        del self._by_id[prefix.prefix_id]
        if prefix.req_id in self.computed:
            self.computed[prefix.req_id] = None
        self._num_tokens -= len(prefix.tokens)
        node = self._node(prefix)
        node.prefixes.remove(prefix)
        self._prune(self._root, self._pages(prefix.tokens))

    def _say(self, prefix: _Prefix, state: str, reason: str = "", is_full: bool = False) -> None:
        self._send([PrefixChanged(prefix.prefix_id, state, reason, is_full)])

    # ------------------------------------------------------------------------------------------------------- requests

    def _request(self, prefix: _Prefix) -> Event:
        """Return the arrival of a request for the prefix's full pages: a partial page would not be cached."""
        self._last_req_id -= 1
        prefix.req_id, prefix.is_ready = self._last_req_id, False
        self.computed[prefix.req_id] = prefix
        tokens = prefix.tokens[: len(prefix.tokens) // self._limits.page_size * self._limits.page_size]
        request = self._requests.add(prefix.req_id, _SAMPLING, tokens, len(tokens), background=True, pin=prefix.pin)
        return request.arrival()

    def refuse(self, req_id: int, field: str, reason: str) -> None:
        """Drop the prefix whose request the scheduler refused, and report the reason."""
        if (prefix := self.computed.pop(req_id)) is not None:
            self._forget(prefix)
            self._say(prefix, "refused", f"{field}: {reason}", is_full=field == "pin")

    def without_own_rows(self, output: StepOutput) -> StepOutput:
        """Return `output` without the rows of prefixes, which are handled here."""
        if not (own := output.req_ids < 0).any():
            return output
        for req_id, reason in zip(output.req_ids[own].tolist(), output.reasons[own].tolist(), strict=True):
            if reason != FinishReason.NONE:
                self._ended(req_id, FinishReason(reason))
        rest = ~own
        return StepOutput(
            output.step, output.req_ids[rest], output.tokens[rest], output.reasons[rest], output.rows[rest]
        )

    def _ended(self, req_id: int, reason: FinishReason) -> None:
        prefix = self.computed.pop(req_id)
        if prefix is None:
            return
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            prefix.is_ready, prefix.num_tries = True, 0
            self._say(prefix, "ready")
        elif (tries := prefix.num_tries + 1) < MAX_TRIES:
            prefix.num_tries = tries
            self.events.append(self._request(prefix))
        else:
            self._forget(prefix)
            self._say(prefix, "failed", f"computing it failed {MAX_TRIES} times")

    def lost(self) -> None:
        """Compute all ready prefixes again after the cache was lost. The scheduler restarts those being computed."""
        for prefix in self._by_id.values():
            if prefix.is_ready:
                self.events.append(self._request(prefix))
                self._say(prefix, "warming")

    # ----------------------------------------------------------------------------------------------------------- hits

    def admitted(self, request: TrackedRequest, cached_len: int) -> None:
        """Count the prefix hits of a request at its first admission, with `cached_len` cached tokens."""
        if not self._by_id or request.namespace:
            return
        page_size, prompt = self._limits.page_size, request.tokens[: request.num_prompt]
        # the last token is always computed, so a fully cached prompt counts its last page as not cached
        whole = len(prompt) // page_size * page_size
        covered = whole if cached_len >= (len(prompt) - 1) // page_size * page_size else cached_len
        node = self._root
        for end in range(page_size, covered + 1, page_size):
            child = node.children.get(prompt[end - page_size : end].tobytes())
            if child is None:
                return
            node = child
            for prefix in node.prefixes:
                if np.array_equal(prompt[end : len(prefix.tokens)], prefix.tokens[end:]):
                    prefix.num_hits += 1

    def _pages(self, tokens: Int32Array) -> list[bytes]:
        page_size = self._limits.page_size
        return [tokens[i : i + page_size].tobytes() for i in range(0, len(tokens) - page_size + 1, page_size)]

    def _node(self, prefix: _Prefix) -> _Node:
        node = self._root
        for page in self._pages(prefix.tokens):
            node = node.children.setdefault(page, _Node())
        return node

    @staticmethod
    def _prune(root: _Node, pages: list[bytes]) -> None:
        """Remove the nodes of the path that hold neither a prefix nor children."""
        path = [root]
        for page in pages:
            path.append(path[-1].children[page])
        for parent, page, node in zip(reversed(path[:-1]), reversed(pages), reversed(path[1:]), strict=True):
            if node.children or node.prefixes:
                return
            del parent.children[page]
