"""The extension with the feature `test-panics`, beside the one that is served."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def panicking_extension(folder: Path) -> ModuleType:
    """In the debug profile: overflows and debug assertions panic too. Skips the test where there is no cargo."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is missing: the extension with test-panics cannot be built")
    target = ROOT / "target"  # what clippy and cargo's tests have built there is not built again
    subprocess.run(
        ["cargo", "build", "--quiet", "--locked", "-p", "minisgl-py", "--features", "extension-module,test-panics"],
        cwd=ROOT,
        env=os.environ | {"CARGO_TARGET_DIR": str(target)},
        check=True,  # without a limit of time: a machine may be slow
    )
    built = next(target.glob("debug/*_rust.so"), None) or next(target.glob("debug/*_rust.dylib"))
    copy = folder / "_rust.abi3.so"
    shutil.copy(built, copy)
    spec = importlib.util.spec_from_file_location("panicking._rust", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
