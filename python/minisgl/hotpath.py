"""The scheduler's building blocks in Rust, for scripts, replays and schedulers of your own (docs/scheduler.md).

Each is a thin layer over the crate `minisgl-core`. Inputs are lists or contiguous int32 numpy arrays; outputs are new
int32 arrays, which `torch.from_numpy` takes without a copy. A bad argument raises a `ValueError` that names it and
changes nothing; a broken invariant raises a `ControlPlaneError`.
"""

from typing import TYPE_CHECKING, Any

from minisgl.extension import _rust

if TYPE_CHECKING:
    from minisgl._rust import (
        RadixCacheHandle,
        RadixCacheManager,
        RadixMatch,
        make_input_mapping,
        make_metadata_buffers,
        make_positions,
        make_write_mapping,
        prefill_admission_plan,
    )

__all__ = [
    "RadixCacheHandle",
    "RadixCacheManager",
    "RadixMatch",
    "make_input_mapping",
    "make_metadata_buffers",
    "make_positions",
    "make_write_mapping",
    "prefill_admission_plan",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(_rust, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
