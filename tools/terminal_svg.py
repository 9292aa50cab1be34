"""Draw a terminal's screen over time as one animated SVG without a script: CSS keyframes show each line in its time.

Invariants: a viewer without animation (a reader who asked for reduced motion, a package index) shows the last screen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

CELL_W, CELL_H = 8.4, 18.0
MARGIN, BAR_H = 14.0, 30.0
COLORS = {
    "default": "#c9d1d9",
    "black": "#6e7681",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#f0f6fc",
}


@dataclass(frozen=True)
class Cell:
    text: str = " "
    color: str = "default"
    bold: bool = False


Line = tuple[Cell, ...]
Screen = tuple[Line, ...]


@dataclass(frozen=True)
class Frame:
    at_s: float
    screen: Screen


def shorten(frames: Sequence[Frame], longest_s: float) -> list[Frame]:
    """Return the same frames with pauses shortened: none is shown for longer than `longest_s`."""
    shortened: list[Frame] = []
    at_s = 0.0
    for before, frame in zip([None, *frames], frames, strict=False):
        at_s += 0.0 if before is None else min(frame.at_s - before.at_s, longest_s)
        shortened.append(Frame(at_s, frame.screen))
    return shortened


@dataclass(frozen=True)
class Shown:
    """Line of text on a row, visible from `begin_s` to `end_s`."""

    row: int
    line: Line
    begin_s: float
    end_s: float


def lines_shown(frames: Sequence[Frame], end_s: float) -> Iterator[Shown]:
    """Yield each non-empty line of each row once for every period in which it stays the same."""
    for row in range(max(len(frame.screen) for frame in frames)):
        since = 0
        for i in range(1, len(frames) + 1):
            line = frames[since].screen[row]
            if i < len(frames) and frames[i].screen[row] == line:
                continue
            if any(cell.text.strip() for cell in line):
                yield Shown(row, line, frames[since].at_s, frames[i].at_s if i < len(frames) else end_s)
            since = i


def svg(frames: Sequence[Frame], title: str, hold_s: float = 4.0) -> str:
    """Return the SVG of the frames. `hold_s`: seconds for which the last screen stays before the animation restarts."""
    end_s = frames[-1].at_s + hold_s
    num_rows = max(
        (row + 1 for frame in frames for row, line in enumerate(frame.screen) if any(c.text.strip() for c in line)),
        default=1,
    )
    width = max(len(line) for frame in frames for line in frame.screen) * CELL_W + 2 * MARGIN
    height = num_rows * CELL_H + BAR_H + 2 * MARGIN
    rules, texts = [], []
    for number, shown in enumerate(lines_shown(frames, end_s)):
        texts.append(_text(shown, number))
        rules.append(_rule(shown, number, end_s))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
            f"<title>{escape(title)}</title>",
            "<style>",
            "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}",
            *rules,
            "@media (prefers-reduced-motion:reduce){text{animation:none!important}}",
            "</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#0d1117"/>',
            *(
                f'<circle cx="{18 + 18 * i}" cy="18" r="5.5" fill="{color}"/>'
                for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
            ),
            *texts,
            "</svg>\n",
        ]
    )


def _rule(shown: Shown, number: int, end_s: float) -> str:
    """Return the CSS of a line's visibility. Without animation only lines of the last screen are visible."""
    begin, end = 100 * shown.begin_s / end_s, 100 * shown.end_s / end_s
    last = shown.end_s >= end_s
    steps = "" if shown.begin_s == 0 else "0%{visibility:hidden}"
    steps += f"{begin:.2f}%{{visibility:visible}}" + ("" if last else f"{end:.2f}%{{visibility:hidden}}")
    rest = "visible" if last else "hidden"
    return (
        f"@keyframes k{number}{{{steps}}}"
        f"#l{number}{{visibility:{rest};animation:k{number} {end_s:.2f}s step-end infinite}}"
    )


def _text(shown: Shown, number: int) -> str:
    """Return the `text` element of a line, with a length for each run of a style, so that columns align in any font."""
    y = BAR_H + MARGIN + shown.row * CELL_H + 13
    spans, column = [], 0
    for (color, bold), cells in groupby(shown.line, key=lambda cell: (cell.color, cell.bold)):
        text = "".join(cell.text for cell in cells)
        if text.strip():
            weight = ' font-weight="bold"' if bold else ""
            visible = text.rstrip()
            spans.append(
                f'<tspan x="{MARGIN + column * CELL_W:.1f}" textLength="{len(visible) * CELL_W:.1f}" '
                f'fill="{COLORS.get(color, COLORS["default"])}"{weight}>{escape(visible)}</tspan>'
            )
        column += len(text)
    return f'<text id="l{number}" y="{y:.0f}">{"".join(spans)}</text>'
