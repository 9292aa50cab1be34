"""The environment of a measurement: hardware and software versions, for the record with every result.

Invariants: no host name, no user, no path; nothing heavy is loaded (a GPU is named only if torch is loaded already).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from minisgl.extension import _rust, why_missing
from minisgl.utils.installed import version_of

PACKAGES = ("torch", "tokenizers", "numpy", "msgspec", "pyzmq", "starlette", "uvicorn", "uvloop", "httptools")
INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def environment() -> dict[str, Any]:
    """Return the hardware, software versions, commit and load of this machine, as JSON fields."""
    name, flags = _cpu()
    return {
        "cpu": name,
        "cores": psutil.cpu_count(logical=True),
        "instruction_sets": [known for known in INSTRUCTION_SETS if known in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {_number(platform.release())} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "extension": _extension(),
        "gpus": _gpus(),
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2),  # average of the last minute
    }


def environment_lines(record: Mapping[str, Any]) -> str:
    """Return an environment record (hardware and versions) as a Markdown list."""
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    extension = record["extension"]
    lines = [
        f"{record['cpu']}, {record['cores']} cores ({', '.join(record['instruction_sets']) or 'plain'}), "
        f"{record['memory_gib']} GiB, {record['system']}",
        f"Python {record['python']}, {packages}",
        "no extension" if extension is None else f"extension {extension['version']}, {extension['profile']} build",
        f"commit {record['commit'] or 'unknown'}; load of the machine at the start {record['load']}",
    ]
    if record["gpus"]:
        lines.insert(1, ", ".join(record["gpus"]))
    return "\n".join(f"- {line}" for line in lines)


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return name.group(1).strip() if name else platform.machine(), frozenset(flags.group(1).split() if flags else ())


def _number(release: str) -> str:
    """Return the number of a kernel release: `"5.15.0-91-generic"` -> `"5.15.0"`."""
    match = re.match(r"[\d.]+", release)
    return match.group(0).rstrip(".") if match else ""


def _extension() -> dict[str, Any] | None:
    if why_missing():
        return None
    info = _rust.build_info()
    return {"version": info["version"], "profile": info["profile"]}


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _commit() -> str | None:
    """Return the commit of this file's checkout, with `+changes` if its code differs; None outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short=10", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/python", ":/rust")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
