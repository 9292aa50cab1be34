"""A model's tokenizer: files to object, text to ids, ids to text.

Keeps true: the same ids as transformers gives for the same files; safe to use from several threads.
Doesn't know: the model's weights, its context length, requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from minisgl.step import Int32Array
from minisgl.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Message
from minisgl.tokenizer.decode import DecodeTable, IncrementalDecoder
from minisgl.tokenizer.echo import ECHO_CHAT_TEMPLATE, ECHO_EOS, echo_tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """Files that are missing or cannot be read; the text says what to do."""


class Tokenizer:
    """Use `load` or `echo`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], chat_template: str | None
    ) -> None:
        self._backend = backend
        self._table = DecodeTable(backend)
        self.special_tokens = special_tokens
        self._chat_template = ChatTemplate(chat_template, special_tokens) if chat_template else None

    @classmethod
    def load(cls, model_dir: str | Path, chat_template: str | None = None) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder."""
        folder = Path(model_dir)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"{folder.name}: no tokenizer.json: make one with transformers' AutoTokenizer(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises the bare class
            raise TokenizerError(f"{folder.name}/tokenizer.json: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        specials = {**_read_json(folder / "special_tokens_map.json"), **config}
        tokens = {name: text for name in _SPECIAL_NAMES if (text := _token_text(specials.get(name))) is not None}
        return cls(backend, tokens, chat_template or _find_template(folder, config))

    @classmethod
    def echo(cls) -> Tokenizer:
        """The built-in byte tokenizer of the echo engine."""
        return cls(echo_tokenizer(), {"eos_token": ECHO_EOS}, ECHO_CHAT_TEMPLATE)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32Array:
        """Ids of `text`, [n] int32."""
        return np.array(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Int32Array]:
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `ids`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def new_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return self._table.new_stream(skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """See `ChatTemplate.render`. Encode the result with `add_special_tokens=False`: it has them already."""
        if self._chat_template is None:
            raise ChatTemplateError("this model has no chat template: use completions")
        return self._chat_template.render(messages, **kwargs)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file.name}: {error}") from error
    return found if isinstance(found, dict) else {}


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _find_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, where it is a text or a list of named texts."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        return named.get("default")
    return found if isinstance(found, str) else None
