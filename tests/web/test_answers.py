"""What an answer is besides its text: tokens by probability, folded reasoning, calls of tools and what they gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.helpers.browser import Tab, tab
from tests.helpers.scripted_engine import chance
from tests.helpers.server import CONFIG, Frontend, frontend, prompt_text

pytestmark = pytest.mark.browser
COLOURS = ".answer [aria-pressed]"
LIMITS = (0.9, 0.6, 0.3, 0.1, 0.02)
FUNCTIONS = ("weather", "time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in FUNCTIONS]


@pytest.fixture(scope="module")
def server(front_end: str) -> Iterator[Frontend]:
    """The model's calls are Hermes', its thoughts Qwen's."""
    config = msgspec.structs.replace(CONFIG, tool_call_parser="hermes", reasoning_parser="qwen3")
    with frontend(front_end=front_end, config=config, max_seq_len=1 << 14) as running:
        yield running
        running.wait_until(lambda: running.num_live == 0)


@pytest.fixture
def chat(chromium: Any, server: Frontend) -> Iterator[Tab]:
    with tab(chromium, server.url, viewport={"width": 1280, "height": 800}) as found:
        found.open()
        yield found
        found.check()


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def spans(chat: Tab) -> list[Any]:
    found: list[Any] = chat.page.eval_on_selector_all(
        ".tokens span", "all => all.map(one => [one.textContent, one.className, one.title.split('\\n')])"
    )
    return found


def test_tokens_show_how_likely_they_were(chat: Tab) -> None:
    page, text = chat.page, "9753 **10**"
    chat.ask(f"say:{text}")
    chat.answered()
    assert not page.is_visible(COLOURS), "nobody asked for log probabilities"
    page.check("#set-logprobs")
    page.click(".again")
    page.wait_for_selector(COLOURS)
    page.click(COLOURS)
    assert page.is_visible(".tokens") and not page.is_visible(".markdown")
    shown = spans(chat)
    assert [one for one, _, _ in shown] == list(text)
    for letter, level, title in shown:
        share = chance(ord(letter))
        assert level == f"p{sum(share < limit for limit in LIMITS)}"
        assert title == [f"{100 * share:.1f}%", f'"{letter}" {100 * share:.1f}%', '"?" 1.0%']
    colour = "one => getComputedStyle(one).backgroundColor"
    assert len({page.eval_on_selector(f".tokens .p{level}", colour) for level in range(5)}) == 5
    page.click(COLOURS)
    assert not page.is_visible(".tokens") and page.inner_text(".markdown strong") == "10"
    page.reload()
    page.wait_for_selector(".markdown strong")
    assert not page.is_visible(COLOURS), "log probabilities are not kept"


def test_tokens_that_are_parts_of_a_letter_are_shown_as_the_letter(chat: Tab) -> None:
    """Here a token is a byte, and é two of them."""
    chat.page.check("#set-logprobs")
    chat.ask("say:<b>é€\U0001f642</b>")
    chat.answered()
    chat.page.click(COLOURS)
    shown = spans(chat)
    assert [one for one, _, _ in shown] == [*"<b>", "é", "€", "\U0001f642", *"</b>"]
    shares = {letter: float(title[0].rstrip("%")) / 100 for letter, _, title in shown}
    assert [shares[one] for one in "é€\U0001f642"] == pytest.approx([0.95**2, 0.95**3, 0.95**4], abs=1e-3)


def test_reasoning_is_folded_and_no_part_of_the_answer(chat: Tab, server: Frontend) -> None:
    page = chat.page
    chat.ask("hang:<think>weighing <b>it")
    page.wait_for_selector(".reasoning summary")
    assert not page.is_visible(".reasoning div"), "it is folded"
    page.click(".reasoning summary")
    page.wait_for_selector(".reasoning div:text-is('weighing <b>it')")
    page.press("#prompt", "Escape")
    chat.answered()
    page.click(".new")
    chat.ask("say:<think>thought of\n\nit</think>The **answer**.")
    chat.answered()
    assert page.inner_text(".markdown").strip() == "The answer." and page.inner_text(".markdown strong") == "answer"
    assert not page.is_visible(".reasoning div")
    page.focus(".reasoning summary")
    page.keyboard.press("Enter")
    assert page.inner_text(".reasoning div") == "thought of\n\nit"
    page.reload()
    page.wait_for_selector(".reasoning")
    assert not page.is_visible(".reasoning div")
    chat.ask("say:further")
    page.wait_for_selector(".markdown p:text-is('further')")
    chat.answered()
    assert page.locator(".reasoning:visible").count() == 1
    sent = prompt_text(server.engine.requests("further")[-1])
    assert "The **answer**." in sent.partition("<assistant>")[2] and "thought of" not in sent.partition("</user>")[2]


def test_calls_are_shown_and_what_all_of_them_gave_goes_back(chat: Tab, server: Frontend) -> None:
    page = chat.page
    page.fill("#set-extra", json.dumps({"tools": TOOLS}))
    chat.ask(f"say:Let me look.{call('weather', city='<i>Bern')}{call('time', zone='CET')}")
    page.wait_for_selector(".result")
    assert page.inner_text(".markdown").strip() == "Let me look."
    assert [one.inner_text() for one in page.query_selector_all(".call code")] == list(FUNCTIONS)
    arguments = [json.loads(one.inner_text()) for one in page.query_selector_all(".call pre")]
    assert arguments == [{"city": "<i>Bern"}, {"zone": "CET"}] and page.query_selector(".call i") is None
    assert "tool_calls" in page.inner_text(".figures")
    page.fill("[aria-label='What weather gave']", "rain, 7 degrees")
    page.fill("[aria-label='What time gave']", "say:It is late.")  # the last order counts
    page.click("[aria-label='Send what the tools gave']")
    page.wait_for_selector(".markdown p:has-text('It is late.')")
    chat.answered()
    assert page.query_selector(".result") is None
    sent = prompt_text(server.engine.requests("rain, 7 degrees")[-1])
    after = sent.rpartition("<assistant>Let me look.")[2]
    places = [after.find(one) for one in ("weather", "time", "rain, 7 degrees", "say:It is late.")]
    assert places == sorted(places) and places[0] > 0
    page.reload()
    page.wait_for_selector(".call")
    results = [one.inner_text() for one in page.query_selector_all("[aria-label='Result of a tool'] .plain")]
    assert results == ["rain, 7 degrees", "say:It is late."]


def test_a_call_that_is_not_over_grows_as_it_comes(chat: Tab) -> None:
    page = chat.page
    page.fill("#set-extra", json.dumps({"tools": TOOLS}))
    chat.ask('hang:<tool_call>{"name": "weather", "arguments": {"city": "Be')
    page.wait_for_selector('.call pre:has-text("Be")')
    assert page.inner_text(".call pre") == '{"city": "Be' and page.query_selector(".result") is None
    page.press("#prompt", "Escape")
    chat.answered()
    assert "stopped" in page.inner_text(".figures")
    assert page.query_selector(".result") is None, "it was never called"
    chat.ask("say:next")
    page.wait_for_selector(".markdown p:text-is('next')")
    chat.answered()
