"""Renders chat templates like transformers: the same jinja environment, filters and globals.

Invariants: a template runs in jinja's immutable sandbox; its output, its loop iterations plus macro calls, and its time
are limited; an error in it is a `ChatTemplateError` for the client.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from minisgl.tokenizer import template_bounds

MAX_RENDERED = 32 * 2**20  # characters + pieces: beyond any context, soon reached by an endless template
_TURN = "true"  # variable that no template can read or set: there its name is a constant
_GUARD = "guard of texts"  # another such variable


class ChatTemplateError(ValueError):
    """Error, meant for the client, for a conversation that does not fit the template, or a missing template."""


class TooMuchWork(ChatTemplateError):
    """Error for a template that exceeds its limit of loop iterations and macro calls, or of time."""


class Work(NamedTuple):
    """Limits of rendering: loop iterations plus macro calls, and seconds of CPU time, checked at each of these. One
    iteration may sort a hundred thousand values."""

    turns: int
    seconds: float


TRIAL_WORK = Work(1 << 14, 1.0)
MAX_WORK = Work(1 << 21, 10.0)  # that many iterations take some seconds; the gateway's renderer counts its own steps


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}`, which marks assistant text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 (the base class says set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _CodeGenerator(template_bounds.BoundedCode):
    """Code generator without constant folding: jinja would compute huge constants, even in branches that never run."""

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData | jinja2.nodes.Const):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Call(self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False) -> None:
        """Write a call of `_TURN` without the sandbox's checks."""
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == _TURN:
            self.visit(node.node, frame)
            self.write("()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)


_PLAIN = (str, jinja2.runtime.LoopContext, template_bounds.QuietNamespace)
_NOT_THERE = object()


class _Environment(template_bounds.BoundedEnvironment):
    """Jinja environment in which each loop iteration and macro call calls the variable `_TURN`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or a key like the sandbox, but skip its checks for dictionary keys and for public
        attributes of texts, loops and namespaces, which are always allowed and which templates read most."""
        kind = type(obj)
        if kind is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if kind in _PLAIN and not attribute.startswith(("_", "format")):
            value = getattr(obj, attribute, _NOT_THERE)
            if value is not _NOT_THERE:
                return value
        return super().getattr(obj, attribute)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        def turn(line: int) -> jinja2.nodes.Call:
            return jinja2.nodes.Call(jinja2.nodes.Name(_TURN, "load", lineno=line), [], [], None, None, lineno=line)

        for node in source.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            assert isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock)
            line = node.lineno
            if isinstance(node, jinja2.nodes.For) and node.test is not None:  # skipped iterations count, too
                node.test = jinja2.nodes.And(turn(line), node.test, lineno=line)
            else:
                node.body.insert(0, jinja2.nodes.ExprStmt(turn(line), lineno=line))
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    guard = context.parent.get(_GUARD)
    found = json.dumps(
        value, ensure_ascii=ensure_ascii and not guard, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _escaped(found, guard) if ensure_ascii and guard else found


def _escaped(text: str, guard: str) -> str:
    """Escape all characters of a JSON text that are not ASCII, except for guards."""
    return guard.join(
        re.sub("[\x7f-\U0010ffff]+", lambda found: json.dumps(found[0])[1:-1], part) for part in text.split(guard)
    )


def environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], optimized=False
    )
    environment.code_generator_class = _CodeGenerator
    environment.filters["tojson"] = _tojson
    environment.bound_filters()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def run(template: jinja2.Template, variables: Mapping[str, Any], most: Work, guard: str = "") -> str:
    """Render the template within the limits `most`. `guard` is a character that the template's JSON filter does not
    escape. Raises `ChatTemplateError`."""
    pieces: list[str] = []
    size = 0
    turns = itertools.count(1)
    end = time.thread_time() + most.seconds
    template_bounds.begin([*variables["messages"], *(variables["tools"] or ())])

    def turn() -> bool:
        if next(turns) > most.turns:
            raise TooMuchWork("messages: the chat template runs too many loop iterations over them")
        if time.thread_time() > end:
            raise TooMuchWork("messages: the chat template takes too long over them")
        return True

    try:
        # `Template.generate` without its copy of all variables
        context = template.new_context({**template.globals, **variables, _TURN: turn, _GUARD: guard}, shared=True)
        for piece in template.root_render_func(context):
            pieces.append(piece)
            size += len(piece) + 1
            if size > MAX_RENDERED:
                raise ChatTemplateError("messages: the chat template renders too long a prompt of them")
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"messages: the chat template refuses them: {error}") from error
    except ChatTemplateError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        # a template's own error on unusual input is reported as an error of the input
        raise ChatTemplateError(f"messages: the chat template fails on them: {error}") from error
    return "".join(pieces)
