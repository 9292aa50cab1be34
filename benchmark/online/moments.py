"""Moments of a server that no steady load shows: its port opens, a long chat goes on.

Each takes a running server and returns figures; times are client's, of this process.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from urllib.parse import urlsplit

from minisgl.bench.load import Server
from minisgl.bench.serve_frontend import frontend_extras
from minisgl.bench.server_process import ServerProcess

MESSAGES = 512
WORDS = 96  # of a message; about as many tokens
TURNS = 8
WORD = "time"
OPEN_TIMEOUT_S = 60.0


def long_chat(server: ServerProcess) -> dict[str, float]:
    """Time to the first token of the next turns of a chat that the server has seen before."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"{i} " + f"{WORD} " * WORDS} for i in range(MESSAGES - 1)]
    first_s, num_tokens = _ttft(connection, server.model, messages)
    turns = []
    for turn in range(TURNS):
        messages.append({"role": "assistant", "content": f"answer {turn}"})
        messages.append({"role": "user", "content": f"question {turn}"})
        turns.append(_ttft(connection, server.model, messages)[0])
    connection.close()
    return {
        "prompt_tokens": float(num_tokens),
        "first_turn_ttft_ms": 1e3 * first_s,
        "next_turn_ttft_ms": 1e3 * statistics.median(turns),
    }


def _ttft(connection: http.client.HTTPConnection, model: str, messages: list[dict[str, str]]) -> tuple[float, int]:
    """Seconds from sending to the first event, and the prompt's tokens."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
    body = json.dumps({"model": model, "messages": messages, **options})
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    took = time.perf_counter() - began
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {first + answer.read()!r}")
    events = [line for line in answer.read().splitlines() if line.startswith(b"data: {")]
    return took, json.loads(events[-1].removeprefix(b"data: "))["usage"]["prompt_tokens"]


def cold_and_idle(server: ServerProcess) -> dict[str, float]:
    """256 connections at once, each with one small request; then nothing."""
    found = frontend_extras(Server(server.url, server.model, None, server))
    if found["cold"]["failed"]:
        raise RuntimeError(f"{found['cold']['failed']} connections were not answered")
    return {
        "cold_last_answered_ms": found["cold"]["last_answered_ms"],
        **{f"{role}_idle_cpu_percent": share for role, share in found["idle_cpu_percent"].items()},
        **{f"{role}_rss_mib": size / 2**20 for role, size in server.rss_bytes().items()},
    }


def port_open(server: ServerProcess) -> dict[str, float]:
    """From the start of a server like this one to the first answer on its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = (sys.executable, "-P", "-m", "minisgl", "serve", "--no-access-log", "--port", str(port))
    began = time.perf_counter()
    process = subprocess.Popen(
        (*program, *server.launch.flags, "--managed"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(server.launch.environment()),
    )
    try:
        while not _is_alive(port):
            if time.perf_counter() - began > OPEN_TIMEOUT_S or process.poll() is not None:
                raise RuntimeError("the port did not open")
        return {"port_open_ms": 1e3 * (time.perf_counter() - began)}
    finally:
        process.terminate()
        process.communicate(timeout=OPEN_TIMEOUT_S)


def _is_alive(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            return client.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        time.sleep(0.001)
        return False
