"""Folders that flags name: their own user alone writes them, or they are refused; no file of them can stop a start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.utils.own_folder import check_own, read_own


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=r"^--cache-dir: the folder can be written by others"):
        check_own(tmp_path, "--cache-dir")
    tmp_path.chmod(0o755)
    check_own(tmp_path, "--cache-dir")
    check_own(tmp_path / "none", "--cache-dir")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        check_own(tmp_path, "--cache-dir")


def test_a_digest_is_a_regular_file_of_its_size(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * 32)
    assert read_own(file, 32) == b"x" * 32 and read_own(file, 31) is None
    os.mkfifo(tmp_path / "pipe")
    assert read_own(tmp_path / "pipe", 32) is None
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        read_own(tmp_path / "link", 32)
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)
        assert read_own(file, 32) is None
