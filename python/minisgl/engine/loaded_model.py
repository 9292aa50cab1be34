"""What loading gives to the torch engines, whoever wrote the layers."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.models.api import Model


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`dtype` is a name of `dtypes.DTYPES`, chosen because of `why`."""

    model: Model
    architecture: str
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    dtype: str
    why: str
    details: str = ""  # for people, as those of `EngineInfo`
