"""The result of one call of the model so far, as formatters read it: token ids, log probabilities, usage, receipts.

Invariants: nothing here ends, counts or waits for anything: `running.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.frontend.output_processor import Logprob, RequestState
from minisgl.receipt import Receipt
from minisgl.server.core.lengths import Lengths
from minisgl.server.core.receipts import OfAnswers
from minisgl.server.core.request import HttpRequest
from minisgl.step import FinishReason


@dataclass(slots=True, eq=False)
class Generation:
    """Prompts times `n` choices; choice i * n + j belongs to prompt i."""

    choices: list[RequestState]
    _n: int
    _lengths: Lengths
    _request: HttpRequest
    _receipts: OfAnswers | None
    _prompt_tokens: dict[int, list[Logprob]] = field(default_factory=dict)  # by prompt, with log probabilities

    def prompt_tokens(self, index: int) -> list[Logprob]:
        """The prompt of a choice with its log probabilities, once its first token is there. All choices of a prompt
        have the same."""
        at = index // self._n
        if at not in self._prompt_tokens:
            self._prompt_tokens[at] = self.choices[index].prompt_tokens()
            for state in self.choices[at * self._n : (at + 1) * self._n]:
                state.prompt_logprobs = {}
        return self._prompt_tokens[at]

    def token_ids(self, index: int) -> list[int]:
        """Generated ids of a choice so far, its stop token included."""
        return self.choices[index].token_ids

    def reason(self, index: int) -> int:
        """Why the engine ended a choice, a `FinishReason`."""
        return int(self.choices[index].reason)

    def cached(self) -> list[int]:
        """Return how many tokens of each choice's prompt were in the cache."""
        return [state.cached_len or 0 for state in self.choices]

    def matched_stop(self, index: int) -> str | int | None:
        """Return the stop of the request that ended a choice: a stop string, or the id of a token."""
        found = self.ended_by(index)
        return found if isinstance(found, str) or found in self.choices[index].sampling.stop_token_ids else None

    def ended_by(self, index: int) -> str | int | None:
        """The stop that ended a choice: a stop string, or the id of a token, which may be the model's own end of
        text; None if no stop did."""
        state = self.choices[index]
        if state.reason is FinishReason.STOP and state.matched_stop is None:
            return state.token_ids[-1] if state.token_ids else None
        return state.matched_stop

    def receipt(self, index: int) -> Receipt | None:
        """The receipt of a choice that has ended, if the request asks for one."""
        return None if self._receipts is None else self._receipts.of(self.choices[index])

    def embedding(self, index: int) -> bytes | None:
        """The embedding of the prompt of a choice that asked for one, float32."""
        return self.choices[index].embedding

    def new_token_ids(self, index: int) -> list[int]:
        """Return the token ids that came since the call before."""
        return self.choices[index].new_token_ids()

    def _of_prompts(self) -> list[RequestState]:
        """One choice of each."""
        return self.choices[:: self._n]

    def headers(self, *, begins: bool = False) -> list[tuple[bytes, bytes]]:
        """Headers of the answer, which `begins` or is whole: the limit of its length, by prompt, and how much of its
        prompts was in the cache. While a stream of several prompts begins that is not known; so it is never said
        there."""
        found = [(b"x-minisgl-max-tokens", self._lengths.shown().encode())]
        cached = [state.cached_len for state in self._of_prompts()]
        if not begins or (len(cached) == 1 and cached[0] is not None):
            found.append((b"x-minisgl-cached-tokens", b"%d" % sum(one or 0 for one in cached)))
        return found

    def times_s(self, index: int) -> tuple[float, float]:
        """Return the seconds from the request's arrival to its first token, and from there to a choice's last one."""
        first, arrival = self._request.ttft_s or 0.0, self._request.arrival_time
        last = self.choices[index].last_time
        return first, 0.0 if last is None else max(0.0, last - arrival - first)

    def usage_of(self, index: int) -> dict[str, Any]:
        """The usage of one choice."""
        return _usage([self.choices[index]], [self.choices[index]])

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt counts once, however many choices it has."""
        return _usage(self._of_prompts(), self.choices)


def _usage(prompts: Sequence[RequestState], choices: Sequence[RequestState]) -> dict[str, Any]:
    num_prompt = sum(len(state.prompt) for state in prompts)
    num_generated = sum(len(state.token_ids) for state in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(state.cached_len or 0 for state in prompts)},
    }
