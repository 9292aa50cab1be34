"""Several models behind one port, seen in a browser: the picker, and what is said of a model that comes or cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import Tab, tab
from tests.helpers.e2e import serving
from tests.helpers.several import echo, write_models

pytestmark = pytest.mark.browser


@pytest.fixture
def seen(chromium: Any, tmp_path: Path) -> Iterator[Tab]:
    """One has room at a time; one is no model."""
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, and then nothing")
    broken = {"name": "broken", "model": str(tmp_path / "broken.gguf"), "memory": "100MB"}
    file = write_models(tmp_path / "models.yaml", [echo("first", preload=True), echo("second"), broken])
    with serving("--models", file, "--memory", "200MB") as server, tab(chromium, server.url) as found:
        yield found
        found.check("503")  # what the console says of the one that cannot be loaded


def test_who_is_picked_is_loaded_and_answers(seen: Tab) -> None:
    page = seen.open()
    assert page.eval_on_selector_all("#picker option", "all => all.map((one) => one.value)") == [
        "first",
        "second",
        "broken",
    ]
    assert page.input_value("#picker") == "first"
    for name in ("second", "first"):
        page.select_option("#picker", name)
        page.wait_for_selector("#served progress")
        page.wait_for_selector(f"#served.ok[title^='{name},']:not(:has(progress))")
        with page.expect_request("**/v1/chat/completions") as asked:
            seen.ask("hello")
        assert asked.value.post_data_json["model"] == name
        seen.answered()
        # Its text depends on a seed that nobody set, and may be none; what it took is said of each whole answer.
        assert "prompt " in page.locator(".figures").last.inner_text()
        assert not page.is_visible(".answer .error")
    page.select_option("#picker", "broken")
    page.wait_for_selector("#served.bad")
    assert "broken" in page.inner_text("#served")
