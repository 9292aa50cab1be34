"""A browser for all of a file's tests; without one they are not run, and the summary says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers import browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if (reason := browser.missing()) is not None:
        pytest.skip(f"{reason} (make browser-test)")
    with browser.browser() as found:
        yield found
