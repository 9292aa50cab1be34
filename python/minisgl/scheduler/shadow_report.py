"""Reading what a shadow reported: which differences, how many, and the first of them with the calls that led to it.

A report that was cut off is read up to the cut.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHOWN = 160  # characters of a value
CALLS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """`what` counts the differences by field; `first` is the first line of the report, if there is one."""

    num_diffs: int
    what: dict[str, int]
    first: dict[str, Any] | None

    @property
    def first_call(self) -> str:
        """Such as "schedule(12)"; empty if there is none."""
        trail = [] if self.first is None else self.first["trail"]
        return f"{trail[-1]['call']}({trail[-1]['step']})" if trail else ""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.num_diffs} differences"
        for name, count in self.what.items():
            yield f"  {count:6} {name}"
        if self.first is not None:
            yield f"the first, in {self.first_call}: {self.first['what']}"
            yield f"  primary {_shown(self.first['primary'])}"
            yield f"  shadow  {_shown(self.first['shadow'])}"
            yield "the calls before it:"
            for call in self.first["trail"][-CALLS_SHOWN:]:
                given = call.get("events", call.get("tokens"))
                yield f"  {call['call']}({call['step']}) {_shown(given)}"


def summarize_report(path: Path) -> ReportSummary:
    """Raises `OSError`, and `ValueError` for a file that is no report."""
    diffs = list(_diffs(path))
    what = Counter(str(one["what"]) for one in diffs)
    return ReportSummary(len(diffs), dict(what.most_common()), diffs[0] if diffs else None)


def _diffs(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return  # cut off: every whole line ends with a newline
            raise ValueError(f"{path.name}: line {number}: {error}") from error
        if not isinstance(found, dict) or not {"what", "primary", "shadow", "trail"} <= found.keys():
            raise ValueError(f"{path.name}: line {number}: not a shadow's report")
        yield found


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
