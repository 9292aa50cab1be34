"""Loads the tokenizer while the engine loads, if its folder is known before the engine names it.

Invariants: the tokenizer, or the error, is that of loading it afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from minisgl.config import ConfigError, EngineConfig
from minisgl.tokenizer import Tokenizer, read_chat_template
from minisgl.tokenizer.tokenizer import FILE
from minisgl.weights.sources import folder_at_hand


class EarlyTokenizer:
    """A tokenizer that is loaded in a thread, which starts with the object."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._template = None if config.chat_template is None else read_chat_template(config.chat_template)
        self._found: tuple[str, Tokenizer] | None = None
        self._thread = threading.Thread(target=self._load, name="early-tokenizer", daemon=True)
        self._thread.start()

    def take(self, model_dir: str | None, say: Callable[[str], None]) -> Tokenizer:
        """Return the tokenizer of the folder that the engine named. Blocks until then. Raises `TokenizerError`."""
        self._thread.join()
        if self._found is not None and self._found[0] == model_dir:
            return self._found[1]
        return Tokenizer.open(model_dir, self._template, say)  # may have to convert it

    def _load(self) -> None:
        if self._config.engine == "echo" or self._config.tokenizer is not None:  # the engine finds it
            return
        try:
            folder: Path | None = folder_at_hand(self._config.model)
            if folder is not None and (folder / FILE).is_file():
                self._found = str(folder), Tokenizer.open(folder, self._template)
        except (ConfigError, OSError, ValueError):  # the engine, or loading it again, reports it
            pass
