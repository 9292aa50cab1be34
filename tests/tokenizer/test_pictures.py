"""Images in conversations: published chat templates render one marker for each, in the place where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl import envs
from minisgl.tokenizer import ChatTemplate
from minisgl.tokenizer.pictures import Images

IMAGE = {"type": "image"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "save", "arguments": "{}"}}
QWEN = "<|image_pad|>"
MARKERS = {
    "qwen3-vl-embedding-8b": QWEN,
    "qwen3.5-community": QWEN,
    "qwen3.8-27b": QWEN,
    "gemma3": "<image_soft_token>",
    "gemma4": "<|image|>",
    "granite-docling-258m": "<image>",
    "smolvlm": "<image>",
}
"""Marker of an image by folder in `MINISGL_DATA/vision`, or as transformers has it."""
REWRITES = {"gemma3": ("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n")}


def said(role: str, *parts: str | dict[str, str], **more: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": texts, **more}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "before": ([said("user", IMAGE, "what?")], "*what?"),
    "behind": ([said("user", "what?", IMAGE)], "what?*"),
    "alone": ([said("user", IMAGE)], "*"),
    "several": (
        [
            said("system", "kind"),
            said("user", "one", IMAGE, "two", IMAGE, IMAGE, "three"),
            said("assistant", "fine"),
            said("user", IMAGE, "four"),
        ],
        "kind one * two ** three fine * four",
    ),
    "two of one role": ([said("user", IMAGE, "one"), said("user", "two", IMAGE)], "* one two *"),
    "tool": (
        [
            said("user", "shot"),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            said("tool", "here", IMAGE, tool_call_id="abcdefghi"),
            said("user", IMAGE, "two"),
        ],
        "shot here ** two",
    ),
    "system": ([said("system", "look", IMAGE), said("user", "what?")], "look * what?"),
    "assistant": ([said("user", "one"), said("assistant", "two", IMAGE), said("user", "what?")], "one two * what?"),
}
"""Conversations, and the order of their words and images (*) in the prompt."""


def template(name: str) -> ChatTemplate:
    """Return a published template; skips the test where it is not."""
    if name == "smolvlm":
        source = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm").DEFAULT_CHAT_TEMPLATE
    else:
        file = (envs.data_dir() or Path()) / "vision" / name / "chat_template.jinja"
        if not file.is_file():
            pytest.skip(f"MINISGL_DATA has no vision/{name}")
        source = file.read_text(encoding="utf-8")
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_a_published_template_has_one_marker_for_each_image_in_its_place(name: str, case: str) -> None:
    conversation, wanted = CONVERSATIONS[case]
    images = Images(REWRITES.get(name))
    prompt = template(name).render(conversation, images=images)
    count = sum(part == IMAGE for one in conversation for part in one["content"])
    assert prompt.count(MARKERS[name]) == count and images.order == [*range(count)]
    rest = prompt.replace(MARKERS[name], "*")
    for word in wanted.replace("*", " * ").split():
        assert word in rest, f"{word} does not follow in {prompt!r}"
        rest = rest[rest.index(word) + len(word) :]
