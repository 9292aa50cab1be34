"""Quantization of full weights to blocks of 8 or 4 bits, once; the result is kept in the cache.
rust/minisgl-cpu/src/files has the block formats.

Invariants: the cached file's name identifies the state of its source files; its content names them, too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from minisgl import envs
from minisgl.config import ConfigError, Quantization
from minisgl.extension import _rust
from minisgl.utils.progress import Report, counter

FORMAT = "2"  # part of the cached file's name


def quantized_weights(source: Path, quantization: Quantization, say: Report) -> Path:
    """Return the quantized GGUF file for `source`, a GGUF file or a folder of safetensors, created now if it is not
    cached; `source` itself if it is quantized already. Raises `ConfigError`, and `ValueError` from `_rust.CpuEngine`.
    """
    key = hashlib.sha256()
    try:
        for file in [source] if source.is_file() else sorted(source.glob("*.safetensors")):
            path = file.resolve()
            now = path.stat()
            key.update(f"{file.name}\n{path}\n{now.st_size}\n{now.st_mtime_ns}\n".encode())
    except OSError as error:
        raise ConfigError(f"{source.name}: {error}") from error
    cached = envs.cache_dir() / "quantized" / f"{key.hexdigest()[:32]}-{quantization}-{FORMAT}.gguf"
    progress = counter(say, f"quantizing {source.name} to {quantization}, once")
    return cached if _rust.quantize_weights(source, quantization, cached, progress) else source
