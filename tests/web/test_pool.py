"""Several engines behind one server, seen in a browser: each in the live view, through the death of one, and the steps
of the one that is chosen."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.browser import Tab, tab
from tests.helpers.data_parallel import engine_processes
from tests.helpers.e2e import ServerProcess, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import data_of

pytestmark = pytest.mark.browser
STATE, RUNNING, FREE, RESTARTS = 1, 2, 4, 6  # columns


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ("--engine", "echo", "--dp", "2", "--num-pages", "512", "--routing", "round_robin", "--no-access-log")
    with ServerProcess(flags, {"MINISGL_STEP_DELAY_FILE": str(tmp_path / "step_ms")}) as running:
        yield running
        assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture
def seen(chromium: Any, server: ServerProcess) -> Iterator[Tab]:
    with tab(chromium, server.url, viewport={"width": 1280, "height": 900}) as found:
        yield found
        found.check()


def wait_for_cell(page: Any, engine: int, column: int, wanted: Callable[[str], bool]) -> None:
    """Until the cell of an engine's row has what is wanted."""
    cell = page.locator(f".engines tbody tr:nth-child({engine + 1}) td:nth-child({column + 1})")
    until(lambda: wanted(cell.inner_text()), f"engine {engine}, column {column}")


def ask(server: ServerProcess, text: str) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 40}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S).raise_for_status()


def test_each_engine_is_seen_to_work_to_die_and_to_come_back(seen: Tab, server: ServerProcess, tmp_path: Path) -> None:
    page = seen.open("live")
    for engine in (0, 1):
        wait_for_cell(page, engine, STATE, "ready".__eq__)
        wait_for_cell(page, engine, FREE, "512".__eq__)
    assert page.locator(".engines tbody tr").count() == 2
    (tmp_path / "step_ms").write_text("500")
    body = {
        "model": "smollm2",
        "prompt": ["one " * 40, "two " * 40],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S) as answers:
        lines = answers.iter_lines()  # held: its end closes the connection
        assert next(data for line in lines if (data := data_of(line)))
        for engine in (0, 1):
            wait_for_cell(page, engine, RUNNING, "1".__eq__)
            wait_for_cell(page, engine, FREE, lambda text: int(text) < 512)
        page.wait_for_selector("#figure-running:text-is('2')")
        engine_processes(server)[1].send_signal(signal.SIGKILL)
        wait_for_cell(page, 0, RUNNING, "2".__eq__)
        wait_for_cell(page, 1, RESTARTS, "1".__eq__)
        wait_for_cell(page, 1, STATE, "ready".__eq__)
        wait_for_cell(page, 1, RUNNING, "0".__eq__)
    wait_for_cell(page, 0, RUNNING, "0".__eq__)


def test_the_steps_and_the_tree_are_those_of_the_engine_that_is_chosen(seen: Tab, server: ServerProcess) -> None:
    page = seen.open("scheduler")
    page.wait_for_selector("select[aria-label='Engine']:visible")
    tree, said = ".tree .node", ".said"
    ask(server, "the first ")
    page.wait_for_selector(f"{said}:has-text('Step')")
    page.wait_for_selector(tree)
    first = page.inner_text(said)
    page.select_option("select[aria-label='Engine']", "1")
    page.wait_for_selector(f"{said}:text-is('No step yet.')")
    assert page.query_selector(tree) is None, "the other engine's"
    ask(server, "the second, which is a little longer than the first ")
    page.wait_for_selector(f"{said}:has-text('Step')")
    page.wait_for_selector(tree)
    page.select_option("select[aria-label='Engine']", "0")
    page.wait_for_selector(f"{said}:text-is('{first}')")  # what it did is not forgotten
    assert page.query_selector(tree) is not None
