"""The page store of an `LLM`, for tests of what it keeps on disk."""

from __future__ import annotations

from minisgl import LLM
from minisgl._rust import PageStore
from minisgl.engine.api import StoreCounts
from minisgl.engine.cpu_engine import CpuEngine


def engine_of(llm: LLM) -> CpuEngine:
    engine = llm._engine
    assert isinstance(engine, CpuEngine)
    return engine


def store_of(llm: LLM) -> PageStore:
    store = engine_of(llm).store
    assert store is not None
    return store


def counts(llm: LLM) -> StoreCounts:
    found = engine_of(llm).store_counts()
    assert found is not None
    return found
