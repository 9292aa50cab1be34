"""Result of one generation request so far, as formatters read it: token ids, log probabilities, usage, receipts.

Invariants: read-only; ending, counting and waiting is done in `running.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.frontend.output_processor import Logprob, RequestState
from minisgl.prompt_image import FIRST_VIRTUAL_ID
from minisgl.receipt import Receipt
from minisgl.server.core.lengths import Lengths
from minisgl.server.core.receipts import ReceiptBuilder
from minisgl.server.core.request import HttpRequest
from minisgl.step import FinishReason, Int32Array


@dataclass(slots=True, eq=False)
class Generation:
    """Choices of a request and their tokens so far: `n` per prompt, choice i * n + j belongs to prompt i."""

    choices: list[RequestState]
    _n: int
    _lengths: Lengths
    _request: HttpRequest
    _receipts: ReceiptBuilder | None
    _prompt_tokens: dict[int, list[Logprob]] = field(default_factory=dict)  # results of `prompt_tokens`, by prompt

    def prompt_tokens(self, index: int) -> list[Logprob]:
        """Return the prompt tokens of a choice with their log probabilities; call it after the first generated token.
        All choices of a prompt share them."""
        at = index // self._n
        if at not in self._prompt_tokens:
            self._prompt_tokens[at] = self.choices[index].prompt_tokens()
            for state in self.choices[at * self._n : (at + 1) * self._n]:
                state.prompt_logprobs = {}
        return self._prompt_tokens[at]

    def token_ids(self, index: int) -> list[int]:
        """Return the generated token ids of a choice so far, including its stop token."""
        return self.choices[index].token_ids

    def reason(self, index: int) -> int:
        """Return the engine's `FinishReason` of a choice."""
        return int(self.choices[index].reason)

    def cached(self) -> list[int]:
        """Return for each choice how many tokens of its prompt were cached."""
        return [state.cached_len or 0 for state in self.choices]

    def matched_stop(self, index: int) -> str | int | None:
        """Return the request's stop string or stop token id that ended a choice; `None` if anything else did."""
        stop = self.ended_by(index)
        return stop if isinstance(stop, str) or stop in self.choices[index].sampling.stop_token_ids else None

    def ended_by(self, index: int) -> str | int | None:
        """Return the stop string or token id that ended a choice (the model's own included); `None` if none did."""
        state = self.choices[index]
        if state.reason is FinishReason.STOP and state.matched_stop is None:
            return state.token_ids[-1] if state.token_ids else None
        return state.matched_stop

    def receipt(self, index: int) -> Receipt | None:
        """Return the receipt of a finished choice, or `None` if the request wants none."""
        return None if self._receipts is None else self._receipts.of(self.choices[index])

    def embedding(self, index: int) -> bytes | None:
        """Return the embedding of a choice's prompt as the bytes of a float32 array, or `None` if none was computed."""
        return self.choices[index].embedding

    def new_token_ids(self, index: int) -> list[int]:
        """Return the token ids that a choice generated since the last call."""
        return self.choices[index].new_token_ids()

    def _first_choices(self) -> list[RequestState]:
        """Return the first choice of each prompt."""
        return self.choices[:: self._n]

    def headers(self, *, begins: bool = False) -> list[tuple[bytes, bytes]]:
        """Return headers of the response: the maximum number of tokens by prompt, and the prompt tokens that were
        cached. When a stream `begins`, the latter is known only for a single prompt, and is left out otherwise."""
        headers = [(b"x-minisgl-max-tokens", self._lengths.shown().encode())]
        cached = [state.cached_len for state in self._first_choices()]
        if not begins or (len(cached) == 1 and cached[0] is not None):
            headers.append((b"x-minisgl-cached-tokens", b"%d" % sum(one or 0 for one in cached)))
        return headers

    def times_s(self, index: int) -> tuple[float, float]:
        """Return the seconds from arrival to the first token (TTFT), and from there to the choice's last token."""
        first, arrival = self._request.ttft_s or 0.0, self._request.arrival_time
        last = self.choices[index].last_time
        return first, 0.0 if last is None else max(0.0, last - arrival - first)

    def usage_of(self, index: int) -> dict[str, Any]:
        """Return OpenAI's usage object for one choice."""
        return _usage([self.choices[index]], [self.choices[index]])

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object for all choices; each prompt counts once."""
        return _usage(self._first_choices(), self.choices)


def num_image_tokens(prompt: Int32Array) -> int:
    """Return how many positions of a prompt images take."""
    return int(np.count_nonzero(prompt >= FIRST_VIRTUAL_ID))


def _usage(prompts: Sequence[RequestState], choices: Sequence[RequestState]) -> dict[str, Any]:
    num_prompt = sum(len(state.prompt) for state in prompts)
    num_generated = sum(len(state.token_ids) for state in choices)
    of_images = sum(num_image_tokens(state.prompt) for state in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(state.cached_len or 0 for state in prompts),
            **({"image_tokens": of_images} if of_images else {}),
        },
    }
