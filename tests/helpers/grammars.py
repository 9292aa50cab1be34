"""Grammars for the echo engine's tokenizer, compiled synchronously, and mock matchers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE, mix
from minisgl.grammar.compiler import Compiled, GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.step import Int32Array

NO_SPACE: Any = {"whitespace_flexible": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "d\n"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def compiler(vocab_size: int = VOCAB_SIZE, eos_ids: tuple[int, ...] = (EOS_ID,)) -> GrammarCompiler:
    """Return a grammar compiler for the echo tokenizer, without a thread."""
    return GrammarCompiler(None, vocab_size, eos_ids, threaded=False)


def of_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher  # not where only the matchers below are used

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=NO_SPACE)


def of_regex(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


def matcher(grammar: str, vocab_size: int = VOCAB_SIZE, eos_ids: tuple[int, ...] = (EOS_ID,)) -> Matcher:
    found = compiler(vocab_size, eos_ids)
    found.submit(0, grammar)
    (made,) = found.take()
    assert made.matcher is not None, made.error
    return made.matcher


class MockMatcher:
    """Base of mock matchers that serve one request and take no time."""

    num_bytes = 0

    def fill(self, mask: Int32Array) -> None:
        raise NotImplementedError

    def try_fill(self, mask: Int32Array, left_s: float) -> bool:
        self.fill(mask)
        return True

    def prepare(self) -> None:
        pass

    def copy(self) -> Self:
        return self


class PickyMatcher(MockMatcher):
    """Mock matcher that allows about a quarter of the ids, depending on all earlier tokens, so that a lost, repeated or
    late token is detected. About once in twelve masks, only an end token and one other id are allowed. `poisoned`:
    fails at the mask with this index. `slow_one_in`: one in this many masks takes long."""

    def __init__(
        self, seed: int, vocab_size: int, eos_ids: Sequence[int], poisoned: int = -1, slow_one_in: int = 0
    ) -> None:
        self.error = ""
        self._seed = seed
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._masks_left = poisoned
        self._slow_one_in, self._prepared = slow_one_in, -1
        self.num_late = 0
        self._state, self._has_ended = mix(seed, 0), False

    def restart(self, generated: Sequence[int]) -> None:
        self._state, self._has_ended = mix(self._seed, 0), False
        for token in generated:
            self.consume(token)

    def allowed(self) -> list[int]:
        if self.error or self._has_ended:
            return self._eos_ids
        ids = np.arange(self._vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(self._state)
        ids ^= ids >> np.uint64(29)
        ids *= np.uint64(0xBF58476D1CE4E5B9)
        candidates = np.flatnonzero(ids >> np.uint64(62) == 0)
        candidates = [int(i) for i in candidates if i not in self._eos_ids] or [self._vocab_size // 2]
        return candidates if self._state % 12 else [*self._eos_ids, candidates[0]]

    def fill(self, mask: Int32Array) -> None:
        if self._masks_left == 0:
            self.error = "it was poisoned"
        self._masks_left -= 1
        mask[:] = 0
        bits = mask.view(np.uint32)
        for token in self.allowed():
            bits[token // 32] |= np.uint32(1 << token % 32)

    def try_fill(self, mask: Int32Array, left_s: float) -> bool:
        if self._slow_one_in and self._state // 64 % self._slow_one_in == 0 and self._prepared != self._state:
            mask[:] = 0x55555555
            self.num_late += 1
            return False
        self.fill(mask)
        return True

    def prepare(self) -> None:
        self._prepared = self._state

    def consume(self, token: int) -> None:
        if self.error or self._has_ended:
            return
        if token not in self.allowed():
            self.error = f"token {token} may not come"
        self._has_ended = token in self._eos_ids
        self._state = mix(self._state, token)


class PickyCompiler:
    """Mock compiler of `PickyMatcher`s. A grammar's text is a seed, and optionally, after a space, the index of the
    mask at which it fails. A slow mask is ready after some steps."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        wrap: Callable[[Any], Any] = lambda it: it,
        slow_one_in: int = 0,
    ) -> None:
        self._made: dict[int, Compiled] = {}
        self._later: dict[int, list[Any]] = {}  # steps that are left, the matcher
        self._of = vocab_size, eos_ids
        self._wrap = wrap
        self._slow_one_in = slow_one_in
        self.num_prepared = 0

    def submit(self, key: int, grammar: str) -> None:
        seed, _, poisoned = grammar.partition(" ")
        matcher = PickyMatcher(int(seed), *self._of, poisoned=int(poisoned or -1), slow_one_in=self._slow_one_in)
        self._made[key] = Compiled(key, self._wrap(matcher))

    def prepare(self, key: int, matcher: Matcher) -> None:
        self.num_prepared += 1
        self._later[key] = [self.num_prepared % 5, matcher]

    def cancel(self, key: int) -> None:
        self._made.pop(key, None)
        self._later.pop(key, None)

    def take(self) -> list[Compiled]:
        for key, one in list(self._later.items()):
            one[0] -= 1
            if one[0] < 0:
                one[1].prepare()
                self._made[key] = Compiled(key, self._later.pop(key)[1])
        compiled = list(self._made.values())
        self._made.clear()
        return compiled

    def follows(self, grammar: str, tokens: Sequence[int]) -> bool:
        """Return true if the grammar allows these tokens."""
        matcher = PickyMatcher(int(grammar), *self._of)
        matcher.restart(tokens)
        return not matcher.error


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()
