"""How long the HTTP server's event loop stands still while grammars are checked, or refused for their size.

    python -m benchmark.grammar.event_loop [--rounds 7] [--kinds small,Lark]

The server runs in a thread of this process, with an engine of scripted replies; its event loop wakes itself each
millisecond and notes by how much it is late. Requests come from a process of their own, four at a time. Each kind is
sent in rounds, each round beside one without a grammar: the machine is never quiet, so what the work itself costs is
the least of the rounds' longest pauses. A line has least and median of the kind, then those of the rounds beside it, in
milliseconds. Exit code 1 if a kind is above `BAR_MS` in all rounds, or is answered otherwise than it should. The last
line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx

from minisgl.grammar import check
from minisgl.supervisor.serving import SWITCH_INTERVAL_S
from tests.helpers.server import Frontend, frontend

TICK_S = 0.001
BAR_MS = 5.0
CHAT, MESSAGES, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"
LARGE = 7_000_000
SAY = [{"role": "user", "content": "say:x"}]


def wide(num_fields: int, tag: str = "", chars: int = 40) -> dict[str, Any]:
    fields = {f"field{tag}_{i}": {"type": "string", "description": "x" * chars} for i in range(num_fields)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def deep(levels: int) -> dict[str, Any]:
    def level(i: int) -> dict[str, Any]:
        below = {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"type": "string"}}
        return {"type": "object", "properties": below, "required": ["a"]}

    levels_by_name: dict[str, Any] = {f"d{i}": level(i) for i in range(levels)}
    return {"$defs": {**levels_by_name, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


Request = tuple[str, dict[str, Any]]


def chat(**more: Any) -> Request:
    return CHAT, {"messages": SAY, "max_tokens": 1, **more}


def by_schema(schema: Any) -> Request:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def as_text(**schemas: Any) -> Request:
    return GENERATE, {"text": "say:x", "max_tokens": 1, **{name: json.dumps(one) for name, one in schemas.items()}}


def with_tools(schemas: list[Any], choice: str = "required") -> Request:
    functions = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    return chat(tools=[{"type": "function", "function": one} for one in functions], tool_choice=choice)


def words(between: str) -> str:
    return between.join(f'"word {i}"' for i in range(1500))


def parts(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "text": "x" * 700}] * 500}] * 20


def to_messages(**more: Any) -> Request:
    return MESSAGES, {"max_tokens": 1, "messages": SAY, **more}


MANY = wide(15_000, chars=400)  # 7 MB, and as many objects as a body may have
BLOCK = [wide(150, chars=400)] * 100
# by kind: the i-th request of a round, how many there are, and the status of each
KINDS: dict[str, tuple[Callable[[int], Request], int, int]] = {
    "none": (lambda i: chat(), 20, 200),
    "small": (lambda i: by_schema(wide(12, f"{i}")), 100, 200),
    "64 KiB": (lambda i: by_schema(wide(400, f"{i}")), 8, 200),
    "64 KiB as text": (lambda i: as_text(json_schema=wide(400, f"{i}")), 8, 200),
    "enum of 1000": (lambda i: by_schema({"enum": [f"value {j} {i}" for j in range(1000)]}), 8, 200),
    "deep references": (lambda i: by_schema(deep(300 + i)), 8, 200),
    "choice of 1500": (lambda i: chat(guided_choice=[f"value {j} {i}" for j in range(1500)]), 8, 200),
    "expression": (lambda i: chat(guided_regex=f"{i}" + "(a|b|ab)*" * 2000), 8, 400),
    "Lark": (lambda i: chat(guided_grammar=f'start: "{i}" | {words(" | ")}'), 4, 200),
    "GBNF": (lambda i: chat(guided_grammar=f'root ::= "{i}" | {words(" | ")}'), 4, 200),
    "7 MB of text in a schema": (lambda i: by_schema({"description": "x" * LARGE}), 2, 400),
    "7 MB schema": (lambda i: by_schema(MANY), 2, 400),
    "7 MB schema as text": (lambda i: as_text(json_schema=MANY), 2, 400),
    "7 MB in two texts": (lambda i: as_text(json_schema=wide(7_000, chars=400), guided_json=MANY["required"]), 2, 400),
    "7 MB beyond the limits": (lambda i: by_schema(wide(70_000)), 2, 400),
    "7 MB of tools": (lambda i: with_tools(BLOCK), 2, 400),
    "7 MB of tools by choice": (lambda i: with_tools(BLOCK, "auto"), 2, 400),
    "7 MB in /v1/messages": (lambda i: to_messages(messages=parts("text")), 2, 400),
    "7 MB of tools there": (lambda i: to_messages(tools=[{"name": "a", "input_schema": MANY}]), 2, 400),
    "7 MB in /v1/responses": (lambda i: (RESPONSES, {"input": parts("input_text")}), 2, 400),
}


def send(url: str, kind: str) -> list[tuple[int, str]]:
    """All requests of a round, four at a time."""

    async def run() -> list[tuple[int, str]]:
        at_once = asyncio.Semaphore(4)
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def one(path: str, content: bytes) -> tuple[int, str]:
                async with at_once:
                    answer = await http.post(path, content=content, headers={"content-type": "application/json"})
                return answer.status_code, answer.text[:200] if answer.status_code != 200 else ""

            make, count, _ = KINDS[kind]
            bodies = [(path, json.dumps(body).encode()) for path, body in map(make, range(count))]
            return await asyncio.gather(*(one(*body) for body in bodies))

    return asyncio.run(run())


class Ticker:
    """Notes how late the event loop wakes."""

    def __init__(self, server: Frontend) -> None:
        self._server = server
        self._longest = 0.0
        server.on_loop(lambda: setattr(self, "_task", asyncio.ensure_future(self._run())))

    async def _run(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self._longest = max(self._longest, time.perf_counter() - began - TICK_S)

    def take(self) -> float:
        """The longest pause since the last time, in milliseconds."""
        found, self._longest = self._longest, 0.0
        return 1000 * found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of " + ", ".join(KINDS))
    given = parser.parse_args()
    pauses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    bad = set[str]()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender, frontend() as server:
        ticker = Ticker(server)
        gc.collect()
        gc.freeze()  # as the server does
        for kind in given.kinds.split(","):
            sender.submit(send, server.url, kind).result()  # what is loaded at first use
            for _ in range(given.rounds):
                check._known.clear()
                for one in ("none", kind):
                    ticker.take()
                    answers = sender.submit(send, server.url, one).result()
                    pauses[one].append(ticker.take())
                    bad |= {f"{one}: {status} {text}" for status, text in answers if status != KINDS[one][2]}
            found, idle = pauses[kind], pauses["none"][-given.rounds :]
            shown = " ".join(f"{min(some):7.1f} {statistics.median(some):7.1f}" for some in (found, idle))
            print(f"{kind:26} {shown}  {answers[0][1][21:120]}", flush=True)
    ok = not bad and all(min(found) <= BAR_MS for found in pauses.values() if found)
    print("\n".join(sorted(bad)))
    print(json.dumps({"ok": ok, "least_ms": {kind: round(min(found), 2) for kind, found in pauses.items() if found}}))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
