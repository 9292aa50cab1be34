"""A load of the server on itself, for people who watch: `--demo-load`.

Invariants: it is a process that ends with this one, and before the server drains: none of its requests is waited for.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

SEED = 0
STOP_S = 5.0


class DemoLoad:
    """From now until `stop`, at the server's own `url`."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "minisgl.bench.demo_load"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        line = {"url": url, "model": model, "api_key": api_key, "seed": SEED}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def stop(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait(STOP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
