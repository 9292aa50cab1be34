"""Compiles grammars, and computes slow masks, in threads besides the step loop.

Invariants: a grammar is compiled once for all requests that have it; each request gets an independent copy, so that an
error in one affects no other; nothing is imported or built before the first grammar; work that no request waits for is
not started; nothing raises: an error in a grammar is part of the result.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minisgl.extension import _rust
from minisgl.grammar.slots import Matcher
from minisgl.tokenizer.tokenizer import tokenizer_json
from minisgl.utils.memory import give_back

MAX_KEPT_BYTES = 64 << 20  # memory of the cache of compiled grammars
COPIES_AT_ONCE = 8  # copies of one matcher before other jobs get their turn
NICE = 10  # niceness of the mask threads: forwards, whose threads wait for each other, go first
NUM_COMPILING = 2
NUM_MASKING = max(1, min(4, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """Result for a request: a matcher that it can use, or the error."""

    key: int
    matcher: Matcher | None
    error: str = ""  # reason for a missing matcher


@dataclass(slots=True, eq=False)
class _Job:
    keys: deque[int]  # requests that wait for it
    grammar: str = ""
    start: Matcher | None = None  # initial state, once the grammar is compiled
    matcher: Matcher | None = None  # matcher whose next mask to compute


@dataclass(slots=True, eq=False)
class _Lane:
    """A job queue and the threads that work on it."""

    name: str
    num_threads: int
    nice: int
    jobs: deque[_Job] = field(default_factory=deque)
    threads: list[threading.Thread] = field(default_factory=list)


class GrammarCompiler:
    """Grammar compiler for the model in `model_dir`, or for the echo tokenizer if that is `None`. `wake` is called in a
    thread when there is a result. `threaded` False does the work in `submit` and `prepare`, for deterministic tests."""

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
        self._making = threading.Lock()  # guards `_tokenizer`
        self._tokenizer: _rust.GrammarTokenizer | None = None
        self._changed = threading.Condition()  # guards all fields below
        self._closed = False
        self._compiling = _Lane("grammar-compile", NUM_COMPILING, 0)
        self._masking = _Lane("grammar-mask", NUM_MASKING, NICE)
        self._jobs: dict[int, _Job] = {}  # by key, until taken or cancelled
        self._by_grammar: dict[str, _Job] = {}  # unfinished jobs
        self._kept: OrderedDict[str, Matcher] = OrderedDict()  # initial matchers, least recently used first
        self._num_kept_bytes = 0
        self._done: list[Compiled] = []

    def submit(self, key: int, grammar: str) -> None:
        """Start compiling `grammar`. `key`, which must be new, identifies the result."""
        with self._changed:
            job = self._by_grammar.get(grammar)
            if job is not None:
                self._jobs[key] = job
                job.keys.append(key)
                return
            job = self._by_grammar[grammar] = _Job(deque([key]), grammar)
        self._add(self._compiling, key, job)

    def prepare(self, key: int, matcher: Matcher) -> None:
        """Compute the slow next mask of `matcher`. `key`, which must be new, identifies the result."""
        self._add(self._masking, key, _Job(deque([key]), matcher=matcher))

    def cancel(self, key: int) -> None:
        """Cancel the result for `key`. A job that no other key waits for is not started; a running one finishes."""
        with self._changed:
            job = self._jobs.pop(key, None)
            if job is not None and key in job.keys:
                job.keys.remove(key)

    def wait(self) -> None:
        """Block until there is a result. Call it only with work submitted."""
        with self._changed:
            self._changed.wait_for(lambda: self._done)

    def take(self) -> list[Compiled]:
        """Return the results since the last call."""
        if not self._jobs:
            return []
        with self._changed:
            results = [result for result in self._done if self._jobs.pop(result.key, None) is not None]
            self._done.clear()
        return results

    def close(self) -> None:
        """Stop the threads after their current jobs. Idempotent."""
        with self._changed:
            self._wake = lambda: None
            self._closed = True
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------------- the threads

    def _add(self, lane: _Lane, key: int, job: _Job) -> None:
        with self._changed:
            self._jobs[key] = job
            lane.jobs.append(job)
            self._changed.notify_all()
        if not self._threaded:
            while lane.jobs:
                self._work_at(lane, lane.jobs.popleft())
        elif len(lane.threads) < lane.num_threads:
            thread = threading.Thread(target=self._work, args=(lane,), name=lane.name, daemon=True)
            lane.threads.append(thread)
            thread.start()

    def _work(self, lane: _Lane) -> None:
        if lane.nice:
            with contextlib.suppress(OSError, AttributeError):  # niceness of this thread, where threads have their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lane.nice)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: lane.jobs or self._closed)
                if self._closed:
                    return
                job = lane.jobs.popleft()
            self._work_at(lane, job)

    def _work_at(self, lane: _Lane, job: _Job) -> None:
        with self._changed:
            if not job.keys:  # all were cancelled
                self._by_grammar.pop(job.grammar, None)
                return
        if job.matcher is not None:
            job.matcher.prepare()
            self._finish(job, job.matcher)
            return
        start, error = None, ""
        try:
            start = job.start = job.start or self._start(job.grammar)
            error = start.error
        except Exception as raised:  # an error of the library, or an unsupported tokenizer
            error = str(raised).partition("\n")[0].strip() or type(raised).__name__
        for _ in range(COPIES_AT_ONCE):
            self._finish(job, None if error or start is None else start.copy(), error)
        with self._changed:
            if job.keys:
                lane.jobs.append(job)
            else:
                self._by_grammar.pop(job.grammar, None)

    def _finish(self, job: _Job, matcher: Matcher | None, error: str = "") -> None:
        """Give the result to the key that has waited longest; an error to all keys of the job."""
        with self._changed:
            for _ in range(len(job.keys) if error else min(1, len(job.keys))):
                self._done.append(Compiled(job.keys.popleft(), matcher, error))
            self._changed.notify_all()
        self._wake()

    def _start(self, grammar: str) -> Matcher:
        """Return the matcher at the grammar's start, with its first mask. It is cached; callers only copy it."""
        with self._changed:
            if (cached := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return cached
        made = self._matcher(grammar)
        made.prepare()
        if made.error:
            return made
        with self._changed:
            self._kept[grammar] = made
            self._num_kept_bytes += _num_bytes(grammar, made)
            while self._num_kept_bytes > MAX_KEPT_BYTES:
                self._num_kept_bytes -= _num_bytes(*self._kept.popitem(last=False))
        return made

    def _matcher(self, grammar: str) -> Matcher:
        if not self._eos_ids:
            raise ValueError("the model has no end-of-sequence token, which a grammar needs")
        with self._making:
            if self._tokenizer is None:
                text = tokenizer_json(self._model_dir)
                self._tokenizer = _rust.GrammarTokenizer(text, self._vocab_size, self._eos_ids)
                del text
                give_back()  # a large vocabulary used tens of megabytes
        return _rust.GrammarMatcher(self._tokenizer, grammar)


def _num_bytes(grammar: str, matcher: Matcher) -> int:
    return len(grammar) + matcher.num_bytes
