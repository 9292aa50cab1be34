"""What holds of the crates by their sources: the core is pure, `unsafe` stands where it must."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.test_layering import ROOT

CORE = ROOT / "rust" / "minisgl-core"
IMPURE = re.compile(r"\bstd::(?:env|fs|io|net|process|thread|time|os)\b|\bunsafe\b(?!_code)|\bprint(?:ln)?!")


def without_comments(source: str) -> str:
    return re.sub(r"//.*", "", source)


@pytest.mark.parametrize("crate", ["minisgl-core", "minisgl-kernels"])
def test_a_crate_depends_on_nothing(crate: str) -> None:
    """The core is pure logic; cargo begins with the kernels, which take long, before any other crate is built."""
    manifest = tomllib.loads((ROOT / "rust" / crate / "Cargo.toml").read_text())
    assert {"dependencies", "build-dependencies", "target"}.isdisjoint(manifest)


def test_the_core_is_pure() -> None:
    assert "#![forbid(unsafe_code)]" in without_comments((CORE / "src" / "lib.rs").read_text())
    for file in (CORE / "src").rglob("*.rs"):
        assert not IMPURE.search(without_comments(file.read_text())), file


def test_text_knows_no_http_and_no_engine() -> None:
    manifest = tomllib.loads((ROOT / "rust" / "minisgl-text" / "Cargo.toml").read_text())
    needed = set(manifest["dependencies"])
    assert not [name for name in needed if name.startswith(("minisgl-", "tokio", "hyper", "http", "pyo3"))]


# Where `unsafe` may stand, each with its reason beside it: an allocator that counts, buffers and descriptors of
# Python's, and of the CPU engine and its kernels what computes on raw memory, shares it between threads or calls C.
UNSAFE = re.compile(
    r"minisgl-core/tests/all/warm_decode_step_allocates_nothing\.rs|minisgl-py/src/(?:buffers|cpu_engine|cpu_head|gateway)\.rs"
    r"|minisgl-cpu/src/(?:files/mapping|threads|openmp|head|limits|states)\.rs"
    r"|minisgl-cpu/src/(?:model|tests)/.*\.rs"
    r"|minisgl-kernels/src/(?:kv|memory|(?:kernels|lanes|attention|tests)/.*)\.rs"
)


def test_unsafe_stands_where_it_must() -> None:
    files = [
        f.relative_to(ROOT / "rust").as_posix()
        for f in (ROOT / "rust").rglob("*.rs")
        if re.search(r"\bunsafe\b(?!_code)", without_comments(f.read_text()))
    ]
    assert [f for f in files if not UNSAFE.fullmatch(f)] == []


def test_comments_of_items_say_what_a_thing_is() -> None:
    """As those of Python do (`tests/test_layering.py`); not yet in the CPU engine and its kernels."""
    files = [file for file in (ROOT / "rust").rglob("*.rs") if not {"minisgl-cpu", "minisgl-kernels"} & set(file.parts)]
    begins = re.compile(r"(?:\A|^(?!\s*//[/!]).*\n)\s*//[/!] Of ", re.MULTILINE)
    assert [file for file in files if begins.search(file.read_text())] == []


def test_rust_lines_are_as_long_as_those_of_python() -> None:
    crates = ("minisgl-core", "minisgl-loadgen", "minisgl-py")
    files = [file for crate in crates for file in (ROOT / "rust" / crate).rglob("*.rs")]
    assert [file for file in files if any(len(line) > 120 for line in file.read_text().splitlines())] == []


def test_panics_unwind() -> None:
    profile = tomllib.loads((ROOT / "Cargo.toml").read_text())["profile"]
    assert profile["release"]["panic"] == "unwind"


def test_vectors_pass_through_no_closure_of_an_array() -> None:
    """`array::map` has no instructions of a set, so what it is given is called for each vector, 30 times slower:
    `both!` does it in place."""
    sets = (ROOT / "rust/minisgl-kernels/src").glob("*/avx*/**/*.rs")
    mapped = re.compile(r"(?<!\.\.n\))\.map\(")
    files = {file: without_comments(file.read_text()) for file in sets}
    assert len(files) > 8 and [file.name for file, text in files.items() if mapped.search(text)] == []
