"""The settings of `minisgl bench serve`, its points and its measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.bench.load import Measured
from minisgl.bench.render import Endpoint
from minisgl.bench.serve_metrics import Slo
from minisgl.bench.workloads import WorkloadSettings
from minisgl.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Settings of the benchmark, by the names of its flags."""

    base_url: str | None
    model: str | None
    api_key: str | None
    flags: tuple[str, ...]
    endpoint: Endpoint
    extra: Mapping[str, Any]
    workload: str
    workload_settings: WorkloadSettings
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    trace_arrivals: bool
    duration_s: float
    warmup_requests: int | None
    repeat: int
    keep_alive: bool
    timeout_s: float
    ramp_s: float
    threads: int
    slo: Slo

    def check(self) -> None:
        for flag, values in (("--concurrency", self.concurrency), ("--rate", self.rates), ("--repeat", (self.repeat,))):
            for value in values:
                if not 0 < value < math.inf:
                    raise ConfigError(f"{flag} {value:g}: must be above 0")
        if self.duration_s <= 0:
            raise ConfigError(f"--duration {self.duration_s:g}: must be above 0")
        if math.isfinite(self.duration_s) and not self.concurrency:
            raise ConfigError("--duration: needs --concurrency: an open loop ends with its arrivals")


@dataclass(frozen=True, slots=True)
class Point:
    """A load to measure: `value` clients in a closed loop, an open loop at rate `value`, or a trace's arrivals."""

    mode: str  # closed, poisson, trace
    value: float = 0.0

    @property
    def label(self) -> str:
        return {"closed": f"{self.value:g} clients", "poisson": f"{self.value:g}/s"}.get(self.mode, "trace")


@dataclass(slots=True)
class Measurement:
    """A repeat of one point, with its measurements."""

    point: Point
    repeat: int
    measured: Measured
    figures: dict[str, Any] = field(default_factory=dict)


def points_of(settings: Serve) -> list[Point]:
    return [
        *(Point("closed", count) for count in settings.concurrency),
        *(Point("poisson", rate) for rate in settings.rates),
        *([Point("trace")] if settings.trace_arrivals else []),
    ]
