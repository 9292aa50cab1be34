"""Each module of the Rust scheduler has its namesake in Python: whoever knows one finds the same thing in the other."""

from __future__ import annotations

import re

import pytest

from tests.test_layering import PACKAGE
from tests.test_layering_rust import CORE

PLACES = (PACKAGE, PACKAGE / "scheduler", PACKAGE / "scheduler" / "reference")
ONLY_RUST = {
    "faulty": "a class of `wrapped` in Python",
    "numbers": "integers of Python have no size",
    "radix/states": "methods of `tree` in Python",
    "step_arrays": "functions of `metadata` in Python",
    "radix/tests": "what the tree's operations cost",
}


def modules(folder: str = "") -> set[str]:
    """As a file of the crate declares them."""
    file = CORE / "src" / (f"{folder}/mod.rs" if folder else "lib.rs")
    return set(re.findall(r"^mod (\w+);", file.read_text(), flags=re.M))


@pytest.mark.parametrize("name", sorted(modules() - ONLY_RUST.keys()))
def test_a_module_of_the_core_has_a_namesake(name: str) -> None:
    assert any((place / f"{name}.py").exists() or (place / name / "__init__.py").exists() for place in PLACES)


@pytest.mark.parametrize("name", sorted(f"radix/{name}" for name in modules("radix")))
def test_a_module_of_the_radix_tree_has_a_namesake(name: str) -> None:
    assert (name in ONLY_RUST) != (PACKAGE / "scheduler" / "reference" / f"{name}.py").exists()


def test_the_exceptions_exist() -> None:
    for name in ONLY_RUST:
        assert (CORE / "src" / f"{name}.rs").exists()


def test_a_module_of_the_reference_has_a_namesake() -> None:
    reference = PACKAGE / "scheduler" / "reference"
    assert {file.stem for file in reference.iterdir() if file.stem not in ("__init__", "__pycache__")} <= modules()
    assert {file.stem for file in (reference / "radix").glob("*.py")} - {"__init__"} <= modules("radix")
