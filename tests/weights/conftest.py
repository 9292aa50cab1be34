"""One process of llama.cpp's converter serves all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.llama_cpp import converter_ends


@pytest.fixture(scope="module", autouse=True)
def _converter_ends() -> Iterator[None]:
    with converter_ends():
        yield
