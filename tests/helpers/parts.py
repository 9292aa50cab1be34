"""Assignment of test files to parts of the suite with a command of their own: `pytest` without paths leaves them out,
`pytest --part NAME` runs them alone, and a path on the command line runs that path.

A part needs something that most changes do not touch: another engine, a device, a browser, third-party programs.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
CORE = "core"
"""Part that runs by default."""
PARTS = {
    "torch": (
        "attention/*",
        "distributed/*",
        "kernels/*",
        "layers/*",
        "engine/test_adapters_peft.py",
        "engine/test_building.py",
        "engine/test_device_*",
        "engine/test_dtypes.py",
        "engine/test_sampler*",
        "engine/test_torch_*",
        "engine/test_transformers_loading.py",
        "models/test_decoder.py",
        "models/test_transformers_*",
        "runner/test_ranks*",
        "e2e/test_no_extension.py",
        "e2e/test_tp_server.py",
        "e2e/test_transformers_server.py",
    ),
    "bench": ("bench/*", "benchmark/*", "e2e/test_bench_serve.py", "tools/test_shake.py", "tools/test_mutate.py"),
    "clients": ("clients/*",),
    "gpu": ("gpu/*",),
    "ray": ("ray/*", "deploy/test_ray.py"),
    "browser": ("web/*",),
}
"""Patterns of files below tests/, by part."""
COMMANDS = {CORE: "make test", "torch": "make wide-test", "bench": "make wide-test", "gpu": "pytest tests/gpu"}


@cache
def part_of(file: Path) -> str:
    """Return the part that a test file belongs to; `CORE` if no other."""
    name = file.relative_to(TESTS).as_posix()
    found = (part for part, patterns in PARTS.items() if any(fnmatch.fnmatch(name, one) for one in patterns))
    return next(found, CORE)


def unmatched() -> Iterator[str]:
    """Yield the patterns that match no file any more."""
    files = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    for patterns in PARTS.values():
        yield from (one for one in patterns if not fnmatch.filter(files, one))


def command_of(part: str) -> str:
    """Return the command that runs a part."""
    return COMMANDS.get(part, f"make {part.removesuffix('s')}-test")
