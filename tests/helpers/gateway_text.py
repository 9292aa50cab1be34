"""Chat templates as the gateway renders them beside Python's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.tokenizer import ChatTemplate, ChatTemplateError
from minisgl.tokenizer.chat_template import _environment, content_shape

rust = pytest.importorskip("minisgl._rust")
PASSED_ON = None  # the gateway leaves it to Python


class BothTemplates:
    """One template in Python and in the gateway."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.python = ChatTemplate(source, special_tokens or {})
        self.why = ""  # the gateway passed the last one on
        try:
            shape = content_shape(_environment().parse(source))
            self.rust = rust.GatewayTemplate(source, shape, dict(special_tokens or {}))
        except Exception as error:  # jinja's own errors among them: then there is nothing to compare
            self.rust = None
            self.why = str(error)

    def render(
        self, messages: Sequence[Any], variables: Mapping[str, Any] | None = None, prompt: bool = True
    ) -> str | None:
        """What both render; `PASSED_ON` if the gateway does not."""
        if self.rust is None:
            return PASSED_ON
        given = variables or {}
        try:
            found = self.rust.render(json.dumps(messages), json.dumps(given), prompt)
        except ValueError as error:
            self.why = str(error)
            return PASSED_ON
        try:
            expected = self.python.render(messages, add_generation_prompt=prompt, **given)
        except ChatTemplateError as error:
            raise AssertionError(f"Python refuses what the gateway renders: {error}: {found!r}") from error
        assert found == expected
        return str(found)


def corpus(folder: Path) -> dict[str, str]:
    """Templates of files, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}
