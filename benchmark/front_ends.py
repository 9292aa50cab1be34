"""Compare front ends in one run: the cost of a streamed chat with each, over an engine that computes nothing.

    MINISGL_DATA=... python -m benchmark.front_ends today=.:rust python=.:python new=../other:rust [--quick] [--out DIR]

A variant is NAME=FOLDER:FRONTEND: the code and the extension of a built checkout, and `rust` or `python`, as in
`minisgl serve --frontend`; the first one is the base of the comparison (or --base NAME). Chats have 180 words in and
exactly the cell's number of tokens out; cells differ in tokens out, tools (which need not be called) and clients. The
chat template shows tools: that of Qwen3, whose tokenizer MINISGL_DATA has, or one of the tests' over the embedded
model's tokenizer. The load generator runs on the same cores.

Each number of tools has servers of its own, one for each variant; they take turns, in alternating order. All variants
of a turn get the same requests, which no other turn gets. Figures are medians over the turns, ratios medians of the
turns' ratios to the base. CPU is user and system time of the server's HTTP process alone, from the first request to the
end of the last response. A pause is the time between two events with text of one stream. "Others' cores" is the CPU use
of all processes other than the variant's server and the load generator: if it is large, trust only CPU per token.

Invariants: a run with a failed request, or with a response of another length, is discarded; a server that does not run
its variant's extension is an error; all processes end with the program, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil

from minisgl import envs
from minisgl.bench.load import HTTP_TIMEOUT_S, Load, Server, send
from minisgl.bench.render import WORDS
from minisgl.bench.report import Report, print_result, public_command, table
from minisgl.bench.serve_metrics import Slo, figures, latencies
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import turns
from minisgl.config import ConfigError

Figures = dict[str, float]
FRONT_ENDS = ("rust", "python")
EXTENSION = Path("python", "minisgl", "_rust.abi3.so")
TEMPLATE = Path(__file__).parents[1] / "tests" / "helpers" / "thoughts_and_calls.jinja"
SERVER = ("--engine", "sim", "--sim-profile", "null", "--max-running-requests", "512", "--max-seq-len", "8192")
PLAIN = ("--reasoning-parser", "none")  # nothing is looked for in the answer to a chat without tools
NUM_WORDS = 180
OUTPUTS, TOOLS, CLIENTS = (128, 512), (0, 2, 8), (1, 64, 256)
QUICK_TOOLS, QUICK_CLIENTS = (0, 2), (256,)
DURATION_S, QUICK_DURATION_S = 6.0, 4.0
TURNS, QUICK_TURNS = 5, 3
NUM_TEXTS = 16384  # requests of a turn that differ; then they come round again
MOST_REQUESTS = 1_000_000  # of a turn, which its duration ends before
RAMP = 0.1  # of the duration, in which the clients begin
COLUMNS = {
    "tok/s": "output_tok_s",
    "HTTP CPU us/token": "http_cpu_us_per_token",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "pause p99.9 ms": "pause_p999_ms",
    "pause max ms": "pause_max_ms",
}
MORE = {
    "tokens/event": "tokens_per_event",
    "HTTP cores": "http_cores",
    "passed on": "passed_on",
    "others' cores": "others_cores",
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    folder: Path
    front_end: str

    def launch(self, flags: Sequence[str]) -> Launch:
        return Launch((*flags, "--frontend", self.front_end), source=self.folder / "python")

    def facts(self) -> dict[str, str]:
        """Return the front end, and the git commit of the folder if there is one."""
        command = ("git", "-C", str(self.folder), "rev-parse", "--short", "HEAD")
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return {"front_end": self.front_end, "commit": done.stdout.strip()}
        return {"front_end": self.front_end}


@dataclass(frozen=True, slots=True)
class Cell:
    output_len: int
    num_tools: int
    clients: int

    def __str__(self) -> str:
        tools = f"{self.num_tools} tools" if self.num_tools else "no tools"
        return f"{self.output_len} out, {tools}, {self.clients} client{'s' if self.clients > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells to measure, the seconds of a turn, and the number of turns."""

    cells: Sequence[Cell]
    duration_s: float
    num_turns: int

    def sets(self) -> list[list[Cell]]:
        """Return the cells in groups that share servers (cells with the same number of tools)."""
        numbers = dict.fromkeys(cell.num_tools for cell in self.cells)
        return [[cell for cell in self.cells if cell.num_tools == number] for number in numbers]


def variant_of(text: str) -> Variant:
    """Parse NAME=FOLDER:FRONTEND. Raises `ConfigError` for a wrong form or a folder without a built extension."""
    name, equals, rest = text.partition("=")
    folder, colon, front_end = rest.rpartition(":")
    if not (name and equals and folder and colon) or front_end not in FRONT_ENDS:
        raise ConfigError(f"{text}: must be NAME=FOLDER:FRONTEND with FRONTEND one of {', '.join(FRONT_ENDS)}")
    variant = Variant(name, Path(folder).expanduser().resolve(), front_end)
    if not (variant.folder / EXTENSION).is_file():
        raise ConfigError(f"{text}: the folder has no {EXTENSION}: build it there")
    return variant


def tools(number: int) -> list[dict[str, Any]]:
    """Return `number` tools typical of an agent: two arguments each, one of them required."""
    path = {"type": "string", "description": "The path of the file, relative to the root of the project."}
    limit = {"type": "integer", "description": "How many lines to look at, at most."}
    schema = {"type": "object", "properties": {"path": path, "limit": limit}, "required": ["path"]}
    return [
        {
            "type": "function",
            "function": {
                "name": f"look_at_file_{i}",
                "description": f"Looks at a file of the project in way number {i} and says what is in it.",
                "parameters": schema,
            },
        }
        for i in range(number)
    ]


def bodies(cell: Cell, model: str, turn: int, count: int) -> list[bytes]:
    """Return the requests of one turn: equal for all variants, different from those of other turns and cells."""
    fixed: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": cell.output_len,
        "ignore_eos": True,
    }
    if cell.num_tools:
        fixed |= {"tools": msgspec.Raw(msgspec.json.encode(tools(cell.num_tools))), "tool_choice": "auto"}
    drawn = np.random.default_rng((turn, cell.output_len, cell.num_tools, cell.clients))
    texts = drawn.integers(len(WORDS), size=(count, NUM_WORDS)).tolist()
    encoder = msgspec.json.Encoder()
    return [
        encoder.encode({**fixed, "messages": [{"role": "user", "content": " ".join(WORDS[i] for i in text)}]})
        for text in texts
    ]


# ----------------------------------------------------------------------------------------------------------- measuring


@contextlib.contextmanager
def servers(variants: Sequence[Variant], flags: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
    """Start a server for each variant; yields them by name. Raises `ConfigError` if one does not start."""
    with contextlib.ExitStack() as stack:
        running = {}
        for variant in variants:
            try:
                server = stack.enter_context(ServerProcess(variant.launch(flags)))
            except ServerFailed as error:
                raise ConfigError(f"{variant.name}: {error}") from error
            maps = {one.path for one in server.processes()["http"].memory_maps()}
            if str(variant.folder / EXTENSION) not in maps:
                raise ConfigError(f"{variant.name}: its server does not run the extension of its folder")
            running[variant.name] = server
        yield running


def measure(server: ServerProcess, cell: Cell, requests: Sequence[bytes], duration_s: float) -> Figures:
    """Measure a turn of one variant; a duration of 0 sends the requests once. Raises `ConfigError` if any failed."""
    target = Server(server.url, server.model, own=server)
    passed_on = _passed_on(server)
    times = -(-MOST_REQUESTS // len(requests)) if duration_s else 1
    load = Load(
        bodies=requests,
        chains=(1,) * (len(requests) * times),
        concurrency=cell.clients,
        ramp_s=RAMP * duration_s,
        duration_s=duration_s or float("inf"),
    )
    busy = _busy_s()
    measured = send(target, load, str(cell))
    busy = _busy_s() - busy
    report, pauses = figures(measured, Slo()), latencies(measured.result).itl
    if report["failed"]:
        raise ConfigError(f"{cell}: {report['failed']} of {report['requests']} requests failed: {report['failures']}")
    if report["output_tokens"] != report["requests"] * cell.output_len:
        raise ConfigError(f"{cell}: responses do not have the requested length: {report['lengths']['output']}")
    cpu = report["server"]["cpu_us_per_token"]
    known_s = report["server"]["cpu_s"]["all"] + report["client"]["cpu_s"]
    return {
        "output_tok_s": report["output_tok_s"],
        "http_cpu_us_per_token": cpu["http"],
        "ttft_p50_ms": report["ttft_ms"]["p50"],
        "ttft_p99_ms": report["ttft_ms"]["p99"],
        "pause_p999_ms": float(np.percentile(pauses, 99.9)) if len(pauses) else 0.0,
        "pause_max_ms": float(pauses.max()) if len(pauses) else 0.0,
        "tokens_per_event": report["tokens_per_event"],
        "http_cores": measured.cpu_s["http"] / report["duration_s"],
        "engine_cpu_us_per_token": cpu["engine"],
        "client_cpu_us_per_token": report["client"]["cpu_us_per_token"],
        "input_tokens_per_request": report["input_tokens"] / report["requests"],
        "others_cores": max(0.0, busy - known_s) / report["duration_s"],
        "requests": float(report["requests"]),
        "passed_on": float(_passed_on(server) - passed_on),
    }


def _busy_s() -> float:
    """Return the CPU seconds that the machine has spent on all processes."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))


def _passed_on(server: ServerProcess) -> int:
    """Return the number of requests that the gateway has forwarded to the Python server so far."""
    http = httpx.get(f"{server.url}/stats", timeout=HTTP_TIMEOUT_S).raise_for_status().json()["http"]
    return int((http.get("gateway") or {}).get("passed_on", 0))


Runs = dict[Cell, dict[str, list[Figures]]]


def measure_all(variants: Sequence[Variant], grid: Grid, flags: Sequence[str]) -> Iterator[tuple[Cell, Runs]]:
    """Measure cell by cell; yields each measured cell with all runs so far."""
    runs: Runs = {}
    for cells in grid.sets():
        with servers(variants, flags) as running:
            model = next(iter(running.values())).model
            for cell in cells:
                warm_up = bodies(cell, model, grid.num_turns, 2 * cell.clients)
                for server in running.values():
                    measure(server, cell, warm_up, 0.0)
                runs[cell] = {name: [] for name in running}
                requests: list[bytes] = []
                for turn, name in turns(list(running), grid.num_turns):
                    if all(len(done) == turn for done in runs[cell].values()):
                        requests = bodies(cell, model, turn, NUM_TEXTS if cell.clients > 1 else NUM_TEXTS // 4)
                    measured = measure(running[name], cell, requests, grid.duration_s)
                    runs[cell][name].append(measured)
                    said = f"{measured['output_tok_s']:,.0f} tok/s"
                    print(f"{cell}: turn {turn + 1} of {grid.num_turns}: {name}: {said}", file=sys.stderr, flush=True)
                yield cell, runs


# ----------------------------------------------------------------------------------------------------------- reporting


def medians(runs: Sequence[Figures]) -> Figures:
    return {key: statistics.median(one[key] for one in runs) for key in runs[0]}


def ratios(runs: Sequence[Figures], base: Sequence[Figures]) -> Figures:
    """Return the median ratio of each figure to the base's of the same turn; figures whose base has a 0 are omitted."""
    return {
        key: statistics.median(one[key] / other[key] for one, other in zip(runs, base, strict=True))
        for key in COLUMNS.values()
        if all(other[key] for other in base)
    }


def result_of(runs: Runs, base: str) -> list[dict[str, Any]]:
    """Return by cell and variant: medians, ratios to the base, and each turn's figures."""
    return [
        {
            **asdict(cell),
            "variants": {
                name: {"medians": medians(turns_of), "ratios": ratios(turns_of, of_cell[base]), "runs": turns_of}
                for name, turns_of in of_cell.items()
            },
        }
        for cell, of_cell in runs.items()
    ]


def cell_table(of_cell: Mapping[str, Sequence[Figures]], base: str) -> str:
    """Return the table of a cell: medians, and their ratios to the base in parentheses."""
    rows = []
    for name, found in of_cell.items():
        middle, against = medians(found), ratios(found, of_cell[base])
        shown = [
            _number(middle[key]) + (f" ({against[key]:.2f})" if name != base and key in against else "")
            for key in COLUMNS.values()
        ]
        rows.append((name, *shown, *(_number(middle[key]) for key in MORE.values())))
    return table(("variant", *COLUMNS, *MORE), rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def flags_of(extra: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of `minisgl serve` for all variants."""
    folder = envs.data_dir()
    qwen3 = None if folder is None else folder / "tokenizers" / "qwen3"
    words = (
        ("--chat-template", str(TEMPLATE))
        if qwen3 is None or not qwen3.is_dir()
        else ("--tokenizer", str(qwen3.resolve()))
    )
    return (*SERVER, *PLAIN, *words, *extra)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="benchmark.front_ends",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("variants", nargs="+", metavar="NAME=FOLDER:FRONTEND", help="variants to compare, at least two")
    flags.add_argument("--base", metavar="NAME", help="variant with which the others are compared (default: the first)")
    flags.add_argument("--quick", action="store_true", help="fewer cells, fewer and shorter turns: some minutes")
    flags.add_argument("--output-len", type=int, nargs="+", metavar="N", help="tokens out of a chat (default: 128 512)")
    flags.add_argument("--tools", type=int, nargs="+", metavar="N", help="tools of a chat (default: 0 2 8; quick: 0 2)")
    flags.add_argument("--clients", type=int, nargs="+", metavar="N", help="clients (default: 1 64 256; quick: 256)")
    flags.add_argument("--duration", type=float, metavar="S", help="seconds of a turn (default: 6; quick: 4)")
    flags.add_argument("--turns", type=int, metavar="N", help="turns of a variant in a cell (default: 5; quick: 3)")
    flags.add_argument("--serve-flags", default="", metavar="FLAGS", help="more flags of minisgl serve for all")
    flags.add_argument("--out", type=Path, metavar="DIR", help="write raw.json and a report")
    return flags


def grid_of(args: argparse.Namespace) -> Grid:
    """Return the grid that the arguments ask for. Raises `ConfigError` if a value is out of range."""
    outputs = args.output_len or OUTPUTS
    numbers = args.tools or (QUICK_TOOLS if args.quick else TOOLS)
    clients = args.clients or (QUICK_CLIENTS if args.quick else CLIENTS)
    duration_s = args.duration or (QUICK_DURATION_S if args.quick else DURATION_S)
    num_turns = args.turns or (QUICK_TURNS if args.quick else TURNS)
    if min(*outputs, *clients, num_turns) < 1 or min(numbers) < 0 or not duration_s > 0:
        raise ConfigError("lengths, clients, turns and the duration must be above 0, and tools at least 0")
    cells = [Cell(out, number, many) for number in numbers for many in clients for out in outputs]
    return Grid(list(dict.fromkeys(cells)), duration_s, num_turns)


def run(args: argparse.Namespace, command: str) -> None:
    """Measure all variants and write the report. Raises `ConfigError` if an argument is wrong or a run fails."""
    variants, grid = [variant_of(text) for text in args.variants], grid_of(args)
    names = [variant.name for variant in variants]
    base = args.base or names[0]
    if len(names) < 2 or len(set(names)) < len(names) or base not in names:
        raise ConfigError("at least two variants with different names are needed, and --base is one of them")
    flags = flags_of(args.serve_flags.split())
    report = None if args.out is None else Report(args.out, "Front ends side by side", command=command)
    raw: dict[str, Any] = {
        "bench": "front_ends",
        "base": base,
        "duration_s": grid.duration_s,
        "turns": grid.num_turns,
        "words_in": NUM_WORDS,
        "tokenizer": "qwen3" if "--tokenizer" in flags else "embedded",
        "variants": {variant.name: variant.facts() for variant in variants},
    }
    print(f"medians of {grid.num_turns} turns; in brackets the median ratio to {base}\n", flush=True)
    for cell, runs in measure_all(variants, grid, flags):
        text = cell_table(runs[cell], base)
        print(f"{cell}\n\n{text}\n", flush=True)
        raw["cells"] = result_of(runs, base)
        if report is not None:
            report.section(str(cell), text)
            report.write(raw)
    print_result(raw)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that servers and their files go
    try:
        run(parser().parse_args(arguments), public_command(arguments, "python -m benchmark.front_ends"))
    except ConfigError as error:
        print(f"benchmark.front_ends: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
