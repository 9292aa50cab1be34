"""A tiny random model that sees and has the tokenizer and template of `sight.py`: for `LLM` and whole servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.sight import END_ID, PAD_ID, START_ID, TEMPLATE, seeing_json
from tests.helpers.vision import idefics3, saved, seer

TILE_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
SMOLVLM_TEMPLATE = (  # as published
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def talking(folder: Path, **text: Any) -> Path:
    """Save the model in `folder`. `text` are settings of its text model."""
    saved(seer(vocab_size=261, max_position_embeddings=4096, **text), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": PAD_ID, "vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(seeing_json())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def talking_of_tiles(folder: Path, architecture: str = "SmolVLMForConditionalGeneration") -> Path:
    """Save an Idefics 3 or SmolVLM in `folder`, whose images are cut into up to 3 x 3 tiles."""
    saved(idefics3(architecture, vocab_size=START_ID + len(TILE_TOKENS), max_position_embeddings=4096), folder)
    config = json.loads((folder / "config.json").read_text()) | {"image_token_id": START_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(seeing_json(TILE_TOKENS))
    (folder / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    return folder
