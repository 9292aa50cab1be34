"""What an engine process reads when it starts. Nothing that computes is imported here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, Limits


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    to_engine: str  # ipc addresses, bound by the HTTP process
    from_engine: str
    step_timeout: float = Limits().step_timeout

    @property
    def folder(self) -> Path:
        """The parent's, for sockets; it removes it."""
        return Path(self.from_engine.removeprefix("ipc://")).parent
