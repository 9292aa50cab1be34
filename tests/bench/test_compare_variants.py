"""Whom `bench compare` can ask: why one is missing, and that what it started goes with it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from minisgl.bench import compare_variants
from minisgl.bench.compare_variants import Missing, Setup, start
from tests.helpers.e2e import is_gone, until
from tests.helpers.seconds import WAIT_S


def setup_of(**changes: object) -> Setup:
    kept = {"model": "smollm2", "dtype": "float32", "gguf": None, "threads": 1, "max_sequences": 1, "max_len": 64}
    return Setup(**{**kept, "pythons": {}, "llama_bin": None, "urls": {}, "flags": (), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("vllm", {"pythons": {"vllm": "/no/such/python"}}, "No such file"),
        ("llama.cpp", {"model": "some/folder"}, "--gguf"),
        ("llama.cpp", {"llama_bin": Path("/no/such/folder")}, "no llama-server"),
        ("transformers", {"model": "/no/such/folder"}, "no such folder"),
        ("minisgl", {"flags": ("--num-pages", "none")}, "--num-pages"),
        ("given", {"urls": {"given": "http://127.0.0.1:9"}}, "127.0.0.1:9"),
    ],
)
def test_reasons(variant: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Missing, match=reason), start(variant, setup_of(**changes)):
        pass


def test_processes_of_a_variant_end_with_it() -> None:
    """A server of many processes, whose first one leaves the others."""
    with compare_variants.Child(("sh", "-c", "sleep 600 & echo '{\"pid\":' $! '}'; wait")) as child:
        pid = child.line(WAIT_S)["pid"]
        assert psutil.Process(pid).is_running()
    until(lambda: is_gone(pid), "its child goes on")
