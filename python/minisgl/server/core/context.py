"""State that every request handler shares: the served model and its names, the tokenizer, the queue and the admission
checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from minisgl.config import ServerConfig
from minisgl.frontend.adapters import AdapterBook
from minisgl.frontend.engine_client import MAX_LIVE_PIXEL_BYTES, MAX_PIXEL_BYTES, ProcessClient, num_pixel_bytes
from minisgl.frontend.pooling import Pooling, own_pooling, own_prompts
from minisgl.frontend.pooling import Prompts as OwnPrompts
from minisgl.message import EngineReady
from minisgl.metrics.server_metrics import Metrics
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import BOUNDS, SamplingParams
from minisgl.server.core.api_keys import CALLER
from minisgl.server.core.errors import NO_MODEL, bad_value, draining, queue_full, wrong
from minisgl.server.core.prompts import Prompts
from minisgl.server.core.waiting import Queue, Turns

LATEST = ":latest"
AbortEntry = tuple[int, str, Callable[[], None]]
"""Entry for /abort_request: index of the API key, `rid`, and a function that ends the request."""
T = TypeVar("T")


class Served:
    """Served model with its aliases and adapters. `defaults`: `SamplingParams` fields that requests leave out."""

    def __init__(self, config: ServerConfig, adapters: AdapterBook, defaults: Mapping[str, Any]) -> None:
        self.name = config.model_name
        self.aliases = config.model_aliases
        self.created = int(time.time())
        self.defaults = dict(defaults)
        self._any_model_name = config.any_model_name
        self._adapters = adapters

    def check(self, name: str | None) -> str:
        """Return the name of the model or adapter that serves a request for `name`; `None` is the model itself. Raises
        `ApiError` 404 for an unknown name, unless any name is accepted (`any_model_name`)."""
        if name is None or name == self.name or name in self.aliases:
            return self.name
        if self._adapters.number(name) is not None:
            return name
        if name.lower().endswith(LATEST):  # Ollama's clients append the default tag
            return self.check(name[: -len(LATEST)])
        for known in (self.name, *self.aliases, *(one.name for one in self._adapters.ready())):
            if known.casefold() == name.casefold():  # Ollama's names are case-insensitive
                return self.name if known in self.aliases else known
        if self._any_model_name:
            return self.name
        served = " and ".join(repr(one) for one in (self.name, *(a.name for a in self._adapters.ready())))
        raise wrong("model", f"{name[:80]!r} does not exist here: this server serves {served}", *NO_MODEL)

    def sampling_for(self, sampling: SamplingParams, name: str) -> SamplingParams:
        """Return `sampling` with the adapter `name` (by `check`). Raises `ApiError` 404 if it was unloaded since."""
        if name == self.name:
            return sampling
        number = self._adapters.number(name)
        if number is None:
            self.check(name)  # 404, unless any name is accepted
        return msgspec.structs.replace(sampling, adapter=number or 0)


class ServerContext:
    def __init__(
        self,
        client: ProcessClient,
        config: ServerConfig,
        served: Served,
        prompts: Prompts,
        queue: Queue,
        metrics: Metrics,
    ) -> None:
        self.client = client
        self.config = config
        self.limits = config.limits
        self.served = served
        self.prompts = prompts
        self.tokenizer, self.parsing = prompts.tokenizer, prompts.parsing
        self.queue, self.keys, self.gateway = queue, queue.keys, queue.gateway
        self.metrics = metrics
        self.turns = Turns(config.limits.max_encoding_bytes, prompts.give_back)
        self.abort_entries: set[AbortEntry] = set()
        self._own: dict[type[Any], Any] = {}
        self.draining = False
        # not ready until the gateway serves: requests would take a slower path
        self.opening = self.gateway is not None

    def own(self, kind: type[T]) -> T:
        """Return the state that an API keeps between requests: one object per `kind`, created on first use."""
        if kind not in self._own:
            self._own[kind] = kind()
        state: T = self._own[kind]
        return state

    @property
    def info(self) -> EngineReady:
        """Properties of the loaded model and engine. Raises `ApiError` 503 while no engine is ready."""
        return self.prompts.info

    @property
    def text_only(self) -> str:
        """The reason in errors about images, if the model does not see."""
        return f"this model reads text only: {self.client.blind}" if self.client.blind else "this model reads text only"

    @cached_property
    def pooling(self) -> Pooling:
        """Default pooling of embeddings, for requests that name none."""
        if self.info.gives_scores:
            return Pooling(None, "it is a reranker or a classifier, which gives scores")
        return own_pooling(self.info.model_dir, has_dense=self.info.engine == "cpu")

    @cached_property
    def own_prompts(self) -> OwnPrompts:
        """Prompts that the model's files define for inputs of embeddings."""
        return own_prompts(self.info.model_dir)

    def check_accepts(self, key: int) -> None:
        """Check that the server accepts requests of the key with index `key`, before any work is done. Raises
        `ApiError` 429 if a queue is full, 503 while the server drains or no engine is ready."""
        if self.draining:
            raise draining()
        _ = self.info
        CALLER.set(key)
        self.queue.check_room(key=key)
        self.keys.check(key)

    def check_room(self, num_prompts: int, num_tokens: int, n: int, key: int) -> None:
        """Check that `n` times `num_prompts` prompts, `num_tokens` tokens together, may be submitted. Raises `ApiError`
        400 for too many choices, 429 if a queue is full."""
        if num_prompts * n > BOUNDS.max_choices:
            raise bad_value("n", n, f"a request must have at most {BOUNDS.max_choices} choices in all")
        self.queue.check_room(num_prompts * n, num_tokens * n, key)
        self.keys.check(key, num_prompts * n)

    def check_images(self, images: Sequence[Sequence[PromptImage]]) -> None:
        """Check that these images, by prompt, may be submitted. Raises `ApiError` 400 if they have too many pixels, 429
        if all unfinished requests together have."""
        size, held = num_pixel_bytes(images), self.client.num_pixel_bytes if images else 0
        if size > MAX_PIXEL_BYTES:
            reason = f"the images have {size} bytes of pixels, resized: at most {MAX_PIXEL_BYTES} are allowed"
            raise wrong("messages", f"{reason}: send fewer or smaller ones")
        if size and held and held + size > MAX_LIVE_PIXEL_BYTES:
            raise queue_full(f"requests in progress have {held} bytes of pixels")
