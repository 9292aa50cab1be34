"""The grammar of an answer that must call tools, or may not break a call once it begins: in the model's own format, so
that the parser of that format reads it. What the model thinks before is free, also before an answer of a certain form.

Invariants: a marker that is one token is that token, else text; arguments are what the tool's schema says, of tools
that are not strict only where a call was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from minisgl.grammar import lark
from minisgl.grammar.check import checked, grammar_of, validate
from minisgl.grammar.sources import ANY_OBJECT, GrammarSource
from minisgl.parsers.answer import Thinking
from minisgl.parsers.choice import ToolFormat
from minisgl.parsers.formats import ARGS, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS
from minisgl.sampling_params import ParamError
from minisgl.server.tools import FunctionTool, ToolUse

MAX_BYTES = 1 << 17  # of all schemas of tools
ANY = "/(.|\\n)*/"
SPACE = "/\\s{0,4}/"
NEW_LINE = "\n"
MARKED = ("hermes", "mistral")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# what an answer that is no call does not begin with, where calls have no marker
_LIKE_A_CALL = r"\s*\[?\s*\{\s*\x22(name|function|type|id|arguments|parameters)\x22(.|\n)*"


def needs_grammar(use: ToolUse | None) -> bool:
    """Else calls are free."""
    return use is not None and (use.required or not use.parallel or any(tool.strict for tool in use.tools))


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """`thinking`: None for models that do not; `source`: the form of an answer that is no call."""

    token_id: Callable[[str], int | None]
    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    use: ToolUse | None = None
    source: GrammarSource | None = None

    def text(self) -> str:
        """As `SamplingParams.grammar` has it, checked. Takes up to seconds. Raises `ParamError`."""
        thinking = self.thinking
        if thinking is not None and thinking.is_open is False:
            thinking = None
        if self.use is None and thinking is None and self.source is not None:
            return grammar_of(self.source)
        body: lark.Piece | None = None
        if self.source is not None:
            body = lark.piece(checked(self.source))
            validate(lark.grammar(body), self.source.field, self.source.value)
        if self.use is not None:
            check_arguments(self.use)
        rules = [*self._calls(body), *self._thought(thinking)]
        found = lark.grammar("\n".join(rules), [] if body is None else [body])
        validate(found, "tools" if self.source is None else self.source.field)
        return found

    def _marker(self, text: str) -> str:
        found = self.token_id(text)
        return lark.literal(text) if found is None else f"<[{found}]>"

    def _thought(self, thinking: Thinking | None) -> Iterator[str]:
        if thinking is None:
            yield "start: answer"
            return
        begin, end = self._marker(thinking.begin), self._marker(thinking.end)
        thought = f"thought {end}"
        yield f"thought: {ANY}"
        if end.startswith('"'):
            thought = "thought_end"
            yield f"thought_end[stop={end}]: {ANY}"
        yield f"start: {thought} space answer" if thinking.is_open else f"start: ({begin} {thought} space)? answer"
        yield f"space: {SPACE}"

    # ----------------------------------------------------------------------------------------------------------- calls

    def _calls(self, body: lark.Piece | None) -> Iterator[str]:
        """Rules of `answer`."""
        if self.use is None or self.tools is None:
            yield f"answer: {'' if body is None else body.body}"
            return
        use = self.use
        if use.required:
            yield "answer: calls"
        elif body is not None:
            yield f"answer: calls | {body.body}"
        else:
            yield from self._free(use, self.tools)
        yield from getattr(self, f"_{self.tools.name}")(use)

    def _free(self, use: ToolUse, tools: ToolFormat) -> Iterator[str]:
        """Text, and calls from their marker on. A marker that is spelled out ends a text by itself: a longer text would
        be preferred to it."""
        if tools.name not in MARKED:
            yield f"TEXT: {ANY} & ~/{_LIKE_A_CALL}/"
            yield "answer: calls | TEXT"
            return
        begin = tools.markers[0]
        if self.token_id(begin) is not None:
            yield f"TEXT: {ANY}"
            yield f"answer: TEXT (call TEXT){'*' if use.parallel else '?'}"
            return
        yield f"TEXT: {ANY} & ~/(.|\\n)*{re.escape(begin)}(.|\\n)*/"
        yield f"before[stop={lark.literal(begin)}]: {ANY}"
        yield f"answer: TEXT | before called{' answer' if use.parallel else ''}"

    def _hermes(self, use: ToolUse) -> Iterator[str]:
        yield f"calls: call{more(use, NEW_LINE)}"
        yield f"call: {self._marker(TOOL_CALL)} called"
        yield f'called: "\\n" object "\\n" {self._marker(TOOL_CALL_END)}'
        yield from self._objects(use, "arguments")

    def _mistral(self, use: ToolUse) -> Iterator[str]:
        yield f"call: {self._marker(TOOL_CALLS)} called"
        if self.token_id(ARGS) is None:
            yield "calls: call"
            yield f'called: "[" object{more(use, ", ", "object")} "]"'
            yield from self._objects(use, "arguments")
            return
        yield f"calls: call{more(use, '')}"
        yield "called: object"
        yield from self._named(use, lambda name: f"{lark.literal(name)} {self._marker(ARGS)}", "")

    def _llama3_json(self, use: ToolUse) -> Iterator[str]:
        yield f"calls: object{more(use, '; ', 'object')}"
        yield from self._objects(use, "parameters")

    def _pythonic(self, use: ToolUse) -> Iterator[str]:
        """Objects, which the parser takes too: the order and the commas of what may be left out need a rule for each
        way to leave something out."""
        yield from self._llama3_json(use)

    def _json(self, use: ToolUse) -> Iterator[str]:
        if use.parallel and use.named is None:
            yield 'calls: object | first (", " object)+ "]"'
            yield from self._objects(use, "arguments", "first", "[")
        else:
            yield "calls: object"
        yield from self._objects(use, "arguments")

    def _objects(self, use: ToolUse, key: str, rule: str = "object", before: str = "") -> Iterator[str]:
        def begin(name: str) -> str:
            return lark.literal(f'{before}{{"name": {json.dumps(name)}, "{key}": ')

        yield from self._named(use, begin, ' "}"', rule)

    def _named(self, use: ToolUse, begin: Callable[[str], str], end: str, rule: str = "object") -> Iterator[str]:
        tools = use.callable
        yield f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(tools)))}"
        for i, tool in enumerate(tools):
            yield f"{rule}_{i}: {begin(tool.name)} {self._arguments(use, tool)}{end}"

    def _arguments(self, use: ToolUse, tool: FunctionTool) -> str:
        source = bound_arguments(use, tool)
        return lark.schema(ANY_OBJECT if source is None else source.value)


def bound_arguments(use: ToolUse, tool: FunctionTool) -> GrammarSource | None:
    """The schema that the tool's arguments are generated by, None if they are any object. Raises `ParamError`."""
    if not (use.required or tool.strict):
        return None
    place = next(i for i, one in enumerate(use.tools) if one is tool)
    schema = tool.parameters or NO_ARGUMENTS
    if schema.get("properties") == {}:
        schema = {**NO_ARGUMENTS, **schema}
    found = checked(GrammarSource("json_schema", schema, f"tools.{place}.function.parameters"))
    return found if "type" in schema else replace(found, value={"type": "object", **found.value})


def check_arguments(use: ToolUse) -> None:
    """Whether the library can do all of them: asked once, and more often only to find the tool to name. Raises
    `ParamError`."""
    sources = [source for tool in use.callable if (source := bound_arguments(use, tool)) is not None]
    size = sum(len(lark.schema(source.value)) for source in sources)
    if size > MAX_BYTES:
        raise ParamError("tools", size, f"their schemas have more than {MAX_BYTES} bytes together")

    def check(some: Sequence[GrammarSource]) -> None:
        rules = " | ".join(lark.schema(source.value) for source in some)
        validate(lark.grammar(f"start: {rules}"), "tools")

    try:
        if sources:
            check(sources)
    except ParamError:
        while len(sources) > 1:
            half = len(sources) // 2
            try:
                check(sources[:half])
                sources = sources[half:]
            except ParamError:
                sources = sources[:half]
        validate(lark.grammar(lark.piece(sources[0])), sources[0].field, sources[0].value)
        raise


def more(use: ToolUse, separator: str, rule: str = "call") -> str:
    """Calls behind the first. A call that is asked for by name is one."""
    return f" ({lark.literal(separator)} {rule})*" if use.parallel and use.named is None else ""
