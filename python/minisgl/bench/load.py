"""The measurement of one load on one server: the generator runs while the server's processes are sampled.

Sampling costs little (a few reads of /proc twice a second); a server that is not local is measured from the client's
side only.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from tqdm import tqdm

from minisgl.bench.render import PATHS, Endpoint, Line, probe, words
from minisgl.bench.server_process import ServerProcess
from minisgl.bench.stats import PERCENTILES
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.utils.installed import need_extension

if TYPE_CHECKING:
    from minisgl._rust import LoadResult

SAMPLE_S = 0.5
HTTP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """The server that is measured. `own` is its process, if it was started for it and can be sampled."""

    url: str
    model: str
    api_key: str | None = None
    own: ServerProcess | None = None

    def headers(self) -> list[tuple[str, str]]:
        key = [] if self.api_key is None else [("authorization", f"Bearer {self.api_key}")]
        return [("content-type", "application/json"), ("accept", "text/event-stream"), *key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests to send to a server: with `arrivals` an open loop, with `concurrency` a closed one."""

    bodies: Sequence[bytes]
    chains: Sequence[int]
    endpoint: Endpoint = "chat"
    arrivals: Sequence[float] | None = None
    concurrency: int = 0
    ramp_s: float = 0.0
    duration_s: float = math.inf  # closed loop: no request begins later
    keep_alive: bool = True
    timeout_s: float = 600.0
    threads: int = 1
    left_out: Mapping[str, int] = field(default_factory=dict)  # parts of the workload that are not sent, by reason


@dataclass(slots=True)
class Sample:
    """A sample: seconds since the start, events with text so far, requests in flight."""

    at: float
    tokens: int
    in_flight: int


@dataclass(slots=True)
class Measured:
    """A finished load. CPU seconds and peak bytes are by role of the server's process; empty if not local."""

    result: LoadResult
    samples: list[Sample] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    rss_bytes: dict[str, int] = field(default_factory=dict)


class Watch:
    """A sampler of a server's processes, which are looked up once, because that is the slow part."""

    def __init__(self, own: ServerProcess | None) -> None:
        self._processes: Mapping[str, psutil.Process] = {} if own is None else own.processes()
        self.rss_bytes: dict[str, int] = {}

    def cpu_seconds(self) -> dict[str, float]:
        seconds = {}
        for role, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds[role] = float(sum(process.cpu_times()[:2]))
        return seconds

    def look(self) -> None:
        for role, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.rss_bytes[role] = max(self.rss_bytes.get(role, 0), int(process.memory_info().rss))


def generator() -> Callable[..., LoadResult]:
    """Return `run_load` of the extension. Raises `ConfigError` if the extension is missing."""
    need_extension("the load generator")
    return _rust.run_load


def send(server: Server, load: Load, label: str) -> Measured:
    """Send `load` and measure, with a progress bar `label` on a terminal. Raises `ConfigError` for invalid loads."""
    watch, samples = Watch(server.own), list[Sample]()
    began, looked = time.monotonic(), 0.0
    before = watch.cpu_seconds()
    endless = math.isfinite(load.duration_s)
    with tqdm(total=None if endless else sum(load.chains), desc=label, unit="req", disable=None, leave=False) as bar:

        def progress(finished: int, failed: int, in_flight: int, tokens: int) -> None:
            nonlocal looked
            now = time.monotonic()
            samples.append(Sample(now - began, tokens, in_flight))
            if now - looked >= SAMPLE_S:
                looked = now
                watch.look()
            bar.n = finished
            bar.set_postfix(failed=failed, in_flight=in_flight, refresh=False)
            bar.refresh()

        try:
            result = generator()(
                server.url + PATHS[load.endpoint],
                load.bodies,
                chains=load.chains,
                arrivals=load.arrivals,
                concurrency=load.concurrency,
                ramp_s=load.ramp_s,
                stop_after_s=load.duration_s,
                headers=server.headers(),
                keep_alive=load.keep_alive,
                timeout_s=load.timeout_s,
                threads=load.threads,
                progress=progress,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
    after = watch.cpu_seconds()
    watch.look()
    for sample in samples:
        sample.at += began - result["started"]
    used = {role: after[role] - before.get(role, 0.0) for role in after}
    return Measured(result, samples, used, watch.rss_bytes)


def first_model(url: str, api_key: str | None) -> str:
    """Return the first model in the server's list. Raises `ConfigError`."""
    try:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        answer = httpx.get(url + "/v1/models", headers=headers, timeout=HTTP_TIMEOUT_S)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--base-url: {url}/v1/models: {error!r}: give --model if the server has no such list"
        ) from error


def model_facts(server: Server) -> Mapping[str, Any]:
    """Return the server's model card, with `max_model_len` and, if simulated, its profile; {} if it has none."""
    try:
        answer = httpx.get(server.url + "/v1/models", headers=dict(server.headers()), timeout=HTTP_TIMEOUT_S)
        models = answer.json()["data"]
        card = next((model for model in models if model["id"] == server.model), models[0])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return {}  # another kind of server
    return card if isinstance(card, Mapping) else {}


def stats_of(server: Server) -> dict[str, Any]:
    """Return a minisgl server's counters (`/stats`), or {} for another kind of server or an older one."""
    try:
        answer = httpx.get(server.url + "/stats", headers=dict(server.headers()), timeout=HTTP_TIMEOUT_S)
        stats = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    return stats if isinstance(stats, dict) else {}


def server_counters(server: Server) -> dict[str, Any] | None:
    """Return a minisgl server's figures since its start: maxima, and percentiles of the times of scheduling a step and
    writing its arrays. None for another kind of server or an older one."""
    try:
        stats = stats_of(server)
        meters = stats["engine"]["meters"]
        return {
            **{f"{name}_most": stats["http"][name]["most"] for name in ("requests_in_flight", "requests_queued")},
            **{f"{name}_us": _in_us(meters[name]) for name in ("schedule", "metadata")},
        }
    except (KeyError, TypeError):
        return None


def _in_us(meter: Mapping[str, float]) -> dict[str, float]:
    """Return a meter in microseconds, with the names of `stats.summary`; without percentiles if it is empty."""
    names = {**{name: f"{name}_s" for name in PERCENTILES if f"{name}_s" in meter}, "max": "longest_s"}
    mean = meter["total_s"] / meter["count"] if meter["count"] else 0.0
    return {"mean": 1e6 * mean, **{name: 1e6 * meter[key] for name, key in names.items()}}


def calibrate(server: Server, endpoint: Endpoint, extra: Mapping[str, Any]) -> Line:
    """Measure how prompt tokens depend on words, by two requests for one token. Raises `ConfigError`."""
    headers = dict(server.headers())

    def count(num_words: int) -> int:
        text = words(("probe",), num_words)
        prompt = {"prompt": text} if endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
        body = {**extra, "model": server.model, "max_tokens": 1, **prompt}
        try:
            answer = httpx.post(server.url + PATHS[endpoint], json=body, headers=headers, timeout=HTTP_TIMEOUT_S)
            if answer.is_error:
                raise ConfigError(f"the server refuses a prompt of {num_words} words: {answer.text[:300]}")
            return int(answer.json()["usage"]["prompt_tokens"])
        except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the server does not say how many tokens a prompt has: {error!r}") from error

    return probe(count)
