"""What the gateway asks of a request's tools and of the form of its answer, once for all requests that have the same:
so the checks, the tools as the chat template takes them and the grammars are those of the Python server
(`rust/minisgl-gateway/src/forms.rs` asks, and remembers).

Invariants: what is wrong, or only the Python server can do, has no answer: the request comes here, and is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from minisgl.sampling_params import ParamError
from minisgl.server.bodies import ChatRequest
from minisgl.server.chat import of_allowed_tools
from minisgl.server.errors import ApiError
from minisgl.server.request import parse
from minisgl.server.tools import Parsing, explained, needs_grammar, tool_use

IS_OPEN = {"untold": None, "open": True, "closed": False}


class Question(msgspec.Struct):
    """`fields` of a body, as the client wrote them. `thinking`: where the answer begins, as `Thinking.is_open` has it;
    `later`: that is not known yet, the grammar is asked for again. `messages`: the question is how these are written
    for a chat template that shows no tools."""

    thinking: Literal["none", "untold", "open", "closed", "later"]
    fields: msgspec.Raw
    messages: list[dict[str, Any]] | None = None


class Form(msgspec.Struct):
    """`tools`: for the chat template; with `calls` they may be called."""

    tools: list[dict[str, Any]]
    calls: bool
    named_call: bool
    needs_grammar: bool
    grammar: str | None


class Explained(msgspec.Struct):
    messages: list[dict[str, Any]]


def form_of(parsing: Parsing) -> Callable[[str], str | None]:
    """The function that the gateway asks."""

    def answer(question: str) -> str | None:
        try:
            return msgspec.json.encode(_form(parsing, msgspec.json.decode(question, type=Question))).decode()
        except (ApiError, ParamError, msgspec.MsgspecError, ValueError, RecursionError):
            return None

    return answer


def _form(parsing: Parsing, question: Question) -> Form | Explained:
    chat = of_allowed_tools(parse(bytes(question.fields), ChatRequest))
    if question.messages is not None:
        return Explained(explained(question.messages, chat.tools_for_template(), parsing.tool_format))
    use, source = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls), chat.grammar_source()
    budget = None if question.thinking in ("none", "closed") else chat.thinking_budget
    if chat.thinking_budget is not None and not parsing.ends_thinking:
        raise ValueError("thinking_budget: the Python server says that it is ignored")
    needs, grammar = source is not None or needs_grammar(use) or budget is not None, None
    if needs and question.thinking != "later":
        thinking = parsing.thinking if question.thinking in IS_OPEN else None
        if thinking is not None:
            thinking = thinking.opened(IS_OPEN[question.thinking])
        grammar = parsing.grammar(thinking, use, source, budget).text()
    return Form(
        tools=chat.tools_for_template(),
        calls=use is not None,
        named_call=use is not None and use.named is not None,
        needs_grammar=needs,
        grammar=grammar,
    )
