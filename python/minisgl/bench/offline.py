"""The command `minisgl bench offline`: both schedulers on the same sequences, in turns, and the report.

Every run is a new process (`offline_run`); the variants alternate, and so does their order; a difference in their
tokens is reported.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from minisgl.bench.offline_run import PARTS, OfflineJob
from minisgl.bench.report import Report, print_result, table
from minisgl.bench.stats import paired_difference, turns
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.choice import cuda_is_available
from minisgl.engine.sim.profile import load_profile

WITHOUT_MODEL = ("echo", "sim")
Range = tuple[int, int]
Runs = dict[str, list[dict[str, Any]]]

SIZES: dict[str, tuple[int, Range, Range]] = {
    "full": (256, (100, 1024), (100, 1024)),
    "small": (16, (32, 128), (32, 64)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """Settings of `bench offline`; None means: as the size says."""

    engine: EngineConfig
    size: str = "auto"
    num_sequences: int | None = None
    input_len: Range | None = None
    output_len: Range | None = None
    seed: int = 0
    control_planes: tuple[str, ...]
    repeats: int = 3

    def job(self) -> OfflineJob:
        """Return the workload of one run. Raises `ConfigError` for an invalid one."""
        num, input_len, output_len = SIZES[self._size()]
        job = OfflineJob(
            engine=self.engine,
            num_sequences=num if self.num_sequences is None else self.num_sequences,
            input_len=self.input_len or input_len,
            output_len=self.output_len or output_len,
            seed=self.seed,
        )
        for flag, value in (("--num-sequences", job.num_sequences), ("--repeats", self.repeats)):
            if value < 1:
                raise ConfigError(f"{flag} {value}: must be at least 1")
        for flag, (low, high) in (("--input-len", job.input_len), ("--output-len", job.output_len)):
            if not 1 <= low <= high:
                raise ConfigError(f"{flag} {low} {high}: must be at least 1, and the second not below the first")
        return msgspec.structs.replace(job, engine=self._engine(job))

    def _size(self) -> str:
        if self.size != "auto":
            return self.size
        return "small" if self.engine.engine not in WITHOUT_MODEL and _device(self.engine) == "cpu" else "full"

    def _engine(self, job: OfflineJob) -> EngineConfig:
        """Return the engine's settings: all sequences run at once, unless the rows are given. The KV pool of an engine
        without a model fits all of them, because its memory costs little."""
        changes: dict[str, Any] = {"max_running_requests": self.engine.max_running_requests or job.num_sequences}
        if self.engine.engine in WITHOUT_MODEL and self.engine.num_pages is None:
            pages = -(-(job.input_len[1] + job.output_len[1]) // self.engine.page_size)
            changes["num_pages"] = (pages + 1) * job.num_sequences
        return msgspec.structs.replace(self.engine, **changes)


def _device(engine: EngineConfig) -> str:
    if engine.device != "auto":
        return engine.device
    return "cuda" if engine.engine != "cpu" and cuda_is_available() else "cpu"


def run_offline(settings: Offline, out: Path | None, *, command: str) -> int:
    """Measure, print the table and the result, and write the report to `out`. Return the exit code."""
    job = settings.job()
    report = None if out is None else Report(out, "Offline throughput", command=command)  # records the load average now
    runs: Runs = {name: [] for name in settings.control_planes}
    with tqdm(total=settings.repeats * len(runs), desc="offline", unit="run", disable=None) as bar:
        for _, name in turns(settings.control_planes, settings.repeats):
            runs[name].append(run_in_a_process(job, name))
            bar.update()
    result = _result(job, settings, runs)
    print(_figures(result))
    if report is not None:
        _write(report, result, runs)
    print_result(result)
    return 0 if result["same_tokens"] in (True, None) else 1


def run_in_a_process(job: OfflineJob, control_plane: str) -> dict[str, Any]:
    """Run a job with one scheduler in a new process and return its figures. Raises `ConfigError` if it fails."""
    engine = msgspec.structs.replace(job.engine, cpu_backend=control_plane)
    done = subprocess.run(
        [sys.executable, "-m", "minisgl.bench.offline_run"],
        input=msgspec.json.encode(msgspec.structs.replace(job, engine=engine)),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"the {control_plane} run failed: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    figures: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return figures


def _result(job: OfflineJob, settings: Offline, runs: Runs) -> dict[str, Any]:
    result: dict[str, Any] = {
        "bench": "offline",
        "engine": job.engine.engine,
        "simulated": load_profile(job.engine.sim_profile).name if job.engine.engine == "sim" else None,
        "model": Path(job.engine.model).name if job.engine.engine != "echo" else None,
        "num_sequences": job.num_sequences,
        "input_len": job.input_len,
        "output_len": job.output_len,
        "seed": job.seed,
        "repeats": settings.repeats,
        "variants": {name: _variant(own) for name, own in runs.items()},
        "same_tokens": None,
    }
    digests = {run["tokens_sha256"] for own in runs.values() for run in own}
    if len(runs) > 1:
        exact = job.engine.engine not in ("auto", "torch")  # torch's rounding may differ with the rows of a step
        result["same_tokens"] = len(digests) == 1 if exact else (True if len(digests) == 1 else None)
        first, second = [[run["output_tok_s"] for run in runs[name]] for name in ("python", "rust_hotpath")]
        paired = paired_difference(first, second)
        result["rust_hotpath_against_python"] = paired.as_dict() | {"text": str(paired)}
    return result


def _variant(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return float(statistics.median(run[key] for run in runs))

    return {
        "output_tok_s": median("output_tok_s"),
        "total_tok_s": median("total_tok_s"),
        "wall_s": median("wall_s"),
        "cpu_s": median("cpu_s"),
        "num_steps": runs[0]["num_steps"],
        "num_retracted": runs[0]["num_retracted"],
        "scheduler_step_us": median("scheduler_step_us"),
        "step_us": {
            part: statistics.median(1e6 * run["seconds"][part] / run["num_steps"] for run in runs)
            for part in (*PARTS, "other")
        },
        "max_rss_mib": max(run["max_rss_mib"] for run in runs),
        "runs_output_tok_s": [run["output_tok_s"] for run in runs],
    }


def _figures(result: Mapping[str, Any]) -> str:
    head = ("scheduler", "output tok/s", "total tok/s", "wall s", "CPU s", "steps", "schedule + commit us/step")
    keys = ("output_tok_s", "total_tok_s", "wall_s", "cpu_s", "num_steps", "scheduler_step_us")
    return table(head, [(name, *(variant[key] for key in keys)) for name, variant in result["variants"].items()])


def _write(report: Report, result: Mapping[str, Any], runs: Runs) -> None:
    lengths = "{} sequences, {} to {} tokens in, {} to {} out, seed {}".format(
        result["num_sequences"], *result["input_len"], *result["output_len"], result["seed"]
    )
    profile = result["simulated"]
    simulated = f" (simulated, profile {profile}: no model runs)" if profile else ""
    report.section(
        "Throughput",
        f"Engine {result['engine']}{simulated}; {lengths}; medians of {result['repeats']} runs, each in a process of "
        "its own, in turns.",
        _figures(result),
        _comparison(result),
    )
    parts = {name: variant["step_us"] for name, variant in result["variants"].items()}
    rows = [(name, *steps.values()) for name, steps in parts.items()]
    report.section(
        "Time of a step",
        "Mean us per step: the scheduler's two calls (requests are taken in before the first), the engine's launch and "
        "the wait for it, and the rest of the loop (replies built).",
        table(("scheduler", *PARTS, "other"), rows),
    )
    report.write({"result": result, "runs": runs})


def _comparison(result: Mapping[str, Any]) -> str:
    paired = result.get("rust_hotpath_against_python")
    if paired is None or paired["ratio"] is None:
        return ""
    said = {
        True: "gave the same tokens",
        False: "**gave different tokens**",
        None: "gave other tokens where rounding decides (a model's logits depend on the rows of a step)",
    }[result["same_tokens"]]
    return (
        f"`rust_hotpath` against `python`: {paired['text']} output tok/s "
        f"(geometric mean over pairs, 95 % t interval). Both {said}."
    )
