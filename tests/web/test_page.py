"""The page where something is wrong or unusual: hostile answers, the key, lost servers, long answers, screens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest

from tests.helpers.browser import tab
from tests.helpers.e2e import ServerProcess
from tests.helpers.server import CONFIG, Frontend, frontend

pytestmark = pytest.mark.browser
HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload=window.hit=3></svg>

[click](javascript:window.hit=4) [data](data:text/html,hit) ![seen](https://elsewhere.example/a.png) [far](https://elsewhere.example/b)

<style>body { display: none }</style><iframe src="https://elsewhere.example"></iframe><base href="https://elsewhere.example/">

```html"><script>window.hit=5</script>
<script>window.hit = 6</script>
```

<form action="https://elsewhere.example"><button id="key" class="primary">give</button></form>
<a href="https://elsewhere.example" onclick="window.hit=7" style="position:fixed">x</a>
<math><mtext></form><style></math>"""
LOST = ("net::ERR_", "Failed to load resource")


@pytest.fixture(scope="module")
def server() -> Iterator[Frontend]:
    with frontend(front_end="python", max_seq_len=65536) as running:
        yield running


@pytest.mark.parametrize("streamed", [True, False])
def test_hostile_text_stays_text(chromium: Any, server: Frontend, streamed: bool) -> None:
    """While it grows and at its end, in answers and in prompts."""
    with tab(chromium, server.url) as one:
        page = one.open()
        one.ask(f"{'hang' if streamed else 'say'}:{HOSTILE}")
        if streamed:
            page.wait_for_selector(".tail:has-text('<mtext></form><style></math>')")
            page.press("#prompt", "Escape")
        one.answered()
        text = page.inner_text(".markdown")
        assert "<script>window.hit = 1</script>" in text and "<iframe" in text and "onclick" in text
        inside = "script, img, svg, style, iframe, base, form, [onclick], [onerror], [style], #key"
        assert page.query_selector(".log .markdown :is(" + inside + ")") is None
        assert page.query_selector(".log .plain *") is None
        links = page.eval_on_selector_all(".markdown a", "all => all.map(a => [a.getAttribute('href'), a.rel])")
        far = "noopener noreferrer nofollow"
        assert {href for href, _ in links} <= {None, "https://elsewhere.example/a.png", "https://elsewhere.example/b"}
        assert {rel for _, rel in links} == {far}
        assert page.evaluate("window.hit") is None
        one.check()


def test_the_key_is_asked_for_and_stays_in_the_tab(chromium: Any) -> None:
    config = msgspec.structs.replace(CONFIG, api_key="right")
    with frontend(config=config) as running, tab(chromium, running.url) as one:
        page = one.page
        page.goto(running.url)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector(".wrong")
        page.fill("#key", "right")
        page.click("dialog .primary")
        page.wait_for_selector("#served.ok")
        one.ask("say:let in")
        one.answered()
        assert page.inner_text(".markdown").strip() == "let in"
        assert "right" not in str(page.evaluate("JSON.stringify(localStorage)"))
        page.reload()
        page.wait_for_selector("#served.ok")  # it is still this tab's
        page.click("[aria-label='Copy the request for curl']")
        assert "right" not in page.evaluate("navigator.clipboard.readText()")
        other = one.context.new_page()
        other.goto(running.url)
        other.wait_for_selector("#key")
        one.check("401")


def test_a_connection_that_drops_is_said(chromium: Any) -> None:
    with frontend(front_end="python") as running, tab(chromium, running.url) as one:
        one.open()
        one.ask("hang:as far as this")
        one.page.wait_for_selector(".tail:has-text('as far as this')")
        running.on_loop(lambda: [found.transport.abort() for found in list(running.connections)])
        one.answered()
        assert "connection was lost" in one.page.inner_text(".answer .error")
        assert one.page.inner_text(".markdown").strip() == "as far as this"
        one.page.click(".again")
        one.page.wait_for_selector(".tail:has-text('as far as this')")
        one.page.press("#prompt", "Escape")
        one.answered()
        one.check(*LOST)


def test_an_engine_that_dies_is_said(chromium: Any) -> None:
    with ServerProcess(["--engine", "echo", "--model", "smollm2"]) as running, tab(chromium, running.url) as one:
        one.open()
        engine = psutil.Process(running.process.pid).children(recursive=True)
        for child in engine:
            child.suspend()  # so that no answer is faster than its death
        one.ask("Is there anybody?")
        one.page.wait_for_selector(".answer[aria-busy]")
        for child in engine:
            child.kill()
        one.answered()
        assert one.page.inner_text(".answer .error")
        one.check(*LOST)


def test_a_long_answer_is_shown_whole_and_the_page_answers_meanwhile(chromium: Any, server: Frontend) -> None:
    text = "".join(f"Line {i} of **many**\n\n" for i in range(500))
    assert len(text) > 10_000  # of these, a byte is a token
    with tab(chromium, server.url) as one:
        page = one.open()
        one.ask(f"hang:{text}The end.")
        page.wait_for_selector(".tail:has-text('The end.')")
        page.press("#prompt", "Escape")
        one.answered()
        assert page.eval_on_selector_all(".markdown p strong", "all => all.length") == 500
        one.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(chromium: Any, server: Frontend, scheme: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    shades = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 26)"}
    with tab(chromium, server.url, color_scheme=scheme) as one:
        page = one.open()
        assert page.evaluate(colour) == shades[scheme]
        page.click("#theme")
        assert page.evaluate(colour) == shades["light"]
        page.click("#theme")
        page.reload()
        assert page.evaluate(colour) == shades["dark"]
        one.check()


@pytest.mark.parametrize("view", ["chat", "live", "scheduler"])
def test_a_narrow_screen_has_room_for_all(chromium: Any, server: Frontend, view: str) -> None:
    with tab(chromium, server.url, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True) as one:
        page = one.open(view)
        if view == "chat":
            one.ask("say:" + "wide" * 60 + "\n```\n" + "code " * 80 + "\n```")
            one.answered()
            page.click("#toggle-right")
            page.wait_for_selector("#set-temperature:visible")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        one.check(*([] if view == "chat" else ["404"]))


def test_compared_answers_and_their_tokens(chromium: Any, server: Frontend) -> None:
    with tab(chromium, server.url, viewport={"width": 1280, "height": 800}) as one:
        page = one.open()
        page.check("#set-compare")
        page.fill("#b-temperature", "0.5")
        page.fill("#set-temperature", "0")
        one.ask("say:both")
        one.answered()
        assert [found.inner_text().strip() for found in page.query_selector_all(".compared .markdown")] == [
            "both",
            "both",
        ]
        for which, temperature in enumerate(("0", "0.5")):
            page.query_selector_all("[aria-label='Copy the request for Python']")[which].click()
            page.wait_for_selector(".notice")
            code = page.evaluate("navigator.clipboard.readText()")
            compile(code, "copied", "exec")
            assert f"temperature={temperature}," in code and "seed=1," in code
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") != "BODY"
        one.check()
