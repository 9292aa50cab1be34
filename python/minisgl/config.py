"""The resolved, immutable configuration of one engine process and of one server.

Keeps true: built once (by cli or llm.py), checked there, never changed; it travels to the engine process as JSON.
Doesn't know: command-line spelling, the environment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.scheduler.api import CachePolicy

EngineName = Literal["torch", "echo"]
ModelSource = Literal["auto", "huggingface", "modelscope"]
LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
MODEL_SMOLLM2 = "smollm2"


class ConfigError(ValueError):
    """A setting that cannot be; the text names it and says what to change."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to load and how to schedule. `None` means: decided from the model and the machine."""

    model: str = MODEL_SMOLLM2
    engine: EngineName = "torch"
    model_source: ModelSource = "auto"
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: Dtype = "auto"
    device: str = "auto"
    seed: int = 0  # of dummy weights
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float = 0.5  # of the memory that is free after loading, for the KV pool, without num_pages
    max_seq_len: int | None = None
    max_running_requests: int = 64
    max_prefill_length: int = 2048
    cache: CachePolicy = "lru"
    cpu_backend: str = "python"
    overlap: bool = True
    num_threads: int | None = None

    def check(self) -> EngineConfig:
        """Raise `ConfigError` at the first impossible value, else return self."""

        def at_least(name: str, low: int) -> None:
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: {value}: must be at least {low}")

        for name in ("page_size", "num_pages", "max_running_requests", "max_prefill_length", "num_threads"):
            at_least(name, 1)
        at_least("max_seq_len", 2)
        if not 0.0 < self.memory_ratio <= 1.0:
            raise ConfigError(f"memory_ratio: {self.memory_ratio}: must be above 0 and at most 1")
        return self


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole server: one HTTP address in front of one engine process."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 1919
    served_model_name: str | None = None

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        return self.served_model_name or self.engine.model.rstrip("/")
