"""Encodes prompts off the event loop: one thread for short texts, in batches, and one for all other work.

Invariants: the event loop stays responsive; a long text delays no short one; a text that cannot be encoded fails alone.
More threads would only wait for each other at the interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from minisgl.metrics.meters import Meter
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer, TooManyTokens
from minisgl.tokenizer.rendering import MAX_WORK, TooMuchWork, Work

MAX_SHORT_CHARS = 16_384
MAX_BATCH = 16
MAX_SHORT_WORK = Work(4096, 0.05)  # about 15 ms; longer work is restarted in the other thread
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    """A job of the pool. `result` gets what `work` returns or raises; for a `_Text`, its token ids."""

    work: Callable[[], Any]
    result: asyncio.Future[Any]

    def forget(self, _: object = None) -> None:
        """Release the job's text, which may have megabytes, once its result is set."""
        self.work = str


@dataclass(slots=True, eq=False)
class _Text(_Job):
    add_special_tokens: bool
    most: int | None


class TokenizePool:
    """Pool of threads that render and encode. They are daemons, start with the first job and end with the process.
    `expected` are errors of a request: they are raised without traceback."""

    def __init__(self, tokenizer: Tokenizer, meter: Meter, expected: tuple[type[Exception], ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._expected: tuple[type[Exception], ...] = (ValueError, *expected)
        self._meter = meter  # time to render and encode
        self._short: queue.SimpleQueue[_Text] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread for long work and return its result."""
        return await self._result(self._long, _Job(work, _new_result()))  # type: ignore[no-any-return]

    def run_later(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread for long work, without waiting for it."""
        self._start()
        self._long.put(_Job(work, _new_result()))

    async def encode(
        self, text: Callable[[], str], num_chars: int, *, add_special_tokens: bool, most: int | None = None
    ) -> Int32Array:
        """Return the token ids of the text that `text()` returns, about `num_chars` long. Raises the errors of `text`
        and of `Tokenizer.encode`."""
        if num_chars > MAX_SHORT_CHARS:
            return await self.run(lambda: self._tokenizer.encode(text(), add_special_tokens, most=most))
        job = partial(_Text, text, add_special_tokens=add_special_tokens, most=most)
        return await self._result(self._short, job(_new_result()))  # type: ignore[no-any-return]

    async def encode_chat(
        self,
        messages: Callable[[], list[dict[str, Any]]],
        num_chars: int,
        variables: Mapping[str, Any],
        *,
        most: int | None = None,
    ) -> Int32Array:
        """Return the token ids of a conversation of about `num_chars` characters, rendered with `variables` of the
        template. A short one that is much work for the template moves to the thread for long work. Raises the errors of
        `Tokenizer.apply_chat_template` and `Tokenizer.encode`."""

        def render(most: Work = MAX_WORK) -> str:
            return self._tokenizer.apply_chat_template(messages(), most, **variables)

        if num_chars <= MAX_SHORT_CHARS:
            with contextlib.suppress(TooMuchWork):
                return await self.encode(
                    partial(render, MAX_SHORT_WORK), num_chars, add_special_tokens=False, most=most
                )
        return await self.run(lambda: self._tokenizer.encode(render(), False, most=most))

    async def _result(self, lane: queue.SimpleQueue[Any], job: _Job) -> Any:
        """Queue a job and return its result. No local variable may refer to a raised error: its traceback leads here
        and to the callers, and such a cycle would keep their texts until a full garbage collection."""
        self._start()
        result = job.result
        result.add_done_callback(job.forget)  # above all for jobs cancelled before their turn
        lane.put(job)
        del job
        try:
            return await result
        finally:
            del result

    # ------------------------------------------------------------------------------------------------- the threads

    def _start(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for name, lane in (("encode-short", self._work_short), ("encode-long", self._work_long)):
                threading.Thread(target=lane, name=name, daemon=True).start()

    def _work_long(self) -> None:
        while True:
            self._do(self._long.get())

    def _work_short(self) -> None:
        while True:
            jobs = [self._short.get()]
            while len(jobs) < MAX_BATCH and not self._short.empty():
                jobs.append(self._short.get())
            self._do_all(jobs)
            jobs.clear()

    def _do(self, job: _Job) -> None:
        """Run a job. Afterwards the thread holds no reference to it: its text may have megabytes."""
        if not job.result.cancelled():
            began = time.perf_counter_ns()
            self._deliver([(job, self._outcome(job.work))], began)

    def _do_all(self, jobs: list[_Text]) -> None:
        began = time.perf_counter_ns()
        results: list[tuple[_Job, Any]] = []
        texts: list[tuple[_Text, str]] = []
        for job in jobs:
            if not job.result.cancelled():
                outcome = self._outcome(partial(self._text_of, job))
                if isinstance(outcome, str):
                    texts.append((job, outcome))
                else:
                    results.append((job, outcome))
        for special in (False, True):
            if same := [pair for pair in texts if pair[0].add_special_tokens is special]:
                outcomes = self._encode([text for _, text in same], special)
                results.extend((job, _checked(ids, job.most)) for (job, _), ids in zip(same, outcomes, strict=True))
        self._deliver(results, began)

    def _text_of(self, job: _Text) -> str | Int32Array:
        """Return the text of a job, or its token ids if it turned out to be long."""
        text: str = job.work()
        if len(text) > MAX_SHORT_CHARS:
            return self._tokenizer.encode(text, job.add_special_tokens, most=job.most)
        self._tokenizer.check_length(text, job.most)
        return text

    def _encode(self, texts: Sequence[str], special: bool) -> list[Any]:
        """Return the token ids of each text, or the exception."""
        outcome = self._outcome(lambda: list(self._tokenizer.encode_batch(texts, special)))
        if not isinstance(outcome, Exception):
            return outcome  # type: ignore[no-any-return]
        return [outcome] if len(texts) == 1 else [self._encode([text], special)[0] for text in texts]

    def _outcome(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except self._expected as error:
            # the traceback would refer to the job, and the job to the error; see `_result`
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        except Exception as error:  # raised in the waiting task
            return error
        except BaseException as error:  # a panic in the library is no `Exception`, and must not end the thread
            return RuntimeError(f"{type(error).__name__}: {error}")

    def _deliver(self, found: list[tuple[_Job, Any]], began: int) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._set_results, found, time.perf_counter_ns() - began)
        except RuntimeError:  # the loop is closed, so no task waits
            return

    def _set_results(self, found: list[tuple[_Job, Any]], ns: int) -> None:
        self._meter.add(ns, len(found))
        for job, outcome in found:
            if job.result.done():
                continue
            if isinstance(outcome, Exception):
                job.result.set_exception(outcome)
            else:
                job.result.set_result(outcome)


def _new_result() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _checked(ids: Any, most: int | None) -> Any:
    return TooManyTokens(len(ids)) if most is not None and not isinstance(ids, Exception) and len(ids) > most else ids
