"""Cargo's progress is counted, its names are left out, and everything else is passed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools import build_progress

SCRIPT = Path(build_progress.__file__)
CARGO = """
import sys
sys.stderr.write("   Compiling syn v2.0.119\\n    Building [==>   ] 57/202: minisgl-kernels, tokenizers(build)...\\r")
sys.stderr.write("\\x1b[1m\\x1b[33mwarning\\x1b[0m: unused variable\\nerror: it does not compile\\n")
sys.exit(101)
"""


def test_crates_are_counted_and_errors_are_passed_on() -> None:
    command = [sys.executable, str(SCRIPT), sys.executable, "-c", CARGO]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first, *others = done.stderr.splitlines()
    assert first.startswith("   57 of 202 crates, ") and first.endswith(" s: minisgl-kernels, tokenizers")
    assert others == ["warning: unused variable", "error: it does not compile"]
    assert done.returncode == 101


def test_a_line_that_is_no_progress_is_none() -> None:
    assert build_progress.status("   Compiling tokenizers v0.21.0", 1.0) is None
    assert build_progress.status("    Building [=====] 3/4", 9.6) == "3 of 4 crates, 10 s"


def test_without_a_command_it_says_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: " in done.stderr
