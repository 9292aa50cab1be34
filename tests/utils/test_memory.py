"""What is free, where control groups have limits: made-up ones, of both versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from minisgl.utils import memory

MIB = 2**20
V2 = {"memory.max": "{}", "memory.current": "{}", "memory.stat": "anon 1\nactive_file {}\ninactive_file {}\n"}
V1 = {
    "memory.limit_in_bytes": "{}",
    "memory.usage_in_bytes": "{}",
    "memory.stat": "cache 1\ntotal_active_file {}\ntotal_inactive_file {}\n",
}


def group(folder: Path, version: Mapping[str, str], limit: int | str, used: int = 0, kept: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, used_file, stat = version
    (folder / limit_file).write_text(version[limit_file].format(limit) + "\n")
    (folder / used_file).write_text(version[used_file].format(used) + "\n")
    (folder / stat).write_text(version[stat].format(kept, kept))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_version_2(root: Path) -> None:
    """The tightest of the groups on the way up; kept files are free."""
    (root / "proc/self/cgroup").write_text("0::/user/work\n")
    top = root / "sys/fs/cgroup"
    group(top / "user" / "work", V2, "max")
    assert memory.free_memory().whose == "of this machine"
    group(top / "user" / "work", V2, 9 * MIB, used=MIB)
    group(top / "user", V2, 8 * MIB, used=5 * MIB, kept=MIB)
    assert memory.free_memory() == memory.Free(5 * MIB, "of this control group's 8 MiB")


@pytest.mark.parametrize("seen", ["box", ""], ids=["by its path", "as the root"])
def test_version_1(root: Path, seen: str) -> None:
    """In a container its own group is the root, whatever its path is called."""
    (root / "proc/self/cgroup").write_text("5:cpu:/box\n4:memory:/box\n0::/\n")
    group(root / "sys/fs/cgroup/memory", V1, 9223372036854771712)
    group(root / "sys/fs/cgroup/memory" / seen, V1, 4 * MIB, used=3 * MIB)
    assert memory.free_memory() == memory.Free(MIB, "of this control group's 4 MiB")
    group(root / "sys/fs/cgroup/memory" / seen, V1, 4 * MIB, used=5 * MIB)
    assert memory.free_memory().num_bytes == 0


def test_without_groups(root: Path) -> None:
    assert memory.free_memory().whose == "of this machine"
