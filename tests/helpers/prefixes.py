"""A step loop on the echo engine that is told of prefixes: what it answers, and what requests beside them get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from minisgl.engine.echo import EchoEngine, EchoModel
from minisgl.message import (
    AddPrefix,
    AddRequest,
    CacheCleared,
    FromEngine,
    PrefixChanged,
    PrefixState,
    StepTokens,
    ToEngine,
)
from minisgl.runner.intake import LoopSettings
from minisgl.runner.loop import StepLoop
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig
from minisgl.step import FinishReason
from tests.helpers.received import Received

MAX_STEPS = 5000
PAGE = 4
NUM_PAGES = 64
CONTEXT = 100
EOS_IDS = (256,)


def config(**more: int) -> ControlPlaneConfig:
    """64 pages of 4 tokens, 4 rows, 16 tokens a step; as much as possible may be pinned."""
    num_pages = more.pop("num_pages", NUM_PAGES)
    plain = ControlPlaneConfig(num_pages, PAGE, 4, 16, CONTEXT, EOS_IDS)
    return replace(plain, **{"max_pinned_pages": plain.num_pinnable_pages, **more})


class PrefixLoop(Received):
    """`said`: states of prefixes by id, in order."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        overlap: bool = True,
        fallback: Callable[[], ControlPlane] | None = None,
        fail_steps: Sequence[int] = (),
        keeps_prefixes: bool = True,
    ) -> None:
        self.engine = EchoEngine(
            num_pages=plane.buffers.limits.num_pages,
            page_size=PAGE,
            max_rows=4,
            max_seq_len=CONTEXT,
            context_len=CONTEXT,
            worker_thread=False,
        )
        self.engine.fail_steps.update(fail_steps)
        self.loop = StepLoop(
            plane,
            self.engine,
            self._take,
            fallback=fallback,
            settings=LoopSettings(overlap=overlap, keeps_prefixes=keeps_prefixes),
        )
        super().__init__()
        self.said: dict[int, list[str]] = {}
        self.refusals: dict[int, PrefixChanged] = {}
        self.cleared: list[int] = []
        self._requests: dict[int, tuple[list[int], int]] = {}
        self._next_id = 0

    def _take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case PrefixChanged(prefix_id, state):
                    self.said.setdefault(prefix_id, []).append(state)
                    if state in ("refused", "failed"):
                        self.refusals[prefix_id] = message
                case CacheCleared(num_pages):
                    self.cleared.append(num_pages)
                case StepTokens():
                    self.take_step(message)
                case _:
                    raise AssertionError(f"not expected here: {message}")

    def take_step(self, message: StepTokens) -> None:
        told = np.frombuffer(message.admitted_ids + message.req_ids, np.int64).tolist()
        assert all(i in self._requests for i in told), "a row that nobody asked for"
        super().take_step(message)

    # --------------------------------------------------------------------------------------------------------- orders

    def request(self, prompt: Sequence[int], max_tokens: int = 3) -> AddRequest:
        req_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[req_id] = (list(prompt), max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, seed=req_id, ignore_eos=True)
        return AddRequest(req_id, np.array(prompt, np.int32).tobytes(), sampling)

    def step(self, *messages: ToEngine) -> None:
        self.loop.step(messages)
        self.loop.control_plane.check()

    def run(self, *messages: ToEngine) -> None:
        """Until nothing is left to do."""
        self.step(*messages)
        for _ in range(MAX_STEPS):
            if self.loop.idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def ask(self, prompt: Sequence[int], max_tokens: int = 3) -> int:
        """One request alone, whole; how many of its tokens were cached."""
        message = self.request(prompt, max_tokens)
        self.run(message)
        self.check_texts()
        return self.cached[message.req_id]

    # --------------------------------------------------------------------------------------------------------- answers

    def check_texts(self) -> None:
        """Each request that has ended by itself got what it gets alone, the others the beginning of it."""
        for req_id, (prompt, max_tokens) in self._requests.items():
            alone = EchoModel(seed=req_id).generate(prompt, max_tokens, ignore_eos=True)
            got, reason = self.tokens.get(req_id, []), self.reasons.get(req_id)
            whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert got == alone if whole else got == alone[: len(got)], (req_id, got, alone)

    def states(self) -> dict[int, PrefixState]:
        return {one.prefix_id: one for one in self.loop.prefixes.states()}

    def prefix_tokens(self, prefix_id: int) -> list[int]:
        found: list[int] = self.loop.prefixes._by_id[prefix_id].tokens.tolist()
        return found

    @property
    def num_pinned_pages(self) -> int:
        return self.loop.control_plane.stats().num_pinned_pages


def prefix(prefix_id: int, tokens: Sequence[int], *, pin: bool = True) -> AddPrefix:
    return AddPrefix(prefix_id, np.array(tokens, np.int32).tobytes(), pin)


def text(first: int, length: int) -> list[int]:
    """Tokens that share no page with those of another `first`."""
    return [first, *((first * 31 + i * 7) % 250 for i in range(length - 1))]
