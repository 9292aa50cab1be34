"""The Rust parts of a scheduler (`minisgl.hotpath`), each with its Python version as a fallback.

Invariants: decisions are bit-identical to those of the Python parts. A function that fails is replaced by its Python
version, in the same call and for good. A prefix cache that fails cannot be replaced: it raises `PartFailed`, and the
step loop continues with another scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minisgl.extension import _rust
from minisgl.scheduler.parts import MakeTree
from minisgl.scheduler.policies import PART_NAMES, scheduler_problem
from minisgl.scheduler.reference import PYTHON, Parts


class Guarded:
    """A Rust function that is replaced by `twin`, its Python version, at its first exception. `failure` has the error
    text (empty: none)."""

    def __init__(self, function: Callable[..., Any], twin: Callable[..., Any]) -> None:
        self._function = function
        self._twin = twin
        self.failure = ""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self.failure:
            try:
                return self._function(*arguments, **named)
            except Exception as error:  # any error: the Python version takes over
                self.failure = f"{type(error).__name__}: {error}"
        return self._twin(*arguments, **named)


def parse_parts(text: str) -> tuple[str, ...]:
    """Return the parts in `rust_parts` (all) or `rust_parts:radix,metadata`. Raises `ValueError` for others."""
    _, colon, listed = text.partition(":")
    if problem := scheduler_problem(text):
        raise ValueError(problem)
    names = listed.split(",") if colon else PART_NAMES
    return tuple(name for name in PART_NAMES if name in names)


def make_parts(names: Sequence[str]) -> Parts:
    """Return a scheduler's parts: those in `names` in Rust, the others in Python. Raises `ExtensionMissing`."""
    tree: MakeTree = _rust.RadixCacheManager if "radix" in names else PYTHON.tree
    plan_chunks, make_metadata = PYTHON.plan_chunks, PYTHON.make_metadata
    return Parts(
        tree,
        Guarded(_rust.prefill_admission_plan, plan_chunks) if "admission" in names else plan_chunks,
        Guarded(_rust.make_metadata_buffers, make_metadata) if "metadata" in names else make_metadata,
        tuple(names),
    )
