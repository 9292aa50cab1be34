"""Measure serving over HTTP on a GPU, in one command of 8 minutes: `python benchmark/gpu/serve_http.py --out FOLDER`.

Runs `minisgl serve` with its defaults on the shape of Qwen3-0.6B with random weights, first with the scheduler in Rust,
then with the one in Python; `minisgl bench serve` sends a closed loop of 1, 16, 64 and 256 clients to each. For each
point: TTFT, TPOT and output tokens per second. In the remaining time, runs upstream's offline workload (`offline.py`).

    python benchmark/gpu/serve_http.py --out FOLDER --seconds 480    # writes what it has after each part
    python benchmark/gpu/serve_http.py --out FOLDER --tiny           # a tiny shape on the CPU: does it run?

minisgl must be installed, or on PYTHONPATH as `tests/gpu/session.sh` sets it.

Invariants: README.md and raw.json are rewritten after each part; a server or a point that fails is a record with its
last lines, and the others continue; no point begins that would not end in time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import httpx  # noqa: E402

from benchmark.gpu.shapes import SHAPES, TINY, write_shape  # noqa: E402
from minisgl.bench.report import Report, public_command, table  # noqa: E402
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess  # noqa: E402
from minisgl.tokenizer.echo import char_to_byte  # noqa: E402

Record = dict[str, Any]
PLANES = ("rust_hotpath", "python")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
HEALTH = ("engine", "cpu_backend", "frontend", "device", "dtype", "engine_details", "num_pages", "page_size")
OFFLINE_S = 60.0  # the offline workload is left out if less time is left
WARM_UP_S = 10.0  # assumed seconds of a point before its measurement


@dataclass(frozen=True, slots=True)
class Size:
    """Model that is served, and load that is sent to it."""

    shape: str
    clients: tuple[int, ...]
    seconds: float  # of a point
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    flags: tuple[str, ...] = ()
    offline: tuple[str, ...] = ()


GPU = Size("qwen3-0.6b", (1, 16, 64, 256), 15.0, (256, 1024), (64, 256), offline=("--models", "qwen3-0.6b"))
SMALL = ("--device", "inline", "--num-pages", "400", "--max-running-requests", "8", "--max-prefill-length", "64")
REHEARSAL = Size("tiny", (1, 4), 2.0, (8, 16), (4, 8), SMALL, ("--rehearse",))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for README.md, raw.json and offline/")
    parser.add_argument("--seconds", type=float, default=480.0, help="time limit of the benchmark (default: 480)")
    parser.add_argument("--tiny", action="store_true", help="run a tiny shape on the CPU, for a test")
    return parser


def write_model(size: Size, folder: Path) -> Path:
    """Write a model folder without weights. Its tokenizer has the bytes and invented words, as many as the model has
    ids, so that each id is a text."""
    shapes = {**SHAPES, "tiny": TINY}
    words = char_to_byte()
    words |= {f"w{number}": number for number in range(len(words), shapes[size.shape]["vocab_size"])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": words, "merges": []},
    }
    write_shape(size.shape, folder, shapes)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def served(plane: str, model: Path, size: Size, deadline: float) -> Iterator[Record]:
    """Start a server with the scheduler `plane`; yields a record of the server and one of each point."""
    flags = ("--model", str(model), "--load-format", "dummy", "--cpu-backend", plane, *size.flags)
    server = ServerProcess(Launch(flags))
    try:
        with server:
            health = httpx.get(f"{server.url}/health", timeout=30.0).json()
            yield {"kind": "server", "start_s": server.start_s, **{name: health.get(name) for name in HEALTH}}
            for clients in size.clients:
                if time.monotonic() + size.seconds + WARM_UP_S > deadline:
                    yield {"kind": "left out", "clients": clients}
                    continue
                yield point(server.url, clients, size, deadline)
    except (ServerFailed, httpx.HTTPError) as error:
        yield {"kind": "error", "error": str(error)[-4000:]}


def point(url: str, clients: int, size: Size, deadline: float) -> Record:
    """Run `minisgl bench serve` with `clients` clients; return its figures, or an error."""
    command = [sys.executable, "-m", "minisgl", "bench", "serve", "--base-url", url, "--concurrency", str(clients)]
    command += ["--duration", str(size.seconds), "--warmup-requests", str(max(4, clients)), "--seed", str(clients)]
    command += ["--input-len", *map(str, size.input_len), "--output-len", *map(str, size.output_len)]
    try:
        left_s = max(1.0, deadline - time.monotonic()) + WARM_UP_S
        done = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        (found,) = json.loads(done.stdout.splitlines()[-1])["points"]
    except subprocess.TimeoutExpired:
        return {"kind": "error", "clients": clients, "error": "did not end in time"}
    except (ValueError, IndexError, KeyError):
        return {"kind": "error", "clients": clients, "error": f"exit code {done.returncode}: {done.stderr[-4000:]}"}
    return {"kind": "point", "clients": clients, **found}


def offline(size: Size, out: Path, seconds: float) -> Record:
    """Run upstream's offline workload with both schedulers; writes files of its own."""
    command = [sys.executable, str(Path(__file__).with_name("offline.py")), *size.offline, "--repeats", "1"]
    command += ["--seconds", str(seconds), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"kind": "error", "plane": "both", "error": f"offline.py: {(done.stdout + done.stderr)[-4000:]}"}
    return {"kind": "offline", "plane": "both", "lines": done.stdout.splitlines()}


def write(report: Report, records: list[Record]) -> None:
    """Write all files from the records so far."""
    report.clear()
    points = [one for one in records if one["kind"] == "point"]
    head = ("clients", "scheduler", "requests", "failed", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "tok/s")
    rows = [
        (
            *(one["clients"], one["plane"], one["requests"], one["failed"]),
            *(one["ttft_ms"]["p50"], one["ttft_ms"]["p99"], one["tpot_ms"]["p50"], one["output_tok_s"]),
        )
        for one in sorted(points, key=lambda one: (one["clients"], one["plane"]))
    ]
    others = [json.dumps(one) for one in records if one["kind"] != "point"]
    report.section("Over HTTP", table(head, rows))
    report.section("Servers, offline, and what failed", *(f"```\n{text}\n```" for text in others))
    report.write({"records": records})


def main() -> int:
    args = parser().parse_args()
    size = REHEARSAL if args.tiny else GPU
    ends = time.monotonic() + args.seconds
    title = "Rehearsal of serving on a GPU: no figure means anything" if args.tiny else "Serving over HTTP on a GPU"
    report = Report(args.out, title, command=public_command(sys.argv[1:], "python benchmark/gpu/serve_http.py"))
    records: list[Record] = []

    def put(record: Record) -> None:
        records.append(record)
        print(json.dumps(record)[:400], flush=True)
        write(report, records)

    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(size, Path(scratch) / size.shape)
        for at, plane in enumerate(PLANES):
            share = (ends - time.monotonic()) / (len(PLANES) - at)
            for record in served(plane, model, size, time.monotonic() + share):
                put({"plane": plane, **record})
    if (left_s := ends - time.monotonic()) >= OFFLINE_S or args.tiny:
        put(offline(size, args.out / "offline", left_s))
    return 1 if any(one["kind"] == "error" for one in records) else 0


if __name__ == "__main__":
    sys.exit(main())
