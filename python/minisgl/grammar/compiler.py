"""Grammars become matchers in a thread of their own.

Invariants: a matcher belongs to one request: the library's copies share lexers, and what breaks one would break all;
before the first grammar nothing is imported or built; nothing raises: what is wrong with a grammar is its answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.grammar.matcher import first_line, make_matchers
from minisgl.grammar.slots import Matcher
from minisgl.tokenizer import Tokenizer
from minisgl.utils.memory import give_back


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    key: int
    matcher: Matcher | None
    error: str = ""  # why there is none


class GrammarCompiler:
    """For the model of a folder, or the echo tokenizer without one. `wake` is called, in the thread, when there is
    something to take. `threaded` False compiles in `submit`, for tests that want no concurrency."""

    def __init__(
        self,
        model_dir: str | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        wake: Callable[[], None] = lambda: None,
        threaded: bool = True,
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_ids = tuple(token for token in eos_ids if token < vocab_size)
        self._wake = wake
        self._threaded = threaded
        self._make: Callable[[str], Matcher] | None = None
        self._thread: threading.Thread | None = None
        self._todo: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done: list[Compiled] = []
        self._open: set[int] = set()  # submitted, neither cancelled nor taken

    def submit(self, key: int, grammar: str) -> None:
        """`key` is new."""
        self._open.add(key)
        if not self._threaded:
            self._done.append(self._compile(key, grammar))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammar-compile", daemon=True)
            self._thread.start()
        self._todo.put((key, grammar))

    def cancel(self, key: int) -> None:
        """It is never taken. One that is being compiled is compiled to its end."""
        self._open.discard(key)

    def wait(self) -> None:
        """Until there is something to take. Only with something submitted."""
        with self._changed:
            self._changed.wait_for(lambda: self._done)

    def take(self) -> list[Compiled]:
        """What is done."""
        with self._changed:
            found = [one for one in self._done if one.key in self._open]
            self._done.clear()
        self._open.difference_update(one.key for one in found)
        return found

    def close(self) -> None:
        """End the thread, behind the grammar that it is at. Idempotent."""
        self._open.clear()
        self._wake = lambda: None
        self._todo.put(None)

    # ---------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            if job[0] in self._open:
                found = self._compile(*job)
                with self._changed:
                    self._done.append(found)
                    self._changed.notify_all()
                self._wake()

    def _compile(self, key: int, grammar: str) -> Compiled:
        try:
            matcher = self._matcher(grammar)
        except Exception as error:  # the library's, or of a model without a tokenizer that it knows
            return Compiled(key, None, first_line(str(error)) or type(error).__name__)
        return Compiled(key, None, matcher.error) if matcher.error else Compiled(key, matcher)

    def _matcher(self, grammar: str) -> Matcher:
        if not self._eos_ids:
            raise ValueError("the model has no end of sequence, where a grammar could end")
        if self._make is None:
            tokenizer = Tokenizer.open(self._model_dir, lazy=True)
            text = tokenizer.to_json() if tokenizer.file is None else tokenizer.file.read_text(encoding="utf-8")
            self._make = make_matchers(text, self._vocab_size, self._eos_ids)
            del text
            give_back()  # tens of megabytes, of a large vocabulary
        return self._make(grammar)
