"""Other projects' names for values and settings, mostly mini-sglang's and SGLang's.

Invariants: an accepted name means exactly the same as the name here; a setting given under two names is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl.config import ConfigError, PrefixFile, device_problem
from minisgl.scheduler.policies import scheduler_problem
from minisgl.utils.prefix_file import is_prefix_file

DTYPES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
}
KV_DTYPES = {
    "fp16": "f16",
    "half": "f16",
    "float16": "f16",
    "fp32": "f32",
    "float32": "f32",
    "q8_0": "q8",
    "int8": "q8",
    "q4_0": "q4",
    "int4": "q4",
}
QUANTIZATIONS = {"q8_0": "q8", "int8": "q8", "q4_1": "q4", "int4": "q4"}
ATTENTION_BACKENDS = ("torch_sdpa", "flashinfer", "flashinfer:fa3", "flash_attention", "eager")
ATTENTION = {
    "fi": "flashinfer",
    "fa": "flash_attention",
    "flash_attention_2": "flash_attention",
    "sdpa": "torch_sdpa",
}
NO_ATTENTION = {"trtllm": "not supported"}
CACHES = {"radix": "lru"}
ROUTINGS = {"rr": "round_robin", "fsfs": "least_load"}
SETTINGS = {
    "model_path": "model",
    "max_seq_len_override": "max_seq_len",
    "max_extend_tokens": "max_prefill_length",
    "max_running_req": "max_running_requests",
    "cache_type": "cache",
    "num_page_override": "num_pages",
    "use_dummy_weight": "load_format",
    "enforce_eager": "cuda_graph_max_bs",
}
"""Other names of `LLM` settings, and their fields of `EngineConfig`."""
SWITCHES = {"use_dummy_weight": ("auto", "dummy"), "enforce_eager": (None, 0)}
"""Values of a field by a switch of `SETTINGS`: for false, for true."""


def dtype(value: object) -> str:
    """Return the long name of a dtype. A torch dtype is read by its name, so that torch is not needed."""
    name = str(value).removeprefix("torch.")
    return DTYPES.get(name, name)


def kv_dtype(value: object) -> str:
    name = str(value).removeprefix("torch.").lower()
    return KV_DTYPES.get(name, name)


def quantization(value: object) -> str:
    name = str(value).lower()
    return QUANTIZATIONS.get(name, name)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def size(value: object) -> int:
    """Parse a number of bytes, with or without a unit, such as 6GB or 512MiB. Raises `ConfigError`."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or not (num_bytes := int(float(match[1]) * _UNITS[(match[2] or "").lower()])):
        raise ConfigError(f"{value}: must be a size such as 6GB, 512MiB or a number of bytes")
    return num_bytes


def routing(value: object) -> str:
    """Return the name of a routing policy; `fsfs` is mini-sglang's name for `least_load`."""
    name = str(value).replace("-", "_")
    return ROUTINGS.get(name, name)


def positive(text: str) -> int:
    """Parse a whole number of at least 1. Raises `ConfigError`."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text}: must be a whole number, at least 1")
    return int(text)


def number_or_auto(text: str) -> int | str:
    """Parse a whole number of at least 1, or "auto". Raises `ConfigError`."""
    if text == "auto":
        return text
    try:
        return positive(text)
    except ConfigError as error:
        raise ConfigError(f"{error}, or auto") from None


def device(text: str) -> str:
    """Return `text` if it is a valid device name, whether the device exists or not. Raises `ConfigError`."""
    if problem := device_problem(text):
        raise ConfigError(f"{text}: {problem}")
    return text


def cpu_backend(text: str) -> str:
    """Return `text` if it names a scheduler. Raises `ConfigError`."""
    if problem := scheduler_problem(text):
        raise ConfigError(f"{text}: {problem}")
    return text


def attention_backend(text: str) -> str:
    """Return an attention backend, or PREFILL,DECODE if they differ. Raises `ConfigError`."""
    names = [_attention_backend(name.strip(), text) for name in text.split(",")]
    if len(names) > 2 or (len(names) == 2 and "auto" in names):
        raise ConfigError(f"{text}: give one backend, or two as PREFILL,DECODE: {', '.join(ATTENTION_BACKENDS)}")
    return names[0] if len(set(names)) == 1 else ",".join(names)


def _attention_backend(name: str, text: str) -> str:
    if name in NO_ATTENTION:
        raise ConfigError(f"{text}: {name} is {NO_ATTENTION[name]}: choose auto, {', '.join(ATTENTION_BACKENDS)}")
    full = ATTENTION.get(name, name)
    if full not in ("auto", *ATTENTION_BACKENDS):
        raise ConfigError(f"{text}: {name!r} is none of auto, {', '.join(ATTENTION_BACKENDS)}; short: fi, fa")
    return full


def text_or_file(text: str) -> str | PrefixFile:
    """Return `text`, or for @FILE its text, or a `PrefixFile` for an exported prefix. Raises `ConfigError`."""
    if not text.startswith("@"):
        return text
    file = Path(text[1:]).expanduser()
    try:
        return PrefixFile(str(file)) if is_prefix_file(file) else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{text}: cannot be read: {reason}") from error


def image_hosts(text: str) -> tuple[str, ...]:
    """Parse host names, separated by commas. Raises `ConfigError`."""
    hosts = tuple(text.lower().split(","))
    for host in hosts:
        if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*", host):
            raise ConfigError(f"{text}: must be names of hosts, such as a.example,b.example, without scheme and port")
    return hosts


def adapter(text: str) -> tuple[str, str]:
    """Parse NAME=PATH, or vLLM's {"name": ..., "path": ...}, to an adapter's name and folder. Raises `ConfigError`."""
    if text.startswith("{"):
        try:
            said = json.loads(text)
            name, path = said["name"], said["path"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{text}: must have a name and a path: {error!r}") from error
    else:
        name, _, path = text.partition("=")
    if not isinstance(name, str) or not isinstance(path, str) or not name.strip() or not path:
        raise ConfigError(f"{text}: must be NAME=PATH: the adapter's name in requests, and its folder")
    return name.strip(), str(Path(path).expanduser())


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of `LLM` to fields of `EngineConfig`. Raises `TypeError` or `ConfigError`."""
    fields: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name, value in given.items():
        field = SETTINGS.get(name, name)
        if field in first:
            raise TypeError(f"LLM: {first[field]} and {name} are the same setting: give one of them")
        first[field] = name
        fields[field] = SWITCHES[name][bool(value)] if name in SWITCHES else value
    if "dtype" in fields:
        fields["dtype"] = dtype(fields["dtype"])
    if "kv_dtype" in fields:
        fields["kv_dtype"] = kv_dtype(fields["kv_dtype"])
    if fields.get("quantization") is not None:
        fields["quantization"] = quantization(fields["quantization"])
    if fields.get("cache") in CACHES:
        fields["cache"] = CACHES[fields["cache"]]
    if isinstance(texts := fields.get("warm_prefixes"), (list, tuple)):
        fields["warm_prefixes"] = tuple(text_or_file(one) if isinstance(one, str) else one for one in texts)
    if isinstance(lora := fields.get("lora"), Mapping):
        fields["lora"] = tuple(adapter(f"{name}={path}") for name, path in lora.items())
    if isinstance(backend := fields.get("attention_backend"), str):
        try:
            fields["attention_backend"] = attention_backend(backend)
        except ConfigError as error:
            raise ConfigError(f"attention_backend: {error}") from error
    return fields
