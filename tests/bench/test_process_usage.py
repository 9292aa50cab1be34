"""What a process and its children used."""

from __future__ import annotations

import subprocess
import sys

from minisgl.bench.process_usage import Usage

WORK = """
import sys
data = bytearray(b"x" * (200 << 20))
sum(range(3_000_000))
print(flush=True)
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_children_count() -> None:
    """The process that is asked starts another one, and that does the work."""
    process = subprocess.Popen((sys.executable, "-c", PARENT, WORK), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with Usage(process.pid) as used:
        process.stdout.readline()
    process.stdin.close()
    process.stdout.close()
    process.wait()
    assert used.cpu_s is not None and used.cpu_s > 0
    assert used.rss_bytes is not None and used.rss_bytes > 200 << 20


def test_usage_without_a_process_is_unknown() -> None:
    with Usage(None) as used:
        pass
    assert used.cpu_s is None and used.rss_bytes is None
