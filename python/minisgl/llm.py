"""The offline API: `LLM(model).generate(prompts, params)` runs a model in this process, without a server.

It uses the step loop, scheduler, engine and output processor of the server. Results come in the order of the prompts.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from minisgl import envs
from minisgl.config import ENGINE_SETTINGS, ConfigError, EngineConfig, ImageLimits, check_ranges, with_source
from minisgl.engine.api import Exports
from minisgl.frontend.engine_client import InProcessClient
from minisgl.frontend.generation_config import read_defaults
from minisgl.frontend.output_processor import RequestState, Subscriber, with_bad_words
from minisgl.frontend.prefixes import Prefix
from minisgl.llm_prompts import Encoded, Message, Prompt, PromptEncoder
from minisgl.metrics.steps import step_timers
from minisgl.runner.build import build_compiler, build_control_plane, build_engines, build_step_time
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.loop import StepLoop, Timing
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.step import Int32Array
from minisgl.tokenizer.early import EarlyTokenizer
from minisgl.utils import prefix_file, spellings
from minisgl.utils.progress import Display

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["LLM", "Completion", "Encoded", "RequestOutput"]
IMAGE_LIMITS = ("max_image_tokens", "max_image_pixels")
LEVELS = ("error", "warning", "info", "debug")


@dataclass(slots=True)
class Completion:
    """A generated sequence. `token_ids` include the stop token that ended it; `text` has neither that nor a stop
    string. `logprobs`: one per token if `SamplingParams.logprobs` is set. `error`: why the engine failed, or None."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return _item(self, name)


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its `params.n` completions. `prompt` is None if token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    def __getitem__(self, name: str) -> Any:
        """Return the first completion's `["text"]` or `["token_ids"]`, for programs written for mini-sglang."""
        return _item(self, name)


OnText = Callable[[RequestOutput, str], None]


class LLM:
    """A model that is loaded into this process: from a local folder, a GGUF file, `smollm2`, or a hub id.

    `settings` are the fields of `EngineConfig` and `DebugConfig` in config.py, or mini-sglang's names
    (utils/spellings.py), or `max_image_tokens` and `max_image_pixels`, limits of an image. With `log_level="debug"`
    each step is logged to standard error; `describe_token` then formats the id of each sampled token. Usable as a
    context manager; `close` frees the engine.
    """

    def __init__(
        self, model: str | None = None, *, describe_token: Callable[[int], str] | None = None, **settings: Any
    ) -> None:
        envs.check()
        defaults: dict[str, Any] = {"overlap": not envs.disable_overlap_scheduling()}
        names = {name: f"{name}=" for name in ENGINE_SETTINGS}
        if backend := envs.cpu_backend():
            defaults["cpu_backend"] = backend
            names |= {} if "cpu_backend" in settings else {"cpu_backend": f"{envs.CPU_BACKEND}="}
        settings = spellings.settings(settings if model is None else {"model": model, **settings})
        limits = {name: settings[name] for name in IMAGE_LIMITS if name in settings}
        settings.pop("max_image_pixels", None)
        if unknown := sorted(settings.keys() - set(ENGINE_SETTINGS)):
            raise TypeError(f"LLM: unknown settings {', '.join(unknown)}")
        if "model" not in settings:
            raise TypeError("LLM: model: missing: name a folder, a GGUF file, a hub id, or smollm2")
        # msgspec checks the types of all settings
        try:
            self.config = EngineConfig.of({**defaults, **settings})
            check_ranges(images := msgspec.convert(limits, ImageLimits))
        except ConfigError as error:
            raise ConfigError(with_source(str(error), names)) from error
        if self._shows("warning"):
            _say_all(f"minisgl: {line}" for line in envs.notices())
        say = _say if self._shows("info") else _say_nothing
        early = EarlyTokenizer(self.config)
        terminal = sys.stderr if self._shows("info") and sys.stderr.isatty() else None
        self._engine, self._guesses = build_engines(self.config, Display(say, terminal))
        info = self._engine.info
        self._control_plane = build_control_plane(self.config, info, _say_all, describe_token)
        self._client = InProcessClient()
        self._compiler = build_compiler(info)
        self._loop = StepLoop(
            self._control_plane,
            self._engine,
            self._client.receive,
            LoopSettings.of(self.config),
            timing=Timing(
                timers=step_timers(self.config.debug.profile_steps, say), step_time=build_step_time(self.config, info)
            ),
            beside=Beside(self._compiler, guesses=self._guesses),
        )
        for name, folder in self.config.lora:
            self.load_lora(name, folder)
        self.engine_info = info
        self.tokenizer = early.take(info.model_dir, _say)
        self._prompts = PromptEncoder(info, self.tokenizer, images)
        self.default_params = SamplingParams(
            **read_defaults(info.model_dir, self.config.generation_config, self.config.model)
        )
        """Sampling parameters of a call without `params`: the model's own defaults."""
        self._texts: list[tuple[RequestOutput, str]] = []  # new text of this step
        for prefix in self.config.warm_prefixes:
            self.insert_prefix(prefix if isinstance(prefix, str) else prefix_file.read_head(prefix.path).tokens)

    # ------------------------------------------------------------------------------------------------------ public

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        progress: bool = True,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt and return the outputs in order. A prompt is a text, token ids, or
        `{"prompt": text, "images": [...]}`; an image is a path, bytes, a data URL or a PIL image. `params` is one for
        all prompts or one each; None is `default_params`. `lora` is the name of a loaded adapter for all prompts, or a
        name or None for each. `on_text(output, text)` is called with each new piece of text.
        Raises `ParamError` for a bad prompt or parameter before anything is computed."""
        self._check_kind()
        return self._generate(self._prompts.encode_all(prompts), params, lora, progress, on_text)

    def _generate(
        self,
        batch: Sequence[Encoded],
        params: SamplingParams | Sequence[SamplingParams] | None,
        lora: str | Sequence[str | None] | None,
        progress: bool,
        on_text: OnText | None,
    ) -> list[RequestOutput]:
        each = [params or self.default_params] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise ParamError("params", len(each), f"must be one for all, or one for each of the {len(batch)} prompts")
        names = [lora] * len(batch) if lora is None or isinstance(lora, str) else list(lora)
        if len(names) != len(batch):
            raise ParamError("lora", len(names), f"must be one for all, or one for each of the {len(batch)} prompts")
        prepared = [self._prepared(self._adapted(one, name)) for one, name in zip(each, names, strict=True)]
        for prompt, one in zip(batch, prepared, strict=True):
            self._check_fits(prompt, one)
        requests = [self._submit(prompt, one) for prompt, one in zip(batch, prepared, strict=True)]
        self._run(progress, on_text)
        return requests

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        progress: bool = True,
        on_text: OnText | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's chat template. Parameters are those of `generate`. Content
        parts of the type `image` (a path, bytes, a data URL or a PIL image, as `image`) and `image_url` are images."""
        self._check_kind()
        return self._generate(self._prompts.encode_chats(messages), params, lora, progress, on_text)

    def load_lora(self, name: str, folder: str) -> None:
        """Load a LoRA adapter, a folder as peft saves it, under `name` for calls with `lora=name`. Raises `ParamError`
        if the name is taken or the adapter does not fit."""
        book = self._client.adapters
        if name in book.by_name:
            raise ParamError("lora", name, "is loaded already: unload it first, or choose another name")
        adapter = book.load(name, folder)
        self._settle()
        if adapter.refusal is not None:
            raise ParamError("lora", name, adapter.refusal)

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Raises `ParamError` if it is not loaded."""
        if (adapter := self._client.adapters.by_name.get(name)) is None:
            raise ParamError("lora", name, "is not loaded")
        self._client.adapters.unload(adapter)
        self._settle()

    def insert_prefix(self, prefix: Prompt | Sequence[Message], *, pin: bool = True) -> Prefix:
        """Compute a prefix (text, token ids, or a conversation's beginning) and cache it: until `remove_prefix` with
        `pin`, else until it is evicted. Raises `ParamError` if it cannot be cached."""
        return self._insert(self._prefix_ids(prefix), pin=pin)

    def export_prefix(self, prefix: Prompt | Sequence[Message], path: str | Path) -> int:
        """Compute a prefix, unless `cache_dir` has it, and write its KV pages to `path`, for `warm_prefixes` or
        `minisgl cache import`. Return the number of tokens written. Raises `ParamError`, `ConfigError`."""
        ids = self._prefix_ids(prefix)
        self._insert(ids, pin=False)
        if not isinstance(self._engine, Exports):
            raise ConfigError(
                f"{path}: --engine {self._engine.info.name} does not support cache export: use --engine cpu"
            )
        self._engine.export_pages(ids, Path(path))
        return len(ids) // self._engine.info.page_size * self._engine.info.page_size

    def _prefix_ids(self, prefix: Prompt | Sequence[Message]) -> Int32Array:
        self._check_kind()
        found = self._prompts.encode_prefix(prefix)
        if found.images:
            raise ParamError("prefix", len(found.images), "must have no images: their pages are cached by use alone")
        self._check_fits(found, self.default_params)
        return found.ids

    def _insert(self, ids: Int32Array, *, pin: bool) -> Prefix:
        book = self._client.prefixes
        prefix = book.insert(ids, pin=pin)
        while not book.is_settled(prefix):
            self._client.step(self._loop.step)
        if (refusal := prefix.refusal) is not None:
            book.remove(prefix)
            self._client.step(self._loop.step)
            raise ParamError("prefix", len(ids), refusal.reason)
        return prefix

    def remove_prefix(self, prefix: Prefix) -> None:
        """Unpin a prefix that `insert_prefix` returned, so that it may be evicted. No-op if it was removed already."""
        self._client.prefixes.remove(prefix)
        self._settle()

    def clear_cache(self) -> int:
        """Empty the prefix cache except for pinned prefixes. Return the number of freed pages."""
        self._settle()
        clearing = self._client.prefixes.clear()
        self._settle()
        return sum(clearing.num_pages.values())

    def _settle(self) -> None:
        self._client.step(self._loop.step)
        while not self._loop.idle:
            self._loop.step([])

    def close(self) -> None:
        self._loop.timers.close()
        if self._compiler is not None:
            self._compiler.close()
        if self._guesses is not None:
            self._guesses.close()
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------- private

    def _shows(self, level: str) -> bool:
        return LEVELS.index(level) <= LEVELS.index(self.config.log_level)

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """Check `params` and return them with `bad_words` as token ids, for the engine. Raises `ParamError`."""
        return with_bad_words(params.check(), self.tokenizer, self._engine.info.vocab_size)

    def _adapted(self, params: SamplingParams, name: str | None) -> SamplingParams:
        if name is None:
            return params
        if (number := self._client.adapters.number(name)) is None:
            raise ParamError("lora", name, "is not loaded: load it first, with load_lora")
        return msgspec.structs.replace(params, adapter=number)

    def _check_kind(self) -> None:
        if self._engine.info.kind != "decoder":
            raise ParamError("model", self._engine.info.kind, "returns embeddings and no text: use minisgl serve")

    def _check_fits(self, prompt: Encoded, params: SamplingParams) -> None:
        limit = self._control_plane.buffers.limits.max_seq_len
        vocab_size, ids = self._engine.info.vocab_size, prompt.ids
        if not len(ids):
            raise ParamError("prompt", "", "must have at least one token")
        if len(ids) >= limit:
            raise ParamError("prompt", len(ids), f"must have at most {limit - 1} tokens")
        if prompt.images and params.prompt_logprobs is not None:
            raise ParamError("prompt_logprobs", params.prompt_logprobs, "cannot be used with images")
        if bad := params.beyond(vocab_size):
            raise ParamError(*bad, f"token ids must be below {vocab_size}")

    def _submit(self, prompt: Encoded, params: SamplingParams) -> RequestOutput:
        output = RequestOutput(prompt.text, prompt.shown, [])
        states: list[RequestState] = []
        subscriber = Subscriber(partial(self._update, output, states))
        max_seq_len = self._control_plane.buffers.limits.max_seq_len
        states += self._client.submit(
            [prompt.ids],
            params,
            self.tokenizer,
            max_seq_len,
            subscriber,
            images=[prompt.images] if prompt.images else (),
        )
        output.outputs += [Completion(state.index, token_ids=state.token_ids) for state in states]
        return output

    def _update(self, output: RequestOutput, states: list[RequestState]) -> None:
        output.num_cached_tokens = states[0].cached_len or 0
        for state in states:
            if (delta := state.take()) is None:
                continue
            if state.found_stop:
                self._client.finish(state)
            completion = output.outputs[state.index]
            completion.text += delta.text
            completion.logprobs += [one.logprob or 0.0 for one in delta.logprobs]
            completion.finish_reason, completion.error = delta.finish_reason, state.error
            if delta.text:
                self._texts.append((output, delta.text))

    def _run(self, progress: bool, on_text: OnText | None) -> None:
        total = self._client.num_live
        with _bar(total) if progress else contextlib.nullcontext() as bar, _interrupts() as interrupted:
            try:
                while self._client.num_live:
                    if interrupted():
                        raise KeyboardInterrupt
                    self._loop.wait_for_grammar()
                    self._client.step(self._loop.step)
                    texts, self._texts = self._texts, []
                    if on_text is not None:
                        for output, text in texts:
                            on_text(output, text)
                    if bar is not None:
                        bar.update(total - self._client.num_live - bar.n)
            except BaseException:  # also Ctrl-C: the next call must find an empty engine
                self._texts.clear()
                self._client.abort_all(self._loop.step)
                while not self._loop.idle:
                    self._loop.step([])
                raise


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed, so that a call can end between two steps: within a
    step the scheduler would miss its commit. A second Ctrl-C raises `KeyboardInterrupt` at once."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    came: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        if came:
            signal.default_int_handler(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, take)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _item(output: Completion | RequestOutput, name: str) -> Any:
    if name not in ("text", "token_ids"):
        raise KeyError(name)
    return getattr(output, name)


def _bar(total: int) -> tqdm[NoReturn]:
    from tqdm import tqdm

    return tqdm(total=total, desc="generate", unit="req")


def _say_nothing(text: str) -> None:
    """Drop a log line whose level is not shown."""


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        _say(line)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
