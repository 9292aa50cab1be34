"""Compare the simulated engine's profiles with the steps of a real device, and fit better parameters.

    python benchmark/gpu/calibrate.py benchmark/runs/DATE-gpu-offline/points.json

For each model with a profile: predicted over measured time of its steps, by kind; and the bandwidth, arithmetic and
overhead of a roofline fitted to these steps. Decode steps determine bandwidth and overhead, steps of many tokens the
arithmetic.

The same points give the same figures; a profile's file is not changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import numpy as np  # noqa: E402

from minisgl.bench.report import print_result, table  # noqa: E402
from minisgl.engine.sim.profile import Model, Roofline, StepLoad, load_profile, profile_names  # noqa: E402

PROFILE = "{}-h200"
MANY_TOKENS = 2048  # from which on arithmetic decides
CLEARLY = 1.2


def traffic(roofline: Roofline, load: StepLoad) -> float:
    """Return the bytes that a step reads and writes."""
    model = roofline.model
    weights = (model.layer_weights + model.output_weights) * roofline.bytes_per_weight
    return weights + (load.kv_tokens + load.tokens) * roofline.kv_bytes


def operations(model: Model, load: StepLoad) -> float:
    flops = 2.0 * (model.layer_weights * load.tokens + model.output_weights * load.samples)
    return flops + 4.0 * model.layers * model.heads * model.head_dim * load.pairs


def fit(roofline: Roofline, loads: Sequence[StepLoad], seconds: Sequence[float]) -> dict[str, float]:
    """Fit roofline parameters by least squares: seconds = overhead + bytes / bandwidth over memory-bound decode steps,
    then seconds - overhead = FLOP / peak over steps of many tokens. Parameters without such steps are omitted."""
    parameters: dict[str, float] = {}
    decode = [i for i, load in enumerate(loads) if load.tokens == load.rows and _by_memory(roofline, load)]
    if len({loads[i].kv_tokens for i in decode}) > 2:
        x = np.array([traffic(roofline, loads[i]) for i in decode])
        slope, start = np.polyfit(x, np.array([seconds[i] for i in decode]), 1)
        parameters |= {"bandwidth": float(1 / slope), "overhead_us": float(1e6 * start)}
    overhead = parameters.get("overhead_us", 0.0) / 1e6
    many = [i for i, load in enumerate(loads) if load.tokens >= MANY_TOKENS]
    if many:
        x = np.array([operations(roofline.model, loads[i]) for i in many])
        y = np.array([seconds[i] for i in many]) - overhead
        parameters["flops"] = float((x @ x) / (x @ y))
    return parameters


def _by_memory(roofline: Roofline, load: StepLoad) -> bool:
    by_arithmetic = operations(roofline.model, load) / roofline.flops
    return traffic(roofline, load) / roofline.bandwidth > CLEARLY * by_arithmetic


def compare(roofline: Roofline, loads: Sequence[StepLoad], seconds: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of predicted to measured time by kind of step: median, 5th and 95th percentile."""
    ratio = np.array([roofline.seconds(load) for load in loads]) / np.array(seconds)
    decode = np.array([load.tokens == load.rows for load in loads])
    by_kind = {}
    for kind, chosen in (("decode", decode), ("with prompts", ~decode)):
        if chosen.any():
            low, median, high = np.percentile(ratio[chosen], (5, 50, 95)).tolist()
            by_kind[kind] = {"steps": int(chosen.sum()), "median": median, "p5": low, "p95": high}
    return by_kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    steps = json.loads(parser.parse_args().points.read_text())["steps"]
    results = {}
    for model, points in steps.items():
        name = PROFILE.format(model)
        roofline = load_profile(name).roofline if name in profile_names() else None
        if roofline is None:
            print(f"{model}: no profile {name}\n")
            continue
        loads = [StepLoad(*(int(value) for value in point[:5])) for point in points]
        seconds = [point[5] / 1e3 for point in points]
        against, fitted = compare(roofline, loads, seconds), fit(roofline, loads, seconds)
        rows = [(kind, of["steps"], of["median"], of["p5"], of["p95"]) for kind, of in against.items()]
        print(f"{model}: predicted / measured\n\n{table(('steps', 'number', 'median', '5 %', '95 %'), rows)}\n")
        own = {"bandwidth": roofline.bandwidth, "flops": roofline.flops}
        own["overhead_us"] = roofline.overhead_us + roofline.model.layers * roofline.layer_overhead_us
        print(
            table(("of the whole step", "profile", "fitted"), [(key, own[key], fitted.get(key)) for key in own]), "\n"
        )
        results[model] = {"against": against, "fitted": fitted}
    print_result(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
