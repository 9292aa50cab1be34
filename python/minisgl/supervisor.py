"""Run a server: this process is HTTP and text, a child process is the engine.

Keeps true: the port is taken before anything is loaded; the death of the child ends the server with a message and a
non-zero code; Ctrl-C and SIGTERM end both with 0; no process, socket or file is left behind.
Doesn't know: the protocol, scheduling, torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
import time

import uvloop

from minisgl.config import MODEL_SMOLLM2, ConfigError, ServerConfig
from minisgl.message import EngineReady, Shutdown
from minisgl.runner.launch import EngineProcess
from minisgl.server.app import build_app
from minisgl.server.engine_client import EngineClient, EngineGone
from minisgl.server.http import HttpServer
from minisgl.tokenizer import Tokenizer


def run_server(config: ServerConfig) -> int:
    """Serve until a signal or the engine's end; returns the exit code."""
    try:
        listener = _listen(config.host, config.port)
    except OSError as error:
        raise ConfigError(f"--host {config.host} --port {config.port}: {error.strerror}: choose another") from error
    with listener:
        return uvloop.run(_supervise(config, listener))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
