"""The choice of a replica for each request: the engine pool's router (`minisgl.routing`) behind Serve's interface.

Invariants: the rules are those of `--routing cache_aware`, in the same code: the replica with the longest cached
prefix, unless it is much busier than others; without a prefix the least load. An index belongs to one replica until
that is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from minisgl.ray.placement import Placement, routing_fields
from minisgl.ray.relay import Call


class PrefixRouter(RequestRouter):  # type: ignore[misc,unused-ignore]
    """The request router of a deployment of `replica.Replica`."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._placement = Placement[ReplicaID]()
        self._numbers: dict[str, int] = {}  # request numbers by Serve's ids
        self._next = itertools.count()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._placement.update(
            {one.replica_id: {**one.replica_metadata, **(one.routing_stats or {})} for one in replicas}
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._placement.leave(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not pending_request.args or not isinstance(pending_request.args[0], Call):
            return [candidate_replicas]
        by_id = {one.replica_id: one for one in candidate_replicas}
        request_id = pending_request.metadata.internal_request_id
        if request_id in self._numbers:  # the first choice did not accept it
            return [self._by_load(candidate_replicas)[:1], candidate_replicas]
        number = self._numbers[request_id] = next(self._next)
        chosen = self._placement.place(number, routing_fields(pending_request.args[0].body).prefix)
        if chosen not in by_id:
            return [candidate_replicas]
        return [[by_id[chosen]], self._by_load(candidate_replicas)]

    def _by_load(self, replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
        return sorted(replicas, key=lambda one: self._placement.load(one.replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if (number := self._numbers.pop(internal_request_id, None)) is not None:
            self._placement.remove(number)
