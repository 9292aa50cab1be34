"""Templates that grow what they make: each ends with an error, in little memory. What real ones make is as it was."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from minisgl.tokenizer import ChatTemplate, ChatTemplateError, template_bounds
from minisgl.tokenizer.rendering import Work
from tests.helpers.seconds import WAIT_S

USER = {"role": "user", "content": "ab\nab\t"}
BIG = "{% set big = 'ab' * 20000 %}"


def again(begin: str, step: str, shown: str = "", times: int = 60) -> str:
    loop = f"{{% for i in range({times}) %}}{{% set n.x = {step} %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={begin}) %}}{loop}{shown}"


NESTED = "[n.x, n.x]"
ATTACKS = {
    # nested values, written out or compared
    "string": again("[1]", NESTED, "{{ n.x | string | length }}"),
    "json": again("[1]", NESTED, "{{ n.x | tojson }}"),
    "pprint": again("[1]", NESTED, "{{ n.x | pprint }}"),
    "compared": again("[1]", NESTED, "{{ n.x == [n.x] }}"),
    "tuples": again("(1,)", "(n.x, n.x)", "{{ n.x }}"),
    "dictionaries": again("{}", "{'a': n.x, 'b': n.x}", "{{ n.x }}"),
    "calls of dict": again("{}", "dict(a=n.x, b=n.x)", "{{ n.x }}"),
    "keys": again("1", "dict.fromkeys('abc', n.x)", "{{ n.x }}"),
    "items": again("{}", "{'a': n.x.items(), 'b': n.x.items()}", "{{ n.x }}"),
    "mapped": again("['']", "[0, 0] | map('default', n.x, true) | list", "{{ n.x }}"),
    "batches": again("[1]", "(n.x | batch(4, n.x) | list) * 2", "{{ n.x }}"),
    "repeated": again("[1]", "[n.x] * 9", "{{ n.x }}"),
    "concatenated": again("[1]", "n.x + n.x"),
    # numbers
    "squares": again("3", "n.x * n.x", times=40),
    "powers": again("3", "n.x ** n.x"),
    "power": "{{ 10 ** 1000000000 }}",
    "sums": again("1", "n.x + n.x", times=9999),
    "hexadecimal": "{% set x = ('f' * 20000) | int(base=16) %}{{ x // 3 }}",
    "bytes of a number": "{{ (1).to_bytes(3000000000) }}",
    "digits": "{{ 1.5 | round(100000000) }}",
    # texts
    "times": "{{ 'a' * 3000000000 }}",
    "times, turned": "{{ 3000000000 * 'a' }}",
    "list times": "{{ [1] * 3000000000 }}",
    "doubled": again("'ab'", "n.x + n.x"),
    "joined": again("'ab'", "n.x ~ n.x"),
    "joined with a list": again("'ab'", "n.x ~ [n.x]"),
    "block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "macro": "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}" + again("'ab'", "f(n.x)"),
    "caller": "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 20
    + "abcd" * 9
    + "{% endcall %}" * 20,
    "filter block": BIG + "{% filter replace('a', big) %}{{ big }}{% endfilter %}",
    "held": BIG
    + "{% macro f(n, s) %}{% set t = s ~ n %}{{ f(n + 1, t) }}{{ t | length }}{% endmacro %}{{ f(0, big) }}",
    "held slices": BIG + "{% macro f(s) %}{{ f(s[1:]) }}{{ s | length }}{% endmacro %}{{ f(big) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "rjust": "{{ 'a'.rjust(width=3000000000) }}" + "{{ 'a'.rjust(3000000000) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "zfill": "{{ 'a'.zfill(3000000000) }}",
    "a method by its name": "{{ ('a' | attr('zfill'))(3000000000) }}",
    "a method as a variable": "{% set f = 'a'.zfill %}{{ f(3000000000) }}",
    "bytes": "{{ 'a'.encode().zfill(3000000000) }}",
    "tabs": "{{ messages[0].content.expandtabs(3000000000) }}",
    "indented": "{{ messages[0].content | indent(3000000000) }}",
    "many lines indented": "{{ ('a\\n' * 15000) | indent(4000) }}",
    "indented json": "{{ messages | tojson(indent=100000000) }}",
    "replaced": BIG + "{{ big.replace('a', big) }}",
    "replaced everywhere": BIG + "{{ big.replace('', big) }}",
    "replace": BIG + "{{ big | replace('a', big) }}",
    "join": BIG + "{{ big.join(big) }}",
    "join a list": BIG + "{{ big | list | join(big) }}",
    "join many": BIG + "{{ range(9999) | map('replace', '1', big) | join }}",
    "translated": BIG + "{{ big.translate({97: big}) }}",
    "filled": "{{ [1] | batch(1000000000, 1) | list }}",
    "sliced": "{{ [1] | slice(1000000000) | list }}",
    "formatted": "{{ '%1000000000d' % 1 }}",
    "formatted by a star": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format many": BIG + "{{ ('%s' * 9999) % ((big,) * 9999) }}",
    # what is counted
    "the counter": "{% with minisgl_turn = joiner() %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endwith %}",
    "the counter by its name": "{% with true = joiner() %}{% endwith %}",
    "the counter as a loop's": "{% for true in [joiner()] %}{% endfor %}",
    "the counter as a macro": "{% macro true() %}{% endmacro %}",
    "words": "{{ lipsum(n=100000000) }}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_that_grows_is_stopped(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before this, most took all memory, or all of the interpreter's time in one expression."""
    monkeypatch.setattr(template_bounds, "MAX_SIZE", 1 << 16)
    monkeypatch.setattr(template_bounds, "MAX_MADE", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError):
            ChatTemplate(ATTACKS[attack], {}).render([USER], Work(20_000, WAIT_S))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 25


def test_namespaces_show_nothing_of_what_is_in_them() -> None:
    source = "{% set a = namespace(x=1) %}{% for i in range(60) %}"
    source += "{% set b = namespace(x=a, y=a) %}{% set a.x = b %}{% endfor %}"
    assert ChatTemplate(source + "{{ a }}", {}).render([USER]) == "<Namespace>"


MADE: dict[str, tuple[str, Any]] = {
    "list": (
        "{% set n = namespace(x=[]) %}{% for i in range(3) %}{% set n.x = n.x + [i] %}{% endfor %}{{ n.x }}",
        [0, 1, 2],
    ),
    "tuple": ("{{ (1, 2) + (3,) }}", (1, 2, 3)),
    "dictionary": ("{{ dict({'a': [1]}, b=2) }}", {"a": [1], "b": 2}),
    "text": ("{{ 'a' ~ 1 ~ [2] ~ none + 'b' * 2 + '%03d' % 7 + '{:>4}'.format('x') }}", "a1[2]Nonebb007   x"),
    "numbers": ("{{ 2 ** 10 - 7 // 2 % 3 + 1.5 * 2 }}", 2**10 - 7 // 2 % 3 + 1.5 * 2),
    "filters": (
        "{{ 'a,b' | replace(',', ';') | center(7) | indent(2) }}{{ [1, 2, 3] | batch(2) | list }}",
        "  a;b  [[1, 2], [3]]",
    ),
    "round": ("{{ 1.256 | round(2) }}", 1.26),
    "json": ("{{ {'a': (1, [2])} | tojson(indent=1) }}", '{\n "a": [\n  1,\n  [\n   2\n  ]\n ]\n}'),
    "methods": ("{{ 'a b'.split() + ['c'.ljust(2) + '|'] }}{{ ', '.join(['x', 'y']) }}", "['a', 'b', 'c |']x, y"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_templates_make_is_as_it_was(name: str) -> None:
    source, expected = MADE[name]
    assert ChatTemplate(source, {}).render([USER]) == str(expected)


def test_lists_of_long_messages_grow_as_they_did() -> None:
    """A list's texts count once, however often the list is made anew."""
    source = (
        "{% set n = namespace(x=[]) %}{% for m in messages %}{% set n.x = n.x + [m] %}{% endfor %}{{ n.x | length }}"
    )
    messages = [{"role": "user", "content": "a" * 2000}] * 2000
    assert ChatTemplate(source, {}).render(messages) == "2000"
