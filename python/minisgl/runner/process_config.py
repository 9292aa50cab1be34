"""What an engine process reads when it starts. Nothing that computes is imported here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, Limits

SOCKET = "engine"  # the name of the one that front ends connect to


def last_words_file(socket: Path) -> Path:
    """Where a process that cannot go on says why, before it ends the connection: its parent may see the end of the
    process before the message about it."""
    return socket.with_name(f"{socket.name}.failed")


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    address: str  # ipc://PATH, where this process listens
    step_timeout: float = Limits().step_timeout

    @property
    def socket_path(self) -> Path:
        return Path(self.address.removeprefix("ipc://"))

    @property
    def folder(self) -> Path:
        """The parent's, for sockets; it removes it, or this process does if it is killed."""
        return self.socket_path.parent

    @property
    def ranks_folder(self) -> Path:
        """For what the ranks of `--tp` have among themselves: another one for each of several engines."""
        name = self.socket_path.name
        return self.folder if name == SOCKET else self.folder / f"{name}-ranks"
