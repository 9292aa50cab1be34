"""Of which tokens' hidden states a model's own embeddings are made: modules.json and 1_Pooling/config.json, as
sentence-transformers writes them and as an imported GGUF file has them.

Invariants: a model whose files ask for anything else than what is computed has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
_COMPUTED = {"Transformer", "Pooling", "Normalize"}
_MODES: dict[str, Literal["mean", "last"]] = {"mean_tokens": "mean", "lasttoken": "last"}
_MODE = "pooling_mode_"


class Pooling(NamedTuple):
    name: Literal["mean", "last"] | None
    why: str = ""
    """There is none."""


def own_pooling(model_dir: str | None) -> Pooling:
    """Of the folder, or the mean where its files say nothing."""
    folder = Path(model_dir or "none")
    try:
        modules = _read(folder / MODULES, [])
        kinds = {str(one["path"]): str(one["type"]).rpartition(".")[2] for one in modules}
        if others := [f"{path} ({kind})" for path, kind in kinds.items() if kind not in _COMPUTED]:
            return Pooling(None, f"{MODULES}: {', '.join(others)} is not computed")
        place = next((f"{path}/config.json" for path, kind in kinds.items() if kind == "Pooling"), POOLING)
        raw = _read(folder / place, None)
        if raw is None:
            return Pooling("mean")
        modes = [name.removeprefix(_MODE) for name, on in raw.items() if name.startswith(_MODE) and on is True]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Pooling(None, f"its files are not as sentence-transformers writes them: {error!r}")
    if len(modes) == 1 and modes[0] in _MODES:
        return Pooling(_MODES[modes[0]])
    return Pooling(None, f"{place} asks for {' and '.join(modes) or 'nothing'}")


def _read(file: Path, default: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else default
