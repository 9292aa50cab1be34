"""Names of scheduler backends and policies. Configuration code imports them without the rest of the scheduler."""

from __future__ import annotations

from typing import Literal

CachePolicy = Literal["lru", "lfu", "naive"]
SchedulePolicy = Literal["fcfs", "lpm", "srpf"]

BACKENDS = ("python", "rust_hotpath")
AUTO = "auto"
"""Name for the default scheduler: rust_hotpath if the extension loads, else python."""
RUST_PARTS = "rust_parts"
"""Name for the Python scheduler with its parts in Rust; `rust_parts:radix,metadata` uses only the listed ones."""
PART_NAMES = ("radix", "admission", "metadata")


def scheduler_problem(name: str) -> str | None:
    """Return why `name` is no valid scheduler name, with the valid ones; `None` if it is valid."""
    kind, colon, listed = name.partition(":")
    if kind == RUST_PARTS:
        wrong = [part for part in listed.split(",") if part not in PART_NAMES] if colon else []
        return f"unknown part {wrong[0]!r}; valid: {', '.join(PART_NAMES)}" if wrong else None
    if name in (*BACKENDS, AUTO):
        return None
    return f"unknown scheduler {name!r}; valid: {', '.join(BACKENDS)}, {RUST_PARTS}, {RUST_PARTS}:PART,PART, {AUTO}"
