"""Tests that need a CUDA device: one command there, `python -m pytest tests/gpu -rs`; skipped elsewhere.

With MINISGL_GPU_REHEARSAL=1 they run on the CPU, the engine through `--device inline`, FlashInfer through its stand-in;
with MINISGL_GPU_REHEARSAL=late on the device of the tests that runs each job as late as it may. A rehearsal shows that
the tests can run. What passes in it is reported as skipped, "rehearsed on cpu": it was not seen on a GPU.

Without a device each test says why it is skipped; what a test took of the device is free for the next one;
a test that broke the device is named, and the run ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.gpu import REHEARSAL, rehearse

HERE = Path(__file__).parent
REASON = "" if REHEARSAL or torch.cuda.is_available() else "no CUDA device"
REHEARSED = "rehearsed on cpu: not seen on a GPU"
# What later files build on comes first; what takes long comes last, with files that are not named here before it.
FIRST = ("pieces", "kernels", "models", "attention", "graphs", "scheduling")
LAST = ("failures", "big", "server")
BROKEN = 86  # exit status: no test after it can pass in this process; session.sh goes on in another

_before: list[str] = []  # the test before this one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [i for i, item in enumerate(items) if item.path.parent == HERE]
    for i in mine if REASON else ():
        items[i].add_marker(pytest.mark.skip(reason=REASON))
    for i, item in zip(mine, sorted((items[i] for i in mine), key=_place), strict=True):
        items[i] = item


def _place(item: pytest.Item) -> int:
    topic = item.path.stem.removeprefix("test_gpu_")
    if topic in FIRST:
        return FIRST.index(topic)
    return len(FIRST) + (1 + LAST.index(topic) if topic in LAST else 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield
    if REHEARSAL and report.when == "call" and report.passed:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, REHEARSED)
    return report  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if REHEARSAL:
        rehearse(monkeypatch)
        yield
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device was broken by the time that {_before[-1:]} ended: {error}", returncode=BROKEN)
    yield
    _before.append(request.node.nodeid)
    gc.collect()
    torch.cuda.empty_cache()
