"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from minisgl.frontend.output_processor import Delta, Logprob
from minisgl.sampling_params import SamplingParams
from minisgl.server.bodies import ChatRequest
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value, param_errors
from minisgl.server.formatter import SSE_DONE, Formatter, chat_logprobs, json_bytes, prompt_logprobs, sse
from minisgl.server.generation import Generation
from minisgl.step import Int32Array

TEXT_MARK = "\x00text\x00"


async def chat_endpoint(context: ServerContext, chat: ChatRequest) -> ChatFormatter:
    _check_prompt(chat)
    limit = chat.limit()
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    if limit is not None and limit < 1:
        raise bad_value(name, limit, "must be at least 1")
    if limit is None:
        limit = context.defaults.get("max_tokens")
    with param_errors():
        asked = {"logprobs": chat.num_logprobs(), "prompt_logprobs": chat.prompt_logprobs}
        sampling = chat.to_sampling(limit, context.defaults, **asked)
    prompt = chat if chat.messages else [chat.prompt or ""]
    prompts, sampling = await context.encode(prompt, sampling, chat.truncate_prompt_tokens)
    return ChatFormatter(context, chat, prompts, sampling)


def _check_prompt(chat: ChatRequest) -> None:
    """Either `messages` that make sense or, as mini-sglang's clients send it, a `prompt`."""
    if chat.prompt is not None:
        if chat.messages:
            raise ApiError(400, "prompt: give either messages or prompt", param="prompt", code="invalid_value")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"):
            if (value := getattr(chat, name)) is not None:
                raise bad_value(name, value, "needs messages: a prompt is not rendered by the chat template")
        return
    if chat.messages is None:
        raise ApiError(400, "messages: required", param="messages", code="missing_required_parameter")
    if not chat.messages:
        raise bad_value("messages", [], "must not be empty")
    for i, message in enumerate(chat.messages):
        if message.role != "assistant":
            if message.content is None:
                raise bad_value(f"messages.{i}.content", None, f"required for the role {message.role}")
            if message.has_refusal:
                raise bad_value(f"messages.{i}", message.role, "only an assistant refuses")


class ChatFormatter(Formatter):
    def __init__(
        self, context: ServerContext, chat: ChatRequest, prompts: Sequence[Int32Array], sampling: SamplingParams
    ) -> None:
        super().__init__(prompts, sampling, stream=chat.stream, priority=chat.priority)
        self._tokenizer = context.tokenizer
        self._n = sampling.n
        self._with_logprobs = sampling.logprobs is not None
        self._with_prompt_logprobs = sampling.prompt_logprobs is not None
        self._include_usage = chat.include_usage
        self._continuous_usage = chat.continuous_usage
        self._with_token_ids = bool(chat.return_token_ids)
        self._has_begun = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands around the text
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": context.model_name}

    def _logprobs(self, tokens: Sequence[Logprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._with_logprobs else None

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": i,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    **({"token_ids": generation.token_ids(i)} if self._with_token_ids else {}),
                }
                for i, choice in enumerate(choices)
            ],
            "usage": generation.usage(),
            **self._about_prompt(generation, 0),
        }

    def _about_prompt(self, generation: Generation, index: int) -> dict[str, Any]:
        """Known once the choice has its first token."""
        found: dict[str, Any] = {}
        if self._with_token_ids:
            found["prompt_token_ids"] = self.prompts[0].tolist()
        if self._with_prompt_logprobs:
            found["prompt_logprobs"] = prompt_logprobs(self._tokenizer, generation.prompt_tokens(index))
        return found

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        more: dict[str, Any] = {"usage": generation.usage()} if self._continuous_usage else {}
        if not self._has_begun:  # the roles go with the first tokens: an early failure is an HTTP error
            self._has_begun = True
            first = {**more, **self._about_prompt(generation, deltas[0].index)}
            for i in range(self._n):
                frames.append(self._chunk(i, {"role": "assistant", "content": ""}, {}, first))
                first = more
        for delta in deltas:
            of_choice: dict[str, Any] = {}
            if self._with_token_ids:
                of_choice["token_ids"] = generation.new_token_ids(delta.index)
            if delta.logprobs or (delta.text and (more or of_choice)):
                of_choice["logprobs"] = self._logprobs(delta.logprobs) if delta.logprobs else None
                frames.append(self._chunk(delta.index, {"content": delta.text}, of_choice, more))
                of_choice = {"token_ids": []} if self._with_token_ids else {}
            elif delta.text:
                frames.append(self._text_chunk(delta.index, delta.text))
            if delta.finish_reason is not None:
                frames.append(self._chunk(delta.index, {}, {**of_choice, "finish_reason": delta.finish_reason}, more))
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        if not self._include_usage:
            return SSE_DONE
        head = {**self._head, "object": "chat.completion.chunk"}
        return sse({**head, "choices": [], "usage": generation.usage()}) + SSE_DONE

    def _chunk(self, index: int, delta: dict[str, Any], of_choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **of_choice}
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return sse({**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage, **more})

    def _text_chunk(self, index: int, text: str) -> bytes:
        """The same with all but the text formatted once."""
        if (parts := self._frames.get(index)) is None:
            before, after = self._chunk(index, {"content": TEXT_MARK}, {}, {}).split(json_bytes(TEXT_MARK))
            parts = self._frames[index] = (before, after)
        before, after = parts
        return b"%b%b%b" % (before, json_bytes(text), after)
