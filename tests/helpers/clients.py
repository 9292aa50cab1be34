"""Programs of official clients, each in the environment that `make client-test` creates for it in `.clients`.

Invariants: a test without its environment is skipped with that reason; a test sees nothing of a program but its output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".clients"
CLIENTS = ROOT / "tests" / "clients"
PROGRAM_S = 300.0  # a failure, not a measurement
INSTALLED = ".installed"
PYCACHE = str(ENVIRONMENTS / "pycache")  # bytecode of imported modules: environments are installed without it
CHECKS = "checks"  # a test's property: its client, and how many checks ended how


def environment(name: str, made_by: str = "make client-test") -> Path:
    """Return the folder of a client's environment. Skips the test if it does not exist."""
    folder = ENVIRONMENTS / name
    if not (folder / INSTALLED).exists():
        pytest.skip(f"the environment of {name} is not there: {made_by} makes it")
    return folder


def python_command(name: str) -> list[str]:
    return [str(environment(name) / "bin" / "python")]


def node_command(program: str) -> list[str]:
    """Return the command of a Node program, copied next to the modules that it imports."""
    folder = environment("node")
    for source in (CLIENTS / "node").glob("*.mjs"):
        shutil.copy(source, folder / source.name)
    return ["node", str(folder / program)]


def run(command: list[str], url: str, *, check: bool = True) -> str:
    """Run a client program against the server at `url`; return its stdout. Asserts exit code 0 if `check` is set."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    more = {"MINISGL_URL": url, "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none", "PYTHONPYCACHEPREFIX": PYCACHE}
    more |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AI_SDK_LOG_WARNINGS": "false"}  # no other host, no news
    done = subprocess.run(
        command, env=env | more, text=True, capture_output=True, timeout=PROGRAM_S, check=False, cwd=CLIENTS
    )
    assert not check or done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def langchain_standard(url: str) -> tuple[int, int, str]:
    """Run LangChain's standard integration tests of chat models; return the counts passed and failed, the output."""
    program = str(CLIENTS / "programs" / "langchain_standard.py")
    # its asynchronous client lives as long as the process, and so must the loop
    loops = [f"-o=asyncio_default_{what}_loop_scope=session" for what in ("test", "fixture")]
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "-o=asyncio_mode=auto", *loops]
    command = [*python_command("langchain"), "-m", "pytest", "--tb=short", *options, program]
    text = run(command, url, check=False)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", text.splitlines()[-1])}
    return counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), text[-12000:]


def report(command: list[str], url: str) -> dict[str, Any]:
    """Run a program and return its report, the JSON in the last line of its output."""
    report: dict[str, Any] = json.loads(run(command, url).splitlines()[-1])
    return report
