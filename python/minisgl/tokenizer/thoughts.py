"""Finds out how much reasoning of earlier turns a chat template shows, and which variable makes it show more. Reasoning
that a template omits from earlier turns is missing in the next prompt: the cached prefix ends there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from minisgl.tokenizer.chat_template import ChatTemplate
from minisgl.tokenizer.conversation import TRIAL_TOOL
from minisgl.tokenizer.rendering import TRIAL_WORK, ChatTemplateError

_CALL = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "trial", "arguments": "{}"}}
_THOUGHTS = ("thought1x", "thought2x", "thought3x")
_SESSION: list[dict[str, Any]] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL], "reasoning_content": _THOUGHTS[0]},
    {"role": "tool", "tool_call_id": _CALL["id"], "content": "result"},
    {"role": "assistant", "content": "answer", "reasoning_content": _THOUGHTS[1]},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "another", "reasoning_content": _THOUGHTS[2]},
    {"role": "user", "content": "last"},
]
_SWITCHES = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Variables that switch the next output's reasoning, and do not concern earlier ones."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Counts of a trial: how many of the `of` reasoning texts in a session the template shows in the next turn."""

    shown: int
    most: int
    """Texts shown with `kwarg`."""
    kwarg: tuple[str, bool] | None
    """Variable and value with which the template shows most; `None` if none shows more."""
    of: int = len(_THOUGHTS)


def kept(template: ChatTemplate) -> Kept:
    """Return how much reasoning of earlier turns the template shows. Raises `ChatTemplateError`."""
    shown = most = _num_shown(template)
    kwarg: tuple[str, bool] | None = None
    for name in sorted(template.variables - _SWITCHES):
        for value in (True, False):
            with contextlib.suppress(ChatTemplateError, TypeError):  # TypeError: a name that is set for every request
                num_shown = _num_shown(template, **{name: value})
                if num_shown > most:
                    most, kwarg = num_shown, (name, value)
    return Kept(shown, most, kwarg)


def _num_shown(template: ChatTemplate, **kwargs: Any) -> int:
    prompt = template.render(_SESSION, TRIAL_WORK, tools=[TRIAL_TOOL], **kwargs)
    return sum(thought in prompt for thought in _THOUGHTS)
