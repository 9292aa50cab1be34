"""Requests that are refused for their size, many at once: what they cost the HTTP process, and whom they disturb.

    python -m benchmark.online.refused [--clients 64] [--bytes 7500000] [--kinds ids,spaces] [--out FILE]

Starts its own server of the echo engine. For each kind of request (`KINDS`), as many clients send one at once from a
process of their own, beside one stream, which notes the longest pause between its pieces, and a client of small
requests. Sampled: the memory of the HTTP process before, at its highest, and 10 s later. Exit code 1 if a large request
is not refused with a 4xx that says why, anything else fails, or a bound is passed (`MAX_...`). The last line of stdout
is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.helpers.e2e import serving

SETTLE_S = 10.0
SAMPLE_S = 0.02
MAX_PEAK_MB = 400.0
MAX_LEFT_MB = 60.0
MAX_PAUSE_S = 0.1
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _wide(size: int) -> dict[str, Any]:
    """As many fields as a body may have, with long descriptions."""
    fields = {f"field_{i}": {"type": "string", "description": "x" * (size // 15_000 - 60)} for i in range(15_000)}
    return {"type": "object", "properties": fields}


def _form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": schema}}


def _parts(kind: str, size: int) -> list[dict[str, Any]]:
    part = {"type": kind, "text": "hi " * (size // 30_000 - 10)}
    return [{"role": "user", "content": [part] * 500}] * 20


# what to send, for about so many bytes
KINDS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "spaces": (CHAT, lambda size: {"messages": [_message(" " * size)]}),
    "no-spaces": (TEXT, lambda size: {"prompt": "a" * size}),
    "words": (CHAT, lambda size: {"messages": [_message("hello, world " * (size // 13))]}),
    "emoji": (CHAT, lambda size: {"messages": [_message("\U0001f600" * (size // 4))]}),
    "many-prompts": (TEXT, lambda size: {"prompt": ["hello, world " * (size // 13 // 256)] * 256}),
    "token-ids": (TEXT, lambda size: {"prompt": [7] * (size // 2)}),
    "lists-of-ids": (TEXT, lambda size: {"prompt": [[17] * 8000] * (size // 24_000)}),
    "many-messages": (CHAT, lambda size: {"messages": [_message("hi")] * (size // 32)}),
    "long-messages": (CHAT, lambda size: {"messages": [_message("hi " * (size // 12_288))] * 4000}),
    "empty-lists": (TEXT, lambda size: {"prompt": [[]] * (size // 3)}),
    "tokenize": ("/tokenize", lambda size: {"prompt": "hello, world " * (size // 13)}),
    "schema": (CHAT, lambda size: {"messages": [_message("hi")], "response_format": _form(_wide(size))}),
    "tools": (
        CHAT,
        lambda size: {"messages": [_message("hi")], "tools": [_tool(_wide(size))], "tool_choice": "required"},
    ),
    "blocks": ("/v1/messages", lambda size: {"max_tokens": 1, "messages": _parts("text", size)}),
    "input-items": ("/v1/responses", lambda size: {"input": _parts("input_text", size)}),
    "detokenize": ("/detokenize", lambda size: {"tokens": [7] * (size // 2)}),
}


def body(kind: str, size: int) -> bytes:
    return json.dumps(KINDS[kind][1](size), ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(slots=True)
class Seen:
    failed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # of the stream
    waits: list[float] = field(default_factory=list)  # of small requests
    num_streams: int = 0


async def send(http: httpx.AsyncClient, path: str, content: bytes) -> tuple[str, str]:
    """Status and message, or the error's name."""
    try:
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        return str(answer.status_code), answer.json()["error"]["message"][:200]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return type(error).__name__, str(error)


def send_all(url: str, kind: str, size: int, clients: int) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        content, limits = body(kind, size), httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            return await asyncio.gather(*(send(http, KINDS[kind][0], content) for _ in range(clients)))

    return asyncio.run(run())


async def stream(http: httpx.AsyncClient, over: asyncio.Event, seen: Seen) -> None:
    """One answer after the other: pauses are counted within each."""
    while not over.is_set():
        asked = {"prompt": "a stream", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        last, reason = None, None
        try:
            async with http.stream("POST", TEXT, json=asked) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            seen.pauses.append(now - last)
                        last, reason = now, json.loads(line[6:])["choices"][0]["finish_reason"]
                        if over.is_set():
                            return
        except (httpx.HTTPError, ValueError, KeyError) as error:
            seen.failed.append(f"stream: {error!r}")
            return
        seen.num_streams += 1
        if reason != "length":
            seen.failed.append(f"stream: ended with {reason}")


async def small(http: httpx.AsyncClient, over: asyncio.Event, seen: Seen) -> None:
    while not over.is_set():
        began = time.monotonic()
        try:
            answer = await http.post(TEXT, json={"prompt": "a small one", "max_tokens": 4})
            if answer.status_code != 200:
                seen.failed.append(f"small: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            seen.failed.append(f"small: {error!r}")
        seen.waits.append(time.monotonic() - began)
        await asyncio.sleep(0.05)


async def watch(process: psutil.Process, over: asyncio.Event, samples: list[float]) -> None:
    while not over.is_set():
        samples.append(process.memory_info().rss / 1e6)
        await asyncio.sleep(SAMPLE_S)


async def flood(url: str, pid: int, kind: str, size: int, clients: int, senders: Executor) -> dict[str, Any]:
    process, seen, over, samples = psutil.Process(pid), Seen(), asyncio.Event(), list[float]()
    before = process.memory_info().rss / 1e6
    async with httpx.AsyncClient(base_url=url, timeout=600) as beside:
        others = [asyncio.create_task(work) for work in (stream(beside, over, seen), small(beside, over, seen))]
        watching = asyncio.create_task(watch(process, over, samples))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(senders, send_all, url, kind, size, clients)
        took = time.monotonic() - began
        await asyncio.sleep(0.5)
        over.set()
        await asyncio.gather(*others, watching)
    await asyncio.sleep(SETTLE_S)
    after = process.memory_info().rss / 1e6
    return {
        "kind": kind,
        "bytes": len(body(kind, size)),
        "clients": clients,
        "seconds": round(took, 2),
        "statuses": dict(Counter(status for status, _ in answers)),
        "messages": sorted({message for _, message in answers})[:3],
        "rss_mb": {"before": round(before, 1), "peak": round(max(samples), 1), "later": round(after, 1)},
        "peak_mb": round(max(samples) - before, 1),
        "left_mb": round(after - before, 1),
        "pause_ms": {
            "max": round(1000 * max(seen.pauses, default=0.0), 1),
            "p99": round(1000 * statistics.quantiles(seen.pauses or [0, 0], n=100)[98], 1),
        },
        "small_max_ms": round(1000 * max(seen.waits, default=0.0), 1),
        "failed": seen.failed[:5],
    }


def verdict(report: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    bad = [f"answered {status}" for status in report["statuses"] if not status.startswith("4") or status == "429"]
    bad += report["failed"]
    bad += [f"peak +{report['peak_mb']} MB"] if report["peak_mb"] > MAX_PEAK_MB else []
    bad += [f"left +{report['left_mb']} MB"] if report["left_mb"] > MAX_LEFT_MB else []
    bad += [f"pause of {report['pause_ms']['max']} ms"] if report["pause_ms"]["max"] > 1000 * MAX_PAUSE_S else []
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=7_500_000)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reports = []
    senders = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with senders, serving("--engine", "echo", "--no-access-log") as server:
        pid = server.process.pid
        asyncio.run(flood(server.url, pid, "words", 1000, 1, senders))  # what is loaded at first use
        for kind in args.kinds.split(","):
            report = asyncio.run(flood(server.url, pid, kind, args.bytes, args.clients, senders))
            report["bad"] = verdict(report)
            print(json.dumps(report), flush=True)
            reports.append(report)
        errors = [line for line in server.lines if "Traceback" in line or "ERROR" in line]
    ok = not errors and not any(report["bad"] for report in reports)
    whole = {"ok": ok, "server_errors": errors[:5], "kinds": reports}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
