"""Gateway that does nothing, for tests of Python's calls to one."""

from __future__ import annotations

from minisgl.metrics.gateway import Readings
from minisgl.metrics.keys import KeyReading
from minisgl.metrics.server_metrics import REASONS, SECONDS, TOKENS
from minisgl.server.gateway import NoGateway, gateway_class

PASSED_ON = {"return_token_ids": True}
"""Fields of a generation request that the gateway forwards to the Python server."""
BUCKETS = {"ttft": SECONDS, "itl": SECONDS, "e2e": SECONDS, "queue": SECONDS, "prompt": TOKENS, "answer": TOKENS}


def has_gateway() -> bool:
    """Return true if the extension contains a gateway."""
    try:
        gateway_class()
    except NoGateway:
        return False
    return True


def no_readings() -> Readings:
    """Return the readings of a gateway that has done nothing."""
    return {
        "num_open": 0,
        "num_waiting": 0,
        "num_waiting_tokens": 0,
        "num_accepted": 0,
        "num_finished": dict.fromkeys(REASONS, 0),
        "num_generated": 0,
        "num_live": 0,
        "keys": [],
        "most": {name: {"recent": 0, "most": 0} for name in ("in_flight", "queued")},
        "requests": [],
        "cache": {"hits": 0, "misses": 0, "hit_bytes": 0, "bytes": 0},
        "histograms": {name: {"counts": [0] * (len(bounds) + 1), "sum": 0.0} for name, bounds in BUCKETS.items()},
        "meters": {
            name: {"count": 0, "total_s": 0.0, "longest_s": 0.0, "recent_s": 0.0} for name in ("dispatch", "detokenize")
        },
    }


class Recording:
    """Gateway that records Python's calls. `found` are the readings that it returns."""

    def __init__(self) -> None:
        self.is_draining = False
        self.found = no_readings()
        self.num_readings = 0

    def drain(self) -> None:
        self.is_draining = True

    def fail(self, reason: str) -> None:
        pass

    def beat(self) -> None:
        pass

    @property
    def num_open(self) -> int:
        return self.found["num_open"]

    def waiting(self) -> tuple[int, int, int]:
        return self.found["num_waiting"], self.found["num_waiting_tokens"], self.found["num_live"]

    def key(self, number: int) -> KeyReading | None:
        return dict(enumerate(self.found["keys"])).get(number)

    def readings(self) -> Readings:
        self.num_readings += 1
        return self.found

    def stop(self, grace_s: float) -> None:
        pass
