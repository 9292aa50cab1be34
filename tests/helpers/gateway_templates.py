"""Chat templates that nobody wrote: programs of jinja at random, most of which run.

Expressions are made by kind, so that their operators, filters and methods mostly fit; one in a while does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

Source = st.SearchStrategy[str]

_GRAMMAR = json.loads((Path(__file__).parents[1] / "gateway" / "template_grammar.json").read_text(encoding="utf-8"))
LEAVES: dict[str, list[str]] = _GRAMMAR["leaves"]  # by kind
# What makes an expression of a kind of others: {kind} stands for one, in brackets that keep it whole.
RULES: dict[str, list[str]] = _GRAMMAR["rules"]
NAMES_OF = {"text": "s", "number": "n", "list": "l", "dict": "d", "any": "x"}
TEXTS = ["", " ", "\n", "  \n", "a", "\n  b", "{# c #}", "\n{#- c #}\n", "é", "\t", "\n\n", "}}"]


def _expressions() -> dict[str, Source]:
    """By kind."""
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
