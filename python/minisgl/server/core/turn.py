"""Turns a chat request of any API into the input of the engine, and the output into content, reasoning and tool calls.

Invariants: code that the chat APIs have in common is here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minisgl.extension import HOW_TO_BUILD, NEEDS, why_missing
from minisgl.frontend.output_processor import Delta
from minisgl.message.prepared import AnswerParts
from minisgl.parsers.api import CallArguments, CallBegun, MessageParser, Part, Reasoning, Text
from minisgl.parsers.choice import answer_tools, new_parser
from minisgl.server.core.admission import GenerationInput
from minisgl.server.core.bodies import SEEN, ChatMessage, ChatRequest
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import bad_value, missing, param_errors, renamed, wrong
from minisgl.server.core.fields import LeftOut, Picture, type_of
from minisgl.server.core.formatter import Formatter, chat_entries, json_bytes
from minisgl.server.core.lengths import TO_THE_END, asked_limit
from minisgl.server.core.sections import Change, JoinedText, Sections
from minisgl.server.core.sight import images_of, leave_out_oldest, name_of
from minisgl.server.core.tools import ToolUse, allowed_tools, needs_grammar, tool_use
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import AnswerTools, Thinking, ToolFormat
    from minisgl.tokenizer.reference import Formats

MAX_DEPTH = 120  # of JSON in Rust, slightly below its parser's limit
OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
    "thinking_budget",
    "tools",
)
OF_REASONING = ("enable_thinking", "thinking_budget", "reasoning_effort", "include_reasoning", "separate_reasoning")


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    grown: JoinedText = field(default_factory=JoinedText)

    @property
    def arguments(self) -> str:
        """Arguments of the call so far, as JSON text."""
        return str(self.grown)


@dataclass(slots=True)
class TurnChoice:
    """Output of one choice of a chat: content, reasoning and tool calls so far."""

    parser: MessageParser
    named_call: bool = False  # the client named the tool: OpenAI's finish reason is then not tool_calls
    streams: bool = False
    whole_calls: list[ToolCall] = field(default_factory=list)  # set at the end
    grown_content: JoinedText = field(default_factory=JoinedText)
    grown_reasoning: JoinedText = field(default_factory=JoinedText)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None  # OpenAI's: stop, length, tool_calls

    @property
    def content(self) -> str:
        return str(self.grown_content)

    @property
    def broken(self) -> list[int]:
        """Indices of tool calls with broken arguments."""
        return self.parser.broken

    @property
    def calls_tools(self) -> bool:
        """True if the finished output calls tools. A broken call does not count; in a stream it voids all of them."""
        return bool(self.whole_calls) and not (self.streams and self.broken)

    @property
    def reasoning(self) -> str:
        return str(self.grown_reasoning)

    def take(self, delta: Delta) -> list[Part]:
        """Parse a delta and return the new parts; at the end also those that the parser held back."""
        parts = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self.parser.finish(delta.finish_reason == "length")
        for part in parts:
            match part:
                case Text(text):
                    self.grown_content.add(text)
                case Reasoning(text):
                    self.grown_reasoning.add(text)
                case CallBegun(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].grown.add(text)
        if delta.finish_reason is not None:
            broken = self.broken
            self.whole_calls = [call for i, call in enumerate(self.calls) if i not in broken]
            called = self.calls_tools and delta.finish_reason == "stop" and not self.named_call
            self.finish_reason = "tool_calls" if called else delta.finish_reason
        return parts


@dataclass(slots=True, eq=False)
class Turn(GenerationInput):
    """Generation request with one prompt, a conversation. `shown`: special tokens that the parser looks for."""

    calls: ToolFormat | None = None  # format of calls, if tools may be called
    thinking: Thinking | None = None  # format of reasoning, if it is split from the content
    schemas: dict[str, dict[str, Any]] | None = None  # schemas of tool parameters, by tool name
    named_call: bool = False
    shows_thoughts: bool = True
    think_end: int | None = None  # id of the token that ends reasoning, if there is one
    _known: AnswerTools | None = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None

    @property
    def is_plain(self) -> bool:
        """True if the output is plain text: no tool calls and no reasoning to parse."""
        return self.calls is None and self.thinking is None

    def choice(self, *, streams: bool = False) -> TurnChoice:
        return TurnChoice(new_parser(*(self.formats() or (None, None))), self.named_call, streams)

    def formats(self) -> Formats | None:
        """Return the formats by which output is parsed; `None` for plain text. The tools' schemas are compiled once."""
        if self._known is None and self.schemas is not None:
            self._known = answer_tools(self.schemas)
        return None if self.is_plain else (self.calls, self.thinking, self._known)

    def parts(self) -> AnswerParts | None:
        """Return the settings by which the gateway parses the output; `None` for plain text."""
        if self.is_plain:
            return None
        thinking = self.thinking
        return AnswerParts(
            None if self.calls is None else self.calls.place,
            None if thinking is None else thinking.name,
            None if thinking is None else thinking.is_open,
            "" if self.schemas is None else json_bytes(self.schemas).decode(),
            self.named_call,
            self.shows_thoughts,
            self.think_end,
            sorted(self.shown),
        )

    def num_thought(self, choice: TurnChoice, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Return the number of reasoning tokens in a choice, the end marker included."""
        if not choice.grown_reasoning:
            return 0
        if self.think_end is None:
            return len(tokenizer.encode(choice.reasoning, add_special_tokens=False))
        return token_ids.index(self.think_end) + 1 if self.think_end in token_ids else len(token_ids)


class SectionFormatter(Formatter):
    """Base class of formatters that show one choice as sections: items, blocks or lines."""

    def __init__(self, context: ServerContext, turn: Turn, stream: bool | None, priority: int | None) -> None:
        super().__init__(turn, stream, priority)
        self._turn = turn
        self._tokenizer = context.tokenizer
        self._choice = turn.choice(streams=self.stream)
        self._sections = Sections()
        self._with_logprobs = turn.sampling.logprobs is not None  # requested by the client; receipts need them, too
        self._new_logprobs: list[dict[str, Any]] = []  # for text that the parser holds back

    def changes(self, delta: Delta) -> list[Change]:
        """Return how a delta changes the sections of the output."""
        if delta.logprobs and self._with_logprobs:
            self._new_logprobs += chat_entries(self._tokenizer, delta.logprobs)
        parts = self._choice.take(delta)
        return self._sections.take(parts, self._choice.broken, is_end=delta.finish_reason is not None)


async def chat_turn(
    context: ServerContext, chat: ChatRequest, *, least_tokens: int = TO_THE_END, only_counts: bool = False
) -> Turn:
    """Check a chat request and encode its prompt. `least_tokens`: lowest allowed `max_tokens`. `only_counts`: the
    prompt may exceed the context. Raises `ApiError`."""
    places = list(chat.functions())
    if len(places) == len(chat.tools or ()):
        return await _chat_turn(context, chat, least_tokens, only_counts)
    own = chat.model_copy(update={"tools": list(chat.functions().values())})
    with renamed([(rf"tools\.{i}", f"tools.{place}") for i, place in enumerate(places)]):
        return await _chat_turn(context, own, least_tokens, only_counts)


async def _chat_turn(context: ServerContext, chat: ChatRequest, least_tokens: int, only_counts: bool) -> Turn:
    chat = of_allowed_tools(chat)
    _check_prompt(context, chat)
    limit = chat.limit()
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    named = limit is not None
    least = least_tokens if chat.max_completion_tokens is None else 1
    with param_errors():
        limit, only_prompt = asked_limit(name, limit, context.served.defaults.get("max_tokens"), least=least)
        logprob_fields = {"logprobs": chat.num_logprobs(), "prompt_logprobs": chat.prompt_logprobs}
        sampling = chat.to_sampling(limit, context.served.defaults, **logprob_fields)
        source = chat.grammar_source()
    prompt = chat if chat.messages else [chat.prompt or ""]
    use = tool_use([*chat.functions().values()], chat.tool_choice, chat.parallel_tool_calls)
    _check_thinking(context, chat)
    ignored = _ignored(context, chat)
    if context.info.sees and chat.messages:
        ignored += leave_out_oldest(chat.messages, context.config.images.max_images)
    seen = [await context.prompts.see(images_of(chat.messages or ()))] if context.info.sees else [None]
    prompts, sampling = await context.prompts.encode(
        prompt, sampling, chat.truncate_prompt_tokens, side=chat.truncation_side, only_counts=only_counts, seen=seen
    )
    thinking = context.parsing.thinking_after(prompts[0], chat.continued_text())
    budget = chat.thinking_budget if thinking is not None and thinking.is_open is not False else None
    if budget is not None and not context.parsing.ends_thinking:
        budget = None
    left_out: tuple[str, ...] = ()
    if source is not None or needs_grammar(use) or budget is not None:
        with param_errors():
            grammar = context.parsing.grammar(thinking, use, source, budget)
            sampling, left_out = await context.prompts.with_grammar(sampling, grammar.made)
    turn = Turn(prompts, sampling, named, only_prompt, ignored=(*ignored, *left_out))
    turn.take_images(seen)
    return _parsed(context, chat, use, None if chat.separate_reasoning is False else thinking, turn)


def _parsed(
    context: ServerContext, chat: ChatRequest, use: ToolUse | None, thinking: Thinking | None, turn: Turn
) -> Turn:
    """Set the fields of `turn` by which the output is parsed, and return it."""
    parsing = context.parsing
    calls = None if use is None else parsing.tool_format
    if thinking is None and calls is None:
        return turn
    turn.calls, turn.thinking = calls, thinking
    if use is not None:
        turn.schemas = {tool.name: tool.parameters or {} for tool in use.tools}
        _check_depth(turn.schemas)
    turn.named_call = use is not None and use.named is not None
    turn.shown = parsing.shown(() if calls is None else calls.markers)
    turn.shows_thoughts = chat.include_reasoning is not False
    if thinking is not None:
        turn.shown |= parsing.shown(thinking.markers)
        turn.think_end = context.tokenizer.token_id(thinking.end)
    return turn


def _check_depth(schemas: dict[str, dict[str, Any]]) -> None:
    """Check that schemas are not nested too deeply for the parser of calls. Raises `ApiError`."""
    text = json_bytes(schemas)
    if text.count(b"{") + text.count(b"[") < MAX_DEPTH:
        return  # the common case
    try:
        answer_tools(schemas)
    except ValueError as error:
        raise wrong("tools", f"schemas of parameters are nested too deeply: {error}") from error


def of_allowed_tools(chat: ChatRequest) -> ChatRequest:
    """Resolve a `tool_choice` of type `allowed_tools`: the other tools are removed from the request."""
    if not isinstance(chat.tool_choice, dict) or chat.tool_choice.get("type") != "allowed_tools":
        return chat
    functions = [*chat.functions().values()]
    names, mode = allowed_tools(chat.tool_choice, functions)
    tools = [tool for tool in functions if tool.function.name in names]
    return chat.model_copy(update={"tools": tools, "tool_choice": mode})


def _check_thinking(context: ServerContext, chat: ChatRequest) -> None:
    """Check that the chat template supports `enable_thinking` and that reasoning can be parsed. Raises `ApiError`."""
    requested = [name for name in OF_REASONING if getattr(chat, name) not in (None, False, "none")]
    if requested and why_missing():
        reason = f"the parser of reasoning {NEEDS}: {HOW_TO_BUILD}"
        raise bad_value(requested[0], getattr(chat, requested[0]), reason, "unsupported_value")
    if chat.enable_thinking and "enable_thinking" not in context.parsing.variables:
        raise bad_value("enable_thinking", True, "not supported by this model", "unsupported_value")


def _ignored(context: ServerContext, chat: ChatRequest) -> tuple[str, ...]:
    """Return the names of chat fields that have no effect on this model."""
    ignored: tuple[str, ...] = () if chat.verbosity in (None, "medium") else ("verbosity",)
    if chat.thinking_budget is not None and not context.parsing.ends_thinking:
        ignored = ("thinking_budget", *ignored)
    if context.info.sees:
        left_out = (one for message in chat.messages or () if message.role not in SEEN for one in message.images())
        ignored += tuple(name_of(part) for _, part in left_out)
    if chat.reasoning_effort in (None, "none"):
        return ignored  # the common case, in which the template is not inspected
    is_known = not context.parsing.variables.isdisjoint(("enable_thinking", "reasoning_effort"))
    return ignored if is_known else ("reasoning_effort", *ignored)


def _check_prompt(context: ServerContext, chat: ChatRequest) -> None:
    """Check `messages`, or `prompt`, which mini-sglang's clients send instead. Raises `ApiError`."""
    if chat.prompt is not None:
        if chat.messages:
            raise wrong("prompt", "give either messages or prompt")
        for name in OF_MESSAGES:
            if (value := getattr(chat, name)) is not None:
                raise bad_value(name, value, "needs messages: a prompt is not rendered by the chat template")
        return
    if chat.messages is None:
        raise missing("messages")
    if not chat.messages:
        raise bad_value("messages", [], "must not be empty")
    for i, message in enumerate(chat.messages):
        if message.role != "assistant":
            if message.content is None and message.role != "tool":  # a tool's result may be empty
                raise bad_value(f"messages.{i}.content", None, f"required for the role {message.role}")
            if message.has_refusal:
                raise bad_value(f"messages.{i}", message.role, "only an assistant message may have a refusal")
    _check_last(context, chat.messages[:-1] if chat.continue_final_message else chat.messages)


def _check_last(context: ServerContext, messages: Sequence[ChatMessage]) -> None:
    """Check that the last user message has a part that the model can read, and no image if Pillow is what is missing.
    A message after a tool's result passes: it belongs to the result. Raises `ApiError`."""
    turns = [(i, one) for i, one in enumerate(messages) if one.role not in ("system", "developer")][-2:]
    if not turns or turns[-1][1].role != "user" or (len(turns) > 1 and turns[0][1].role == "tool"):
        return
    i, last = turns[-1]
    parts, sees = last.content if isinstance(last.content, list) else [], context.info.sees
    unread = [j for j, one in enumerate(parts) if isinstance(one, LeftOut) and not (sees and isinstance(one, Picture))]
    images = [j for j, _ in last.images()] if context.client.blind else []
    if images or (parts and len(unread) == len(parts)):
        [j, *_], reason = images or unread, context.text_only + ("" if images else ", and the message has no text")
        raise bad_value(f"messages.{i}.content.{j}.type", type_of(parts[j]), reason, "unsupported_value")
