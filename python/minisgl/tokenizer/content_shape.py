"""Finds out from a chat template's syntax tree in which format it takes a message's content. A template that loops over
content, directly, through a variable or through a macro's parameter, takes parts, and strings too if it tests anywhere
for a string; any other takes a string."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentShape = Literal["string", "parts", "either"]


def content_shape(tree: nodes.Template) -> ContentShape:
    """Return the content format. Scopes are ignored: a name that holds content anywhere counts everywhere."""
    names = _content_names(tree)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "string"
    return "either" if any(test.name == "string" for test in tree.find_all(nodes.Test)) else "parts"


def _content_names(tree: nodes.Template) -> set[str]:
    """Return the variables and macro parameters that receive content. Each iteration follows one more assignment."""
    names: set[str] = set()
    bindings = list(_bindings(tree))
    while True:
        new_names = {name for name, value in bindings if _is_content(value, names)}
        if new_names <= names:
            return names
        names |= new_names


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            yield from ((param.name, value) for param, value in zip(macro.args, call.args, strict=False))
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or (node.expr2 is not None and _is_content(node.expr2, names))
    return False
