"""The flag `minisgl generate --narrate`, which logs the whole life of one answer to standard error, for learners.

The lines of each step are those of `--log-level debug`; this adds the model before them, each token, and the times
after them. A server logs none of it, because it logs no texts.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm import LLM


class Narration:
    """Logger of one answer: call `begin` when the model is loaded, `token` for each token, and `end` at the end."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._begin_s = 0.0
        self._token_s: list[float] = []  # arrival time of each token

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an `LLM` that logs its steps in order, without overlap."""
        return {"log_level": "debug", "overlap": False, "describe_token": self.token}

    def begin(self, llm: LLM) -> None:
        """Print the model, where it computes, and the tokens that end an answer; start the clock."""
        self._llm, info = llm, llm.engine_info
        ends = ", ".join(self._name(token) for token in sorted(info.eos_ids)) or "none"
        _print(f"model {llm.config.shown_model}: {info.name} engine on {info.device}, {info.dtype}")
        _print(f"end tokens: {ends}")
        self._begin_s = time.monotonic()

    def token(self, token_id: int) -> str:
        """Record the time of a sampled token and return its id and text."""
        self._token_s.append(time.monotonic())
        return self._name(token_id)

    def _name(self, token_id: int) -> str:
        if self._llm is None:
            return str(token_id)
        return f"{token_id} {self._llm.tokenizer.decode([token_id], skip_special_tokens=False)!r}"

    def end(self) -> None:
        """Print the number of tokens, the time to the first one, and the rate of the others."""
        count = len(self._token_s)
        if not count:
            return
        first_s, last_s = self._token_s[0], self._token_s[-1]
        line = f"answer: {count} {'token' if count == 1 else 'tokens'}, TTFT {(first_s - self._begin_s) * 1000:.1f} ms"
        if last_s > first_s:
            line += f", then {(count - 1) / (last_s - first_s):.1f} tok/s"
        _print(line)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
