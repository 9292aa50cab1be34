"""POST /v1/completions: completion requests with responses in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.parsers import ids
from minisgl.server.core.bodies import CompletionRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.continuation import Continuation, continuation
from minisgl.server.core.formatter import (
    NOT_ASKED_FOR,
    CompletionLogprobs,
    EchoedPrompt,
    Formatter,
    GatewayFormat,
    echoed_prompt,
    final_fields,
    prompt_logprobs,
)
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.streams import SSE_DONE, sse


async def completion_endpoint(
    context: ServerContext, completion: CompletionRequest, request: HttpRequest
) -> CompletionFormatter:
    return CompletionFormatter(context, completion, await continuation(context, completion))


class CompletionFormatter(Formatter):
    def __init__(self, context: ServerContext, completion: CompletionRequest, wanted: Continuation) -> None:
        super().__init__(wanted, completion.stream, completion.priority)
        self._tokenizer = context.tokenizer
        self._asked = completion
        self._num_generated = wanted.sampling.n  # choices per prompt: `best_of`
        self._with_logprobs = completion.logprobs is not None
        self._as_ids = bool(completion.return_tokens_as_token_ids)
        self._choices: dict[int, _Choice] = {}  # by index; streams only
        self._given = wanted.given
        self._echoed: dict[int, EchoedPrompt] = {}  # by prompt
        self._prompt_logprobs: dict[int, msgspec.Raw] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{ids.new_id()}",
            "object": "text_completion",
            "created": ids.created(),
            "model": context.served.check(completion.model),
        }

    def for_gateway(self) -> GatewayFormat | None:
        head, usage = self._head, self._asked.include_usage
        return GatewayFormat("completion", head["id"], head["created"], head["model"], usage, self._with_logprobs)

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        results: list[dict[str, Any]] = []
        for prompt in range(len(self.prompts)):
            first = prompt * self._num_generated
            for at in _best(choices[first : first + self._num_generated], self._asked.n or 1):
                choice = _Choice(first + at, len(results), CompletionLogprobs(self._tokenizer, as_ids=self._as_ids))
                shown = self._choice(choice, generation, choices[first + at])
                results.append({**shown, **NOT_ASKED_FOR, **shown})  # twice: the first one decides the order of fields
        return {**self._head, "choices": results, "usage": generation.usage()}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._asked.include_usage else {}
        if self._asked.continuous_usage:
            usage["usage"] = generation.usage()
        frames = []
        for delta in deltas:
            if (choice := self._choices.get(delta.index)) is None:
                logprobs = CompletionLogprobs(self._tokenizer, as_ids=self._as_ids)
                choice = self._choices[delta.index] = _Choice(delta.index, delta.index, logprobs)
            shown = self._choice(choice, generation, delta)
            frames.append(sse({**self._head, "choices": [shown], **usage}))
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        if not self._asked.include_usage:
            return SSE_DONE
        return sse({**self._head, "choices": [], "usage": generation.usage()}) + SSE_DONE

    # ----------------------------------------------------------------------------------------------------- choices

    def _choice(self, choice: _Choice, generation: Generation, delta: Delta) -> dict[str, Any]:
        """Return the next part of a choice; fields of the prompt come with the first part."""
        text = delta.text
        completion, more = self._asked, dict[str, Any]()
        echoed, of_prompt = None, list[Logprob]()
        if choice.is_first:
            choice.is_first = False
            at = choice.source // self._num_generated
            if completion.prompt_logprobs is not None:
                if at not in self._prompt_logprobs:
                    tokens_of_prompt = generation.prompt_tokens(choice.source)
                    self._prompt_logprobs[at] = prompt_logprobs(self._tokenizer, tokens_of_prompt)
                more["prompt_logprobs"] = self._prompt_logprobs[at]
            if completion.return_token_ids:
                more["prompt_token_ids"] = self.prompts[at].tolist()
            if completion.echo:
                echoed = self._prompt(at)
                text = echoed.text + text
                if self._with_logprobs:
                    of_prompt = generation.prompt_tokens(choice.source)
        logprobs = choice.logprobs.chunk(delta.logprobs, echoed, of_prompt) if self._with_logprobs else None
        if completion.return_token_ids:
            more["token_ids"] = generation.new_token_ids(choice.source)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            **(final_fields(generation, choice.source) if delta.finish_reason else {}),
            **more,
        }

    def _prompt(self, at: int) -> EchoedPrompt:
        if at not in self._echoed:
            given = self._given[at]
            text = given if isinstance(given, str) else None
            ids, with_offsets = self.prompts[at].tolist(), self._with_logprobs
            self._echoed[at] = echoed_prompt(self._tokenizer, text, ids, with_offsets=with_offsets)
        return self._echoed[at]


@dataclass(slots=True, eq=False)
class _Choice:
    """Progress of a choice: `source` is its index in the generation, `index` its index in the response."""

    source: int
    index: int
    logprobs: CompletionLogprobs
    is_first: bool = True


def _best(choices: Sequence[Delta], n: int) -> list[int]:
    """Return the indices of the `n` choices with the highest mean log probability, in ascending order."""
    if n == len(choices):
        return list(range(n))

    def mean(at: int) -> float:
        logprobs = [token.logprob or 0.0 for token in choices[at].logprobs]
        return sum(logprobs) / max(1, len(logprobs))

    return sorted(sorted(range(len(choices)), key=mean, reverse=True)[:n])
