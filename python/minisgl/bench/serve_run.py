"""The work of `minisgl bench serve`: points (a concurrency, a rate, a trace), each warmed up and repeated.

No point sends a text that an earlier one has sent, so that a warm prefix cache cannot help a later point; a failed
request makes the exit code 1.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl.bench.balance import HEAD, balance_rows, difference, read_counters
from minisgl.bench.load import Load, Server, calibrate, first_model, model_facts, send, server_counters
from minisgl.bench.render import Renderer
from minisgl.bench.report import Report, print_result, table
from minisgl.bench.serve_metrics import figures
from minisgl.bench.serve_report import latency_table, result_of, summary_table, write_report
from minisgl.bench.serve_settings import Measurement, Point, Serve, points_of
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.workloads import (
    WARMUP_RUN,
    Workload,
    fitted,
    make_workload,
    poisson_arrivals,
)
from minisgl.config import ConfigError

ENDLESS = 1_000_000  # requests of a run that ends by its duration


def run_serve(settings: Serve, out: Path | None, *, command: str) -> int:
    """Measure, print the table and the result, and write the report to `out`. Return the exit code."""
    settings.check()
    points = points_of(settings)
    make_workload(settings.workload, settings.workload_settings)  # raises errors before a server is started
    report = None if out is None else Report(out, "Serving under load", command=command)
    extras: dict[str, Any]
    with _server(settings) as server:
        extras = {"simulated": model_facts(server).get("simulated")}
        runs = list(_measurements(settings, server, points))
        extras["of_itself"] = server_counters(server)
    result = result_of(settings, server, runs, extras)
    print(f"{summary_table(result)}\n\n{latency_table(result)}")
    if spread := balance_rows(result):
        print(f"\n{table(HEAD, spread)}")
    if report is not None:
        write_report(report, result, runs)
    print_result(result)
    return 0 if all(one.figures["failed"] == 0 for one in runs) else 1


@contextlib.contextmanager
def _server(settings: Serve) -> Iterator[Server]:
    if settings.base_url is not None:
        url = settings.base_url.rstrip("/").removesuffix("/v1")
        yield Server(url, settings.model or first_model(url, settings.api_key), settings.api_key)
        return
    try:
        with ServerProcess(Launch(flags=settings.flags)) as own:
            yield Server(own.url, settings.model or own.model, settings.api_key, own)
    except ServerFailed as error:
        raise ConfigError(str(error)) from error


def _measurements(settings: Serve, server: Server, points: Sequence[Point]) -> Iterator[Measurement]:
    renderer = renderer_for(settings, server)
    run = 0
    for repeat in range(settings.repeat):
        for point in points:
            load = load_of(settings, renderer, point, run)
            warm_up(settings, server, renderer, point, run)
            for reason, count in load.left_out.items():
                print(f"minisgl bench serve: {point.label}: {count} {reason}", file=sys.stderr)
            before = read_counters(server)
            measured = send(server, load, point.label)
            engines = difference(before, read_counters(server))
            more = {"left_out": dict(load.left_out), "engines": engines}
            yield Measurement(point, repeat, measured, {**figures(measured, settings.slo), **more})
            run += 1


def renderer_for(settings: Serve, server: Server) -> Renderer:
    line = calibrate(server, settings.endpoint, settings.extra)
    context = model_facts(server).get("max_model_len")
    return Renderer(
        server.model, settings.endpoint, line, settings.extra, context if isinstance(context, int) else None
    )


def load_of(settings: Serve, renderer: Renderer, point: Point, run: int) -> Load:
    made = make_workload(settings.workload, replace(settings.workload_settings, run=run))
    workload = fitted(made, renderer.context)
    chains, arrivals = workload.chains, _arrivals(settings, workload, point, run)
    if math.isfinite(settings.duration_s) and point.mode == "closed":
        chains = chains * -(-ENDLESS // len(workload.requests))  # texts repeat when all were sent
    return Load(
        bodies=[renderer.body(request) for request in workload.requests],
        chains=chains,
        endpoint=settings.endpoint,
        arrivals=arrivals,
        concurrency=int(point.value) if point.mode == "closed" else 0,
        ramp_s=settings.ramp_s,
        duration_s=settings.duration_s if point.mode == "closed" else math.inf,
        keep_alive=settings.keep_alive,
        timeout_s=settings.timeout_s,
        threads=settings.threads,
        left_out=workload.left_out,
    )


def _arrivals(settings: Serve, workload: Workload, point: Point, run: int) -> Sequence[float] | None:
    if point.mode == "poisson":
        return poisson_arrivals(len(workload.chains), point.value, settings.workload_settings.seed + run)
    if point.mode == "trace":
        if workload.arrivals is None:
            raise ConfigError(
                f"--trace-arrivals: --workload {workload.name} has no arrival times: use a trace, or give --rate"
            )
        return workload.arrivals
    return None


def warm_up(settings: Serve, server: Server, renderer: Renderer, point: Point, run: int) -> None:
    """Send the same kind of load without counting it; in a closed loop at least one request per client."""
    given, least = settings.warmup_requests, int(point.value) if point.mode == "closed" else 1
    count = max(least, settings.workload_settings.num_requests // 4) if given is None else given
    if count == 0:
        return
    some = replace(settings.workload_settings, num_requests=count, run=WARMUP_RUN + run)
    workload = fitted(make_workload(settings.workload, some), renderer.context)
    clients = least if point.mode == "closed" else min(16, count)
    bodies = [renderer.body(request) for request in workload.requests]
    load = Load(bodies=bodies, chains=workload.chains, endpoint=settings.endpoint, concurrency=clients)
    send(server, replace(load, timeout_s=settings.timeout_s, threads=settings.threads), f"{point.label}, warm-up")
