"""What the gateway renders is what Python renders; what it does not render it passes on, and that is counted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl import envs
from minisgl.tokenizer import ChatTemplate, ChatTemplateError
from minisgl.tokenizer.chat_template import _environment, content_shape
from minisgl.tokenizer.echo import ECHO_CHAT_TEMPLATE
from tests.helpers.long_fuzz import apart, for_long
from tests.helpers.text import data_folder
from tests.tokenizer.test_chat_template import CONVERSATIONS, ESCAPES, LANGUAGE, PARTS, REFUSED, STRINGS, TOOL

# Chat templates that nobody wrote: programs of jinja at random, most of which run. Expressions are made by kind, so
# that their operators, filters and methods mostly fit; one in a while does not.
Source = st.SearchStrategy[str]

_GRAMMAR = json.loads((Path(__file__).parents[1] / "gateway" / "template_grammar.json").read_text(encoding="utf-8"))
LEAVES: dict[str, list[str]] = _GRAMMAR["leaves"]  # by kind
# What makes an expression of a kind of others: {kind} stands for one, in brackets that keep it whole.
RULES: dict[str, list[str]] = _GRAMMAR["rules"]
NAMES_OF = {"text": "s", "number": "n", "list": "l", "dict": "d", "any": "x"}
TEXTS = ["", " ", "\n", "  \n", "a", "\n  b", "{# c #}", "\n{#- c #}\n", "é", "\t", "\n\n", "}}"]


def _expressions() -> dict[str, Source]:
    """Return a strategy for each kind of source, by its name."""
    found: dict[str, Source] = {}

    def of_rule(rule: str) -> Source:
        kinds = [part.split("}")[0] for part in rule.replace("{{", "").split("{")[1:]]
        kinds = [kind for kind in kinds if kind in LEAVES]
        parts = st.tuples(*(st.deferred(lambda kind=kind: found[kind]) for kind in kinds))  # type: ignore[misc]
        return parts.map(lambda parts: f"({_filled(rule, kinds, parts)})")

    for kind, leaves in LEAVES.items():
        leaf = st.sampled_from(leaves)
        found[kind] = st.one_of(leaf, leaf, st.one_of([of_rule(rule) for rule in RULES[kind]]))
    return found


def _filled(rule: str, kinds: Sequence[str], parts: Sequence[str]) -> str:
    for kind, part in zip(kinds, parts, strict=True):
        rule = rule.replace("{" + kind + "}", part, 1)
    return rule.replace("{{", "{").replace("}}", "}")


def _bare(expression: str) -> str:
    """Without the brackets around all of it: half of them bind otherwise than with brackets."""
    return expression[1:-1] if expression.startswith("(") and expression.count("(") == 1 else expression


def _block(inside: str) -> Source:
    begin = st.sampled_from(["{%", "{%-", "{%", "{%+"])
    end = st.sampled_from(["%}", "-%}", "%}", "+%}"])
    return st.tuples(begin, end).map(lambda ends: f"{ends[0]} {inside} {ends[1]}")


def _block_of(expression: Source, inside: str) -> Source:
    """`inside` with an expression in its braces."""
    return expression.map(_bare).flatmap(lambda one: _block(inside.replace("{}", one)))


def _joined(*parts: Source) -> Source:
    return st.tuples(*parts).map("".join)


def programs() -> Source:
    """Sources, nearly all of which parse."""
    of_kind = _expressions()
    asked = of_kind["any"].map(_bare)
    shown = st.tuples(st.sampled_from(["{{", "{{-"]), asked, st.sampled_from(["}}", "-}}"])).map(" ".join)
    leaf = st.one_of(
        st.sampled_from(TEXTS),
        shown,
        shown,
        *(_block_of(of_kind[kind], f"set {name} = {{}}") for kind, name in NAMES_OF.items()),
        _block("set ns = namespace(a=1)"),
        _block_of(of_kind["any"], "set ns.a = {}"),
        _block("set x, y = 1, l"),
    )
    whole = st.recursive(leaf, lambda inner: _larger(inner, of_kind), max_leaves=8)
    return st.lists(whole, min_size=1, max_size=6).map("".join)


def _larger(inner: Source, of_kind: dict[str, Source]) -> Source:
    body = st.lists(inner, max_size=3).map("".join)
    asked = _block_of(st.one_of(of_kind["truth"], of_kind["any"]), "if {}")
    loops = [
        _block_of(
            st.one_of(st.just("messages"), of_kind["list"], of_kind["dict"], of_kind["text"]),
            f"for {target} in {{}}{filtered}",
        )
        for target in ("m", "m", "x")
        for filtered in ("", "", " if m", " if m.role == 'user'", " if ns.a")
    ]
    looped = st.one_of(loops)
    of_pairs = _block_of(of_kind["dict"], "for x, y in {}.items()")
    stops = _joined(
        _block_of(of_kind["truth"], "if {}"), st.one_of(_block("continue"), _block("break")), _block("endif")
    )
    inside = st.lists(st.one_of(inner, stops), max_size=3).map("".join)
    return st.one_of(
        _joined(asked, body, _block("endif")),
        _joined(asked, body, _block("else"), body, _block("endif")),
        _joined(asked, body, _block_of(of_kind["truth"], "elif {}"), body, _block("else"), body, _block("endif")),
        _joined(st.one_of(looped, of_pairs), inside, _block("endfor")),
        _joined(looped, body, _block("else"), body, _block("endfor")),
        _joined(_block("set s"), body, _block("endset")),
        _joined(_block("generation"), body, _block("endgeneration")),
        _joined(_block("with x = 1, y = x"), body, _block("endwith")),
        _joined(_block("macro f(a, b=x)"), body, _block("endmacro")),
    )


# Chat templates as the gateway renders them beside Python's.
rust = pytest.importorskip("minisgl._rust")
PASSED_ON = None  # the gateway leaves it to Python


class BothTemplates:
    """One template in Python and in the gateway."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.python = ChatTemplate(source, special_tokens or {})
        self.why = ""  # the gateway passed the last one on
        try:
            shape = content_shape(_environment().parse(source))
            self.rust = rust.GatewayTemplate(source, shape, dict(special_tokens or {}))
        except Exception as error:  # jinja's own errors among them: then there is nothing to compare
            self.rust = None
            self.why = str(error)

    def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any] | None = None, prompt: bool = True
    ) -> str | None:
        """Return what both render; `PASSED_ON` if the gateway does not."""
        if self.rust is None:
            return PASSED_ON
        given = variables or {}
        try:
            found = self.rust.render(json.dumps(messages), json.dumps(given), prompt)
        except ValueError as error:
            self.why = str(error)
            return PASSED_ON
        try:
            expected = self.python.render(messages, add_generation_prompt=prompt, **given)
        except ChatTemplateError as error:
            raise AssertionError(f"Python refuses what the gateway renders: {error}: {found!r}") from error
        assert found == expected
        return str(found)


def corpus(folder: Path) -> dict[str, str]:
    """Templates of files, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FOLDER = Path(__file__).parent
TEMPLATES = corpus(FOLDER / "templates")


@cache
def both(name: str) -> BothTemplates:
    if name == "echo":
        return BothTemplates(ECHO_CHAT_TEMPLATE, TOKENS)
    if name == "qwen3":
        config = json.loads((data_folder("qwen3") / "tokenizer_config.json").read_text(encoding="utf-8"))
        return BothTemplates(config["chat_template"])
    return BothTemplates(TEMPLATES[name], TOKENS)


NAMES = ["echo", "qwen3", *TEMPLATES]

TEXT = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "hi", "  a\n\n", "<think>\nso\n</think>\n\nyes", "</think>", "<tool_response>x</tool_response>"]
    ),
    st.sampled_from(["漢字 👩‍👩‍👧", "<b>&amp;'\"</b>", "{{ 7 * 7 }}{% raw %}", "a\x1cb\x85c", "{# #}", 'it\'s \\ "x"']),
    st.text(max_size=12),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "items", "name", "type", "é", "Z"]), inner, max_size=3),
    ),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "city"]), JSON, max_size=3),
    JSON.map(json.dumps),
    st.sampled_from(
        ["", "not json", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[1, 2.50, 1e5, -0, -0.0]"]
    ),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["1", "123456789"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS}),
        }
    ),
    max_size=2,
)
CONTENT = st.one_of(
    TEXT, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3), st.none()
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"])},
    optional={
        "content": CONTENT,
        "name": TEXT,
        "tool_calls": CALLS,
        "tool_call_id": st.sampled_from(["1", "123456789"]),
    },
)
TOOLS = st.lists(
    st.one_of(
        st.just(TOOL),
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["add", "look_up"]),
                        "description": TEXT,
                        "parameters": st.fixed_dictionaries(
                            {
                                "type": st.just("object"),
                                "properties": st.dictionaries(
                                    st.sampled_from(["a", "items"]),
                                    st.fixed_dictionaries(
                                        {
                                            "type": st.sampled_from(["string", "array", "integer", "object", "odd"]),
                                            "description": TEXT,
                                        },
                                        optional={"items": st.just({"type": "string"})},
                                    ),
                                    max_size=2,
                                ),
                            }
                        ),
                    },
                    optional={"return": st.just({"type": "integer", "description": "sum"})},
                ),
            }
        ),
    ),
    max_size=2,
)
VARIABLES = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.one_of(st.none(), TOOLS),
        "enable_thinking": st.sampled_from([True, False, None, 0, "no"]),
        "date_string": st.just("1 Jan 2030"),
        "tools_in_user_message": st.booleans(),
        "bos_token": st.just("<other>"),
        "content": TEXT,
        "namespace": JSON,
        "loop": JSON,
        "x": JSON,
    },
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_real_conversations(name: str, messages: list[Any], tools: list[Any] | None) -> None:
    template = both(name)
    for prompt in (True, False):
        for variables in ({}, {"enable_thinking": False}, {"date_string": "1 Jan 2030"}):
            template.render(messages, {**variables, "tools": tools}, prompt)
    assert template.rust is not None, template.why


def test_the_usual_conversations_are_rendered() -> None:
    """Not passed on: what a gateway is for."""
    for name in ("echo", "qwen3", "blocks_with_spaces", "one_line", "headers_with_dates", "thinking_switch"):
        for conversation in ("user", "system", "turns", "empty", "spaces"):
            template = both(name)
            assert template.render(CONVERSATIONS[conversation]) is not PASSED_ON, (name, conversation, template.why)
    assert both("qwen3").render(CONVERSATIONS["calls"], {"tools": [TOOL]}) is not PASSED_ON
    assert both("json_types_macro").render(CONVERSATIONS["turns"], {"tools": [TOOL]}) is not PASSED_ON


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=5), variables=VARIABLES, prompt=st.booleans())
def test_any_conversation(name: str, messages: list[Any], variables: dict[str, Any], prompt: bool) -> None:
    both(name).render(messages, variables, prompt)


SOURCES = {
    **LANGUAGE,
    **PARTS,
    **STRINGS,
    **{name: source for name, (source, _) in REFUSED.items()},
    **{f"escape {i}": source for i, source in enumerate(ESCAPES)},
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_language(source: str) -> None:
    template = BothTemplates(source, TOKENS)
    for messages in CONVERSATIONS.values():
        template.render(messages)


# What jinja and its relatives read, compute or print differently, one by one.
ODD = json.loads((FOLDER / "odd_templates.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("source", ODD.values(), ids=ODD)
def test_odd_templates(source: str) -> None:
    template = BothTemplates(source, TOKENS)
    for messages in CONVERSATIONS.values():
        template.render(messages)


@settings(max_examples=2000, deadline=None)
@given(source=programs(), messages=st.lists(MESSAGE, min_size=1, max_size=3), variables=VARIABLES)
def test_any_template(source: str, messages: list[Any], variables: dict[str, Any]) -> None:
    BothTemplates(source, TOKENS).render(messages, variables)


@pytest.mark.slow
def test_any_template_for_long(times: int) -> None:
    """What costs the gateway little costs Python little: it has a bound of memory."""
    rendered, passed_on = apart(_any_templates, 5_000 * times, max_bytes=6 << 30)
    assert rendered > passed_on / 10


def _any_templates(count: int) -> tuple[int, int]:
    """How many were rendered, and passed on."""
    rendered = passed_on = 0

    def check(source: str, messages: list[Any], variables: dict[str, Any]) -> None:
        nonlocal rendered, passed_on
        if BothTemplates(source, TOKENS).render(messages, variables) is PASSED_ON:
            passed_on += 1
        else:
            rendered += 1

    programs_and_all = given(source=programs(), messages=st.lists(MESSAGE, min_size=1, max_size=3), variables=VARIABLES)
    for_long(check, programs_and_all, settings(deadline=None), count)
    return rendered, passed_on


# ------------------------------------------------------------------------------------------------------------- bounds

RUNAWAYS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "repeating": "{{ 'x' * 10000000000 }}",
    "lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "replacing": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
    "parts that are shared": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "parts that are compared": "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == [ns.x, 1] }}",
    "many lists of lists": "{% set x = [[[0] * 9] * 9] %}{% set ns = namespace(x=['a' * 9999]) %}"
    "{% for i in range(14) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | tojson }}",
    "parts within parts": "{% set ns = namespace(x=1) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x is defined }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns.x is defined }}",
    "characters": "{{ ('a' * 9999999) | list | length }}",
    "parts of a text": "{{ ('a' * 9999999).split('a') | length }}{{ ('a ' * 4999999).split() | length }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep": "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    "long sums": "{{ 1" + " + 1" * 5000 + " }}",
    "many branches": "{% if 0 %}" + "{% elif 0 %}" * 5000 + "{% endif %}",
    "deep statements": "{% if 1 %}" * 400 + "{% endif %}" * 400,
    "indenting": "{{ ('\n' * 1000) | indent(100000) }}",
    "json": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "items of a long text": "{% set x = 'é' * 1000000 %}{% for i in range(99999) %}{{ x[999999] }}{% endfor %}",
}


@pytest.mark.parametrize("source", RUNAWAYS.values(), ids=RUNAWAYS)
def test_a_template_that_runs_away_is_passed_on(source: str) -> None:
    """Without asking Python, which may take its time."""
    template = BothTemplates(source, TOKENS)
    if template.rust is not None:
        with pytest.raises(ValueError, match="the chat template"):
            template.rust.render(json.dumps([{"role": "user", "content": "x" * 100}]), "{}", True)


def test_the_templates_of_the_data_are_rendered() -> None:
    """All of them."""
    data = envs.data_dir()
    if data is None:
        pytest.skip(f"{envs.DATA} is not set: no real templates")
    found = 0
    for file in sorted((data / "tokenizers").glob("*/tokenizer_config.json")):
        if source := json.loads(file.read_text(encoding="utf-8")).get("chat_template"):
            template = BothTemplates(source, TOKENS)
            assert template.rust is not None, (file.parent.name, template.why)
            found += 1
    assert found
