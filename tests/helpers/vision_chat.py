"""A tiny random model that sees and has the tokenizer and template of `sight.py`: for `LLM` and whole servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.sight import END_ID, PAD_ID, START_ID, TEMPLATE, seeing_json
from tests.helpers.vision import saved, seer


def talking(folder: Path, **text: Any) -> Path:
    """Save the model in `folder`. `text` are settings of its text model."""
    saved(seer(vocab_size=261, max_position_embeddings=4096, **text), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": PAD_ID, "vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(seeing_json())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
