"""A model's tokenizer: files to object, text to ids, ids to text.

Invariants: the same ids as transformers gives for the same files; safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from minisgl.config import ConfigError
from minisgl.step import Int32Array
from minisgl.tokenizer.bounds import PIECE_CHARS, TokenBound, can_cut, pieces
from minisgl.tokenizer.chat_template import ChatTemplate, ChatTemplateError, ContentShape, Message
from minisgl.tokenizer.decode import DecodeTable, IncrementalDecoder, special_ids
from minisgl.tokenizer.echo import ECHO_BOS, ECHO_CHAT_TEMPLATE, ECHO_EOS, echo_tokenizer


class TokenizerError(ConfigError):
    """Files that are missing or cannot be read; the text says what to do."""


_NO_IDS: Int32Array = np.zeros(0, np.int32)
_WORD = re.compile(rb" [a-z]{2,}")


def _silent(line: str) -> None:
    pass


class NotEncodable(ValueError):
    """A text that is not Unicode (lone surrogates), or has a character that is not in the vocabulary of a tokenizer
    without a token for unknown ones."""


class TooManyTokens(ValueError):
    """A text that has more tokens than its caller can use: as many as `count`, or more if it was not counted to its
    end."""

    def __init__(self, count: int, *, at_least: bool = False) -> None:
        super().__init__(f"{'at least ' if at_least else ''}{count} tokens")
        self.count = count
        self.at_least = at_least


class Tokenizer:
    """Use `open`, `load` or `echo`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | Callable[[], tokenizers.Tokenizer],
        special_tokens: dict[str, str],
        chat_templates: Mapping[str, str],
        file: Path | None = None,
    ) -> None:
        self._given = backend  # or what loads it
        self._loading = threading.Lock()
        self.file = file
        """The tokenizer.json that it is read from, if it is."""
        self.special_tokens = special_tokens
        self._chat_templates = {name: ChatTemplate(text, special_tokens) for name, text in chat_templates.items()}

    @classmethod
    def open(
        cls,
        model_dir: str | Path | None,
        chat_template: str | None = None,
        say: Callable[[str], None] = _silent,
        *,
        lazy: bool = False,
    ) -> Tokenizer:
        """`load`, or `echo` without a folder; `chat_template` (its text) takes the place of all of theirs."""
        found = cls.echo() if model_dir is None else cls.load(model_dir, say, lazy=lazy)
        if chat_template is not None:
            found._chat_templates = {"default": ChatTemplate(chat_template, found.special_tokens)}
        return found

    @classmethod
    def load(cls, model_dir: str | Path, say: Callable[[str], None] = _silent, *, lazy: bool = False) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and the chat templates' files of a model folder. A tokenizer.json
        that is not there is made of what is, once; `say` is told if that takes a moment.

        As in transformers, tokenizer.json alone says which special tokens `encode` adds. Raises `TokenizerError`; with
        `lazy`, whoever first needs the vocabulary waits for tokenizer.json, and hears what is wrong with it.
        """
        folder = Path(model_dir)
        source = folder if (folder / "tokenizer.json").is_file() else _converted(folder, say)
        file = source / "tokenizer.json"
        named = _special_tokens(source, _read_json(source / "tokenizer_config.json"))
        templates = _chat_templates(folder, _read_json(folder / "tokenizer_config.json"))
        found = cls(lambda: _read_backend(file, folder.name), named, templates, file)
        if not lazy:
            _ = found._backend
        return found

    @classmethod
    def echo(cls) -> Tokenizer:
        """The built-in byte tokenizer of the echo engine."""
        return cls(echo_tokenizer(), {"bos_token": ECHO_BOS, "eos_token": ECHO_EOS}, {"default": ECHO_CHAT_TEMPLATE})

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        found = self._given
        if isinstance(found, tokenizers.Tokenizer):
            return found
        with self._loading:
            if not isinstance(self._given, tokenizers.Tokenizer):
                self._given = self._given()
            return self._given

    @cached_property
    def _table(self) -> DecodeTable:
        return DecodeTable(self._backend)

    def templates(self) -> Iterator[tuple[str, str, ContentShape]]:
        """Name, source and shape of each chat template that parses."""
        for name, template in self._chat_templates.items():
            with contextlib.suppress(ChatTemplateError):
                yield name, template.source, template.content_shape

    def to_json(self) -> str:
        """As the text of a tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> Int32Array:
        """Ids of `text`, [n] int32. Raises `NotEncodable`, and `TooManyTokens` for a text of more than `most`. What
        that takes in memory is bounded where the text can be cut, and where it cannot, by `most` if the tokenizer has a
        `TokenBound`."""
        self.check_length(text, most)
        around: tuple[Int32Array, Int32Array] | None = (_NO_IDS, _NO_IDS)
        if add_special_tokens and len(text) > PIECE_CHARS:
            around = self._special_ids
        if len(text) <= PIECE_CHARS or not self._can_cut or around is None:
            return self._encode_whole([text], add_special_tokens, most)[0]
        before, after = around
        found, count = [before], len(before) + len(after)
        for piece in pieces(text, PIECE_CHARS):
            found.append(self._encode_whole([piece], False, None)[0])
            count += len(found[-1])
            if most is not None and count > most:
                raise TooManyTokens(count, at_least=True)
        return np.concatenate([*found, after])

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, most: int | None = None
    ) -> list[Int32Array]:
        """`encode` of each, as many in parallel as together are no longer than a piece."""
        for text in texts:
            self.check_length(text, most)
        found: list[Int32Array] = []
        batch: list[str] = []
        num_chars = 0
        for text in texts:
            if batch and num_chars + len(text) > PIECE_CHARS:
                found += self._encode_whole(batch, add_special_tokens, most)
                batch, num_chars = [], 0
            if len(text) > PIECE_CHARS:
                found.append(self.encode(text, add_special_tokens, most=most))
            else:
                batch.append(text)
                num_chars += len(text)
        return found + self._encode_whole(batch, add_special_tokens, most) if batch else found

    def check_length(self, text: str, most: int | None) -> None:
        """Raise `TooManyTokens` if it is certain without encoding that `text` has more than `most`."""
        if most is None or len(text) * 4 <= most or self.bound is None:
            return
        if (count := self.bound.min_tokens(text, most)) > most:
            raise TooManyTokens(count, at_least=True)

    def _encode_whole(self, texts: list[str], add_special_tokens: bool, most: int | None) -> list[Int32Array]:
        """Other threads run meanwhile: of the library's calls only this one releases the GIL; it keeps neither token
        strings nor offsets, and ids that nobody can use do not become Python objects."""
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _not_text("".join(texts), error) from error
        except Exception as error:  # the library raises the bare class
            raise NotEncodable(f"the tokenizer has no ids for it: {error}") from error
        if most is not None and (longest := max(map(len, found), default=0)) > most:
            raise TooManyTokens(longest)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def prepare(self) -> None:
        """Find out what streams and long texts need to know. Without it the first of them pays."""
        _ = self._table, self.bound, self._can_cut, self._special_ids

    @cached_property
    def bound(self) -> TokenBound | None:
        """How few tokens a text can have."""
        return TokenBound.of(self._backend)

    @cached_property
    def _can_cut(self) -> bool:
        return can_cut(self._backend)

    @property
    def leading_ids(self) -> Int32Array:
        """Special tokens before any text, such as the one of its beginning."""
        return _NO_IDS if self._special_ids is None else self._special_ids[0]

    @cached_property
    def _special_ids(self) -> tuple[Int32Array, Int32Array] | None:
        """What stands before and after any text with special tokens; None if they are not simply around it."""
        [plain], [around] = (self._encode_whole(["a"], special, None) for special in (False, True))
        at = around.tolist().index(plain[0]) if len(plain) and plain[0] in around else len(around)
        before, same, after = np.split(around, [at, at + len(plain)])
        return (before, after) if len(same) and np.array_equal(same, plain) else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of `ids`; ids beyond the vocabulary are no text."""
        return str(self._backend.decode([i for i in ids if i >= 0], skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for in a text, special tokens included: maybe a part of a character."""
        return self._table.bytes_of(token_id)

    @property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return self._table.num_ids

    def word_ids(self, count: int) -> Int32Array:
        """The first `count` ids that stand for a space and a lower-case ASCII word; all ids if there are none."""
        words = (i for i in range(self.num_ids) if _WORD.fullmatch(self.token_bytes(i)))
        found = np.fromiter(itertools.islice(words, count), np.int32)
        return found if len(found) else np.arange(self.num_ids, dtype=np.int32)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled so in the vocabulary."""
        return self._backend.token_to_id(text)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text. They are known without the table, which a server whose gateway decodes never makes."""
        return special_ids(self._backend)

    def new_decoder(self, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()) -> IncrementalDecoder:
        """`shown`: special tokens that are not skipped in any case."""
        return self._table.new_stream(skip_special_tokens, shown)

    def _template(self, tools: bool) -> ChatTemplate | None:
        return self._chat_templates.get("tool_use" if tools and "tool_use" in self._chat_templates else "default")

    def template_source(self, *, tools: bool = False) -> str:
        """The source of the chat template for requests with or without tools; empty without one."""
        template = self._template(tools)
        return "" if template is None else template.source

    def template_variables(self, *, tools: bool = False) -> frozenset[str]:
        """That it asks for; none if it does not parse."""
        template = self._template(tools)
        with contextlib.suppress(ChatTemplateError):
            return frozenset() if template is None else template.variables
        return frozenset()

    def apply_chat_template(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """See `ChatTemplate.render`. Encode the result with `add_special_tokens=False`: it has them already."""
        template = self._template(bool(tools))
        if template is None:
            others = f" named default, only {', '.join(sorted(self._chat_templates))}" if self._chat_templates else ""
            how = "use /v1/completions, or give one with --chat-template"
            raise ChatTemplateError(f"this model has no chat template{others}: {how}")
        return template.render(messages, tools=tools, **kwargs)


def _read_backend(file: Path, name: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise TokenizerError(f"{name}/{file.name}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _not_text(text: Any, error: TypeError) -> Exception:
    """The library says the same of a lone surrogate as of something that is no string."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return NotEncodable("the text is not valid Unicode: it has a lone surrogate")
    except AttributeError:
        pass
    return error


def _converted(folder: Path, say: Callable[[str], None]) -> Path:
    from minisgl.tokenizer import convert

    found = convert.sources(folder)
    if not found:
        raise TokenizerError(f"{folder.name}: no tokenizer.json, and no files that one could be made of")
    try:
        return convert.converted(folder, say)
    except convert.NoConversion as error:
        raise TokenizerError(
            f"{folder.name}: no tokenizer.json, and transformers makes none of {', '.join(found)}: {error}"
        ) from error


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


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens (bos_token, eos_token, a model's own). The older special_tokens_map.json is asked where
    the configuration does not list its added tokens, and then wins."""
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_json(folder / "special_tokens_map.json")}
    named = {name: _token_text(token) for name, token in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files win over tokenizer_config.json, *.jinja over the chat_template.json of older processors. In JSON
    it is one text or a list of named texts."""
    in_json = _named_templates(config.get("chat_template"))
    if (older := folder / "chat_template.json").is_file():
        in_json = _named_templates(_read_json(older).get("chat_template"))
        if not in_json:
            raise TokenizerError(f"{folder.name}/chat_template.json: has no text or list as chat_template")
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()} or in_json


def _named_templates(found: Any) -> dict[str, str]:
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if isinstance(found, str) else {}
