"""Tools of a request: the client's fields, what the model is shown of them, the parser of the model's call format, and
the grammar of output that must call tools, or that must not break a call once it begins.

Invariants: a tool choice without tools, or of an unknown tool, is refused. A marker that is one of the tokenizer's
special tokens is decoded as text for the parser; in a grammar it is that token, else text. Arguments match the tool's
schema if it is strict or a call is required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag

from minisgl.extension import HOW_TO_BUILD, NEEDS, _rust, why_missing
from minisgl.grammar import pieces
from minisgl.grammar.check import Made, checked, grammar_of, taken, validate
from minisgl.grammar.sources import ANY_OBJECT, GrammarSource
from minisgl.parsers.choice import thinking, tool_format
from minisgl.sampling_params import ParamError
from minisgl.server.core.errors import bad_value, wrong
from minisgl.server.core.fields import Body, LeftOut, described, present, runs_on_servers, type_of
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl._rust import Thinking, ToolFormat

NUM_LAST = 16  # last ids of a prompt that are searched for a marker


class Parsing:
    """Parsers of the model's tool calls and reasoning, given by name or "auto", and the grammars for both."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    @cached_property
    def tool_format(self) -> ToolFormat:
        if why_missing():
            raise wrong("tools", f"the parser of tool calls {NEEDS}: {HOW_TO_BUILD}", "unsupported_value")
        source = self._tokenizer.template_source(tools=True)
        try:
            return tool_format(self._tool_call_parser, source, self._tokenizer.token_id)
        except ValueError as error:
            raise wrong("tools", str(error), "unsupported_value", 501) from error

    @cached_property
    def thinking(self) -> Thinking | None:
        return thinking(self._reasoning_parser, self._tokenizer.template_source())

    @cached_property
    def shows_tools(self) -> bool:
        """True if the chat template renders tools."""
        return "tools" in self._tokenizer.template_variables(tools=True)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_id(text)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads."""
        return self._tokenizer.template_variables()

    def thinking_after(self, prompt: Int32Array, continued: str | None) -> Thinking | None:
        """Return the reasoning format for the output after `prompt`, which may have opened or closed the reasoning.
        `continued`: text of the message that the output continues. `None`: the output has no reasoning."""
        thinking = self.thinking
        if thinking is None:
            return None
        if continued:
            is_open = continued.rfind(thinking.begin) > continued.rfind(thinking.end)
            return thinking.opened(True) if is_open else None
        pieces = map(self._tokenizer.token_bytes, prompt[-NUM_LAST:].tolist())
        last = b"".join(pieces).decode(errors="replace").rstrip()
        if last.endswith(thinking.begin):
            return thinking.opened(True)
        return thinking.opened(False) if last.endswith(thinking.end) else thinking

    def grammar(
        self, thinking: Thinking | None, use: ToolUse | None, source: GrammarSource | None, budget: int | None = None
    ) -> TurnGrammar:
        """Return a chat turn's grammar. `use`: callable tools; `source`: output format; `budget`: reasoning tokens."""
        tools = None if use is None else self.tool_format
        return TurnGrammar(self._tokenizer.token_id, thinking, tools, use, source, budget)

    @property
    def ends_thinking(self) -> bool:
        """True if a single token ends reasoning; then a grammar can end it after a budget of tokens."""
        thinking = self.thinking
        return thinking is not None and self._tokenizer.token_id(thinking.end) is not None

    def shown(self, markers: Iterable[str]) -> frozenset[int]:
        """Return the ids of those `markers` that are special tokens of the tokenizer."""
        ids = (self._tokenizer.token_id(marker) for marker in markers)
        return frozenset(i for i in ids if i is not None) & self._tokenizer.special_ids


MAX_TOOLS = 1024


class FunctionTool(Body):
    name: Annotated[StrictStr, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: StrictStr | None = described("What the model is told of it.")
    parameters: dict[str, Any] | None = described("A JSON schema; missing: no parameters.")
    strict: StrictBool | None = described("Arguments are generated by the schema.")


class Tool(Body):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: name, description and parameters."""
        given = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": present(given)}


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[LeftOut, Tag("<left out>")],
    Discriminator(lambda value: "<left out>" if runs_on_servers(type_of(value)) else "<function>"),
]
"""Function tool, or a tool that a provider's servers run, which the model is not shown."""
Tools = Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Choice = StrictStr | dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called. `required`: one must be; `named`: this one must be; `parallel`: several may be."""

    tools: tuple[FunctionTool, ...]
    required: bool = False
    named: str | None = None
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def callable(self) -> tuple[FunctionTool, ...]:
        return self.tools if self.named is None else tuple(tool for tool in self.tools if tool.name == self.named)


def tool_use(
    tools: Sequence[Tool] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolUse | None:
    """Resolve `tools` and `tool_choice`; `None` if no tool may be called. Raises `ApiError`."""
    if not tools:
        if choice not in (None, "none", "auto"):  # there are no tools to choose from
            raise bad_value("tool_choice", choice, "needs tools")
        return None
    functions = tuple(tool.function for tool in tools)
    names = set[str]()
    for i, function in enumerate(functions):
        if function.name in names:
            raise bad_value(f"tools.{i}.function.name", function.name, "another tool has this name: give each its own")
        names.add(function.name)
    if isinstance(choice, Mapping):
        name = _named(choice)
        if name not in names:
            raise bad_value("tool_choice.function.name", name, "must be the name of one of the tools")
        return ToolUse(functions, required=True, named=name, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise bad_value("tool_choice", choice, "must be none, auto, required or an object that names a function")
    if choice == "none":
        return None
    # a model that must call may not stop calling: allow one call unless the client wants several
    if choice == "required":
        return ToolUse(functions, required=True, parallel=parallel is True)
    return ToolUse(functions, parallel=parallel is not False)


def allowed_tools(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[frozenset[str], str]:
    """Return the names and the mode ("auto" or "required") of a choice of `allowed_tools`. Raises `ApiError`."""
    allowed = choice.get("allowed_tools")
    allowed = allowed if isinstance(allowed, Mapping) else {}
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        reason = 'must be {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
        raise bad_value("tool_choice", choice, reason)
    known_names, names = {tool.function.name for tool in tools}, set[str]()
    for i, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in known_names:
            raise bad_value(f"tool_choice.allowed_tools.tools.{i}", tool, "must name a function of tools")
        names.add(name)
    return frozenset(names), str(mode)


def _named(choice: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_value("tool_choice", choice, 'must be {"type": "function", "function": {"name": ...}}')
    return name


# ------------------------------------------------------------------------------------- templates that know no tools


def explained(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Convert a conversation for a template that renders only texts: tool definitions are appended to the system
    message, calls and results become texts."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You may call functions. To call one, {tool_format.explained()}. The functions, a line for each:\n{listed}"
    shown = [_as_text(message, tool_format) for message in messages]
    if shown and shown[0]["role"] == "system":
        return [{**shown[0], "content": f"{_text(shown[0].get('content'))}\n\n{text}"}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _as_text(message: Mapping[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the call: {_text(message.get('content'))}"}
    if calls := message.get("tool_calls"):
        written = [_written(call, tool_format) for call in calls]
        shown["content"] = "\n".join(filter(None, [_text(message.get("content")), *written]))
    return shown


def _written(call: Any, tool_format: ToolFormat) -> str:
    """Return a call as text, in the format that the model is instructed to write."""
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return tool_format.written(str(function.get("name")), text)


MAX_BYTES = 1 << 17  # maximum of all tool schemas together
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def needs_grammar(use: ToolUse | None) -> bool:
    """Return true if calls need a grammar; without one, calls are as the model writes them."""
    return use is not None and (use.required or not use.parallel or any(tool.strict for tool in use.tools))


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """Input of a chat turn's grammar. `thinking`: `None` without reasoning; `source`: format of other output."""

    token_id: Callable[[str], int | None]
    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    use: ToolUse | None = None
    source: GrammarSource | None = None
    budget: int | None = None  # maximum reasoning tokens

    def made(self) -> Made:
        """Compile and check the grammar of a chat turn; may take seconds. Raises `ParamError`."""
        thinking = self.thinking
        if thinking is not None and thinking.is_open is False:
            thinking = None
        if self.use is None and thinking is None and self.source is not None:
            return grammar_of(self.source)
        body: pieces.Piece | None = None
        left_out: tuple[str, ...] = ()
        if self.source is not None:
            of_answer = taken(self.source)
            body, left_out = pieces.piece(of_answer), of_answer.left_out
        use = self.use
        bound = {} if use is None else bound_arguments(use)
        rules = _rust.answer_rules(
            None if use is None else self.tools,
            thinking,
            self.token_id,
            None if body is None else body.body,
            None if use is None else [_callable(tool, bound.get(tool.name)) for tool in use.callable],
            use is not None and use.required,
            use is not None and use.parallel and use.named is None,
            self.budget,
        )
        grammar = pieces.grammar(rules, [] if body is None else [body])
        validate(grammar, "tools" if self.source is None else self.source.field)
        return Made(grammar, (*left_out, *(field for source in bound.values() for field in source.left_out)))


def _callable(tool: FunctionTool, source: GrammarSource | None) -> tuple[str, str, str | None]:
    """Return a tool's name, the grammar rule for its arguments, and their JSON schema (`None`: any object)."""
    if source is None:
        return tool.name, pieces.schema(ANY_OBJECT), None
    return tool.name, pieces.schema(source.value), json.dumps(source.value)


def _arguments(use: ToolUse, tool: FunctionTool) -> GrammarSource | None:
    """Return the schema that a tool's arguments must match; `None` if any object is allowed."""
    if not (use.required or tool.strict):
        return None
    place = next(i for i, one in enumerate(use.tools) if one is tool)
    schema = tool.parameters or NO_ARGUMENTS
    if schema.get("properties") == {}:
        schema = {**NO_ARGUMENTS, **schema}
    strict = tool.strict is True
    return GrammarSource("json_schema", schema, f"tools.{place}.function.parameters", strict=strict)


def bound_arguments(use: ToolUse) -> dict[str, GrammarSource]:
    """Return the schemas of arguments by tool, validated at once, one by one if that fails. Raises `ParamError`."""
    schemas = {tool.name: source for tool in use.callable if (source := _arguments(use, tool)) is not None}
    bound = {name: _of_object(checked(source)) for name, source in schemas.items()}
    size = sum(len(pieces.schema(source.value)) for source in bound.values())
    if size > MAX_BYTES:
        raise ParamError("tools", size, f"their schemas must have at most {MAX_BYTES} bytes together")

    def check(some: Iterable[GrammarSource]) -> None:
        rules = " | ".join(pieces.schema(source.value) for source in some)
        validate(pieces.grammar(f"start: {rules}"), "tools")

    if not bound:
        return bound
    try:
        check(bound.values())
    except ParamError:
        bound = {name: _of_object(taken(source)) for name, source in schemas.items()}
        check(bound.values())
    return bound


def _of_object(source: GrammarSource) -> GrammarSource:
    return source if "type" in source.value else replace(source, value={"type": "object", **source.value})
