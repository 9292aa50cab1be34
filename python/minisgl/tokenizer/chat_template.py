"""A model's chat template: renders a conversation in OpenAI's format as a prompt, and finds out which message formats
the template supports.

Invariants: a conversation is rearranged only if the template would refuse it or omit a part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from minisgl.config import ConfigError
from minisgl.tokenizer import conversation, pictures
from minisgl.tokenizer.content_shape import ContentShape, content_shape
from minisgl.tokenizer.conversation import TRIAL_TOOL, Shown, arranged
from minisgl.tokenizer.guard import Marks, Prompt, guarded, searched
from minisgl.tokenizer.pictures import Images
from minisgl.tokenizer.rendering import MAX_WORK, TRIAL_WORK, ChatTemplateError, Work, environment, run

Message = Mapping[str, Any]
Explain = Callable[[Sequence[Message], Sequence[Any]], Sequence[Message]]

_CONTINUE = "\ue000continue\ue000 "  # marks the end of the final message; the space tells whether the template trims


def read_chat_template(given: str) -> str:
    """Return the template that is, or is in the file named by, the value of `--chat-template`. Raises `ConfigError` if
    it cannot be read or parsed."""
    source = given
    if not any(mark in given for mark in ("{{", "{%", "{#", "\n")):
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(f"--chat-template {given}: {reason}") from error
    try:
        environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"--chat-template: does not parse: {error}") from error
    return source


class ChatTemplate:
    """A chat template with the special tokens it may name (`bos_token`, `eos_token`, ...). It is compiled on first use,
    so that a model with a broken template still serves completions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], marks: Marks | None = None) -> None:
        self.source = source
        self._marks = marks
        self._special_tokens = dict(special_tokens)
        self._abilities: dict[bool, Shown] = {}  # with and without tools
        self._parts: dict[str, bool] = {"user": True}  # whether a role takes parts; for users see `content_shape`
        self._image_texts: dict[str, str] = {}  # by role

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
        images: Images | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a conversation in OpenAI's format; keys with the value `None` count as missing. Encode
        the result as it is: it may be a `Prompt`, which marks where texts of the conversation spell a marker that they
        must not become. `continue_final_message`: the prompt ends within the last message, which the model continues;
        excludes `add_generation_prompt`. `kwargs` are further variables of the template (Qwen's `enable_thinking`).
        `explain` turns messages and tools into messages for a template without tool support; it may add markers.
        `images` allows parts of the type `image` in contents, and gets their order in the prompt. Raises
        `ChatTemplateError`; `TooMuchWork` beyond `most`."""
        if not messages:
            raise ChatTemplateError("messages: must not be empty")
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message: excludes add_generation_prompt")
        template = self._template
        guard = ""
        if images is not None:
            messages = pictures.marked(messages)
        if explain is not None:
            parsed = [_with_parsed_calls(message) for message in messages]
            guard, parsed, tools, kwargs = self._guarded(parsed, tools, kwargs)
            messages = explain(parsed if guard else messages, tools or ())
        shown = self._shown(bool(tools) and explain is None)
        try:
            shaped = [self._shape(message) for message in arranged(messages, shown)]
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        if images is not None:
            shaped = pictures.shown(shaped, self.image_text, images)
        if explain is None:
            guard, shaped, tools, kwargs = self._guarded(shaped, tools, kwargs)
        if continue_final_message:
            shaped[-1]["content"] = _marked(shaped[-1].get("content"))
        try:
            text = run(template, self._variables(shaped, tools, add_generation_prompt, **kwargs), most, guard)
        except ChatTemplateError:
            if (whole := _whole_tools(tools or ())) == [*(tools or ())]:
                raise
            text = run(template, self._variables(shaped, whole, add_generation_prompt, **kwargs), most, guard)
        text = _cut_at_mark(text) if continue_final_message else text
        return Prompt.of(text if images is None else images.text_of(text, self.image_text("user")), guard)

    def _guarded(self, messages: Sequence[Message], tools: Any, kwargs: dict[str, Any]) -> tuple[str, Any, Any, Any]:
        """Return the guard character (empty: none is needed) and the guarded messages, tools and variables."""
        if self._marks is None or not self._marks.has_markers((messages, tools, kwargs)):
            return "", messages, tools, kwargs
        try:
            guard, guarded_messages, (tools, kwargs) = guarded(
                self._marks, messages, (tools, kwargs), self._searched, self.source
            )
        except (ValueError, RecursionError) as error:
            raise ChatTemplateError(f"messages: {error}") from error
        return guard, guarded_messages, tools, kwargs

    @cached_property
    def _searched(self) -> list[str]:
        return searched(environment().parse(self.source))

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return environment().from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template does not parse: {error}") from error

    @cached_property
    def content_shape(self) -> ContentShape:
        """Content format that the template takes: by its syntax tree, unless rendering shows that it takes only the
        other one. Raises `ChatTemplateError`."""
        _ = self._template
        by_tree = content_shape(environment().parse(self.source))
        takes_text, takes_parts = self._shows_user("question"), self._shows_user([{"type": "text", "text": "question"}])
        if takes_text == takes_parts:
            return by_tree
        return "parts" if takes_parts and by_tree == "string" else "string" if takes_text else by_tree

    def _shows_user(self, content: Any) -> bool:
        with contextlib.suppress(ChatTemplateError):
            messages = [{"role": "user", "content": content}]
            return "question" in run(self._template, self._variables(messages, None), TRIAL_WORK)
        return False

    def _takes_parts(self, role: str) -> bool:
        """Return whether content parts in a message of this role are rendered as their texts: some templates show only
        one part of a system message, or Python's notation of the list. True, too, if plain text is not shown either."""
        if (takes_parts := self._parts.get(role)) is None:
            parts = [{"type": "text", "text": "question"}, {"type": "text", "text": "answer"}]
            takes_parts = self._parts[role] = self._shows(role, parts) or not self._shows(role, "question answer")
        return takes_parts

    def image_text(self, role: str) -> str:
        """Return what the template renders for an image in a message of this role; empty if it shows none there."""
        if (found := self._image_texts.get(role)) is None:
            texts = [part for part in pictures.TRIAL if part["type"] == "text"]
            found = pictures.image_text(self._with(role, pictures.TRIAL), self._with(role, texts))
            self._image_texts[role] = found
        return found

    def _shows(self, role: str, content: Any) -> bool:
        """Return whether a test message of this role is rendered with its words and without its data structure."""
        text = self._with(role, content)
        at = text.find("question")
        return 0 <= at < text.find("answer", at) and "'type'" not in text

    def _with(self, role: str, content: Any) -> str:
        """Return the prompt of a test conversation with such a message; empty if the template refuses it."""
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
            messages = [*before, message, *([] if role in ("tool", "user") else [user])]
            return run(self._template, self._variables(messages, None), TRIAL_WORK)
        return ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads from outside. Raises `ChatTemplateError`."""
        _ = self._template
        return frozenset(jinja2.meta.find_undeclared_variables(environment().parse(self.source)))

    def probe(self) -> None:
        """Compute now what `render` needs to know about the template. Raises `ChatTemplateError`."""
        _ = self.content_shape, self.variables, self._shown(False), self._shown(True)

    def _shown(self, with_tools: bool) -> Shown:
        if (abilities := self._abilities.get(with_tools)) is None:
            tools = [TRIAL_TOOL] if with_tools else None
            abilities = self._abilities[with_tools] = Shown.of(lambda messages: self._render_trial(messages, tools))
        return abilities

    def _render_trial(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        return run(self._template, self._variables([self._shape(message) for message in messages], tools), TRIAL_WORK)

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
    """Return the tools with description and parameters added where they lack: some templates require them."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}

    def whole(tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            return tool
        given = {name: value for name, value in function.items() if value not in (None, {})}
        return {**tool, "function": {**given, **{name: one for name, one in empty.items() if name not in given}}}

    return [whole(tool) for tool in tools]


def _marked(content: Any) -> str | list[Any]:
    """Return `content` with the continuation mark at the end of its last text."""
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
    # for a template that trims messages, so that it trims the end
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
    """Return a tool call with its arguments as an object, as templates expect them, instead of OpenAI's JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": conversation.parsed(function["arguments"])}}
