"""A model's own pooling of hidden states for embeddings, and its prompt prefixes: modules.json, 1_Pooling/config.json
and config_sentence_transformers.json in the format of sentence-transformers; imported GGUF files have the second, too.

Invariants: a model whose files require anything that is not implemented has no pooling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

MODULES, POOLING, PROMPTS = "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"
_COMPUTED = {"Transformer", "Pooling", "Dense", "Normalize"}
Name = Literal["mean", "last", "cls"]
_MODES: dict[str, Name] = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}
_MODE = "pooling_mode_"


class Pooling(NamedTuple):
    name: Name | None
    why: str = ""
    """Reason why there is no pooling."""


def own_pooling(model_dir: str | None, *, has_dense: bool = True) -> Pooling:
    """Return the folder's pooling, or mean pooling if its files name none. `has_dense`: the engine has dense layers."""
    folder = Path(model_dir or "none")
    computed = _COMPUTED if has_dense else _COMPUTED - {"Dense"}
    try:
        modules = _read(folder / MODULES, [])
        kinds = {str(module["path"]): str(module["type"]).rpartition(".")[2] for module in modules}
        if others := [f"{path} ({kind})" for path, kind in kinds.items() if kind not in computed]:
            return Pooling(None, f"{MODULES}: {', '.join(others)} is not computed")
        config_file = next((f"{path}/config.json" for path, kind in kinds.items() if kind == "Pooling"), POOLING)
        raw = _read(folder / config_file, None)
        if raw is None:
            return Pooling("mean")
        modes = [name.removeprefix(_MODE) for name, on in raw.items() if name.startswith(_MODE) and on is True]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Pooling(None, f"its files are not as sentence-transformers writes them: {error!r}")
    if len(modes) == 1 and modes[0] in _MODES:
        return Pooling(_MODES[modes[0]])
    return Pooling(None, f"{config_file} asks for {' and '.join(modes) or 'nothing'}")


class Prompts(NamedTuple):
    """Prefixes of texts for embeddings, by name. `default` is the name for requests without one."""

    texts: Mapping[str, str]
    default: str | None

    def of(self, name: str | None) -> str:
        """Return the prefix for `name`, or the default one for `None`. Raises `KeyError` for an unknown name."""
        name = self.default if name is None else name
        return "" if name is None else self.texts[name]

    def of_a_search(self) -> tuple[str, str]:
        """Return the prefixes for a query and for a document, by the names that models commonly use."""
        query = next((self.texts[name] for name in ("query", "search_query", "s2p_query") if name in self.texts), None)
        names = ("document", "passage", "search_document")
        document = next((self.texts[name] for name in names if name in self.texts), None)
        return self.of(None) if query is None else query, self.of(None) if document is None else document


def own_prompts(model_dir: str | None) -> Prompts:
    """Return the prefixes in the model's folder; empty if its file has none."""
    try:
        raw = _read(Path(model_dir or "none") / PROMPTS, {})
        texts = {str(name): str(text) for name, text in (raw.get("prompts") or {}).items() if text is not None}
        default = raw.get("default_prompt_name")
    except (OSError, ValueError, AttributeError):
        return Prompts({}, None)
    return Prompts(texts, str(default) if default in texts else None)


def _read(file: Path, default: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else default
