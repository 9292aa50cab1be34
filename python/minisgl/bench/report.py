"""The output of a benchmark: raw JSON, a Markdown report, and one compact JSON line at the end of stdout.

    report = Report(folder, "Offline throughput")
    report.section("Throughput", table(("variant", "tok/s"), rows))
    report.write(raw)            # FOLDER/raw.json and FOLDER/README.md, with the environment
    print_result(summary)        # the last line of stdout

All figures of a report are in its raw JSON, where NaN and infinities are null.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.bench.environment import environment, environment_lines

RAW = "raw.json"


class Report:
    """A report of sections, written as `README.md` next to the raw data, with the environment at construction."""

    def __init__(self, folder: Path, title: str, *, command: str = "") -> None:
        self.folder = folder
        self.environment = environment()
        self._title = title
        self._command = command
        self._sections: list[tuple[str, str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def section(self, heading: str, *texts: str) -> None:
        self._sections.append((heading, "\n\n".join(text for text in texts if text)))

    def clear(self) -> None:
        """Remove all sections, to write a longer report in place of this one."""
        self._sections.clear()

    def write(self, raw: Mapping[str, Any]) -> Path:
        """Write both files, with environment and command added to `raw`. Return the report's path."""
        record = {"title": self._title, "command": self._command, "environment": self.environment, **raw}
        write_json(self.folder / RAW, record)
        parts = [f"# {self._title}"]
        if self._command:
            parts.append(f"```sh\n{self._command}\n```")
        parts += [f"## {heading}\n\n{text}" for heading, text in self._sections]
        parts.append(f"## Environment\n\n{environment_lines(self.environment)}")
        path = self.folder / "README.md"
        _replace(path, "\n\n".join(parts))
        return path


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. Numbers are right-aligned and formatted by `number`; None is an empty cell."""
    cells = [[_cell(value) for value in row] for row in rows]
    if any(len(row) != len(head) for row in cells):
        raise ValueError(f"rows: must have {len(head)} columns like the head")
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(head))]
    rule = ["---:" if flag else "---" for flag in right]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(head), rule, *cells])


def number(value: float) -> str:
    """Format a number: three significant digits below 1,000, whole numbers with separators from there on."""
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def public_command(arguments: Sequence[str], program: str = "minisgl bench") -> str:
    """Return `program` with `arguments` as a command line, without the folders of this machine's paths."""
    shown = [re.sub(r"^([\w.-]+=)?~?/(?:.*/)?(?=[^/]+/?$)", r"\1", text) for text in arguments]
    return f"{program} {shlex.join(shown)}".rstrip()


def write_json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(data), indent=1, allow_nan=False)
    # lists of plain values go on one line, so that thousands of samples stay readable
    text = re.sub(r"\[\n([^\[\]{}]*?)\n\s*\]", _on_one_line, text)
    _replace(path, text)


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole: if the program is killed, the old file stays."""
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


JSON_HELP = "end with one line of compact JSON, for programs (default: with the table)"


def print_result(result: Mapping[str, Any]) -> None:
    """Print compact JSON as the last line of stdout, for programs that ran the command. A terminal gets none."""
    if sys.stdout.isatty():
        return
    sys.stdout.flush()
    print(json.dumps(plain(result), separators=(",", ":"), allow_nan=False), flush=True)


def plain(data: object) -> Any:
    """Convert `data` to plain JSON values: arrays to lists, numpy numbers to numbers, NaN and infinities to None.
    Raises `TypeError` for other types, such as paths."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, np.ndarray):
        return plain(data.tolist())
    if isinstance(data, np.generic):
        return plain(data.item())
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if data is None or isinstance(data, (str, int, bool)):
        return data
    raise TypeError(f"{type(data).__name__} cannot be part of a result")


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(line.strip() for line in match[1].splitlines())}]"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, str)):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float)):
        return number(value)
    return str(value)


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or re.fullmatch(r"[+-]?[\d,]+(\.\d+)?( ?%)?", cell) is not None
