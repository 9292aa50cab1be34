"""Prompts of `LLM` as token ids: texts, token ids and conversations, and the images in them.

Invariants: a prompt with an image is refused before anything is computed, unless the engine sees. Every error is a
`ParamError` that names the prompt's part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minisgl import images
from minisgl.config import ImageLimits
from minisgl.engine.api import EngineInfo
from minisgl.images import Bounds, ImageError, PreparedImage, Processor
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import ParamError
from minisgl.step import Int32Array
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.pictures import Images


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as token ids, with the virtual ids of its images. `shown` has the placeholder in their place. `text` is
    None if token ids or messages were given."""

    ids: Int32Array
    shown: list[int]
    text: str | None = None
    images: tuple[PromptImage, ...] = ()


Prompt = str | Sequence[int] | Mapping[str, Any] | Encoded
"""A text, token ids, or a mapping with either as `prompt` (vLLM: `prompt_token_ids`) and its `images` (vLLM:
`multi_modal_data`), for each of which the prompt has the model's placeholder once."""
Message = dict[str, Any]
_KEYS = {"prompt", "prompt_token_ids", "images", "multi_modal_data"}
_PARTS = {"image": ("image", "url", "path"), "image_url": ("image_url",), "image_pil": ("image_pil",)}
"""Types of content parts with an image, and the keys that may have it: OpenAI's, Hugging Face's, vLLM's."""


class PromptEncoder:
    """Encodes the prompts of one model."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, limits: ImageLimits) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._limits = limits

    def encode(self, prompt: Prompt) -> Encoded:
        """Encode a text or token ids, with images if it is a mapping. Raises `ParamError`."""
        if isinstance(prompt, Encoded):
            return prompt
        given, sources = _parsed(prompt) if isinstance(prompt, Mapping) else (prompt, [])
        text = given if isinstance(given, str) else None
        prepared = [self._prepared(source, f"images.{i}") for i, source in enumerate(sources)]
        if isinstance(given, str):
            rewritten = Images(self._processor.family.rewrite).rewritten(given) if prepared else given
            ids = self._tokenizer.encode(rewritten)
        else:
            ids = np.asarray(given, np.int32)
        return self._encoded(ids, text, prepared)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> Encoded:
        """Render a conversation with the chat template and encode it. Raises `ParamError` or `ChatTemplateError`."""
        prepared: list[PreparedImage] = []

        def part(one: Any, place: str) -> Any:
            if not isinstance(one, Mapping) or one.get("type") not in _PARTS:
                return one
            key = next((key for key in _PARTS[one["type"]] if key in one), None)
            source = None if key is None else one[key]
            if isinstance(source, Mapping):  # OpenAI's {"url": ..., "detail": ...}
                source = source.get("url")
            prepared.append(self._prepared(source, place))
            return {"type": "image"}

        def message(one: Message, i: int) -> Message:
            content = one.get("content")
            if not isinstance(content, list):
                return one
            return {**one, "content": [part(each, f"messages.{i}.content.{j}") for j, each in enumerate(content)]}

        shaped = [message(one, i) for i, one in enumerate(messages)]
        template = Images(self._processor.family.rewrite) if prepared else None
        text = self._tokenizer.apply_chat_template(shaped, images=template, **variables)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        order = [] if template is None else template.order
        if sorted(order) != [*range(len(prepared))]:
            reason = f"the chat template shows {len(order)} of {len(prepared)} images"
            raise ParamError("messages", None, reason)
        return self._encoded(ids, None, [prepared[i] for i in order])

    def _encoded(self, ids: Int32Array, text: str | None, prepared: Sequence[PreparedImage]) -> Encoded:
        vocab_size = self._info.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise ParamError("prompt", int(ids.max()), f"token ids must be between 0 and {vocab_size - 1}")
        if not prepared:
            return Encoded(ids, ids.tolist(), text)
        marker = self._processor.marker_id
        try:
            expanded, placed = images.expand(ids, marker, prepared)
        except ValueError as error:
            where = self._tokenizer.image_text() or self._tokenizer.decode([marker])
            raise ParamError("prompt", text, f"{error}: write {where} where each of them is") from error
        shown = expanded.copy()
        for one in placed:
            shown[one.start : one.start + one.num_tokens] = marker
        return Encoded(expanded, shown.tolist(), text, placed)

    @cached_property
    def _processor(self) -> Processor:
        """Return the model's image processor. Raises `ParamError` if the model does not see, `ConfigError` if the files
        of its processor are damaged."""
        info, found = self._info, None
        if info.sees and info.model_dir is not None:
            found = images.read_processor(Path(info.model_dir), max_tokens=self._limits.max_image_tokens)
        if found is None:
            raise ParamError("images", info.name, "the model does not see images on this engine")
        return found

    def _prepared(self, source: Any, place: str) -> PreparedImage:
        bounds = Bounds(max_pixels=self._limits.max_image_pixels)
        processor = self._processor
        try:
            if not isinstance(source, bytes | str | os.PathLike) and not hasattr(source, "resize"):
                raise ImageError("must be a PIL image, a path, a data URL or bytes")
            return processor.prepare(images.load(source, bounds), bounds=bounds)
        except ImageError as error:
            raise ParamError(place, source, str(error), "invalid_image") from error


def _parsed(prompt: Mapping[str, Any]) -> tuple[str | Sequence[int], list[Any]]:
    """Return the text or token ids of a mapping, and its images. Raises `ParamError`."""
    if unknown := sorted(prompt.keys() - _KEYS):
        raise ParamError("prompt", unknown, "must be a text, token ids, or a mapping with prompt and images")
    given = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if given is None:
        raise ParamError("prompt", None, "is missing beside the images")
    data = prompt.get("multi_modal_data") or {}
    if other := sorted(data.keys() - {"image"}):
        raise ParamError("multi_modal_data", other, "must have images only, as `image`")
    found = prompt.get("images", data.get("image"))
    return given, [] if found is None else list(found) if isinstance(found, list | tuple) else [found]
