"""POST /v1/chat/completions: chat requests with responses in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.parsers import ids
from minisgl.parsers.api import CallArguments, CallBegun, Part, Reasoning, Text
from minisgl.server.core.bodies import ChatRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.formatter import (
    NOT_ASKED_FOR,
    Formatter,
    GatewayFormat,
    chat_logprobs,
    final_fields,
    json_bytes,
    prompt_logprobs,
)
from minisgl.server.core.generation import Generation
from minisgl.server.core.request import HttpRequest
from minisgl.server.core.streams import SSE_DONE, sse
from minisgl.server.core.turn import Turn, TurnChoice, chat_turn

TEXT_MARK = "\x00text\x00"


async def chat_endpoint(context: ServerContext, chat: ChatRequest, request: HttpRequest) -> ChatFormatter:
    return ChatFormatter(context, chat, await chat_turn(context, chat))


class ChatFormatter(Formatter):
    def __init__(self, context: ServerContext, chat: ChatRequest, turn: Turn) -> None:
        sampling = turn.sampling
        super().__init__(turn, chat.stream, chat.priority)
        self._turn = turn
        self._is_plain = turn.is_plain
        self._tokenizer = context.tokenizer
        self._n = sampling.n
        self._with_logprobs = sampling.logprobs is not None
        self._with_prompt_logprobs = sampling.prompt_logprobs is not None
        self._include_usage = chat.include_usage
        self._continuous_usage = chat.continuous_usage
        self._with_token_ids = bool(chat.return_token_ids)
        self._as_ids = bool(chat.return_tokens_as_token_ids)
        self._has_begun = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: bytes before and after the text
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{ids.new_id()}",
            "created": ids.created(),
            "model": context.served.check(chat.model),
        }

    @cached_property
    def _choices(self) -> list[TurnChoice]:
        """Parser state of each choice. Created lazily: not needed where the gateway formats the response."""
        return [self._turn.choice(streams=self.stream) for _ in range(self._n)]

    def for_gateway(self) -> GatewayFormat | None:
        head, parts = self._head, self._turn.parts()
        return GatewayFormat(
            "chat", head["id"], head["created"], head["model"], self._include_usage, self._with_logprobs, parts
        )

    def _logprobs(self, tokens: Sequence[Logprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens, as_ids=self._as_ids) if self._with_logprobs else None

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": self._message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": self._choices[i].finish_reason,
                    **final_fields(generation, i),
                    **({"token_ids": generation.token_ids(i)} if self._with_token_ids else {}),
                }
                for i, choice in enumerate(choices)
            ],
            "usage": self._usage(generation),
            **NOT_ASKED_FOR,
            **self._about_prompt(generation, 0),
        }

    def _message(self, delta: Delta) -> dict[str, Any]:
        choice = self._choices[delta.index]
        choice.take(delta)
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if self._turn.thinks and self._turn.shows_thoughts:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning or None
        if choice.whole_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.whole_calls
            ]
        return message

    def _usage(self, generation: Generation) -> dict[str, Any]:
        """Return the usage of a finished response, with the number of reasoning tokens."""
        usage: dict[str, Any] = generation.usage()
        if self._turn.thinks:
            count = sum(
                self._turn.num_thought(choice, generation.token_ids(i), self._tokenizer)
                for i, choice in enumerate(self._choices)
            )
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def _about_prompt(self, generation: Generation, index: int) -> dict[str, Any]:
        """Return the requested prompt ids and log probabilities; call it after the choice's first token."""
        fields: dict[str, Any] = {}
        if self._with_token_ids:
            fields["prompt_token_ids"] = self._turn.shown_ids(0)
        if self._with_prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, generation.prompt_tokens(index))
        return fields

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        more: dict[str, Any] = {"usage": generation.usage()} if self._continuous_usage else {}
        if not self._has_begun:  # roles are sent with the first tokens: an earlier failure is an HTTP error
            self._has_begun = True
            first = dict(more)
            if self._continuous_usage:  # the role's chunk has no token
                num_prompt = more["usage"]["prompt_tokens"]
                first["usage"] = more["usage"] | {"completion_tokens": 0, "total_tokens": num_prompt}
            of_prompt = self._about_prompt(generation, deltas[0].index)
            for i in range(self._n):
                frames.append(self._chunk(i, {"role": "assistant", "content": ""}, {}, {**first, **of_prompt}))
                of_prompt = {}
        for delta in deltas:
            frames += self._chunks(generation, delta, more)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return SSE_DONE
        head = {**self._head, "object": "chat.completion.chunk"}
        return sse({**head, "choices": [], "usage": self._usage(generation)}) + SSE_DONE

    def _chunks(self, generation: Generation, delta: Delta, more: dict[str, Any]) -> list[bytes]:
        """Return a delta's chunks. Log probabilities and ids are sent even if the parser holds back their text."""
        of_choice: dict[str, Any] = {}
        if self._with_token_ids:
            of_choice["token_ids"] = generation.new_token_ids(delta.index)
        if delta.logprobs:
            of_choice["logprobs"] = self._logprobs(delta.logprobs)
        frames, reason = list[bytes](), delta.finish_reason
        if self._is_plain and delta.text and not (of_choice or more):  # the common case
            frames.append(self._text_chunk(delta.index, delta.text))
        else:
            shown = [{"content": delta.text}] if delta.text else []
            if not self._is_plain:
                choice = self._choices[delta.index]
                shown = [one for part in choice.take(delta) if (one := self._shown_part(part)) is not None]
                reason = choice.finish_reason
            for one in shown or ([{"content": ""}] if of_choice and (delta.text or delta.logprobs) else []):
                frames.append(self._chunk(delta.index, one, of_choice, more))
                of_choice = {"token_ids": []} if self._with_token_ids else {}
        if delta.finish_reason is not None:
            of_choice |= {"finish_reason": reason, **final_fields(generation, delta.index)}
            frames.append(self._chunk(delta.index, {}, of_choice, more))
        return frames

    def _shown_part(self, part: Part) -> dict[str, Any] | None:
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text} if self._turn.shows_thoughts else None
            case CallBegun(index, call_id, name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _chunk(self, index: int, delta: dict[str, Any], of_choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **of_choice}
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage, **more})

    def _text_chunk(self, index: int, text: str) -> bytes:
        """Return a chunk that has only text, from a cached frame: the rest is formatted once per choice."""
        if (parts := self._frames.get(index)) is None:
            before, after = self._chunk(index, {"content": TEXT_MARK}, {}, {}).split(json_bytes(TEXT_MARK))
            parts = self._frames[index] = (before, after)
        before, after = parts
        return b"%b%b%b" % (before, json_bytes(text), after)
