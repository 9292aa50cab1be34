"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.parsers import ids
from minisgl.server.core.bodies import CompletionRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.continuation import Continuation, Options, continuation
from minisgl.server.core.formatter import (
    NOT_ASKED_FOR,
    SSE_DONE,
    CompletionLogprobs,
    EchoedPrompt,
    Formatter,
    Shown,
    echoed_prompt,
    of_its_end,
    prompt_logprobs,
    sse,
)
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest


async def completion_endpoint(
    context: ServerContext, completion: CompletionRequest, request: HttpRequest
) -> CompletionFormatter:
    return CompletionFormatter(context, completion, await continuation(context, completion))


class CompletionFormatter(Formatter):
    def __init__(self, context: ServerContext, completion: CompletionRequest, found: Continuation) -> None:
        super().__init__(found, completion.stream, completion.priority)
        self._tokenizer = context.tokenizer
        self._options = found.options
        self._choices: dict[int, _Choice] = {}  # of a stream
        self._given = found.given
        self._echoed: dict[int, EchoedPrompt] = {}  # by prompt
        self._prompt_logprobs: dict[int, msgspec.Raw] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{ids.new_id()}",
            "object": "text_completion",
            "created": ids.created(),
            "model": context.served.check(completion.model),
        }

    def for_gateway(self) -> Shown | None:
        options = self._options
        usual = Options(options.n, options.n, with_logprobs=options.with_logprobs, include_usage=options.include_usage)
        if options != usual:
            return None
        head = self._head
        return Shown(
            "completion", head["id"], head["created"], head["model"], options.include_usage, options.with_logprobs
        )

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        options = self._options
        found: list[dict[str, Any]] = []
        for prompt in range(len(self.prompts)):
            first = prompt * options.best_of
            for at in _best(choices[first : first + options.best_of], options.n):
                choice = _Choice(
                    first + at, len(found), CompletionLogprobs(self._tokenizer, as_ids=self._options.as_ids)
                )
                shown = self._choice(choice, generation, choices[first + at])
                found.append({**shown, **NOT_ASKED_FOR, **shown})  # in this order
        return {**self._head, "choices": found, "usage": generation.usage()}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._options.include_usage else {}
        if self._options.continuous_usage:
            usage["usage"] = generation.usage()
        frames = []
        for delta in deltas:
            if (choice := self._choices.get(delta.index)) is None:
                logprobs = CompletionLogprobs(self._tokenizer, as_ids=self._options.as_ids)
                choice = self._choices[delta.index] = _Choice(delta.index, delta.index, logprobs)
            shown = self._choice(choice, generation, delta)
            frames.append(sse({**self._head, "choices": [shown], **usage}))
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        if not self._options.include_usage:
            return SSE_DONE
        return sse({**self._head, "choices": [], "usage": generation.usage()}) + SSE_DONE

    # ----------------------------------------------------------------------------------------------------- choices

    def _choice(self, choice: _Choice, generation: Generation, delta: Delta) -> dict[str, Any]:
        """The next part of a choice; what concerns the prompt comes with the first."""
        text = delta.text
        options, more = self._options, dict[str, Any]()
        echoed, of_prompt = None, list[Logprob]()
        if choice.is_first:
            choice.is_first = False
            if options.with_prompt_logprobs:
                at = choice.source // options.best_of
                if at not in self._prompt_logprobs:
                    tokens_of_prompt = generation.prompt_tokens(choice.source)
                    self._prompt_logprobs[at] = prompt_logprobs(self._tokenizer, tokens_of_prompt)
                more["prompt_logprobs"] = self._prompt_logprobs[at]
            if options.with_token_ids:
                more["prompt_token_ids"] = self.prompts[choice.source // options.best_of].tolist()
            if options.echo:
                echoed = self._prompt(choice.source)
                text = echoed.text + text
                if options.with_logprobs:
                    of_prompt = generation.prompt_tokens(choice.source)
        logprobs = choice.logprobs.chunk(delta.logprobs, echoed, of_prompt) if options.with_logprobs else None
        if options.with_token_ids:
            more["token_ids"] = generation.new_token_ids(choice.source)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            **(of_its_end(generation, choice.source) if delta.finish_reason else {}),
            **more,
        }

    def _prompt(self, index: int) -> EchoedPrompt:
        at = index // self._options.best_of
        if at not in self._echoed:
            given = self._given[at]
            text = given if isinstance(given, str) else None
            ids, with_offsets = self.prompts[at].tolist(), self._options.with_logprobs
            self._echoed[at] = echoed_prompt(self._tokenizer, text, ids, with_offsets=with_offsets)
        return self._echoed[at]


@dataclass(slots=True, eq=False)
class _Choice:
    """How far a choice has come: `source` is its index in the generation, `index` that in the answer."""

    source: int
    index: int
    logprobs: CompletionLogprobs
    is_first: bool = True


def _best(choices: Sequence[Delta], n: int) -> list[int]:
    """Indices of the n choices with the highest log probability per token, in their own order."""
    if n == len(choices):
        return list(range(n))

    def mean(at: int) -> float:
        logprobs = [token.logprob or 0.0 for token in choices[at].logprobs]
        return sum(logprobs) / max(1, len(logprobs))

    return sorted(sorted(range(len(choices)), key=mean, reverse=True)[:n])
