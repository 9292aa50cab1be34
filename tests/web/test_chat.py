"""The chat in a browser, against a server whose engine says what the prompt orders (`tests/helpers/server.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import Tab, tab
from tests.helpers.server import Frontend, frontend

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    with frontend(front_end=front_end) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


@pytest.fixture
def chat(chromium: Any, server: Frontend) -> Iterator[Tab]:
    with tab(chromium, server.url) as found:
        found.open()
        yield found
        found.check()


def texts(chat: Tab) -> list[str]:
    return [one.inner_text().strip() for one in chat.page.query_selector_all(".markdown")]


def test_a_conversation_is_answered_and_kept(chat: Tab) -> None:
    page, both = chat.page, ["Hello there", "Hello there"]
    chat.ask("say:Hello **there**")
    chat.answered()
    assert texts(chat) == ["Hello there"] and page.inner_text(".markdown strong") == "there"
    foot = page.inner_text(".figures")
    assert "first token" in foot and "tokens/s" in foot and "cached" in foot
    chat.ask("and now?")  # the engine does what the first message orders
    chat.answered()
    assert texts(chat) == both
    chat.open()
    page.reload()
    page.wait_for_selector(".markdown")
    assert texts(chat) == both
    page.click(".new")
    assert texts(chat) == []
    page.click(".conversations .open")
    assert texts(chat) == both


def test_one_message_that_cannot_be_shown_keeps_no_other_away(chat: Tab) -> None:
    """Answers that Markdown's parser throws at, and one that is stored in another shape."""
    hostile = ["- " * 1500 + "a", "> " * 2000 + "a", "fine **bold**"]
    answers = [{"text": text, "reasoning": "", "calls": []} for text in hostile] + [{"text": 5}]
    messages = [{"role": "assistant", "text": "", "answers": [one]} for one in answers]
    stored = {"id": "x", "title": "hostile", "changed": 1, "settings": {}, "messages": messages}
    chat.page.evaluate("one => localStorage.setItem('minisgl.conversation.x', JSON.stringify(one))", stored)
    chat.page.reload()
    chat.page.wait_for_selector(".message strong")
    assert chat.page.locator(".message").count() == 4 and chat.page.locator(".answer .plain").count() == 2
    assert "cannot be shown" in chat.page.inner_text(".message > .error")


def test_stop_keeps_what_came_and_frees_the_engine(chat: Tab, server: Frontend) -> None:
    chat.ask("hang:half an answer")
    chat.page.wait_for_selector(".tail:has-text('half an answer')")
    chat.page.press("#prompt", "Escape")
    chat.answered()
    assert texts(chat) == ["half an answer"]
    assert "stopped" in chat.page.inner_text(".figures")
    server.wait_until(lambda: server.num_live == 0)


def test_a_page_left_during_an_answer_keeps_what_came(chat: Tab, server: Frontend) -> None:
    chat.ask("hang:as far as this")
    chat.page.wait_for_selector(".tail:has-text('as far as this')")
    chat.page.reload()
    chat.page.wait_for_selector(".conversations .open")
    assert texts(chat) == ["as far as this"]
    assert chat.page.inner_text(".answer .error")  # that it was left, or that the connection was lost
    server.wait_until(lambda: server.num_live == 0)


def test_edit_and_answer_again(chat: Tab) -> None:
    page = chat.page
    chat.ask("say:one")
    chat.answered()
    page.click(".again")
    page.wait_for_selector(".figures:has-text('tokens')")
    assert texts(chat) == ["one"]
    page.click("[aria-label='Edit this message']")
    page.fill("[aria-label='Edit your message']", "say:two")
    page.press("[aria-label='Edit your message']", "Enter")
    page.wait_for_selector(".markdown p:text-is('two')")
    chat.answered()
    assert texts(chat) == ["two"] and page.inner_text(".message.user .plain") == "say:two"


def test_an_engine_that_fails_is_said(chat: Tab) -> None:
    chat.ask("fail:so far")
    chat.answered()
    assert "so far".startswith(texts(chat)[0])  # the end may overtake what was not sent yet
    assert "scripted failure" in chat.page.inner_text(".answer .error")
    assert all("status of 500" in one for one in chat.faults)  # the browser's own words, if it failed before it began
    chat.faults.clear()
