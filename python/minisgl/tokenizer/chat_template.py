"""Chat templates, rendered as transformers renders them: the same jinja environment, filters and globals.

In what shape a chat template takes a message's content, read from its syntax tree.

Invariants: a template runs in jinja's immutable sandbox, its output is bounded, and so are the turns of its loops and
the calls of its macros, together, and the time that they take; what goes wrong in it is a `ChatTemplateError` for the
client. A template that loops over content, directly, through a variable or through a macro's parameter, takes parts,
and strings too only if it asks anywhere whether something is one; any other gets one string.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from minisgl.config import ConfigError
from minisgl.tokenizer import conversation, template_bounds
from minisgl.tokenizer.conversation import TRIAL_TOOL, Shown, arranged
from minisgl.tokenizer.guard import Marks, Prompt, guarded, searched

ContentShape = Literal["string", "parts", "either"]


def content_shape(tree: nodes.Template) -> ContentShape:
    """Scopes are not told apart: a name that holds content anywhere counts everywhere."""
    names = _content_names(tree)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "string"
    return "either" if any(test.name == "string" for test in tree.find_all(nodes.Test)) else "parts"


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters to which content is given. Each round follows one more hand-over."""
    names: set[str] = set()
    bindings = list(_bindings(tree))
    while True:
        found = {name for name, value in bindings if _is_content(value, names)}
        if found <= names:
            return names
        names |= found


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            yield from ((param.name, value) for param, value in zip(macro.args, call.args, strict=False))
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or (node.expr2 is not None and _is_content(node.expr2, names))
    return False


Message = Mapping[str, Any]
Explain = Callable[[Sequence[Message], Sequence[Any]], Sequence[Message]]

MAX_RENDERED = 32 * 2**20  # characters, and pieces: far beyond any context, soon reached by a template that runs away
_TURN = "true"  # a variable whose name no template can read or set: there it is a constant
_GUARD = "guard of texts"  # another one
_CONTINUE = "\ue000continue\ue000 "  # marks the end of the final message; the space tells whether the template trims


def read_chat_template(given: str) -> str:
    """The template that `--chat-template` names or is. Raises `ConfigError`, also if it does not parse."""
    source = given
    if not any(mark in given for mark in ("{{", "{%", "{#", "\n")):
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"--chat-template {given}: {reason}") from error
    try:
        _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"--chat-template: does not parse: {error}") from error
    return source


class ChatTemplateError(ValueError):
    """The conversation does not fit the template, or there is none. The text is meant for the client."""


class TooMuchWork(ChatTemplateError):
    """A template's loops and macros did more than they may."""


class Work(NamedTuple):
    """Turns of loops and calls of macros, and seconds of the processor's time. They are read at each turn, which may
    sort a hundred thousand values."""

    turns: int
    seconds: float


TRIAL_WORK = Work(1 << 14, 1.0)
MAX_WORK = Work(1 << 21, 10.0)  # as many turns take some seconds; the gateway's renderer counts its steps


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 (the base class says set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _CodeGenerator(template_bounds.BoundedCode):
    """Leaves constants to the rendering: jinja computes them, of any size, in branches that nothing takes too."""

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData | jinja2.nodes.Const):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Call(self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False) -> None:
        """Write the call of `_TURN` without what the sandbox asks of each call."""
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == _TURN:
            self.visit(node.node, frame)
            self.write("()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)


_PLAIN = (str, jinja2.runtime.LoopContext, template_bounds.QuietNamespace)
_NOT_THERE = object()


class _Environment(template_bounds.BoundedEnvironment):
    """Each turn of a loop, and each call of a macro, calls the variable `_TURN`."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or a key, as the sandbox does. Its checks are left out for keys of dictionaries and
        public attributes of texts, loops and namespaces, where they find nothing and which templates read most."""
        kind = type(obj)
        if kind is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        if kind in _PLAIN and not attribute.startswith(("_", "format")):
            found = getattr(obj, attribute, _NOT_THERE)
            if found is not _NOT_THERE:
                return found
        return super().getattr(obj, attribute)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        def turn(line: int) -> jinja2.nodes.Call:
            return jinja2.nodes.Call(jinja2.nodes.Name(_TURN, "load", lineno=line), [], [], None, None, lineno=line)

        for node in source.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            assert isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock)
            line = node.lineno
            if isinstance(node, jinja2.nodes.For) and node.test is not None:  # turns that it leaves out count, too
                node.test = jinja2.nodes.And(turn(line), node.test, lineno=line)
            else:
                node.body.insert(0, jinja2.nodes.ExprStmt(turn(line), lineno=line))
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    guard = context.parent.get(_GUARD)
    found = json.dumps(
        value, ensure_ascii=ensure_ascii and not guard, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _escaped(found, guard) if ensure_ascii and guard else found


def _escaped(text: str, guard: str) -> str:
    """JSON with escapes for all that is not ASCII, but for guards."""
    return guard.join(
        re.sub("[\x7f-\U0010ffff]+", lambda found: json.dumps(found[0])[1:-1], part) for part in text.split(guard)
    )


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], optimized=False
    )
    environment.code_generator_class = _CodeGenerator
    environment.filters["tojson"] = _tojson
    environment.bound_filters()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """One template with the special tokens it may name (`bos_token`, `eos_token`, ...). Compiled on first use, so that
    a model with a broken template still serves completions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], marks: Marks | None = None) -> None:
        self.source = source
        self._marks = marks
        self._special_tokens = dict(special_tokens)
        self._found: dict[bool, Shown] = {}  # by whether there are tools
        self._parts: dict[str, bool] = {"user": True}  # by role: whether it takes parts; of users `content_shape` says

    def render(
        self,
        messages: Sequence[Message],
        most: Work = MAX_WORK,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        explain: Explain | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation in OpenAI's shape; keys with the value None count as missing. Encode what
        comes as it is: a `Prompt` says where texts of the conversation spell a marker, which they do not become.

        `continue_final_message`: the prompt ends within the last message, for the model to go on with it; excludes
        `add_generation_prompt`. `kwargs` are further variables of the template (Qwen's `enable_thinking`).
        `explain` makes, of messages and tools, messages for a template that knows no tools; it may add markers.
        Raises `ChatTemplateError`; `TooMuchWork` beyond `most`.
        """
        if not messages:
            raise ChatTemplateError("messages: must not be empty")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message: excludes add_generation_prompt")
        template = self._template
        guard = ""
        if explain is not None:
            parsed = [_with_parsed_calls(message) for message in messages]
            guard, parsed, tools, kwargs = self._guarded(parsed, tools, kwargs)
            messages = explain(parsed if guard else messages, tools or ())
        shown = self._shown(bool(tools) and explain is None)
        try:
            shaped = [self._shape(message) for message in arranged(messages, shown)]
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        if explain is None:
            guard, shaped, tools, kwargs = self._guarded(shaped, tools, kwargs)
        if continue_final_message:
            shaped[-1]["content"] = _marked(shaped[-1].get("content"))
        try:
            text = _run(template, self._variables(shaped, tools, add_generation_prompt, **kwargs), most, guard)
        except ChatTemplateError:
            if (whole := _whole_tools(tools or ())) == [*(tools or ())]:
                raise
            text = _run(template, self._variables(shaped, whole, add_generation_prompt, **kwargs), most, guard)
        return Prompt.of(_cut_at_mark(text) if continue_final_message else text, guard)

    def _guarded(self, messages: Sequence[Message], tools: Any, kwargs: dict[str, Any]) -> tuple[str, Any, Any, Any]:
        """Return the guard character, empty where no text spells a marker, and what may have guards in it."""
        if self._marks is None or not self._marks.has_markers((messages, tools, kwargs)):
            return "", messages, tools, kwargs
        try:
            guard, found, (tools, kwargs) = guarded(self._marks, messages, (tools, kwargs), self._searched, self.source)
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"messages: {error}") from error
        return guard, found, tools, kwargs

    @cached_property
    def _searched(self) -> list[str]:
        return searched(_environment().parse(self.source))

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template does not parse: {error}") from error

    @cached_property
    def content_shape(self) -> ContentShape:
        """Return the shape of its syntax tree, unless a trial shows that it takes only the other one. Raises
        `ChatTemplateError`."""
        _ = self._template
        found = content_shape(_environment().parse(self.source))
        takes_text, takes_parts = self._shows_user("question"), self._shows_user([{"type": "text", "text": "question"}])
        if takes_text == takes_parts:
            return found
        return "parts" if takes_parts and found == "string" else "string" if takes_text else found

    def _shows_user(self, content: Any) -> bool:
        with contextlib.suppress(ChatTemplateError):
            messages = [{"role": "user", "content": content}]
            return "question" in _run(self._template, self._variables(messages, None), TRIAL_WORK)
        return False

    def _takes_parts(self, role: str) -> bool:
        """Return whether parts of a message of this role are shown as their texts: some templates show one part of a
        system message, or all in the notation of Python. True, too, if a text is not shown either."""
        if (found := self._parts.get(role)) is None:
            parts = [{"type": "text", "text": "question"}, {"type": "text", "text": "answer"}]
            found = self._parts[role] = self._shows(role, parts) or not self._shows(role, "question answer")
        return found

    def _shows(self, role: str, content: Any) -> bool:
        """Return whether a trial with a message of this role shows its words, and nothing of its form."""
        user = self._shape({"role": "user", "content": "hello"})
        call = {"id": "call00000", "type": "function", "function": {"name": "trial", "arguments": {}}}
        message = {"role": role, "content": content}
        before = {
            "assistant": [user],
            "tool": [user, {"role": "assistant", "content": "", "tool_calls": [call]}],
        }.get(role, [])
        if role == "tool":
            message["tool_call_id"] = call["id"]
        with contextlib.suppress(ChatTemplateError):
            messages = [*before, message, *([] if role == "tool" else [user])]
            text = _run(self._template, self._variables(messages, None), TRIAL_WORK)
            at = text.find("question")
            return 0 <= at < text.find("answer", at) and "'type'" not in text
        return False

    @cached_property
    def variables(self) -> frozenset[str]:
        """All that it asks for from outside. Raises `ChatTemplateError`."""
        _ = self._template
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))

    def find_out(self) -> None:
        """Find out now what `render` needs to know of the template. Raises `ChatTemplateError`."""
        _ = self.content_shape, self.variables, self._shown(False), self._shown(True)

    def _shown(self, with_tools: bool) -> Shown:
        if (found := self._found.get(with_tools)) is None:
            tools = [TRIAL_TOOL] if with_tools else None
            found = self._found[with_tools] = Shown.of(lambda messages: self._render_trial(messages, tools))
        return found

    def _render_trial(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        return _run(self._template, self._variables([self._shape(message) for message in messages], tools), TRIAL_WORK)

    def _variables(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _shape(self, message: Message) -> dict[str, Any]:
        shaped = {key: value for key, value in message.items() if value is not None}
        content = shaped.get("content")
        if isinstance(content, list) and (self.content_shape == "string" or not self._takes_parts(message["role"])):
            shaped["content"] = "\n".join(_part_text(part) for part in content)
        elif isinstance(content, str) and self.content_shape == "parts":
            shaped["content"] = [{"type": "text", "text": content}]
        return shaped


def _whole_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the tools with a description and parameters each, which some templates ask for, and requests may lack."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}

    def whole(tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            return tool
        given = {name: value for name, value in function.items() if value not in (None, {})}
        return {**tool, "function": {**given, **{name: one for name, one in empty.items() if name not in given}}}

    return [whole(tool) for tool in tools]


def _run(template: jinja2.Template, variables: Mapping[str, Any], most: Work, guard: str = "") -> str:
    pieces: list[str] = []
    size = 0
    turns = itertools.count(1)
    end = time.thread_time() + most.seconds
    template_bounds.begin([*variables["messages"], *(variables["tools"] or ())])

    def turn() -> bool:
        if next(turns) > most.turns:
            raise TooMuchWork("messages: the chat template takes too many turns over them")
        if time.thread_time() > end:
            raise TooMuchWork("messages: the chat template takes too long over them")
        return True

    try:
        # as `Template.generate`, which copies all that there is
        context = template.new_context({**template.globals, **variables, _TURN: turn, _GUARD: guard}, shared=True)
        for piece in template.root_render_func(context):
            pieces.append(piece)
            size += len(piece) + 1
            if size > MAX_RENDERED:
                raise ChatTemplateError("messages: the chat template makes too long a prompt of them")
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"messages: the chat template refuses them: {error}") from error
    except ChatTemplateError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        # a template is a program: its own mistakes on odd input are the input's mistakes to the client
        raise ChatTemplateError(f"messages: the chat template fails on them: {error}") from error
    return "".join(pieces)


def _marked(content: Any) -> str | list[Any]:
    """`content` with the mark behind its last text."""
    if isinstance(content, str):
        return content + _CONTINUE
    if isinstance(content, list):
        for i in reversed(range(len(content))):
            if isinstance(content[i], Mapping) and isinstance(content[i].get("text"), str):
                return [*content[:i], {**content[i], "text": content[i]["text"] + _CONTINUE}, *content[i + 1 :]]
    raise ChatTemplateError("continue_final_message: the last message has no text to continue")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE.rstrip())
    if at < 0:
        raise ChatTemplateError("continue_final_message: the chat template leaves out the end of the last message")
    # a template that trims a message has to see its end as the message's own
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ChatTemplateError("messages: content: this model takes parts of type text only")
    return text


def _with_parsed_calls(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_parsed_arguments(call) for call in calls]} if calls else dict(message)


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI carries arguments as a JSON string, templates expect the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": conversation.parsed(function["arguments"])}}
