"""The parser of every command line. An error is one line: the flag as it was typed, its value and what is valid.

Invariants: an error is raised (`UsageError`) and never printed here; an unknown flag or command is never guessed, but
the nearest known one is named; a number's range is that of its field (`config.RANGES`).
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from minisgl.config import RANGES, ConfigError, Range
from minisgl.envs import EnvError

_ARGUMENT = re.compile(r"argument (\S+): ")


class UsageError(ConfigError):
    """An invalid command line. `prog` is the command that was typed, such as `minisgl serve`."""

    def __init__(self, prog: str, text: str) -> None:
        super().__init__(text)
        self.prog = prog


class Number:
    """A flag's type: a number of type `kind` within the range of the field `dest`."""

    def __init__(self, kind: type[int] | type[float], dest: str) -> None:
        self.kind = kind
        self.range = RANGES.get(dest, Range())

    def __call__(self, text: str) -> int | float:
        try:
            value = self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(must_be(self.kind)) from None
        if problem := self.range.problem(value):
            raise argparse.ArgumentTypeError(problem)
        return value


def must_be(kind: object) -> str:
    """Return the end of an error about a value that is not of type `kind`, such as "must be a whole number"."""
    return "must be a whole number" if kind is int else "must be a number" if kind is float else "is not valid"


def one_of(names: Iterable[object]) -> str:
    return f"must be one of {', '.join(map(str, names))}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown name: the nearest known one, else `otherwise`."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {close[0]}?" if close else otherwise and f": {otherwise}"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are `UsageError`s of one line. Flags cannot be abbreviated."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **how})
        self._arguments: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`. Of all spellings of a flag, which argparse lists, only the typed one is shown."""
        if match := _ARGUMENT.match(message):
            typed = self._typed_names()
            names = match[1].split("/")
            message = next((name for name in names if name in typed), names[0]) + message[match.end(1) :]
        elif message.startswith("the following arguments are required"):
            message = f"{message} (see {self.prog} --help)"
        raise UsageError(self.prog, message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.refuse(rest)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments = args or ()
        return super().parse_known_args(args, namespace)

    def refuse(self, rest: Sequence[str], namespace: object = None) -> NoReturn:
        """Raise the error about `rest`, the arguments that no parser recognized."""
        unknown = next((text for text in rest if text.startswith("-")), rest[0]).partition("=")[0]
        parser = self._asked()
        what = "unknown flag" if unknown.startswith("-") else "unexpected argument"
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        parser.error(f"{unknown}: {what}{did_you_mean(unknown, known, f'see {parser.prog} --help')}")

    def typed(self) -> Mapping[str, str]:
        """Return the last typed spelling of each flag that was given, by its destination."""
        parser = self._asked()
        actions = parser._option_string_actions
        return {actions[name].dest: name for name in parser._typed_names() if name in actions}

    def _typed_names(self) -> list[str]:
        return [text.partition("=")[0] for text in self._arguments]

    def _asked(self) -> Parser:
        """Return the parser of the typed command, else this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, parser in action.choices.items():
                    if name in self._arguments and isinstance(parser, Parser):
                        return parser._asked()
        return self

    def _spelling(self, action: argparse.Action) -> str:
        """Return the flag as it was typed, or the name of a positional argument."""
        typed, names = self._typed_names(), action.option_strings
        return next(
            (name for name in names if name in typed), names[0] if names else str(action.metavar or action.dest)
        )

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, EnvError):  # from code that the type's check has run
                raise error.__context__ from None
            kind = getattr(action.type, "kind", action.type)
            why = error.message if isinstance(error.__context__, argparse.ArgumentTypeError) else must_be(kind)
            why = why.removeprefix(arg_string).removeprefix(": ") if why.startswith(f"{arg_string}: ") else why
            raise argparse.ArgumentError(None, self._about(action, arg_string, why)) from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            names = [choice.dest for choice in action._choices_actions]
            hint = did_you_mean(str(value), action.choices, f"choose one of {', '.join(names)}")
            raise argparse.ArgumentError(None, f"{value}: unknown command{hint}")
        raise argparse.ArgumentError(None, self._about(action, value, one_of(action.choices)))

    def _about(self, action: argparse.Action, value: object, why: str) -> str:
        shown = str(value) if str(value).strip() else repr(value)
        return f"{self._spelling(action)} {shown}: {why}"
