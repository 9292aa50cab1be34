"""The use of each API key, here and in the gateway.

Invariants: a key is shown by its name only; index 0 stands for all callers without a key of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from prometheus_client.core import Metric

from minisgl.metrics.families import Counter, family


class KeyReading(TypedDict):
    """The gateway's counts of one key: `num_waiting...` are current values, the others are since the start."""

    num_waiting: int
    num_waiting_tokens: int
    num_requests: int
    num_prompt: int
    num_generated: int


@dataclass(slots=True)
class KeyCounts:
    """Use of one API key: requests (one per choice), prompt tokens (once per prompt) and generated tokens."""

    name: str
    num_requests: int = 0
    num_prompt: int = 0
    num_generated: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by limit

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_generated

    def with_(self, there: KeyReading | None) -> KeyCounts:
        """Return the counts with the gateway's added. The gateway itself refuses nothing."""
        if there is None:
            return self
        return KeyCounts(
            self.name,
            self.num_requests + there["num_requests"],
            self.num_prompt + there["num_prompt"],
            self.num_generated + there["num_generated"],
            self.refused,
        )


def families(counts: Sequence[KeyCounts]) -> Iterable[Metric]:
    """Yield the families of both front ends; without samples if there is no file of keys."""
    for name, text, attribute in (
        ("requests", "requests sent to the engine, by API key", "num_requests"),
        ("prompt_tokens", "prompt tokens, by API key", "num_prompt"),
        ("generated_tokens", "generated tokens, by API key", "num_generated"),
    ):
        yield family(Counter, f"key_{name}", text, [(one.name, getattr(one, attribute)) for one in counts], "key")
    refused = [(one.name, limit, count) for one in counts for limit, count in one.refused.items()]
    yield family(Counter, "key_refused", "HTTP requests that a limit of their API key refused", refused, "key", "limit")
