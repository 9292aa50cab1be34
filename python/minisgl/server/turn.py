"""One call of the model with a conversation, whichever API asks for it: what is generated, and how an answer's text is
taken apart, into parts as they come and into sections for the APIs that show lists of items or blocks.

Invariants: what the APIs have in common stands here once. One section is open at a time; whatever pieces the parts come
in, the sections are the same; blank text before, between and after other sections is none, but an answer of nothing
else is a section of text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from minisgl.frontend.output_processor import Delta
from minisgl.parsers.api import CallArguments, CallBegun, MessageParser, Part, PlainParser, Reasoning, Text
from minisgl.parsers.choice import answer_tools, new_parser
from minisgl.sampling_params import SamplingParams
from minisgl.server.bodies import ChatRequest
from minisgl.server.context import ServerContext
from minisgl.server.errors import ApiError, bad_value, param_errors
from minisgl.server.lengths import TO_THE_END, asked_limit
from minisgl.server.tools import ToolUse, allowed_tools, needs_grammar, tool_use
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import Thinking


class JoinedText:
    """False while it is empty."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Section:
    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    grown: JoinedText = field(default_factory=JoinedText)

    @property
    def text(self) -> str:
        """As far as it has come; of a call, its arguments."""
        return str(self.grown)


@dataclass(frozen=True, slots=True)
class Opened:
    section: Section


@dataclass(frozen=True, slots=True)
class Grown:
    section: Section
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    section: Section


Change = Opened | Grown | Closed


class Sections:
    """Turns the parts of one answer into sections."""

    def __init__(self) -> None:
        self.all: list[Section] = []
        self._open: Section | None = None
        self._blank = JoinedText()  # text that may turn out to be none

    def take(self, parts: list[Part]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            match part:
                case Text(text):
                    self._text(text, changes)
                case Reasoning(text):
                    self._grow("reasoning", text, changes)
                case CallBegun(_, call_id, name):
                    self._begin(Section(len(self.all), "call", call_id, name), changes)
                case CallArguments(_, text):
                    self._grow("call", text, changes)
        return changes

    def finish(self) -> list[Change]:
        """At the end of the answer. Idempotent."""
        changes: list[Change] = []
        if self._blank and not self.all:
            self._grow("text", str(self._blank), changes)
        self._close(changes)
        return changes

    def _text(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != "text":
            self._blank.add(text)
            if not text.strip():
                return
            text = str(self._blank)  # `_begin` drops it
        self._grow("text", text, changes)

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Section(len(self.all), kind), changes)
        section = self._open
        assert section is not None
        section.grown.add(text)
        changes.append(Grown(section, text))

    def _begin(self, section: Section, changes: list[Change]) -> None:
        self._close(changes)
        self._blank = JoinedText()
        self.all.append(section)
        self._open = section
        changes.append(Opened(section))

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
            self._open = None


OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
    "tools",
)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    grown: JoinedText = field(default_factory=JoinedText)

    @property
    def arguments(self) -> str:
        """JSON text, as far as it has come."""
        return str(self.grown)


@dataclass(slots=True)
class TurnChoice:
    """One answer as it grows."""

    parser: MessageParser
    named_call: bool = False  # the caller chose the tool: then OpenAI's reason is not that tools are called
    grown_content: JoinedText = field(default_factory=JoinedText)
    grown_reasoning: JoinedText = field(default_factory=JoinedText)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None  # OpenAI's: stop, length, tool_calls

    @property
    def content(self) -> str:
        return str(self.grown_content)

    @property
    def reasoning(self) -> str:
        return str(self.grown_reasoning)

    def take(self, delta: Delta) -> list[Part]:
        """What is new, with all that was held back if the answer ends."""
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
            called = self.calls and delta.finish_reason == "stop" and not self.named_call
            self.finish_reason = "tool_calls" if called else delta.finish_reason
        return parts


@dataclass(slots=True, eq=False)
class Turn:
    """`prompts`: one; `names_length`, `only_prompt` and `ignored`: see `Formatter`."""

    prompts: list[Int32Array]
    sampling: SamplingParams
    names_length: bool
    new_parser: Callable[[], MessageParser] = PlainParser
    named_call: bool = False
    shown: frozenset[int] = frozenset()  # special tokens that the parser looks for
    thinks: bool = False  # the model may, and that is told from the content
    shows_thoughts: bool = True
    think_end: int | None = None  # the token that ends it, if one does
    only_prompt: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """An answer is its text."""
        return self.new_parser is PlainParser

    def choice(self) -> TurnChoice:
        return TurnChoice(self.new_parser(), self.named_call)

    def num_thought(self, choice: TurnChoice, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """Tokens of what was thought, with the marker that ends it."""
        if not choice.grown_reasoning:
            return 0
        if self.think_end is None:
            return len(tokenizer.encode(choice.reasoning, add_special_tokens=False))
        return token_ids.index(self.think_end) + 1 if self.think_end in token_ids else len(token_ids)


async def chat_turn(context: ServerContext, chat: ChatRequest, *, least_tokens: int = TO_THE_END) -> Turn:
    """Check and encode. `least_tokens`: the smallest limit that the endpoint knows. Raises `ApiError`."""
    chat = of_allowed_tools(chat)
    _check_prompt(chat)
    limit = chat.limit()
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    named = limit is not None
    with param_errors():
        limit, only_prompt = asked_limit(name, limit, context.served.defaults.get("max_tokens"), least=least_tokens)
        asked = {"logprobs": chat.num_logprobs(), "prompt_logprobs": chat.prompt_logprobs}
        sampling = chat.to_sampling(limit, context.served.defaults, **asked)
        source = chat.grammar_source()
    prompt = chat if chat.messages else [chat.prompt or ""]
    use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    _check_thinking(context, chat)
    prompts, sampling = await context.prompts.encode(
        prompt, sampling, chat.truncate_prompt_tokens, side=chat.truncation_side
    )
    thinking = context.parsing.thinking_after(prompts[0], chat.continued_text())
    if source is not None or needs_grammar(use):
        with param_errors():
            grammar = context.parsing.grammar(thinking, use, source)
            sampling = await context.prompts.with_grammar(sampling, grammar.text)
    turn = Turn(prompts, sampling, named, only_prompt=only_prompt, ignored=_ignored(context, chat))
    return _parsed(context, chat, use, None if chat.separate_reasoning is False else thinking, turn)


def _parsed(
    context: ServerContext, chat: ChatRequest, use: ToolUse | None, thinking: Thinking | None, turn: Turn
) -> Turn:
    """With what takes the answers apart."""
    parsing = context.parsing
    calls = None if use is None else parsing.tool_format
    if thinking is None and calls is None:
        return turn
    known = None if use is None else answer_tools({tool.name: tool.parameters or {} for tool in use.tools})
    turn.new_parser = lambda: new_parser(calls, thinking, known)
    turn.named_call = use is not None and use.named is not None
    turn.shown = parsing.shown(() if calls is None else calls.markers)
    turn.shows_thoughts = chat.include_reasoning is not False
    if thinking is not None:
        turn.thinks = True
        turn.shown |= parsing.shown(thinking.markers)
        turn.think_end = context.tokenizer.token_id(thinking.end)
    return turn


def of_allowed_tools(chat: ChatRequest) -> ChatRequest:
    """`tool_choice` of `allowed_tools`: the model does not hear of the others."""
    if not isinstance(chat.tool_choice, dict) or chat.tool_choice.get("type") != "allowed_tools":
        return chat
    names, mode = allowed_tools(chat.tool_choice, chat.tools or ())
    tools = [tool for tool in chat.tools or () if tool.function.name in names]
    return chat.model_copy(update={"tools": tools, "tool_choice": mode})


def _check_thinking(context: ServerContext, chat: ChatRequest) -> None:
    """What the model's template cannot be told is not promised."""
    if chat.enable_thinking and "enable_thinking" not in context.parsing.variables:
        raise bad_value("enable_thinking", True, "not supported by this model", "unsupported_value")


def _ignored(context: ServerContext, chat: ChatRequest) -> tuple[str, ...]:
    """The fields that ask for what the model does not know."""
    found = () if chat.verbosity in (None, "medium") else ("verbosity",)
    if chat.reasoning_effort in (None, "none"):
        return found  # nearly always: the template is not looked at
    known = not context.parsing.variables.isdisjoint(("enable_thinking", "reasoning_effort"))
    return found if known else ("reasoning_effort", *found)


def _check_prompt(chat: ChatRequest) -> None:
    """Either `messages` that make sense or, as mini-sglang's clients send it, a `prompt`."""
    if chat.prompt is not None:
        if chat.messages:
            raise ApiError(400, "prompt: give either messages or prompt", param="prompt", code="invalid_value")
        for name in OF_MESSAGES:
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
