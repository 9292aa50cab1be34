"""Workloads: the requests to send to a server, their order and, if known, their times.

    workload = make_workload("random", WorkloadSettings(num_requests=100, input_len=(200, 200)))
    bodies = [renderer.body(request) for request in workload.requests]

A prompt has parts: given text, or a number of tokens of made-up text, named by a key. Equal keys give equal text, so
prompts share a prefix exactly where their parts do. Requests are grouped in chains, which are sent one after the other,
like the turns of a chat.
Invariants: the same name and settings give the same workload; lengths are targets in tokens, and reports also have the
server's counts of what was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np

from minisgl import envs
from minisgl.bench import prompts
from minisgl.bench.conversations import Conversation, is_request_file, read_conversations
from minisgl.bench.traces import NAMES, TraceRequest, read_trace
from minisgl.config import ConfigError

Role = Literal["system", "user", "assistant"]
Range = tuple[int, int]
Key = tuple[int | str, ...]

# The rough shape of publicly shared chats: many short turns, some long ones. The parameters are those of
# log-normal lengths by bucket (share, median and mean in, median and mean out), set so that the whole has the means
# 225 in and 200 out.
CHAT_BUCKETS: dict[str, tuple[float, tuple[float, float], tuple[float, float]]] = {
    "short": (0.45, (20.0, 28.0), (60.0, 85.0)),
    "medium": (0.35, (95.0, 124.0), (190.0, 225.0)),
    "long": (0.20, (700.0, 845.0), (380.0, 415.0)),
}
MIN_LENGTH, MAX_LENGTH = 4, 2048  # tokens of prompts and answers in the chat workloads
WARMUP_RUN = 1 << 20  # runs from here on are warm-ups


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Made-up text of about `num_tokens` tokens; equal keys give equal text."""

    key: Key
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[str | MadeUp, ...]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    messages: tuple[Message, ...]
    output_len: int

    @property
    def input_len(self) -> int | None:
        """The target number of prompt tokens, or None if some of the text is given."""
        total = 0
        for part in (part for message in self.messages for part in message.parts):
            if isinstance(part, str):
                return None
            total += part.num_tokens
        return total

    @property
    def about_len(self) -> int:
        """The number of prompt tokens, estimated if some of the text is given."""
        parts = [part for message in self.messages for part in message.parts]
        return sum(text_len(part) if isinstance(part, str) else part.num_tokens for part in parts)


def text_len(text: str) -> int:
    """Estimate the tokens of a text for an unknown tokenizer: one per four bytes."""
    return max(1, -(-len(text.encode()) // 4))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to send. `chains` are the numbers of requests that follow one another; `arrivals` are seconds from 0,
    ascending, one per chain; `left_out` counts requests of a file that are skipped or shortened, by reason."""

    name: str
    requests: tuple[LoadRequest, ...]
    chains: tuple[int, ...]
    arrivals: tuple[float, ...] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    num_requests: int = 100
    input_len: Range | None = None  # tokens, uniform; None: the workload's default
    output_len: Range | None = None
    seed: int = 0
    num_prefixes: int = 8  # shared-prefix
    prefix_len: int = 1024
    turns: int = 4  # multi-turn
    time_scale: float = 1.0  # traces: 2: twice as fast
    run: int = 0  # each run has other texts with the same lengths


def make_workload(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload of `WORKLOADS`, or of a file with a trace or conversations. Raises `ConfigError` for an unknown
    name, missing data or invalid settings."""
    _check(settings)
    if (make := WORKLOADS.get(name)) is not None:
        return make(name, settings)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"--workload {name}: no such file, and none of {', '.join(WORKLOADS)}")
    return _conversations(name, settings) if is_request_file(path) else _trace(name, settings)


def _check(settings: WorkloadSettings) -> None:
    for flag, value in (("--num-prefixes", settings.num_prefixes), ("--turns", settings.turns)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    if settings.num_requests < 1:
        raise ConfigError(f"--num-requests {settings.num_requests}: must be at least 1")
    if settings.prefix_len < 0:
        raise ConfigError(f"--prefix-len {settings.prefix_len}: must be at least 0")
    if not settings.time_scale > 0:
        raise ConfigError(f"--time-scale {settings.time_scale}: must be above 0")
    for flag, lengths in (("--input-len", settings.input_len), ("--output-len", settings.output_len)):
        if lengths is not None and not 1 <= lengths[0] <= lengths[1]:
            raise ConfigError(
                f"{flag} {lengths[0]} {lengths[1]}: must be at least 1, and the second not below the first"
            )


def _uniform(generator: np.random.Generator, lengths: Range, count: int) -> list[int]:
    return [int(value) for value in generator.integers(lengths[0], lengths[1] + 1, count)]


def _user(*parts: str | MadeUp) -> Message:
    return Message("user", parts)


def _single(name: str, requests: Sequence[LoadRequest], arrivals: Sequence[float] | None = None) -> Workload:
    """Return a workload in which each request is its own chain."""
    times = None if arrivals is None else tuple(arrivals)
    return Workload(name, tuple(requests), (1,) * len(requests), times)


def _random(name: str, settings: WorkloadSettings) -> Workload:
    generator = np.random.default_rng(settings.seed)
    inputs = _uniform(generator, settings.input_len or (200, 200), settings.num_requests)
    outputs = _uniform(generator, settings.output_len or (128, 128), settings.num_requests)
    keys = _keys(settings)
    return _single(
        name, [LoadRequest((_user(MadeUp(next(keys), i)),), o) for i, o in zip(inputs, outputs, strict=True)]
    )


def _keys(settings: WorkloadSettings) -> Iterator[Key]:
    return ((settings.seed, settings.run, i) for i in itertools.count())


def _shared_prefix(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload of a few long system prompts, each with many questions."""
    generator = np.random.default_rng(settings.seed)
    inputs = _uniform(generator, settings.input_len or (32, 128), settings.num_requests)
    outputs = _uniform(generator, settings.output_len or (64, 128), settings.num_requests)
    which = generator.integers(0, settings.num_prefixes, settings.num_requests)
    keys, requests = _keys(settings), []
    for prefix, size, out in zip(which, inputs, outputs, strict=True):
        system = MadeUp(("prefix", settings.seed, settings.run, int(prefix)), settings.prefix_len)
        requests.append(LoadRequest((Message("system", (system,)), _user(MadeUp(next(keys), size))), out))
    return _single(name, requests)


def _multi_turn(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload of chats whose turns include all earlier ones, with made-up answers in between."""
    generator = np.random.default_rng(settings.seed)
    keys, requests, chains = _keys(settings), list[LoadRequest](), list[int]()
    while len(requests) < settings.num_requests:
        turns = min(settings.turns, settings.num_requests - len(requests))
        inputs = _uniform(generator, settings.input_len or (20, 150), turns)
        outputs = _uniform(generator, settings.output_len or (50, 200), turns)
        history: tuple[Message, ...] = ()
        for size, out in zip(inputs, outputs, strict=True):
            history = (*history, _user(MadeUp(next(keys), size)))
            requests.append(LoadRequest(history, out))
            history = (*history, Message("assistant", (MadeUp(next(keys), out),)))
        chains.append(turns)
    return Workload(name, tuple(requests), tuple(chains))


def _log_normal(generator: np.random.Generator, median: float, mean: float) -> int:
    """Draw a length from a log-normal distribution: mean = median * exp(sigma^2 / 2)."""
    sigma = np.sqrt(2 * np.log(mean / median))
    return int(np.clip(round(median * np.exp(sigma * generator.standard_normal())), MIN_LENGTH, MAX_LENGTH))


def _chat(name: str, settings: WorkloadSettings, *, buckets: Sequence[str]) -> Workload:
    generator = np.random.default_rng(settings.seed)
    shares = np.array([CHAT_BUCKETS[bucket][0] for bucket in buckets])
    drawn = generator.choice(len(buckets), settings.num_requests, p=shares / shares.sum())
    keys, requests = _keys(settings), []
    for bucket in drawn:
        _, given, answered = CHAT_BUCKETS[buckets[bucket]]
        size, out = _log_normal(generator, *given), _log_normal(generator, *answered)
        requests.append(LoadRequest((_user(MadeUp(next(keys), size)),), out))
    return _single(name, requests)


def _mt_bench(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload of MT-Bench chats of two turns; the first answer in the second turn is made up."""
    low, high = settings.output_len or (256, 256)
    generator = np.random.default_rng(settings.seed)
    questions = prompts.mt_bench()
    order = generator.permutation(len(questions))
    keys, requests, chains = _keys(settings), list[LoadRequest](), list[int]()
    for i in range(-(-settings.num_requests // 2)):
        first, second = questions[order[i % len(questions)]]
        a, b = _uniform(generator, (low, high), 2)
        opening = _user(first)
        requests.append(LoadRequest((opening,), a))
        requests.append(LoadRequest((opening, Message("assistant", (MadeUp(next(keys), a),)), _user(second)), b))
        chains.append(2)
    return Workload(name, tuple(requests), tuple(chains))


def _gsm8k(name: str, settings: WorkloadSettings, *, shots: int = 4) -> Workload:
    """Return a workload of GSM8K questions after the same few worked examples."""
    pairs = prompts.gsm8k()
    generator = np.random.default_rng(settings.seed)
    order = generator.permutation(len(pairs))
    examples = "".join("Question: {}\nAnswer: {}\n\n".format(*pairs[i]) for i in order[:shots])
    outputs = _uniform(generator, settings.output_len or (200, 200), settings.num_requests)
    questions = [pairs[order[shots + i % (len(pairs) - shots)]][0] for i in range(settings.num_requests)]
    texts = [f"{examples}Question: {question}\nAnswer:" for question in questions]
    return _single(name, [LoadRequest((_user(text),), out) for text, out in zip(texts, outputs, strict=True)])


def _trace(name: str, settings: WorkloadSettings) -> Workload:
    """Return the beginning of a trace as a workload. Lengths in `settings` are upper limits of the trace's lengths."""
    most_in = settings.input_len[1] if settings.input_len else 1 << 30
    most_out = settings.output_len[1] if settings.output_len else 1 << 30
    keys, requests, arrivals = _keys(settings), [], []
    for request in _read(name, _stamp(name))[: settings.num_requests]:
        left, blocks = min(request.input_len, most_in), list[MadeUp]()
        for block in request.blocks:
            if left > 0:
                blocks.append(MadeUp(("block", settings.seed, settings.run, block), min(left, request.block_len)))
                left -= request.block_len
        parts = blocks or [MadeUp(next(keys), left)]
        requests.append(LoadRequest((_user(*parts),), min(request.output_len, most_out)))
        arrivals.append(request.arrival_s / settings.time_scale)
    return _single(name, requests, arrivals)


@lru_cache(maxsize=1)
def _read(name: str, stamp: tuple[str, int, int]) -> list[TraceRequest]:
    """Read a trace. The result is cached, because each point and each warm-up needs it."""
    return read_trace(name)


def _stamp(name: str) -> tuple[str, int, int]:
    """Return a cache key that changes with the trace file."""
    if name in NAMES:
        return str(envs.data_dir()), 0, 0
    state = Path(name).expanduser().stat()
    return "", state.st_mtime_ns, state.st_size


def _conversations(name: str, settings: WorkloadSettings) -> Workload:
    """Return a workload of real conversations: each question follows earlier ones with their answers and asks for the
    original length. Later runs take other conversations while there are any; warm-ups begin in the middle."""
    path = Path(name).expanduser()
    if settings.input_len is not None:
        raise ConfigError(f"--input-len: cannot be used with --workload {path.name}: its questions have lengths")
    usable, unusable = read_conversations(path)
    order = np.random.default_rng(settings.seed).permutation(len(usable))
    most_out = settings.output_len[1] if settings.output_len else 1 << 30
    at = (settings.run % WARMUP_RUN) * settings.num_requests + (settings.run >= WARMUP_RUN) * len(usable) // 2
    requests, chains = list[LoadRequest](), list[int]()
    while len(requests) < settings.num_requests:
        chat = usable[order[at % len(usable)]]
        turns = _asked(chat, min(settings.turns, settings.num_requests - len(requests)), most_out)
        requests += turns
        chains.append(len(turns))
        at += 1
    left_out = {"conversations without a question and an answer": unusable} if unusable else {}
    return Workload(name, tuple(requests), tuple(chains), None, left_out)


def _asked(chat: Conversation, turns: int, most_out: int) -> list[LoadRequest]:
    history: tuple[Message, ...] = (Message("system", (chat.system,)),) if chat.system else ()
    requests = []
    for question, answer in chat.turns[:turns]:
        history = (*history, _user(question))
        requests.append(LoadRequest(history, min(text_len(answer), most_out)))
        history = (*history, Message("assistant", (answer,)))
    return requests


def fitted(workload: Workload, context: int | None) -> Workload:
    """Return the workload without the requests (and their successors in the chain) whose prompt does not fit a context
    of `context` tokens, and with answers shortened to what is left. Lengths are targets, so a hundredth stays free, and
    more if text is given. Raises `ConfigError` if nothing is left."""
    if context is None:
        return workload
    requests, chains, arrivals = list[LoadRequest](), list[int](), list[float]()
    skipped = cut = at = 0
    for i, chain in enumerate(workload.chains):
        kept = 0
        for one in workload.requests[at : at + chain]:
            exact = one.input_len
            about, limit = (exact, 0.99 * context) if exact is not None else (one.about_len, 0.8 * context)
            if about + 1 > limit:
                break
            room = context - about
            cut += one.output_len > room
            requests.append(replace(one, output_len=min(one.output_len, room)))
            kept += 1
        skipped += chain - kept
        at += chain
        if kept:
            chains.append(kept)
            arrivals += workload.arrivals[i : i + 1] if workload.arrivals is not None else ()
    if not requests:
        raise ConfigError(
            f"--workload {Path(workload.name).name}: no prompt fits the server's context of {context} tokens"
        )
    reasons = {f"prompts over the context of {context}": skipped, f"answers cut to the context of {context}": cut}
    left_out = {**workload.left_out, **{reason: count for reason, count in reasons.items() if count}}
    times = None if workload.arrivals is None else tuple(arrivals)
    return Workload(workload.name, tuple(requests), tuple(chains), times, left_out)


WORKLOADS: dict[str, Callable[[str, WorkloadSettings], Workload]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "chat": partial(_chat, buckets=tuple(CHAT_BUCKETS)),
    **{f"chat-{bucket}": partial(_chat, buckets=(bucket,)) for bucket in CHAT_BUCKETS},
    "mt-bench": _mt_bench,
    "gsm8k": _gsm8k,
    "mooncake-conversation": _trace,
    "mooncake-synthetic": _trace,
    "azure-conversation": _trace,
    "azure-code": _trace,
}


def poisson_arrivals(count: int, rate: float, seed: int) -> tuple[float, ...]:
    """Return `count` arrival times in seconds, `rate` per second on average, with exponential gaps. The first is 0."""
    gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, count)
    gaps[:1] = 0.0
    return tuple(float(time) for time in np.cumsum(gaps))
