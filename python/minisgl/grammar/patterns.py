"""Rewrites regular expressions with look-ahead, which the library lacks, as several without: a text must match all of
them. Only look-ahead at the start of a whole expression is rewritten: `^(?=A)B`, and `^(?!A)B` if there is a pattern
for texts that do not begin with A. Generators write these for decimals, mail addresses and host names.

Invariants: the expressions together match what the given one matches, or it is returned unchanged.
"""

from __future__ import annotations

import re

_ONE = r"(?:\\[.\-+_/$^*?()\[\]{}|\\dws]|\[(?:\\.|[^\]\\])+\]|[A-Za-z0-9_@\-+ ])"
_LOOK = re.compile(r"\(\?([=!])")
_REPEATED = re.compile(rf"\^?({_ONE})([*+])\$")
_TWICE = re.compile(rf"\.\*({_ONE})\1")
_AHEAD = re.compile(rf"\.\*({_ONE})")
_SINGLE = re.compile(_ONE)


def without_lookahead(pattern: str) -> list[str]:
    rest, patterns = pattern.removeprefix("^"), list[str]()
    if rest == pattern or _has_choice(rest):
        return [pattern]
    while look := _LOOK.match(rest):
        end = _end(rest)
        inside = rest[look.end() : end - 1]
        one = f"^(?:{inside})" if look[1] == "=" else _unless(inside)
        if one is None:
            return [pattern]
        patterns.append(one)
        rest = rest[end:]
    return [f"^{rest}", *patterns]


def _unless(inside: str) -> str | None:
    """Return a pattern for texts that do not begin with `inside`; `None` if none is known."""
    if _SINGLE.fullmatch(inside):
        return f"^(?:$|{_other(inside)})"
    if match := _REPEATED.fullmatch(inside):
        return _other(match[1]) if match[2] == "*" else f"^$|{_other(match[1])}"
    if match := _TWICE.fullmatch(inside):
        other = _other(match[1])
        return f"^{other}*(?:{match[1]}{other}+)*{match[1]}?$"
    if match := _AHEAD.fullmatch(inside):
        return f"^{_other(match[1])}*$"
    return None


def _other(one: str) -> str:
    """Return a pattern for every character that `one` does not match."""
    if one.startswith("["):
        return f"[{one[2:]}" if one.startswith("[^") else f"[^{one[1:]}"
    return f"[^{one}]" if one != "-" else "[^\\-]"


def _end(text: str) -> int:
    """Return the end of the group at the start of `text`."""
    depth = 0
    for at, one in _marks(text):
        depth += {"(": 1, ")": -1}.get(one, 0)
        if depth == 0:
            return at + 1
    return len(text)


def _has_choice(text: str) -> bool:
    """Return whether the pattern has a `|` outside of all groups."""
    depth = 0
    for _, one in _marks(text):
        depth += {"(": 1, ")": -1}.get(one, 0)
        if one == "|" and depth == 0:
            return True
    return False


def _marks(text: str) -> list[tuple[int, str]]:
    """Return the positions of parentheses and bars that are operators of the pattern."""
    skipped = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
    plain = skipped.sub(lambda found: "x" * len(found[0]), text)
    return [(at, one) for at, one in enumerate(plain) if one in "()|"]
