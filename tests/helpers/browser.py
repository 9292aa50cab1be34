"""A headless browser for tests of the page: Debian's chromium, driven by Playwright. It notes what must not happen: an
error of the console, and a request to anybody but the server of the test."""

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
    """Why there is no browser; None: there is one."""
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
    """`page` is Playwright's. `faults`: what the console and the page complained of; `hosts`: who was asked."""

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
        """No fault but those with one of these texts, and nobody else was asked."""
        assert [one for one in self.faults if not any(text in one for text in expected)] == []
        assert self.hosts - {""} == {urlsplit(self.url).netloc}


@contextlib.contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[Tab]:
    found = Tab(browser, url, **options)
    found.context.set_default_timeout(1000 * WAIT_S)
    try:
        yield found
    finally:
        found.context.close()
