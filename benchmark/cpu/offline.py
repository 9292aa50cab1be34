"""`python -m benchmark.cpu offline`: the CPU engine beside llama.cpp and the torch engine, without a server.

Three parts: the embedded model (128 in, 64 out), random weights in Qwen3-0.6B's shapes as Q4_1, Q8_0 and bfloat16
(`QWEN_SIZES`), and one thread against two. Each with its bars; the machine's limits stand beside.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmark.cpu import bars, limits, models
from benchmark.cpu.sidebyside import Found, measure, missing_table, speeds_table
from benchmark.cpu.sizes import model_size
from benchmark.cpu.variants import ENGINES, LLAMA, Point, Setup
from minisgl.bench.report import Report, print_result, table

NUM_IN, NUM_OUT = 128, 64
BATCHES = (1, 8, 32)
PARTS = ("smollm2", "q4_1", "q8_0", "bf16", "scaling")
REHEARSAL_IN, REHEARSAL_OUT = 16, 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`models`: folder of the random weights; `variants`: only these, where a part has them."""

    rounds: int = 3
    threads: int = 2
    llama: Mapping[str, Path] = field(default_factory=dict)
    models: Path | None = None
    parts: Sequence[str] = PARTS
    variants: Sequence[str] | None = None
    rehearse: bool = False

    def points(self, part: str) -> list[Point]:
        """Of a part. Random weights of 0.6B parameters get shorter ones: the slower variant takes minutes a round."""
        if self.rehearse:
            return [Point("decode", 1, REHEARSAL_IN, REHEARSAL_OUT), Point("prefill", 1, REHEARSAL_IN)]
        if part == "smollm2":
            return [*(Point("decode", batch, NUM_IN, NUM_OUT) for batch in BATCHES), Point("prefill", 1, 512)]
        return [*(Point("decode", batch, 32, 24) for batch in BATCHES), Point("prefill", 1, 256)]

    def names(self, of_part: Sequence[str]) -> list[str]:
        if self.rehearse:
            of_part = ["echo"]
        if LLAMA in of_part:
            of_part = [*of_part, *(name for name in self.llama if name != LLAMA)]
        return [name for name in of_part if self.variants is None or name in self.variants]


VARIANTS = {
    "smollm2": ("exact", "bf16", "int8", LLAMA, "torch"),
    "q4_1": ("int8", "exact", LLAMA),
    "q8_0": ("int8", "exact", LLAMA),
    "bf16": ("bf16", "exact", "torch-bf16"),
}
BARS = {"smollm2": bars.SMOLLM2, "q4_1": bars.QWEN_BLOCKS, "q8_0": bars.QWEN_BLOCKS, "bf16": bars.QWEN_BF16}


def run(settings: Settings, out: Path | None, command: str) -> dict[str, Any]:
    report = None if out is None else Report(out, "The CPU engine offline", command=command)
    raw: dict[str, Any] = {"limits": {} if settings.rehearse else limits.measure(settings.threads)}
    verdicts: list[dict[str, Any]] = []
    if report is not None and raw["limits"]:
        report.section("Limits of the machine", limits.limits_table(raw["limits"]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.models or Path(temporary)
        for part in settings.parts:
            if part == "scaling":
                raw[part] = record = scaling(settings)
                text = _scaling_table(record)
            else:
                found, points = _measure(settings, part, folder)
                judged = bars.verdicts(part, BARS[part], found.medians(points))
                verdicts += judged
                raw[part] = {**found.record(points), "verdicts": judged}
                texts = [speeds_table(found, points), bars.ratio_table(judged), missing_table(found.missing)]
                if raw["limits"]:
                    raw[part]["shares"] = shared = _shares(settings, part, found, points, raw["limits"], folder)
                    texts.insert(2, _shares_table(shared))
                text = "\n\n".join(one for one in texts if one)
            print(f"\n{part}\n\n{text}\n", flush=True)
            if report is not None:
                report.section(_heading(settings, part), text)
                report.write(raw)
    result = {"bench": "cpu offline", "bars": bars.score(verdicts), "medians": _medians(raw)}
    print_result(result)
    return raw


def _measure(settings: Settings, part: str, folder: Path) -> tuple[Found, list[Point]]:
    file = _file(settings, part, folder)
    points = settings.points(part)
    # bfloat16: llama.cpp is no opponent there
    setup = Setup(
        model=models_name(part, file),
        gguf=file if part != "bf16" else None,
        llama=settings.llama,
        threads=settings.threads,
        points=points,
    )
    return measure(settings.names(VARIANTS[part]), setup, points, settings.rounds, part), points


def models_name(part: str, file: Path) -> str:
    return "smollm2" if part == "smollm2" else str(file)


def _file(settings: Settings, part: str, folder: Path) -> Path:
    if part == "smollm2":
        return models.smollm2()
    return models.qwen3(part, folder, models.TINY if settings.rehearse else models.QWEN3_06B)


def scaling(settings: Settings) -> dict[str, Any]:
    """One thread against two at batch 8, alive side by side; only one is asked at a time."""
    points = settings.points("smollm2")
    points = [point for point in points if point.batch == 8] or points[:1]
    points.append(settings.points("smollm2")[-1])
    found: dict[str, Any] = {}
    for name in settings.names([name for name in ("exact", "int8") if name in ENGINES]):
        speeds: dict[str, dict[str, float]] = {}
        missing: dict[str, str] = {}
        samples: dict[int, list[Found]] = {1: [], 2: []}
        for _ in range(max(settings.rounds, 2)):
            for threads in (1, 2):
                setup = Setup(model="smollm2", threads=threads, points=points)
                one = measure([name], setup, points, 1, f"scaling, {threads} threads")
                samples[threads].append(one)
                missing.update(one.missing)
        for point in points:
            best = {
                str(threads): max(
                    (v for one in of for v in one.samples(points).get(name, {}).get(point.name, [])), default=0.0
                )
                for threads, of in samples.items()
            }
            if all(best.values()):
                speeds[point.name] = {**best, "ratio": best["2"] / best["1"]}
        found[name] = {"speeds": speeds, "missing": missing}
    return found


def _scaling_table(record: dict[str, Any]) -> str:
    rows = [
        (variant, point, one["1"], one["2"], one["ratio"], bars.SCALING, bars.said(one["ratio"] >= bars.SCALING))
        for variant, of_variant in record.items()
        for point, one in of_variant["speeds"].items()
    ]
    missing = {variant: why for variant, of_variant in record.items() for why in of_variant["missing"].values()}
    head = ("variant", "point", "1 thread, tok/s", "2 threads", "ratio", "bar", "")
    return "\n\n".join(text for text in (table(head, rows) if rows else "", missing_table(missing)) if text)


def _shares(
    settings: Settings, part: str, found: Found, points: Sequence[Point], measured: dict[str, Any], folder: Path
) -> dict[str, dict[str, dict[str, float]]]:
    """How near our variants come to the limits, by variant and point."""
    size = model_size(_file(settings, part, folder))
    shared: dict[str, dict[str, dict[str, float]]] = {}
    for variant in ("exact", "int8"):
        for point in points:
            if tok_s := found.medians(points).get(variant, {}).get(point.name):
                decoding = point.kind == "decode"
                shared.setdefault(variant, {})[point.name] = limits.shares(
                    measured,
                    weight_bytes=size["weight_bytes"],
                    # a prompt needs the head once
                    parameters=size["parameters"] if decoding else size["parameters"] - size["head"],
                    kv_bytes=size["kv_bytes"] * (point.num_in + point.num_out // 2) if decoding else 0,
                    batch=point.batch if decoding else point.num_in,
                    tok_s=tok_s,
                    kind="int8" if variant == "int8" and part != "bf16" else "f32",
                )
    return shared


def _shares_table(shared: dict[str, dict[str, dict[str, float]]]) -> str:
    kinds = sorted({kind for of_variant in shared.values() for one in of_variant.values() for kind in one})
    rows = [
        (variant, point, *(100 * one[kind] if kind in one else None for kind in kinds))
        for variant, of_variant in shared.items()
        for point, one in of_variant.items()
    ]
    return table(("variant", "point", *(f"% of {kind}" for kind in kinds)), rows) if rows else ""


def _heading(settings: Settings, part: str) -> str:
    titles = {
        "smollm2": "SmolLM2-135M Q4_1",
        "q4_1": "Qwen3-0.6B's shapes, random weights, Q4_1",
        "q8_0": "Qwen3-0.6B's shapes, random weights, Q8_0",
        "bf16": "Qwen3-0.6B's shapes, random weights, bfloat16",
        "scaling": "One thread and two",
    }
    return f"{titles[part]} ({settings.threads} threads, {os.cpu_count()} cores)"


def _medians(raw: dict[str, Any]) -> dict[str, Any]:
    return {part: raw[part]["medians"] for part in raw if part not in ("limits", "scaling")}
