"""Chat templates, rendered as transformers renders them: the same jinja environment, filters and globals.

Keeps true: a template runs in jinja's immutable sandbox; what goes wrong in it is a `ChatTemplateError` for the client.
Doesn't know: token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The conversation does not fit the template, or there is none. The text is meant for the client."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 (the base class says set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """One template with the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._wants_parts = _iterates_content(environment.parse(source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """`messages` in OpenAI's shape; `kwargs` are further variables of the template (Qwen's `enable_thinking`)."""
        shaped = [self._shape(message) for message in messages]
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **kwargs,
                    "messages": shaped,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"messages: the chat template refuses them: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
            # a template is a program: its own mistakes on odd input are the input's mistakes to the client
            raise ChatTemplateError(f"messages: the chat template fails on them: {error}") from error

    def _shape(self, message: Message) -> dict[str, Any]:
        shaped = dict(message)
        content = shaped.get("content")
        if isinstance(content, list) and not self._wants_parts:
            shaped["content"] = "\n".join(part["text"] for part in content)
        if calls := shaped.get("tool_calls"):
            shaped["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return shaped


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI carries arguments as a JSON string, templates expect the object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, that is, expects a list of parts."""

    def is_content(node: jinja2.nodes.Node) -> bool:
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        return (
            isinstance(node, jinja2.nodes.Getitem)
            and isinstance(node.arg, jinja2.nodes.Const)
            and node.arg.value == "content"
        )

    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
