"""Flags of mini-sglang and SGLang: aliases of flags here, and flags that have no effect here.

Invariants: no help shows them, and a `--config` file may have them; a flag without an effect gets one line that says
so; a flag that asks for something unsupported is refused with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.config import ConfigError


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name, `typed`, for `flag` (with a fixed `value` if not None). One value is repeated for several."""

    typed: str
    flag: str
    value: object = None


ALIASES = (
    Alias("--attn", "--attention-backend"),
    Alias("--attn-impl", "--attention-backend"),
    Alias("--graph", "--cuda-graph-max-bs"),
    Alias("--eager", "--cuda-graph-max-bs", 0),
    Alias("--enforce-eager", "--cuda-graph-max-bs", 0),
    Alias("--disable-cuda-graph", "--cuda-graph-max-bs", 0),
    Alias("--max-extend-length", "--max-prefill-length"),
    Alias("--max-seq-len-override", "--max-seq-len"),
    Alias("--dummy-weight", "--load-format", "dummy"),
    Alias("--shell-mode", "--shell"),
    Alias("--max-new-tokens", "--max-tokens"),
    Alias("--max-new-tokens", "--output-len"),  # of bench offline
    Alias("--max-tokens", "--output-len"),
)


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A flag without an effect here. `line(value)` returns the notice that says why, or raises `ConfigError`."""

    typed: tuple[str, ...]
    line: Callable[[Any], str]
    kind: Callable[[str], object] = str  # type of its value
    choices: tuple[str, ...] | None = None
    has_value: bool = True

    @property
    def dest(self) -> str:
        return self.typed[0].removeprefix("--").replace("-", "_")


def _tokenizers(number: int) -> str:
    if number not in (0, 1):
        raise ConfigError(f"--num-tokenizer {number}: must be 0 or 1: threads of the HTTP process tokenize")
    return f"--num-tokenizer {number}: has no effect: threads of the HTTP process tokenize"


NO_EFFECT = (
    NoEffect(
        ("--disable-pynccl",),
        lambda _: "--disable-pynccl: has no effect: torch's own NCCL is used",
        has_value=False,
    ),
    NoEffect(
        ("--moe-backend",),
        lambda name: f"--moe-backend {name}: has no effect: there is one backend for experts",
        choices=("auto", "fused"),
    ),
    NoEffect(("--num-tokenizer", "--tokenizer-count"), _tokenizers, kind=int),
)
NOT_GIVEN: Any = argparse.SUPPRESS


class _Times(argparse.Action):
    """Action of an alias with one value: repeats it for a flag that takes `const` values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [values] * self.const)


def add_to(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the aliases of all flags that `parser` has, and return it."""
    actions = {option: action for action in parser._actions for option in action.option_strings}
    for alias in ALIASES:
        target = actions.get(alias.flag)
        if target is None or alias.typed in actions:
            continue
        actions[alias.typed] = target
        kind: dict[str, Any] = {} if target.type is None else {"type": target.type}
        hidden: dict[str, Any] = {"dest": target.dest, "default": NOT_GIVEN, "help": NOT_GIVEN}
        if target.nargs == 0 or alias.value is not None:
            value = target.const if alias.value is None else alias.value
            parser.add_argument(alias.typed, action="store_const", const=value, **hidden)
        elif isinstance(target.nargs, int):
            parser.add_argument(alias.typed, action=_Times, const=target.nargs, metavar="N", **kind, **hidden)
        else:
            parser.add_argument(alias.typed, choices=target.choices, metavar=target.metavar, **kind, **hidden)
    if "--tp" in actions:  # a command that loads an engine
        for flag in NO_EFFECT:
            _add_no_effect(parser, flag)
    return parser


def _add_no_effect(parser: argparse.ArgumentParser, flag: NoEffect) -> None:
    if not flag.has_value:
        parser.add_argument(*flag.typed, dest=flag.dest, action="store_true", help=NOT_GIVEN)
    else:
        parser.add_argument(*flag.typed, dest=flag.dest, type=flag.kind, choices=flag.choices, help=NOT_GIVEN)


def notices(args: argparse.Namespace) -> Iterator[str]:
    """Yield a notice for each flag in `args` that has no effect. Raises `ConfigError` for an unsupported value."""
    for flag in NO_EFFECT:
        value = getattr(args, flag.dest, None)
        if value is not None and value is not False:
            yield flag.line(value)
