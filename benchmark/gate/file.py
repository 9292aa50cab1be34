"""The gates file: what must hold, as data.

    gates:
      - name: a decode step of 256 rows
        run: minisgl bench scheduler --case decode_256
        checks:
          - {field: us.rust_hotpath.decode_256, at_most: 5}

A misspelt key, a kind without what it needs, a check without a bound and two gates of one name are errors
with the file's name; nothing is a default that lets a gate pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from minisgl.config import ConfigError

Kind = Literal["command", "variation", "start_stop", "shadow"]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on one field of the result, which is named by its keys with dots between (`variants.python.cpu_s`)."""

    field: str
    at_least: float | None = None
    at_most: float | None = None
    equals: bool | int | float | str | None = None

    def bound(self) -> str:
        low = None if self.at_least is None else f"at least {self.at_least:g}"
        high = None if self.at_most is None else f"at most {self.at_most:g}"
        same = None if self.equals is None else f"{self.equals}"
        return ", ".join(text for text in (low, high, same) if text is not None)

    def holds(self, value: object) -> bool:
        if self.equals is not None and (
            value != self.equals or isinstance(value, bool) != isinstance(self.equals, bool)
        ):
            return False
        if self.at_least is None and self.at_most is None:
            return True
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= value <= high


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One gate.

    command: `run` ends with code 0, and its last line on stdout is JSON that meets `checks` (without checks the code
    alone decides). variation: `run`, `repeats` times; checks see cv (of `field`), median and values. start_stop: a
    server with `flags` started and stopped `repeats` times; checks see start_s, stop_s (medians); anything left behind
    fails. shadow: a seeded load on the echo engine with both schedulers; any difference fails.
    """

    name: str
    kind: Kind = "command"
    run: str = ""
    field: str = ""
    flags: tuple[str, ...] = ()
    repeats: int = 0
    checks: tuple[Check, ...] = ()
    timeout_s: float = 600.0

    def problem(self) -> str | None:
        """Why this cannot be a gate."""
        if self.kind in ("command", "variation") and not self.run:
            return "run: missing: the command"
        if self.kind in ("start_stop", "shadow") and self.run:
            return f"run: not for the kind {self.kind}"
        if self.kind == "variation" and (not self.field or self.repeats < 2 or not self.checks):
            return "variation: needs field, repeats of at least 2, and checks"
        if self.kind == "start_stop" and self.repeats < 1:
            return "start_stop: needs repeats of at least 1"
        if self.timeout_s <= 0:
            return "timeout_s: must be above 0"
        empty = [check.field for check in self.checks if not check.bound()]
        return f"checks: {empty[0]}: needs at_least, at_most or equals" if empty else None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gates: tuple[Gate, ...]


def read_gates(path: Path) -> tuple[Gate, ...]:
    """Raises `ConfigError` with what is wrong and where."""
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        gates = msgspec.convert(data, _File).gates
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not gates:
        raise ConfigError(f"{path}: gates: must have at least one")
    names = [gate.name for gate in gates]
    for gate in gates:
        if names.count(gate.name) > 1:
            raise ConfigError(f"{path}: {gate.name}: two gates have this name")
        if (problem := gate.problem()) is not None:
            raise ConfigError(f"{path}: {gate.name}: {problem}")
    return gates
