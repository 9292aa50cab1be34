"""Receipts of responses (`receipt: true`): the model's digests, computed once, and what each response adds.

Invariants: nothing is read or computed for requests without a receipt; only output that was generated here is signed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from minisgl import receipt
from minisgl.config import ConfigError
from minisgl.frontend.output_processor import Delta, RequestState
from minisgl.receipt import LogprobDigest, Model, Numerics, Receipt
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.errors import wrong
from minisgl.tokenizer.tokenizer import tokenizer_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from minisgl.server.core.context import ServerContext

FIELD = "receipt"


class Receipts:
    """Creates receipts for the requests of one server."""

    def __init__(self, context: ServerContext) -> None:
        """Read the signing key, if configured. Raises `ConfigError` for a bad key."""
        self._context = context
        self._found: dict[int, tuple[Model, Numerics]] = {}  # by adapter index; 0 is the model itself
        path = context.config.receipt_key
        self._key = None if path is None else receipt.read_key(path)

    async def begin(self, sampling: SamplingParams, name: str) -> tuple[SamplingParams, ReceiptBuilder]:
        """Return the sampling parameters with log probabilities, and the builder of the receipts, for a request to the
        model or adapter `name`. Raises `ApiError` if the weights cannot be identified."""
        adapter = self._context.client.adapters.by_name.get(name)
        number, folder = (0, None) if adapter is None else (adapter.number, adapter.path)
        if number not in self._found:
            await self._context.prompts.run(partial(self._find, number, folder))
        if sampling.logprobs is None and not self._context.info.simulated:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        return sampling, ReceiptBuilder(*self._found[number], self._key)

    def _find(self, number: int, folder: str | None) -> None:
        """Compute the digests of an adapter (0: the model), if not cached. Runs in any thread. Raises `ApiError`."""
        if number not in self._found:
            try:
                self._found[number] = self._model(folder)
            except ConfigError as error:
                raise wrong(FIELD, str(error), "unsupported_value") from error

    def _model(self, adapter: str | None) -> tuple[Model, Numerics]:
        info, config, tokenizer = self._context.info, self._context.config.engine, self._context.tokenizer
        numerics = receipt.numerics(config, info.engine, info.engine_details)
        model = Model(
            weights=receipt.weights_digest(config),
            adapter=None if adapter is None else receipt.folder_digest(adapter),
            tokenizer=receipt.text_digest(tokenizer_json(info.model_dir)),
            template=receipt.text_digest(tokenizer.template_source()),
        )
        return model, numerics


class ReceiptBuilder:
    """Builds the receipts of one request's choices from their output deltas."""

    def __init__(self, model: Model, numerics: Numerics, key: Ed25519PrivateKey | None) -> None:
        self._model = model
        self._numerics = numerics
        self._key = key
        self._logprobs: dict[int, LogprobDigest | None] = {}  # by choice; None: another server computed a part

    def add(self, delta: Delta, *, was_elsewhere: bool = False) -> None:
        """Add a delta's log probabilities. `was_elsewhere`: another server computed it; there is no digest then."""
        if was_elsewhere:
            self._logprobs[delta.index] = None
        elif delta.logprobs and (digest := self._logprobs.setdefault(delta.index, LogprobDigest())) is not None:
            digest.add([one.logprob or 0.0 for one in delta.logprobs])

    def of(self, state: RequestState) -> Receipt:
        """Return the receipt of a finished choice."""
        digest = self._logprobs.get(state.index)
        return receipt.make(
            self._model,
            self._numerics,
            state.sampling,
            state.prompt.tolist(),
            state.token_ids,
            state.finish_reason or "",
            None if digest is None else digest.shown(),
            self._key,
            state.image_digests,
        )
