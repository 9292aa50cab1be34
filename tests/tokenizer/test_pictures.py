"""Chat templates with images: test messages show where a template puts an image, every rearrangement of messages keeps
the order of their images, and no text of a conversation becomes an image."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.tokenizer import ChatTemplate, ChatTemplateError
from minisgl.tokenizer.pictures import Images
from tests.helpers.sight import MARKED, PAD_ID, seeing_tokenizer

IMAGE = {"type": "image"}
# Content through a macro, which refuses images of the system and counts them (Qwen3.5).
BY_MACRO = """
{%- set seen = namespace(count=0) -%}
{%- macro shown(content, is_system=false) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content -%}
{%- if part.type == 'image' or 'image_url' in part -%}
{%- if is_system %}{{ raise_exception('no images of the system') }}{% endif -%}
{%- set seen.count = seen.count + 1 -%}
{%- if add_vision_id %}Picture {{ seen.count }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part %}{{ part.text }}{% else %}{{ raise_exception('what is this?') }}{% endif -%}
{%- endfor %}{% endif %}{% endmacro -%}
{%- for m in messages -%}
[{{ m.role }}]{{ shown(m.content, m.role == 'system') }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }}{{ call.function.arguments }}>{% endfor %}{% endfor -%}"""
# All images of a message before its texts; results as plain text.
FIRST = """
{%- for m in messages %}[{{ m.role }}]
{%- if m.content is string or m.role == 'tool' %}{{ m.content }}{% else -%}
{%- for part in m.content if part.type == 'image' %}<image>{% endfor -%}
{%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{% endfor -%}"""
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALL = {"id": "c", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def rendered(template: str, *messages: dict[str, Any], **how: Any) -> tuple[str, list[int]]:
    """Return the prompt without its generation prompt, and the order of the images in it."""
    images = Images()
    prompt = ChatTemplate(template, {}).render(messages, images=images, add_generation_prompt=False, **how)
    return prompt, images.order


@pytest.mark.parametrize(
    ("template", "of_user", "of_tool", "of_system"),
    [(BY_MACRO, MARKED, MARKED, ""), (FIRST, "<image>", "", "<image>"), (TEXTS, "", "", "")],
)
def test_what_an_image_is_in_a_prompt_is_found_for_each_role(
    template: str, of_user: str, of_tool: str, of_system: str
) -> None:
    found = ChatTemplate(template, {})
    assert [found.image_text(role) for role in ("user", "tool", "system")] == [of_user, of_tool, of_system]


def test_images_stand_where_the_template_puts_them() -> None:
    message = user(text("a"), IMAGE, text("b"), IMAGE)
    assert rendered(BY_MACRO, message) == (f"[user]a{MARKED}b{MARKED}", [0, 1])
    assert rendered(BY_MACRO, message, add_vision_id=True)[0] == f"[user]aPicture 1: {MARKED}bPicture 2: {MARKED}"
    assert rendered(FIRST, message) == ("[user]<image><image>ab", [0, 1])


def test_a_result_that_is_shown_as_text_has_the_text_of_a_users_image() -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": [text("a"), IMAGE]}
    messages = [user(text("q"), IMAGE), {"role": "assistant", "tool_calls": [CALL]}, result]
    prompt, order = rendered(FIRST, *messages)
    assert prompt.startswith("[user]<image>q") and prompt.endswith("a\n<image>") and order == [0, 1]


def test_a_template_of_texts_refuses_images_and_takes_messages_without() -> None:
    with pytest.raises(ChatTemplateError, match="shows no images"):
        rendered(TEXTS, user(IMAGE))
    assert rendered(TEXTS, user(text("a"))) == ("[user]a", [])


def test_a_rewritten_marker_is_one_of_the_template_only() -> None:
    """Gemma 3's template writes one token for an image, which the processor replaces by several before encoding."""
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<|vision_start|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = seeing_tokenizer(template)
    images = Images("<|vision_start|>", ["((<|image_pad|>))"])
    prompt = tokenizer.apply_chat_template(
        [user(text("<|vision_start|>"), IMAGE, text("<|image_pad|>"))], images=images
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False).tolist()
    assert ids.count(PAD_ID) == 1 and prompt == "<|vision_start|>((<|image_pad|>))<|image_pad|>"
    assert bytes(token for token in ids[: ids.index(PAD_ID)] if token < 256) == b"<|vision_start|>(("
