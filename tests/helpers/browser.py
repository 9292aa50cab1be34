"""Headless browser for tests of the page: Debian's chromium, driven by Playwright. Records faults: errors of the
console, and requests to any host but the test's server."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.helpers.seconds import WAIT_S

CHROMIUM = "MINISGL_CHROMIUM"  # path of another browser of that kind


def missing() -> str | None:
    """Return the reason why there is no browser, or `None` if there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -r tests/web/requirements.txt"
    return None if _path() else "there is no chromium: apt-get install chromium"


def _path() -> str | None:
    return os.environ.get(CHROMIUM) or shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=_path(), args=["--no-sandbox", "--disable-gpu"])
        try:
            yield found
        finally:
            found.close()


class Tab:
    """Browser tab. `page` is Playwright's. `faults`: errors and warnings of the console; `hosts`: requested hosts."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.faults: list[str] = []
        self.hosts: set[str] = set()
        self.context = browser.new_context(**options)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.page = self.context.new_page()
        self.page.on("console", lambda one: one.type in ("error", "warning") and self.faults.append(one.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.context.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def open(self, view: str = "chat") -> Any:
        self.page.goto(f"{self.url}/#{view}")
        self.page.wait_for_selector("#served.ok")
        return self.page

    def ask(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def answered(self) -> None:
        self.page.wait_for_selector("#send:visible")

    def check(self, *expected: str) -> None:
        """Assert that there were no faults but those containing one of these texts, and no requests to other hosts."""
        assert [one for one in self.faults if not any(text in one for text in expected)] == []
        assert self.hosts - {""} == {urlsplit(self.url).netloc}


@contextlib.contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[Tab]:
    tab = Tab(browser, url, **options)
    tab.context.set_default_timeout(1000 * WAIT_S)
    try:
        yield tab
    finally:
        tab.context.close()
