"""What the page's modules compute, by themselves in a browser."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.browser import Tab, tab
from tests.helpers.server import frontend

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Tab]:
    with frontend() as running, tab(chromium, running.url) as found:
        found.open()
        yield found


def run(page: Tab, module: str, code: str, *given: Any) -> Any:
    """`code` is an expression of `m`, the module, and `given`."""
    source = f"async ([url, ...given]) => {{ const m = await import(url); return {code}; }}"
    return page.page.evaluate(source, [f"{page.url}/web/js/{module}.js", *given])


def step(number: int, rows: list[list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "at_ms": 1000.0 * number,
        "rows": rows,
        "finished": [],
        "retracted": [],
        "num_retracted": 0,
        "waiting": 0,
        "free": 9,
    } | more


def test_events_are_the_same_wherever_they_are_cut(page: Tab) -> None:
    text = 'event: stats\r\ndata: {"a":1}\r\n\r\n: a comment\n\ndata: x\ndata: y\n\ndata: [DONE]\n\ndata: half'
    whole = [["stats", '{"a":1}'], ["message", "x\ny"], ["message", "[DONE]"]]
    take = "(e => given[0].flatMap(one => e.take(one)).map(one => [one.event, one.data]))(new m.Events())"
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(page, "sse", take, pieces) == whole


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("one\ntwo", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\nc", "```\na\n\nb\n```\n"),
        ("~~~\n```\n\n~~~\nx", "~~~\n```\n\n~~~\n"),
        ("a\n\n````\n```\n\n", "a\n\n"),
        ("```not `code`\n\nb", "```not `code`\n\n"),
        ("1. a\n\n2. b\n\n   more\n\n", ""),
        ("1. a\n\n2. b\n\nText\n", "1. a\n\n2. b\n\n"),
        ("- a\n\n```\nx\n```\n", "- a\n\n```\nx\n```\n"),
    ],
)
def test_blocks_end_where_markdown_ends_them(page: Tab, text: str, whole: str) -> None:
    assert text[: run(page, "markdown", "m.lastBorder(given[0], 0)", text)] == whole


@pytest.mark.parametrize(
    ("text", "heavy"),
    [
        ("- " * 1500 + "a", True),
        ("> " * 2000 + "a", True),
        ("_a" * 40_000, True),
        (" " * 80_000 + "a", True),
        ("*" * 5000, True),
        ("a" * (1 << 18) + "b", True),
        ("```\n" + "_a * b " * 5000 + "\n```", False),
        ("A sentence, with a *word*. " * 500, False),
        ("| a | b |\n" * 300, False),
        (("_a" * 1000 + "\n\n") * 50, False),
    ],
)
def test_what_takes_the_parser_long_is_plain_text(page: Tab, text: str, heavy: bool) -> None:
    assert run(page, "markdown", "m.isHeavy(given[0])", text) is heavy
    found = run(page, "markdown", "(e => [e.className === 'plain', e.textContent.length])(m.rendered(given[0]))", text)
    assert found[0] is heavy and (not heavy or found[1] == len(text))


@pytest.mark.parametrize(
    "text",
    [
        "<div>\n```\n\n" + "_a" * 40_000,
        "<!--\n```\n-->\n\n" + "_a" * 40_000,
        "- a\n  ```\nb\n" + "_a" * 40_000,
        ("*a_" * 1300 + "\n\n") * 60,
    ],
    ids=["html", "comment", "list", "many paragraphs"],
)
def test_marks_that_only_the_parser_sees_are_plain_text_too(page: Tab, text: str) -> None:
    """Behind a fence that is none, or in more paragraphs than one."""
    found = run(page, "markdown", "(e => [e.className, e.textContent.length])(m.rendered(given[0]))", text)
    assert found == ["plain", len(text)]


def test_a_code_that_nothing_closes_ends_with_its_block(page: Tab) -> None:
    text = "Wrap it in <code> first.\n\nThen if x<y then z && w."
    assert "Then if x<y then z && w." in run(page, "markdown", "m.rendered(given[0]).textContent", text)


def test_each_request_keeps_its_lane_until_it_ends(page: Tab) -> None:
    steps = [
        step(1, [[5, "prefill", 64, 32, 96], [6, "prefill", 8, 0, 8]]),
        step(2, [[5, "decode", 1, 0, 97], [6, "decode", 1, 0, 9]], finished=[[5, "stop"]]),
        step(3, [[6, "decode", 1, 0, 10], [7, "prefill", 4, 0, 4]]),
        step(4, [[7, "decode", 1, 0, 5]], retracted=[6], num_retracted=1),
    ]
    code = """(l => { l.take(given[0]);
        return l.columns.map(c => c.cells.map(one => [one.request, one.lane, one.mark])); })(new m.Lanes())"""
    assert run(page, "lanes", code, steps) == [
        [[5, 0, ""], [6, 1, ""]],
        [[5, 0, "end"], [6, 1, ""]],
        [[6, 1, ""], [7, 0, ""]],
        [[7, 0, ""], [6, 1, "retracted"]],
    ]
    again = """(l => { l.take(given[0]); l.take(given[1], 9);
        return l.columns.at(-1).cells[0].lane; })(new m.Lanes())"""
    assert run(page, "lanes", again, steps[:2], [step(90, [[8, "decode", 1, 0, 5]])]) == 0  # 6 ended unseen
    restarted = "(l => { l.take(given[0]); l.take(given[1]); return l.columns.length; })(new m.Lanes())"
    assert run(page, "lanes", restarted, steps, [step(1, [], at_ms=9e9)]) == 1
    assert run(page, "lanes", restarted, steps, steps[1:]) == len(steps), "they were told again"


def test_a_retraction_is_shown_though_its_step_is_told_later(page: Tab) -> None:
    steps = [
        step(1, [[5, "decode", 1, 0, 9], [6, "decode", 1, 0, 9]]),
        step(4, [[5, "decode", 1, 0, 10]], retracted=[6], num_retracted=1, at_ms=999.0),
    ]
    code = """(l => { l.take(given[0]);
        return l.columns.at(-1).cells.map(c => [c.request, c.lane, c.mark]); })(new m.Lanes())"""
    assert run(page, "lanes", code, steps) == [[5, 0, ""], [6, 1, "retracted"]]


def test_no_request_is_red(page: Tab) -> None:
    hues = run(page, "lanes", "given[0].map(m.hue)", [*range(400), 2**40 + 5, -3])
    assert all(30 <= one <= 330 for one in hues) and len(set(hues[:40])) == 40


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1. **English-Branded", "English-Branded"),
        ("see `code", "code"),
        ("a **b** and **", "a b and"),
        ("```\n**x", "**x"),
        ("one\n\n2. **Adding", "Adding"),
    ],
)
def test_a_block_that_is_being_written_is_markdown(page: Tab, text: str, shown: str) -> None:
    code = "(g => { g.show(given[0]); return [g.element.innerText ?? '', g.element.textContent]; })(new m.Growing())"
    found = run(page, "markdown", code, text)[1]
    assert shown in found and ("**" not in found or "```" in text) and ("`" not in found)


def test_the_tree_is_an_icicle(page: Tab) -> None:
    """As wide as the tokens, at the place in the text; as high as what goes on from it."""
    nodes = [
        {"id": 1, "parent": 0, "tokens": 64, "depth": 64},
        {"id": 2, "parent": 1, "tokens": 32, "depth": 96},
        {"id": 3, "parent": 1, "tokens": 16, "depth": 80},
        {"id": 4, "parent": 3, "tokens": 8, "depth": 88},
        {"id": 5, "parent": 0, "tokens": 4, "depth": 4},
    ]
    code = "m.laidOut(given[0]).map(one => [one.node.id, one.from, one.to, one.row, one.rows])"
    assert run(page, "tree", code, nodes) == [
        [1, 0, 64, 0, 2],
        [2, 64, 96, 0, 1],
        [3, 64, 80, 1, 1],
        [4, 80, 88, 1, 1],
        [5, 0, 4, 2, 1],
    ]
    node = {**nodes[0], "locks": 0, "age": 14, "children": 2, "pinned": False, "saved": False}
    assert run(page, "tree", "m.inWords(given[0])", node) == (
        "64 tokens, from 0 to 64 of a text; idle: unused while 14 other prefixes were released; 2 branches"
    )


def test_the_tree_puts_children_below_their_parents(page: Tab) -> None:
    nodes = [{"id": one, "parent": parent, "tokens": 9} for one, parent in ((3, 2), (4, 1), (1, 0), (5, 99), (2, 1))]
    found = run(page, "tree", "m.ordered(given[0]).map(([node, level]) => [node.id, level])", nodes)
    assert found == [[1, 0], [4, 1], [2, 1], [3, 2], [5, 0]]


def test_a_request_is_the_same_for_a_shell_and_python(page: Tab) -> None:
    sent = {
        "model": "m",
        "messages": [{"role": "user", "content": 'it\'s "so"\n$HOME `x` \\ é'}],
        "seed": 3,
        "top_k": 4,
        "stream": True,
    }
    curl = shlex.split(run(page, "request", "m.asCurl(given[0], true)", sent))
    assert json.loads(curl[curl.index("-d") + 1]) == sent
    assert "Authorization: Bearer $MINISGL_API_KEY" in curl
    python = run(page, "request", "m.asPython(given[0], false)", sent)
    called: dict[str, Any] = {}
    start = python.index("stream = client.chat.completions.create(") + len("stream = client.chat.completions.create")
    exec("called.update(dict" + python[start : python.index("for chunk")] + ")", {"called": called})
    assert called == {
        **{name: sent[name] for name in ("model", "messages", "seed", "stream")},
        "extra_body": {"top_k": 4},
    }
