"""A server whose settings another process has resolved: it reads them as the first line of its standard input, and ends
when that is closed (`--managed`). Until they come it imports what every server needs, as does its engine's process."""

from __future__ import annotations

import os
import select
import sys

import msgspec

from minisgl import envs
from minisgl.config import ConfigError, ServerConfig
from minisgl.runner import launch


def main() -> int:
    envs.keep_little()
    if not select.select([sys.stdin], [], [], 0)[0]:  # else the engine starts first, and this is imported beside it
        launch.prepare()
        from minisgl.supervisor import serving, start  # noqa: F401
    said = bytearray()
    while not said.endswith(b"\n"):  # byte for byte: what comes after the line is not for Python's buffer
        if not (one := os.read(sys.stdin.fileno(), 1)):
            launch.dismiss()
            return 1
        said += one
    config = msgspec.structs.replace(msgspec.json.decode(said, type=ServerConfig), managed=True)
    try:
        from minisgl.supervisor.start import run_server

        return run_server(config)
    except (ConfigError, OSError, MemoryError) as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
