"""Tests that need a CUDA device: one command there, `python -m pytest tests/gpu`; skipped elsewhere.

Keeps true: without a device each test says why it is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "no CUDA device" if torch.version.cuda is None or not torch.cuda.is_available() else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REASON and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))
