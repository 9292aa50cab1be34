"""Every environment variable that minisgl reads, and the only module that reads them.

Invariants: a variable is read when it is needed, never at import; a bad value is an `EnvError` that names the variable.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

CPU_BACKEND = "MINISGL_CPU_BACKEND"
"""Scheduler: python, rust_hotpath, or rust_gateway (that with the Rust front end). `--cpu-backend` wins."""

FRONTEND = "MINISGL_FRONTEND"
"""Front end: rust or python. `--frontend` wins."""

NO_EXTENSION = "MINISGL_NO_EXTENSION"
"""1: serve as if the compiled extension were missing (`minisgl/extension.py`)."""

CPU_ISA = "MINISGL_CPU_ISA"
"""Limit the CPU engine to an instruction set: scalar, avx2, avxvnni, avx512, amx or neon. Default: the best one."""

DISABLE_OVERLAP_SCHEDULING = "MINISGL_DISABLE_OVERLAP_SCHEDULING"
"""1: schedule a step only when the step before it is committed."""

CACHE = "MINISGL_CACHE"
"""Folder for imported models and converted tokenizers. Default: minisgl in XDG_CACHE_HOME or ~/.cache."""

DATA = "MINISGL_DATA"
"""Folder with real tokenizers, traces and prompts, for tests and benchmarks, which are skipped without it."""

API_KEY = "MINISGL_API_KEY"
"""API key that clients must send, and that `minisgl chat` sends. `--api-key` wins, but shows in lists of processes."""

ECHO_FAIL_STEPS = "MINISGL_ECHO_FAIL_STEPS"
"""Steps whose forward fails on the echo engine, separated by commas. For tests of a server."""

ECHO_STATES = "MINISGL_ECHO_STATES"
"""Number of slots for state snapshots of the echo engine, which gets recurrent states by it. For tests."""

HEAD_WAIT = "MINISGL_HEAD_WAIT"
"""Seconds of `minisgl.config.Silence.head_wait`. For tests: a slow machine then changes no stream's status."""

STEP_DELAY_FILE = "MINISGL_STEP_DELAY_FILE"
"""File with a delay of each step in milliseconds, read anew at each step. For tests and screenshots."""

SHADOW = "MINISGL_CPU_BACKEND_SHADOW"
"""1: run the other scheduler with the same calls, and compare their decisions."""

SHADOW_REPORT = "MINISGL_CPU_BACKEND_SHADOW_REPORT"
"""File for the differences of a shadow, one JSON line each."""

SHADOW_EVERY_N = "MINISGL_CPU_BACKEND_SHADOW_EVERY_N"
"""A shadow compares every n-th step only. Default: 1."""

SHADOW_MAX_DIFFS = "MINISGL_CPU_BACKEND_SHADOW_MAX_DIFFS"
"""A shadow stops after this number of differences. Default: 100."""

FAULTY_CONTROL_PLANE = "MINISGL_FAULTY_CONTROL_PLANE"
"""Point at which the scheduler fails, such as commit:40:after. For tests of a server."""

TRANSPORT_LATENCY_STATS = "MINISGL_TRANSPORT_LATENCY_STATS"
"""1: measure encoding, decoding and queueing of the messages between the processes."""

SHELL_MAX_TOKENS = "MINISGL_SHELL_MAX_TOKENS"
"""Token limit of one answer in the chat. `--max-tokens` wins."""

SHELL_TEMPERATURE = "MINISGL_SHELL_TEMPERATURE"
"""The temperature of the chat. `--temperature` wins."""

SHELL_TOP_K = "MINISGL_SHELL_TOP_K"
"""The top-k of the chat. `--top-k` wins."""

SHELL_TOP_P = "MINISGL_SHELL_TOP_P"
"""The top-p of the chat. `--top-p` wins."""

ALL = (
    API_KEY,
    CPU_BACKEND,
    FRONTEND,
    NO_EXTENSION,
    CPU_ISA,
    SHADOW,
    SHADOW_REPORT,
    SHADOW_EVERY_N,
    SHADOW_MAX_DIFFS,
    TRANSPORT_LATENCY_STATS,
    DISABLE_OVERLAP_SCHEDULING,
    CACHE,
    DATA,
    ECHO_FAIL_STEPS,
    ECHO_STATES,
    FAULTY_CONTROL_PLANE,
    HEAD_WAIT,
    STEP_DELAY_FILE,
    SHELL_MAX_TOKENS,
    SHELL_TEMPERATURE,
    SHELL_TOP_K,
    SHELL_TOP_P,
)

NO_EFFECT = {
    "MINISGL_FLASHINFER_USE_TENSOR_CORES": "FlashInfer's own choice is used",
    "MINISGL_PYNCCL_MAX_BUFFER_SIZE": "torch's own NCCL is used",
}
"""Variables of mini-sglang that have no effect here, with the reason."""

ISAS = ("scalar", "avx2", "avxvnni", "avx512", "amx", "neon")
OF_TESTS = ("MINISGL_GPU_REHEARSAL",)
"""Variables that only the tests read."""

PREFIX = "MINISGL_"
RUST_GATEWAY = "rust_gateway"


class EnvError(ValueError):
    """An environment variable with an invalid value. The text names the variable and says what is valid."""


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise EnvError(f"{name}: {value!r}: must be 0 or 1")


def notices() -> list[str]:
    """Return a warning for each `MINISGL_*` variable that is set and unknown or without an effect."""
    lines = []
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if name in NO_EFFECT:
            lines.append(f"{name}: does nothing here: {NO_EFFECT[name]}")
        elif name not in (*ALL, *OF_TESTS):
            close = difflib.get_close_matches(name, ALL, 1)
            lines.append(f"{name}: unknown variable, ignored" + (f": did you mean {close[0]}?" if close else ""))
    return lines


def check() -> None:
    """Raise `EnvError` for the first variable with an invalid value, whether it will be used or not."""
    for read in (
        *(no_extension, frontend, cpu_isa, shadow, disable_overlap_scheduling, cache_dir, transport_latency_stats),
        *(echo_fail_steps, echo_states, faulty_control_plane, shell_settings),
    ):
        read()


def set_variables(names: Iterable[str]) -> list[str]:
    """Return the `names` of variables that are set and not empty, in their order."""
    return [name for name in names if os.environ.get(name)]


def use_temporary(folder: str) -> None:
    """Make `folder` the place for temporary files of this process and its children."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder


OPENBLAS = "OPENBLAS_NUM_THREADS"  # threads of numpy's BLAS, which start with its import


def with_one_thread() -> dict[str, str]:
    """Return the environment with one BLAS thread, for a process that imports numpy and forks."""
    return {**os.environ, OPENBLAS: "1"}


def forget_one_thread() -> None:
    """Remove the limit of `with_one_thread` from this process's environment, so that its children use all threads."""
    os.environ.pop(OPENBLAS, None)


def shell_settings() -> dict[str, int | float]:
    """Return the fields of a chat's requests that `MINISGL_SHELL_*` variables set. Raises `EnvError`."""
    kinds: dict[str, type[int] | type[float]] = {
        SHELL_MAX_TOKENS: int,
        SHELL_TEMPERATURE: float,
        SHELL_TOP_K: int,
        SHELL_TOP_P: float,
    }
    fields: dict[str, int | float] = {}
    for name, kind in kinds.items():
        if value := os.environ.get(name, "").strip():
            try:
                number = kind(value)
                if not math.isfinite(number):
                    raise ValueError(value)
                fields[name.removeprefix("MINISGL_SHELL_").lower()] = number
            except ValueError as error:
                what = "a whole number" if kind is int else "a number"
                raise EnvError(f"{name}: {value!r}: must be {what}") from error
    return fields


def api_key() -> str | None:
    return os.environ.get(API_KEY) or None


def shadow() -> dict[str, bool | int | str | None]:
    """Return the shadow settings of `DebugConfig` from the environment. Raises `EnvError`."""
    return {
        "shadow": _flag(SHADOW),
        "shadow_report": os.environ.get(SHADOW_REPORT) or None,
        "shadow_every_n": _count(SHADOW_EVERY_N, 1),
        "shadow_max_diffs": _count(SHADOW_MAX_DIFFS, 100),
    }


def _count(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise EnvError(f"{name}: {value!r}: must be a number, at least 1")
    return int(value)


def transport_latency_stats() -> bool:
    return _flag(TRANSPORT_LATENCY_STATS)


def faulty_control_plane() -> str:
    value = os.environ.get(FAULTY_CONTROL_PLANE, "")
    if value and not re.fullmatch(r"(schedule|commit):[0-9]+:(before|after)", value):
        raise EnvError(f"{FAULTY_CONTROL_PLANE}: {value!r}: must be like commit:40:after")
    return value


def echo_fail_steps() -> set[int]:
    value = os.environ.get(ECHO_FAIL_STEPS, "")
    try:
        return {int(step) for step in value.split(",") if step}
    except ValueError as error:
        raise EnvError(f"{ECHO_FAIL_STEPS}: {value!r}: must be numbers separated by commas") from error


def echo_states() -> int | None:
    value = os.environ.get(ECHO_STATES, "")
    if value and not value.isdigit():
        raise EnvError(f"{ECHO_STATES}: {value!r}: must be a number, at least 0")
    return int(value) if value else None


def head_wait() -> float | None:
    value = os.environ.get(HEAD_WAIT, "")
    if value and not value.isdecimal():
        raise EnvError(f"{HEAD_WAIT}: {value!r}: must be a whole number of seconds")
    return float(value) if value else None


def step_delay_file() -> str | None:
    return os.environ.get(STEP_DELAY_FILE) or None


def cpu_backend() -> str | None:
    value = os.environ.get(CPU_BACKEND) or None
    return "rust_hotpath" if value == RUST_GATEWAY else value


def frontend() -> Literal["rust", "python"] | None:
    """Return the front end of `FRONTEND`, else of `CPU_BACKEND=rust_gateway`, else None. Raises `EnvError`."""
    value = os.environ.get(FRONTEND, "")
    if value not in ("", "rust", "python"):
        raise EnvError(f"{FRONTEND}: {value!r}: must be rust or python")
    if value == "python":
        return "python"
    return "rust" if value or os.environ.get(CPU_BACKEND) == RUST_GATEWAY else None


def no_extension() -> bool:
    """Return True if the compiled extension is to be treated as missing."""
    return _flag(NO_EXTENSION)


def cpu_isa() -> str | None:
    """Return the instruction set that limits the CPU engine, or None. The engine checks if the machine has it."""
    value = os.environ.get(CPU_ISA) or None
    if value not in (None, *ISAS):
        raise EnvError(f"{CPU_ISA}: {value!r}: must be one of {', '.join(ISAS)}")
    return value


def cuda_visible_devices() -> str | None:
    """Return CUDA's own variable CUDA_VISIBLE_DEVICES, or None if unset. An empty value or -1 hides all devices."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def disable_overlap_scheduling() -> bool:
    return _flag(DISABLE_OVERLAP_SCHEDULING)


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment updated with `changes`, for a child process."""
    return {**os.environ, **changes}


def set_purge_delay() -> None:
    """Let the extension's allocator return freed memory to the system at once, unless the user set its purge delay.
    Call it once, before the extension is loaded; child processes inherit it."""
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")


def state_dir() -> Path:
    """Return the folder for remembered user input, such as the chat's history. It is not created here."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state") / "minisgl"


def cache_dir() -> Path:
    """Return the folder of imported models and converted tokenizers, not created here. Raises `EnvError`."""
    if own := os.environ.get(CACHE):
        folder = Path(own).expanduser()
        if why := not_a_folder(folder):
            raise EnvError(f"{CACHE}: {own!r}: {why}: must be a folder that can be written")
        return folder
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "minisgl"


def not_a_folder(path: Path) -> str:
    """Return why `path` cannot be a writable folder, or "" if it can. `path` need not exist yet."""
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def hf_home() -> Path:
    """Return Hugging Face's home folder, by HF_HOME or XDG_CACHE_HOME."""
    if own := os.environ.get("HF_HOME"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "huggingface"


def hf_cache_dir() -> Path:
    """Return the download cache of huggingface_hub, which `--model OWNER/REPO` uses as well. It is not created here."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(own).expanduser() if own else hf_home() / "hub"


def hub_endpoint(name: str, default: str) -> str:
    """Return a hub's URL from the variable `name`, else `default`. Raises `EnvError` if it is no http(s) URL."""
    value = os.environ.get(name, "").strip().rstrip("/") or default
    if not value.startswith(("http://", "https://")):
        raise EnvError(f"{name}: {value!r}: must begin with http:// or https://")
    return value


def hub_token(name: str) -> str | None:
    """Return the access token in the variable `name`, for HF_TOKEN else the one of `hf auth login`, or None."""
    if value := os.environ.get(name, "").strip():
        return value
    if name == "HF_TOKEN":
        try:
            own = os.environ.get("HF_TOKEN_PATH")
            file = Path(own).expanduser() if own else hf_home() / "token"
            return file.read_text(encoding="utf-8").strip() or None
        except OSError:
            return None
    return None


def hub_offline() -> bool:
    """Return True if no model hub may be contacted (HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE)."""
    return _flag("HF_HUB_OFFLINE") or _flag("TRANSFORMERS_OFFLINE")


def data_dir() -> Path | None:
    value = os.environ.get(DATA)
    return Path(value) if value else None
