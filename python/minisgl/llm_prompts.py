"""Prompts of `LLM` as token ids: texts, token ids and conversations, and the images in them.

Invariants: a prompt with an image is refused before anything is computed, unless the engine sees. Every error is a
`ParamError` that names the prompt's part.
"""

from __future__ import annotations

import contextlib
import os
import sys
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
_TEXTS = ("text", "input_text", "output_text")
_PARTS = {
    "image": ("image", "url", "path"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image_pil": ("image_pil",),
}
"""Types of content parts with an image, and the keys that may have it: OpenAI's, Hugging Face's, vLLM's."""
_FORMS = "must be a text, token ids (whole numbers), or a mapping with prompt and images"


class PromptEncoder:
    """Encodes the prompts of one model."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, limits: ImageLimits) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._limits = limits

    def encode_all(self, prompts: object) -> list[Encoded]:
        """Encode one prompt, or each of a list. Raises `ParamError`."""
        if not isinstance(prompts, list | tuple | np.ndarray) or _are_ids(prompts):
            return [self.encode(prompts)]
        return [self.encode(one, f"prompts.{i}") for i, one in enumerate(prompts)]

    def encode_chats(self, messages: object) -> list[Encoded]:
        """Encode one conversation, or each of a list. Raises `ParamError` or `ChatTemplateError`."""
        if not isinstance(messages, list | tuple) or (messages and isinstance(messages[0], Mapping)):
            return [self.encode_chat(messages)]
        return [self.encode_chat(one, f"messages.{i}") for i, one in enumerate(messages)]

    def encode_prefix(self, prefix: object) -> Encoded:
        """Encode a prompt, or the beginning of a conversation. Raises `ParamError` or `ChatTemplateError`."""
        if isinstance(prefix, list | tuple) and prefix and isinstance(prefix[0], Mapping):
            return self.encode_chat(prefix, add_generation_prompt=False)
        return self.encode(prefix)

    def encode(self, prompt: object, place: str = "prompt") -> Encoded:
        """Encode a `Prompt`, which errors call `place`. Raises `ParamError`."""
        if isinstance(prompt, Encoded):
            return prompt
        given, sources = _parsed(prompt, place) if isinstance(prompt, Mapping) else (prompt, [])
        within = "" if place == "prompt" else f"{place}."
        text = given if isinstance(given, str) else None
        prepared = [self._prepared(source, f"{within}images.{i}") for i, source in enumerate(sources)]
        if isinstance(given, str):
            ids = self._tokenizer.encode(self._template_images(prepared).rewritten(given) if prepared else given)
        else:
            ids = self._checked_ids(given, place)
        return self._encoded(ids, text, prepared, place)

    def encode_chat(self, messages: object, place: str = "messages", **variables: Any) -> Encoded:
        """Render a conversation, which errors call `place`, by the chat template and encode it. Raises `ParamError` or
        `ChatTemplateError`."""
        if not isinstance(messages, list | tuple):
            raise ParamError(place, messages, "must be a list of messages, or a list of such lists")
        prepared: list[PreparedImage] = []
        shaped = [self._message(one, f"{place}.{i}", prepared) for i, one in enumerate(messages)]
        template = self._template_images(prepared) if prepared else None
        text = self._tokenizer.apply_chat_template(shaped, images=template, **variables)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        order = [] if template is None else template.order
        if sorted(order) != [*range(len(prepared))]:
            reason = f"the chat template shows {len(order)} of {len(prepared)} images"
            raise ParamError(place, None, reason)
        return self._encoded(ids, None, [prepared[i] for i in order], place)

    def _message(self, one: object, place: str, prepared: list[PreparedImage]) -> Message:
        """Return a message for the chat template, and append its images to `prepared`. Raises `ParamError`."""
        if not isinstance(one, Mapping):
            raise ParamError(place, one, "must be a message: a mapping with role and content")
        role, content = one.get("role"), one.get("content")
        if not isinstance(role, str):
            raise ParamError(f"{place}.role", role, "must be a text, such as user")
        if isinstance(content, list | tuple):
            parts = [self._part(part, f"{place}.content.{j}", prepared) for j, part in enumerate(content)]
            return {**one, "content": parts}
        if not isinstance(content, str) and not (content is None and role not in ("system", "user")):
            raise ParamError(f"{place}.content", content, "must be a text or a list of parts")
        return {**one}

    def _part(self, one: object, place: str, prepared: list[PreparedImage]) -> dict[str, Any]:
        """Return a part of a message for the chat template, and append its image to `prepared`. Raises `ParamError`."""
        kind = one.get("type") if isinstance(one, Mapping) else None
        if not isinstance(one, Mapping) or not isinstance(kind, str) or kind not in (*_TEXTS, *_PARTS):
            where, value = (f"{place}.type", kind) if isinstance(one, Mapping) else (place, one)
            raise ParamError(where, value, f"a part must have one of the types {', '.join((*_TEXTS, *_PARTS))}")
        if kind in _TEXTS:
            if not isinstance(text := one.get("text"), str):
                raise ParamError(f"{place}.text", text, "must be a text")
            return {**one, "type": "text"}
        key = next((key for key in _PARTS[kind] if key in one), _PARTS[kind][0])
        source, detail, place = one.get(key), one.get("detail"), f"{place}.{key}"
        if isinstance(found := source, Mapping):  # OpenAI's {"url": ..., "detail": ...}
            source, detail = found.get("url"), found.get("detail", detail)
        prepared.append(self._prepared(source, place, detail))
        return {"type": "image"}

    def _checked_ids(self, given: object, place: str) -> Int32Array:
        """Return token ids as an array. Raises `ParamError` unless they are ids of the vocabulary."""
        vocab_size, found = self._info.vocab_size, None
        if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes | bytearray):
            with contextlib.suppress(ValueError, OverflowError):  # such as lists of several lengths
                found = np.asarray(given)
        if found is None or found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
            raise ParamError(place, given, _FORMS)
        if len(beyond := np.flatnonzero((found < 0) | (found >= vocab_size))):
            reason = f"token ids must be between 0 and {vocab_size - 1}"
            raise ParamError(f"{place}.{beyond[0]}", int(found[beyond[0]]), reason)
        return found.astype(np.int32)

    def _encoded(self, ids: Int32Array, text: str | None, prepared: Sequence[PreparedImage], place: str) -> Encoded:
        if not prepared:
            return Encoded(ids, ids.tolist(), text)
        marker = self._processor.marker_id
        try:
            expanded, placed = images.expand(ids, marker, prepared)
        except ValueError as error:
            where = self._tokenizer.image_text() or self._tokenizer.decode([marker])
            raise ParamError(place, text, f"{error}: write {where} where each of them is") from error
        shown = expanded.copy()
        for one in placed:
            shown[one.start : one.start + one.num_tokens] = marker
        return Encoded(expanded, shown.tolist(), text, placed)

    def _template_images(self, prepared: Sequence[PreparedImage]) -> Images:
        texts = [one.text for one in prepared]
        return Images(self._processor.family.marker, texts, [*range(len(prepared))])

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

    def _prepared(self, source: Any, place: str, detail: object = None) -> PreparedImage:
        bounds = Bounds(max_pixels=self._limits.max_image_pixels)
        processor = self._processor
        try:
            max_tokens = images.most_tokens(detail)
        except ImageError as error:
            raise ParamError(f"{place}.detail", detail, str(error)) from error
        try:
            if not isinstance(source, bytes | str | os.PathLike) and not _is_picture(source):
                raise ImageError("must be a PIL image, a path, a data URL or bytes")
            return processor.prepare(images.load(source, bounds), bounds=bounds, max_tokens=max_tokens)
        except ImageError as error:
            raise ParamError(place, source, str(error), "invalid_image") from error


def _are_ids(given: Sequence[object] | np.ndarray[Any, Any]) -> bool:
    """Return whether a list is one prompt, of token ids, rather than several prompts."""
    if isinstance(given, np.ndarray):
        return given.ndim < 2 and given.dtype.kind in "iu"
    return len(given) > 0 and isinstance(given[0], int | np.integer)


def _is_picture(source: object) -> bool:
    """Return whether it is an image of Pillow's, which is not imported here."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(source, pillow.Image)


def _parsed(prompt: Mapping[str, Any], place: str) -> tuple[object, list[Any]]:
    """Return the text or token ids of a mapping, and its images. Raises `ParamError`."""
    if unknown := sorted(map(str, prompt.keys() - _KEYS)):
        raise ParamError(place, unknown, _FORMS)
    given = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if given is None:
        raise ParamError(place, None, "is missing beside the images")
    data = {} if prompt.get("multi_modal_data") is None else prompt["multi_modal_data"]
    if not isinstance(data, Mapping):
        raise ParamError("multi_modal_data", data, "must be a mapping with images, as `image`")
    if other := sorted(data.keys() - {"image"}):
        raise ParamError("multi_modal_data", other, "must have images only, as `image`")
    found = prompt.get("images", data.get("image"))
    return given, [] if found is None else list(found) if isinstance(found, list | tuple) else [found]
