"""Take the screenshots of the docs from real servers: `python -m tools.screenshots [FOLDER]`, by default docs/img.

Shows a conversation with the embedded SmolLM2, a picture in a chat, the live view and the scheduler under the demo
load, and single ideas of the scheduler. Needs Playwright and chromium, like `make browser-test`. `--only NAME` takes
one of the latter.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers import browser
from tests.helpers.e2e import serving
from tests.helpers.sight import seeing_frontend
from tools.scheduler_scenes import SCENES, STEP_MS, Scene, play

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "img"
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 780}
WATCHED_MS = 12_000  # until there is something to see
DRAWN_MS = 2_500  # the last steps and the tree come once a second


def shoot(page: Any, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(folder / f"{name}.png"))
    print(f"{name}.png")


def chat(chromium: Any, folder: Path) -> None:
    with serving("--model", "smollm2") as server:
        for name, viewport, scheme in (("chat", WIDE, "light"), ("chat-phone", PHONE, "dark")):
            with browser.tab(chromium, server.url, viewport=viewport, color_scheme=scheme) as tab:
                page = tab.open()
                for field, value in (("temperature", "0"), ("max_tokens", "120")):
                    page.eval_on_selector(
                        f"#set-{field}", f"e => {{ e.value = '{value}'; e.dispatchEvent(new Event('input')); }}"
                    )
                for text in ("What is the capital of France?", "Write a Python function that adds two numbers."):
                    tab.ask(text)
                    tab.answered()
                shoot(page, folder, name)
                tab.check()


def chat_image(chromium: Any, folder: Path) -> None:
    """Take the screenshot of a picture in a chat. The answer is a scripted engine's."""
    question = "Which of these requests has the longest prompt?"
    answer = (
        "The fourth one, in **olive**: its prefill takes 19 chunks, from step 9 to step 27. "
        "The other three requests go on meanwhile, a token a step."
    )
    with (
        tempfile.TemporaryDirectory() as model,
        seeing_frontend(Path(model), replies={question: answer}) as server,
        browser.tab(chromium, server.url, viewport={"width": 900, "height": 620}, color_scheme="light") as tab,
    ):
        page = tab.open()
        page.set_input_files("input[type=file]", str(FOLDER / "scheduler-chunks.png"))
        page.wait_for_selector(".attached img")
        tab.ask(question)
        page.wait_for_selector(".figures:has-text('tokens')")
        page.set_input_files("input[type=file]", str(FOLDER / "scheduler-retraction.png"))
        page.wait_for_selector(".attached img")
        page.fill("#prompt", "And what happened here?")
        shoot(page, folder, "chat-image")
        tab.check()


def load(chromium: Any, folder: Path) -> None:
    """Take the screenshots of the live and scheduler views under the demo load, with the scheduler in slow motion."""
    slow = ("--sim-profile", "slow-motion")
    for name, view, scheme, flags in (
        ("live", "live", "light", ()),
        ("scheduler", "scheduler", "light", slow),
        ("scheduler-dark", "scheduler", "dark", slow),
    ):
        with (
            serving("--engine", "sim", "--demo-load", *flags) as server,
            browser.tab(chromium, server.url, viewport=WIDE, color_scheme=scheme) as tab,
        ):
            page = tab.open(view)
            page.wait_for_timeout(WATCHED_MS)
            shoot(page, folder, name)
            tab.check()


@contextlib.contextmanager
def delay() -> Iterator[dict[str, str]]:
    """Yield an environment for a server whose steps take `STEP_MS` longer, so that each one is drawn."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(str(STEP_MS))
        file.flush()
        yield {"MINISGL_STEP_DELAY_FILE": file.name}


def scene(chromium: Any, folder: Path, shown: Scene) -> None:
    """Play a scene and take a screenshot of its card, the steps or the prefix tree, after the last step."""
    with (
        delay() as env,
        serving(*shown.flags, env={**env, **shown.env}) as server,
        browser.tab(chromium, server.url, viewport=WIDE, color_scheme="light") as tab,
    ):
        page = tab.open("scheduler")
        page.wait_for_selector(".card:visible")
        play(server.url, shown)
        page.wait_for_timeout(DRAWN_MS)
        card = page.locator(".card", has=page.get_by_role("heading", name="Prefix tree" if shown.tree else "Steps"))
        folder.mkdir(parents=True, exist_ok=True)
        card.screenshot(path=str(folder / f"{shown.name}.png"))
        print(f"{shown.name}.png")
        tab.check()


def main(folder: Path = FOLDER, only: str | None = None) -> int:
    if (reason := browser.missing()) is not None:
        print(f"screenshots: {reason}", file=sys.stderr)
        return 1
    with browser.browser() as chromium:
        if only is None:
            chat(chromium, folder)
            chat_image(chromium, folder)
            load(chromium, folder)
        for shown in SCENES:
            if only in (None, shown.name):
                scene(chromium, folder, shown)
    return 0


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    given.add_argument("--only", choices=[shown.name for shown in SCENES])
    sys.exit(main(**vars(given.parse_args())))
