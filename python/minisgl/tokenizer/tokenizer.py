"""A model's tokenizer: loads it from files. Encoding and decoding are in `rust/minisgl-text`, or in `reference.py` if
the extension is missing.

Invariants: the ids equal those of transformers for the same files; safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from minisgl.config import ConfigError
from minisgl.extension import _rust, why_missing
from minisgl.step import Int32Array
from minisgl.tokenizer.chat_template import ChatTemplate, Message
from minisgl.tokenizer.echo import ECHO_BOS, ECHO_CHAT_TEMPLATE, ECHO_EOS, echo_json
from minisgl.tokenizer.guard import guards_of
from minisgl.tokenizer.reference import (
    NotEncodable,
    ReferenceDecoder,
    ReferenceStream,
    ReferenceTokenizer,
    TooManyTokens,
)
from minisgl.tokenizer.rendering import MAX_WORK, ChatTemplateError, Work
from minisgl.tokenizer.thoughts import Kept, kept

if TYPE_CHECKING:
    from minisgl._rust import TextDecoder, TextStream, TextTokenizer
    from minisgl.tokenizer.reference import Formats

TextBackend: TypeAlias = "TextTokenizer | ReferenceTokenizer"

FILE, FILE_CONFIG = "tokenizer.json", "tokenizer_config.json"


class TokenizerError(ConfigError):
    """Error for tokenizer files that are missing or cannot be read; the text says what to do."""


_WORD = re.compile(rb" [a-z]{2,}")


def _silent(line: str) -> None:
    pass


class Tokenizer:
    """A tokenizer with its chat templates. Create it with `open`, `load`, `echo` or `from_json`."""

    def __init__(
        self, text: TextBackend, special_tokens: dict[str, str], chat_templates: Mapping[str, str] | None = None
    ) -> None:
        self.text = text
        """Encoder and decoder, shared with the gateway."""
        self.special_tokens = special_tokens
        self._chat_templates = {
            name: ChatTemplate(source, special_tokens, text) for name, source in (chat_templates or {}).items()
        }

    @classmethod
    def open(
        cls, model_dir: str | Path | None, chat_template: str | None = None, say: Callable[[str], None] = _silent
    ) -> Tokenizer:
        """Load a folder's tokenizer, or the echo tokenizer for `None`. `chat_template` replaces its templates."""
        tokenizer = cls.echo() if model_dir is None else cls.load(model_dir, say)
        if chat_template is not None:
            tokenizer._chat_templates = {
                "default": ChatTemplate(chat_template, tokenizer.special_tokens, tokenizer.text)
            }
        return tokenizer

    @classmethod
    def load(cls, model_dir: str | Path, say: Callable[[str], None] = _silent) -> Tokenizer:
        """Load tokenizer.json, tokenizer_config.json and the chat templates of a model folder. A missing tokenizer.json
        is converted from other files, once; `say` gets a line if that takes a moment. As in transformers,
        tokenizer.json alone decides which special tokens `encode` adds. Raises `TokenizerError`."""
        folder = Path(model_dir)
        source = tokenizer_source(folder, say)
        named = _special_tokens(source, _read_json(source / FILE_CONFIG))
        templates = _chat_templates(folder, _read_json(folder / FILE_CONFIG))
        return cls(_text_tokenizer(folder.name, file=source / FILE), named, templates)

    @classmethod
    def echo(cls) -> Tokenizer:
        """Return the built-in byte tokenizer of the echo engine."""
        tokens = {"bos_token": ECHO_BOS, "eos_token": ECHO_EOS}
        return cls.from_json(echo_json(), tokens, {"default": ECHO_CHAT_TEMPLATE})

    @classmethod
    def from_json(
        cls, text: str, special_tokens: dict[str, str] | None = None, chat_templates: Mapping[str, str] | None = None
    ) -> Tokenizer:
        """Create a tokenizer from the text of a tokenizer.json. Raises `TokenizerError`."""
        return cls(_text_tokenizer("", text=text), special_tokens or {}, chat_templates)

    def compile_templates(self) -> None:
        """Compile the chat templates ahead of the first conversation. An invalid one fails its requests only."""
        for template in self._chat_templates.values():
            with contextlib.suppress(ChatTemplateError):
                template.probe()

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> Int32Array:
        """Return the token ids of `text`, int32 [n]. Raises `NotEncodable`, and `TooManyTokens` for more than `most`:
        then a long text is not encoded to its end, or not at all. Other threads run meanwhile."""
        with _text_only():
            return self.text.encode(text, add_special_tokens, most, guards_of(text))

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[Int32Array]:
        """Encode several texts (see `encode`), in parallel if none has guards."""
        if any(map(guards_of, texts)):
            return [self.encode(text, add_special_tokens, most=most) for text in texts]
        with _text_only():
            return self.text.encode_batch(texts, add_special_tokens, most)

    def encode_pair(self, one: str, other: str) -> Int32Array:
        """Return the token ids of two texts in the model's pair format with special tokens. Raises `NotEncodable`."""
        with _text_only():
            return self.text.encode_pair(one, other)

    def check_length(self, text: str, most: int | None) -> None:
        """Raise `TooManyTokens` if `text` certainly has more than `most` tokens. Does not encode it."""
        with _text_only():
            if most is not None and (count := self.text.min_tokens(text, most)) > most:
                raise TooManyTokens(count, at_least=True)

    @property
    def leading_ids(self) -> Int32Array:
        """Special token ids that precede any text, such as the beginning of sequence."""
        return self.text.leading_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids beyond the vocabulary give no text."""
        return self.text.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for, maybe a part of a character; special tokens have theirs, too."""
        return self.text.token_bytes(token_id)

    @property
    def num_ids(self) -> int:
        """Largest token id + 1."""
        return self.text.num_ids

    def word_ids(self, count: int) -> Int32Array:
        """Return the first `count` ids that are a space and a lower-case ASCII word; all ids if there are none."""
        words = (i for i in range(self.num_ids) if _WORD.fullmatch(self.token_bytes(i)))
        ids = np.fromiter(itertools.islice(words, count), np.int32)
        return ids if len(ids) else np.arange(self.num_ids, dtype=np.int32)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this spelling in the vocabulary; `None` if there is none."""
        return self.text.token_id(text)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which give no text."""
        return frozenset(self.text.special_ids)

    def new_decoder(self, skip_special_tokens: bool = True) -> TextDecoder | ReferenceDecoder:
        """Return an incremental decoder for one stream of token ids."""
        return self.text.decoder(skip_special_tokens)

    def new_stream(
        self,
        stop: Sequence[str] = (),
        shown: Collection[int] = (),
        min_tokens: int = 0,
        formats: Formats | None = None,
    ) -> TextStream | ReferenceStream:
        """Return an incremental decoder that stops at the first stop string. The first `min_tokens` - 1 ids are not
        part of any. Special tokens give no text, except those in `shown`, which are not searched for stop strings.
        `formats`: parser of the output; only its content is searched."""
        return self.text.stream(stop, sorted(shown), min_tokens, formats)

    def _template(self, tools: bool) -> ChatTemplate | None:
        return self._chat_templates.get("tool_use" if tools and "tool_use" in self._chat_templates else "default")

    def template_source(self, *, tools: bool = False) -> str:
        """Return the source of the chat template for requests with or without tools; empty if there is none."""
        template = self._template(tools)
        return "" if template is None else template.source

    def image_text(self) -> str:
        """Return the chat template's text of an image in a user's message; empty if it shows none."""
        template = self._template(tools=False)
        with contextlib.suppress(ChatTemplateError):
            return "" if template is None else template.image_text("user")
        return ""

    def kept_thoughts(self) -> Kept | None:
        """Return how much reasoning of earlier turns the chat template shows; `None` without a template. Raises
        `ChatTemplateError`."""
        template = self._template(tools=True)
        return None if template is None else kept(template)

    def template_variables(self, *, tools: bool = False) -> frozenset[str]:
        """Return the variables that the template reads; empty if it does not parse."""
        template = self._template(tools)
        with contextlib.suppress(ChatTemplateError):
            return frozenset() if template is None else template.variables
        return frozenset()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        most: Work = MAX_WORK,
        /,
        *,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation: see `ChatTemplate.render`. Encode the result with `add_special_tokens=False`: it has
        them already. Raises `ChatTemplateError`."""
        template = self._template(bool(tools))
        if template is None:
            others = f" named default, only {', '.join(sorted(self._chat_templates))}" if self._chat_templates else ""
            how = "use /v1/completions, or give one with --chat-template"
            raise ChatTemplateError(f"this model has no chat template{others}: {how}")
        return template.render(messages, most, tools=tools, **kwargs)


def _text_tokenizer(name: str, **source: Any) -> TextBackend:
    try:
        return ReferenceTokenizer(**source) if why_missing() else _rust.TextTokenizer(**source)
    except ValueError as error:
        raise TokenizerError(f"{name}/{FILE}: {error}") from error


@contextlib.contextmanager
def _text_only() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise NotEncodable("the text is not valid Unicode: it has a lone surrogate") from error


def bad_token_ids(tokenizer: Tokenizer, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `bad_words` as in vLLM: for each word, those at the beginning of a text and after a
    space, as the tokenizer spells them, without ids beyond `vocab_size`. Other spellings with smaller tokens are not
    included. Raises `ValueError` for a word that is not valid Unicode."""
    spellings = []
    for word in words:
        bare = word.lstrip()
        spellings += [bare, f" {bare}"] if bare else [word]
    sequences = [tuple(ids.tolist()) for ids in tokenizer.encode_batch(spellings, add_special_tokens=False)]
    return tuple(dict.fromkeys(ids for ids in sequences if ids and max(ids) < vocab_size))


def tokenizer_json(model_dir: str | None) -> str:
    """Return the text of a folder's tokenizer.json, or of the echo engine's for `None`. Raises `TokenizerError`."""
    if model_dir is None:
        return echo_json()
    return (tokenizer_source(Path(model_dir), _silent) / FILE).read_text(encoding="utf-8")


def tokenizer_source(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the folder with the tokenizer.json: `folder` itself, or one with the converted file. Raises
    `TokenizerError`."""
    return folder if (folder / FILE).is_file() else _converted(folder, say)


def _converted(folder: Path, say: Callable[[str], None]) -> Path:
    from minisgl.tokenizer import convert

    sources = convert.sources(folder)
    if not sources:
        how = "--tokenizer names another folder or a hub id with one"
        raise TokenizerError(f"{folder.name}: no tokenizer.json, and no files that one could be made of: {how}")
    try:
        return convert.converted(folder, say)
    except convert.NoConversion as error:
        raise TokenizerError(
            f"{folder.name}: no tokenizer.json, and transformers makes none of {', '.join(sources)}: {error}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file.name}: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens (bos_token, eos_token, a model's own). The older special_tokens_map.json is read
    if the configuration does not list its added tokens, and then takes precedence."""
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_json(folder / "special_tokens_map.json")}
    named = {name: _token_text(token) for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Files take precedence over tokenizer_config.json, *.jinja over the
    chat_template.json of older processors. In JSON the value is one text or a list of named texts."""
    in_json = _named_templates(config.get("chat_template"))
    if (older := folder / "chat_template.json").is_file():
        in_json = _named_templates(_read_json(older).get("chat_template"))
        if not in_json:
            raise TokenizerError(f"{folder.name}/chat_template.json: chat_template must be a string or a list")
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()} or in_json


def _named_templates(value: Any) -> dict[str, str]:
    """Return the templates in a JSON value by name. Raises `TokenizerError` for a list entry without both texts."""
    if not isinstance(value, list):
        return {"default": value} if isinstance(value, str) else {}
    named = dict[str, str]()
    for at, entry in enumerate(value):
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise TokenizerError(f"chat_template[{at}]: {entry!r:.80}: name and template must be strings")
    return named
