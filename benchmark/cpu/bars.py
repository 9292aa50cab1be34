"""What the CPU engine has to reach: ratios against others in the same run, and limits of its own.

A bar names the figure it is about, and whose figure it is divided by; a missing figure is no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.bench.report import table

OFFLINE_POINTS = ("decode 1", "decode 8", "decode 32", "prefill 512")
QWEN_POINTS = ("decode 1", "decode 8", "decode 32", "prefill 256")
HTTP_POINTS = ("clients 1", "clients 8", "clients 32")
FIELDS = ("model", "ours", "theirs", "point", "ours_value", "theirs_value", "ratio", "bar", "met", "stretch")


@dataclass(frozen=True, slots=True)
class Bar:
    """`ours` over `theirs` at `point` must be at least `least`; beyond it lies `stretch`."""

    ours: str
    theirs: str
    point: str
    least: float
    stretch: float | None = None


def _bars(
    ours: str, theirs: str, points: Sequence[str], least: Sequence[float | None], stretch: Sequence[float] = ()
) -> list[Bar]:
    beyond: list[float | None] = list(stretch) or [None] * len(points)
    return [
        Bar(ours, theirs, point, bar, far)
        for point, bar, far in zip(points, least, beyond, strict=True)
        if bar is not None
    ]


SMOLLM2 = (
    *_bars("exact", "llama.cpp", OFFLINE_POINTS, (1.3, 1.8, 1.6, 1.7), (1.5, 2.5, 2.5, 2.5)),
    *_bars("int8", "llama.cpp", OFFLINE_POINTS, (1.8, 3.5, 3.5, 4.0), (2.2, 4.5, 4.5, 5.0)),
    *_bars("exact", "torch", OFFLINE_POINTS, (6.0, 3.0, 1.7, 1.0), (8.0, 4.0, 2.2, 1.25)),
)
QWEN_BLOCKS = tuple(_bars("int8", "llama.cpp", QWEN_POINTS, (1.3, 2.0, 2.0, 2.0)))
QWEN_BF16 = tuple(_bars("bf16", "torch-bf16", QWEN_POINTS, (1.3, None, 1.0, 1.0), (1.5, 1.5, 1.5, 1.5)))
HTTP = (
    *_bars("exact", "llama.cpp", HTTP_POINTS, (1.4, 1.8, 2.0)),
    *_bars("int8", "llama.cpp", HTTP_POINTS, (2.2, 3.3, 3.5)),
)
SCALING = 1.8  # two threads over one, at batch 8

Medians = Mapping[str, Mapping[str, float]]
"""By variant and point."""


def verdicts(model: str, bars: Sequence[Bar], medians: Medians) -> list[dict[str, Any]]:
    """A record for each bar; `met` is None where one of the two was not measured."""
    found: list[dict[str, Any]] = []
    for bar in bars:
        ours, theirs = medians.get(bar.ours, {}).get(bar.point), medians.get(bar.theirs, {}).get(bar.point)
        ratio = ours / theirs if ours and theirs else None
        values = (model, bar.ours, bar.theirs, bar.point, ours, theirs, ratio, bar.least)
        met = None if ratio is None else ratio >= bar.least
        beyond = None if ratio is None or bar.stretch is None else ratio >= bar.stretch
        found.append(dict(zip(FIELDS, (*values, met, beyond), strict=True)))
    return found


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure of ours that must not exceed `most` (or not fall below `least`)."""

    name: str
    unit: str
    most: float | None = None
    least: float | None = None
    stretch: float | None = None

    def keeps(self, value: float, bound: float) -> bool:
        return value <= bound if self.least is None else value >= bound

    def record(self, value: float | None, other: float | None = None) -> dict[str, Any]:
        """`other`: the same of the torch engine, or whoever stands beside it."""
        bound = self.most if self.least is None else self.least
        assert bound is not None
        return {
            "name": self.name,
            "unit": self.unit,
            "value": value,
            "beside": other,
            "bar": bound,
            "met": None if value is None else self.keeps(value, bound),
            "stretch": None if value is None or self.stretch is None else self.keeps(value, self.stretch),
        }


STARTUP = {
    "ready_seen": Limit("process start to ready, file seen before", "s", most=1.5, stretch=0.8),
    "ready_new": Limit("process start to ready, file never seen", "s", most=2.0, stretch=0.8),
    "first_token": Limit("`minisgl generate` to the first token", "s", most=2.0, stretch=1.0),
    "make_serve": Limit("`make serve`, second start, to curl's answer", "s", most=3.0),
    "rss_above": Limit("memory above weights file and KV pages in use", "MB", most=150.0, stretch=80.0),
    "idle_cpu": Limit("CPU of the idle engine process", "% of a core", most=0.5),
}
QUALITY = {
    "exact mean_dlogprob": Limit("exact, f16 KV: mean |dlogprob|", "", most=1e-3),
    "exact max_dlogprob": Limit("exact, f16 KV: largest |dlogprob|", "", most=1e-3),
    "exact top1": Limit("exact, f16 KV: top-1", "%", least=100.0),
    "int8 mean_kl": Limit("int8: mean KL", "nats", most=0.005),
    "int8 top1": Limit("int8: top-1", "%", least=96.0),
    "int8 perplexity": Limit("int8: perplexity off by", "%", most=0.3),
}


def ratio_table(records: Sequence[Mapping[str, Any]], unit: str = "tok/s") -> str:
    head = ("model", "variant", "against", "point", f"ours, {unit}", f"theirs, {unit}", "ratio", "bar", "", "stretch")
    return table(head, [(*(one[f] for f in FIELDS[:8]), said(one["met"]), _beyond(one["stretch"])) for one in records])


def limit_table(records: Sequence[Mapping[str, Any]], beside: str = "torch") -> str:
    head = ("figure", "unit", "value", beside, "bar", "", "stretch")
    rows = [(*(one[k] for k in ("name", "unit", "value", "beside", "bar")), said(one["met"]), _beyond(one["stretch"]))
            for one in records]  # fmt: skip
    return table(head, rows)


def said(met: bool | None) -> str:
    return {True: "met", False: "**not met**", None: "not measured"}[met]


def _beyond(met: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[met]


def score(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many were met, missed, not measured."""
    count: Callable[[bool | None], int] = lambda met: sum(one["met"] is met for one in records)  # noqa: E731
    return {"met": count(True), "not_met": count(False), "not_measured": count(None)}
