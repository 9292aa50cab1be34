"""A scripted model that sees: a tokenizer of bytes with tokens of images, its chat template and its image processor."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.images import PreparedImage, read_processor
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.echo import echo_json
from tests.helpers.image_files import QWEN3, QWEN3_MODEL, encoded, model_folder, picture
from tests.helpers.server import Frontend, frontend

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
START_ID, PAD_ID, END_ID = 258, 259, 260
MARKED = "".join(TOKENS)
PARTS = (
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}{{ call.function.arguments }}]{% endfor %}"
    "</{{ message.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_SEQ_LEN = 4096


def seeing_json(tokens: Sequence[str] = TOKENS) -> str:
    """Return the echo tokenizer with the tokens of images, as the text of a tokenizer.json."""
    tokenizer = json.loads(echo_json())
    like = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"] += [like | {"id": START_ID + i, "content": one} for i, one in enumerate(tokens)]
    return json.dumps(tokenizer)


def seeing_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer.from_json(seeing_json(), {}, {"default": template})


def seeing_folder(folder: Path) -> Path:
    """Write the files of an image processor, whose images have 8 x 8 pixels a token."""
    processor: dict[str, Any] = {**QWEN3, "patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1 << 20}}
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return model_folder(folder, processor, {**QWEN3_MODEL, "image_token_id": PAD_ID, "vision_config": vision})


@contextmanager
def seeing_frontend(folder: Path, template: str = TEMPLATE, **settings: Any) -> Iterator[Frontend]:
    """Run a server of a scripted model that sees during the `with`."""
    settings = {"max_seq_len": MAX_SEQ_LEN, "engine": "cpu", **settings}
    tokenizer = seeing_tokenizer(template)
    with frontend(sees=True, model_dir=str(seeing_folder(folder)), tokenizer=tokenizer, **settings) as server:
        yield server


def png(width: int = 32, height: int = 24, seed: int = 0) -> bytes:
    return encoded(picture(width, height, seed))


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{in_base64(data)}"


def prepared(folder: Path, data: bytes, max_tokens: int | None = None) -> PreparedImage:
    """Return what the server should make of an image."""
    processor = read_processor(folder, max_tokens=1024)
    assert processor is not None
    return processor.prepare(data, max_tokens=max_tokens)
