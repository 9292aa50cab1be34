"""Images in a conversation: the places where a chat template shows them, and their order in the prompt.

The content part `{"type": "image"}` of a message is an image. Until the template renders the messages a mark stands for
it in a text, so that messages with images are joined, reordered and turned into other roles as all others. Where the
template shows no image in a message of a role, its text of a user's image replaces the mark.

Invariants: the prompt has each image once, or the caller finds another number of placeholder tokens; `order` says which
is which; a text of the conversation becomes no image.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from minisgl.tokenizer.rendering import ChatTemplateError

TRIAL: list[dict[str, str]] = [
    {"type": "text", "text": "question"},
    {"type": "image"},
    {"type": "text", "text": "answer"},
]
"""Content of a test message that finds out whether a template shows images."""
_NONCE = secrets.token_hex(8)  # no text of a client has it
_MARK = re.compile(f"\ue001{_NONCE}-([0-9]{{1,9}})\ue001")


@dataclass(slots=True)
class Images:
    """Images of one conversation for `ChatTemplate.render`, which sets `order`: their indices as the prompt has them.
    `marker` is the template's text for an image; `texts`, by image, replace it before the prompt is encoded."""

    marker: str = ""
    texts: Sequence[str] = ()
    order: list[int] = field(default_factory=list)

    def text_of(self, prompt: str, image_text: str) -> str:
        """Return a prompt with `image_text` in place of the marks that are left. Raises `ChatTemplateError` if the
        template shows no images."""
        if not image_text and _MARK.search(prompt):
            raise ChatTemplateError("messages: the model's chat template shows no images")
        return self.rewritten(_MARK.sub(lambda _: image_text, prompt))

    def rewritten(self, prompt: str) -> str:
        """Return a prompt with the images' texts in place of the markers."""
        if not self.marker:
            return prompt
        first, *rest = prompt.split(self.marker)
        texts = chain((self.texts[i] for i in self.order), repeat(self.marker))
        return first + "".join(text + part for text, part in zip(texts, rest, strict=False))


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with marks in place of the images, which are numbered from 0."""
    count = 0

    def of(part: Any) -> Any:
        nonlocal count
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        count += 1
        return {"type": "text", "text": f"\ue001{_NONCE}-{count - 1}\ue001"}

    return [
        {**one, "content": [of(part) for part in one["content"]]} if isinstance(one.get("content"), list) else one
        for one in messages
    ]


def shown(messages: Sequence[dict[str, Any]], shows: Callable[[str], object], images: Images) -> list[dict[str, Any]]:
    """Return messages with images as parts where `shows(role)` is true; other marks stay. Sets the order."""
    images.order = [
        int(mark) for one in messages for text in _texts(one.get("content")) for mark in _MARK.findall(text)
    ]

    def of(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not any(_MARK.search(text) for text in _texts(content)) or not shows(message["role"]):
            return message
        return {**message, "content": [part for one in _parts(content) for part in _split(one)]}

    return [of(message) for message in messages]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(content: Any) -> Iterator[str]:
    for part in _parts(content) if isinstance(content, str | list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


def _split(part: Any) -> Iterator[Any]:
    """Yield the texts and images of a part."""
    if not isinstance(part, Mapping) or not isinstance(text := part.get("text"), str):
        yield part
        return
    for i, piece in enumerate(_MARK.split(text)):
        if i % 2:
            yield {"type": "image"}
        elif piece:
            yield {**part, "text": piece}


def image_text(with_image: str, without: str) -> str:
    """Return what a template renders for an image, from prompts of `TRIAL` with and without it; empty: nothing."""
    if "'type'" in with_image or len(with_image) <= len(without):
        return ""
    same = next((i for i, (a, b) in enumerate(zip(with_image, without, strict=False)) if a != b), len(without))
    return with_image[same : same + len(with_image) - len(without)].strip()
