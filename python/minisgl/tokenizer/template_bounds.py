"""Limits on the values that a chat template creates: each is checked before it is created, or while it cannot be large.

Invariants: no text, number or container that a template creates is longer than `MAX_SIZE` when written out; all its
texts and lists together have at most `MAX_MADE` characters and items. The result size of filters and methods that may
expand their input is estimated before they run (`_FILTERS`, `_METHODS`). Namespaces print nothing of their content:
only containers nest.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.sandbox
from jinja2 import nodes
from jinja2.utils import Namespace, _PassArg, pass_context

MAX_SIZE = 1 << 25
MAX_MADE = 1 << 29
MAX_BITS = 1 << 12  # bits of an operand
MAX_WIDTH = 1 << 12
MAX_PRETTY = 1 << 16
_SMALL = 1 << 62
_FEW = 256  # longest text that is not counted: loop iterations are
_WIDE = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a width of five digits, or one given by an argument


class TooLarge(ValueError):
    """Error for a template that creates more than it may."""

    def __init__(self) -> None:
        super().__init__("the chat template creates too large a value")


class _Made(threading.local):
    """Sizes of this thread's rendering: all that was created, and its input values."""

    size = 0
    given: Sequence[Any] = ()
    sizes: Mapping[int, int] | None = None  # sizes of the given values, by `id`


_made = _Made()


def begin(given: Sequence[Any]) -> None:
    """Reset the counters for a new rendering. `given`: values of the request, which a template may copy often."""
    _made.size, _made.given, _made.sizes = 0, given, None


def _take(size: int) -> None:
    """Count a created text of `size` characters, or a list of as many items. Raises `TooLarge`."""
    if size > MAX_SIZE:
        raise TooLarge
    if size > _FEW:
        _made.size += size
        if _made.size > MAX_MADE:
            raise TooLarge


def _check(size: int) -> int:
    if size > MAX_SIZE:
        raise TooLarge
    return size


class _List(list[Any]):
    """List created by a template; `size` is the result of `_size`."""

    __slots__ = ("size",)

    size: int


def _size(value: Any) -> int:
    """Return the approximate length of a value when written out, at most a little above `MAX_SIZE`."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if _made.sizes is None:
        _made.sizes = {}
        _made.sizes = {id(one): _size(one) for one in _made.given}
    size, left, sizes = 0, [value], _made.sizes
    while left and size <= MAX_SIZE:
        one = left.pop()
        size += 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, _List):
            size += one.size
        elif (known := sizes.get(id(one))) is not None:
            size += known
        elif isinstance(one, int):
            size += one.bit_length() // 3
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            left += one
    return size


def _kept(value: Any) -> Any:
    """Check and count a value that was just created; return it, a list with its size attached. Raises `TooLarge`."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str | bytes):
        if len(value) > _FEW:
            _take(len(value))
    elif type(value) is list:
        value = _sized(value, sum(map(_size, value)))
    elif isinstance(value, int):
        _number(value)
    elif isinstance(value, tuple | dict):
        _check(_size(value))
    return value


def _sized(items: list[Any], size: int) -> _List:
    _take(len(items))
    sized = _List(items)
    sized.size = _check(size)
    return sized


def _number(value: Any) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TooLarge


def _width(value: Any) -> int:
    """Return the amount by which a width argument may expand a text or list. Raises `TooLarge`."""
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TooLarge
    return abs(value) if isinstance(value, int) else 0


def _formatted(text: Any, *values: Any) -> int:
    if isinstance(text, str | bytes):
        shown = text if isinstance(text, str) else text.decode("latin-1")
        if _WIDE.search(shown):
            raise TooLarge
        return len(shown) + (shown.count("%") + shown.count("{")) * (MAX_WIDTH + _size(values))
    return 0


def _replaced(text: Any, old: Any, new: Any = "", *_: Any) -> int:
    return _size(text) + (text.count(old) + (0 if old else len(text))) * len(new) if _are_texts(text, old, new) else 0


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values) or all(isinstance(value, bytes) for value in values)


def _joined(separator: Any, values: Any = (), *_: Any) -> int:
    return _size(values) + (len(separator) * len(values) if isinstance(values, list | tuple | str | dict) else 0)


def _translated(text: Any, table: Any = None, *_: Any) -> int:
    return len(text) * max(map(_size, table.values()), default=1) if isinstance(table, Mapping) else len(text)


def _widths(text: Any, *values: Any) -> int:
    return _size(text) + sum(map(_width, values))


def _lines(text: Any, *values: Any) -> int:
    if not any(map(_width, values)):
        return 0
    return (1 + text.count("\n") if isinstance(text, str) else _size(text)) * (1 + sum(map(_width, values)))


def _pretty(value: Any, *_: Any) -> int:
    return MAX_SIZE // MAX_PRETTY * _size(value)  # slow to compute


def _tabs(text: Any, size: Any = 8, *_: Any) -> int:
    return len(text) * _width(size)


_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "to_bytes"), _widths),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _joined,
    "translate": _translated,
}
"""Functions, by method name, that return the longest result of a call, from the object and the arguments."""

_FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "batch", "slice", "round"), _widths),
    **dict.fromkeys(("indent", "tojson"), _lines),
    "pprint": _pretty,
    "format": _formatted,
    "replace": _replaced,
    "join": lambda values, separator="", *_: _joined(separator, values),
}

_MAKE_NOTHING = frozenset(
    ("length", "count", "first", "last", "default", "d", "select", "selectattr", "reject", "rejectattr", "map", "items")
)
"""Filters that return a number or existing values only."""


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    estimate, wants = _FILTERS.get(name), _PassArg.from_obj(function)
    if name in _MAKE_NOTHING:
        return function

    @pass_context
    def run(context: jinja2.runtime.Context, *args: Any, **kwargs: Any) -> Any:
        if estimate is not None:
            _take(estimate(*args, *kwargs.values()))
        if wants is _PassArg.context:
            return _kept(function(context, *args, **kwargs))
        if wants is _PassArg.eval_context:
            return _kept(function(context.eval_ctx, *args, **kwargs))
        return _kept(function(*([context.environment] if wants else []), *args, **kwargs))

    return run


class QuietNamespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"


class BoundedCode(jinja2.compiler.CodeGenerator):
    """Code generator that has the environment create containers and joined texts."""

    def visit_Concat(self, node: nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self._call("joined", nodes.Tuple(node.nodes, "load", lineno=node.lineno), frame)

    def visit_Add(self, node: nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:
        left: nodes.Expr = node
        parts: list[nodes.Expr] = []
        while isinstance(left, nodes.Add):
            parts.insert(0, left.right)
            left = left.left
        self._call("added", nodes.Tuple([left, *parts], "load", lineno=node.lineno), frame)

    def visit_List(self, node: nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._kept(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self._kept(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        self._kept(super().visit_Tuple, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.sliced(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def _kept(
        self, visit: Callable[[Any, jinja2.compiler.Frame], None], node: nodes.Expr, frame: jinja2.compiler.Frame
    ) -> None:
        """Visit a container expression, and have its value checked unless it is constant or an assignment target."""
        is_loaded = getattr(node, "ctx", "load") == "load"
        is_made = is_loaded and any(node.find(kind) is not None for kind in (nodes.Name, nodes.Call, nodes.Filter))
        self.write("environment.kept(" if is_made else "")
        visit(node, frame)
        self.write(")" if is_made else "")

    def _call(self, name: str, node: nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        self.write(f"environment.{name}(")
        super().visit_Tuple(node, frame)
        self.write(")")


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox with limits on created values. Call `bound_filters` after adding filters, `begin` before rendering."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table) - {"+"}  # see `added`
    kept = staticmethod(_kept)

    def bound_filters(self) -> None:
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.globals["namespace"] = QuietNamespace
        del self.globals["lipsum"]

    @staticmethod
    def sliced(value: Any) -> Any:
        return _kept(value) if isinstance(value, str | bytes) else value

    @staticmethod
    def joined(values: tuple[Any, ...]) -> str:
        for value in values:
            if not isinstance(value, str):
                _check(_size(value))
        texts = [str(value) for value in values]
        _take(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        found = list(pieces)
        _take(sum(map(len, found)))
        return "".join(found)

    def added(self, values: tuple[Any, ...]) -> Any:
        """Return the sum of the values, from left to right. Raises `TooLarge`."""
        size = 0
        for value in values:
            if type(value) is not str:
                return functools.reduce(self._added, values)
            size += len(value)
        if size > _FEW:
            _take(size)
        return "".join(values)

    def _added(self, left: Any, right: Any) -> Any:
        if type(left) is _List and type(right) is _List:
            return _sized([*left, *right], left.size + right.size)
        _number(left)
        _number(right)
        if isinstance(left, str) and isinstance(right, str):
            _take(len(left) + len(right))
        return _kept(left + right)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of a binary operator. Raises `TooLarge`."""
        if operator == "-" and type(left) is int and type(right) is int and -_SMALL < left < _SMALL > right > -_SMALL:
            return left - right
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            _take(max(0, count) * _size(value))
        elif operator == "%" and isinstance(left, str | bytes):
            _take(_formatted(left, right))
        else:
            _number(left)
            _number(right)
            if operator == "**" and isinstance(left, int) and isinstance(right, int):
                _number(1 << min(max(0, right) * left.bit_length(), MAX_BITS + 1))
        return _kept(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call, like the sandbox. Raises `TooLarge`."""
        method = __obj if type(__obj) is BuiltinMethodType else getattr(__obj, "__wrapped__", None)
        owner = getattr(method, "__self__", None)
        if type(owner) is dict:  # returns only its own content
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, str | bytes | int) and (estimate := _METHODS.get(getattr(method, "__name__", ""))):
            _take(estimate(owner, *args, *kwargs.values()))
        return _kept(super().call(__context, __obj, *args, **kwargs))
