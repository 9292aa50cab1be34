"""Tokenizers for the tests of the text path, and reference models of whole texts to compare streams with.

The models look at the whole text at once and share no code with what they check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from minisgl import envs
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.echo import echo_json
from minisgl.tokenizer.tokenizer import FILE

REAL = ("qwen3", "mistral-v3")
TEXTS = (
    "The capital of France is Paris.",
    "  leading, trailing and   many spaces \n\n\t tabs  ",
    "漢字とかな、한국어, ภาษาไทย, עברית, हिन्दी, བོད་ཡིག, ᚠᛇᚻ",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇪🇺 é é Å ﬁ ﷽",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒁀 🂡 \U000e0041 \u200b\u200d\ufeff \ufffd�",
    "def f(x):\n\treturn {'a': [1, 2.5, 12345]}  # <tool_call> </think>",
    "<s>[INST] not special? [/INST]</s> <|im_end|> <0x41> ▁ Ġ",
    "",
)


def data_folder(name: str) -> Path:
    """Return tokenizers/NAME of the test data; skips the test without it."""
    data = envs.data_dir()
    if data is None:
        pytest.skip(f"{envs.DATA} is not set: no real tokenizers")
    return data / "tokenizers" / name


@cache
def _loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


_echo = cache(Tokenizer.echo)


def tokenizer_named(name: str) -> Tokenizer:
    return _echo() if name == "echo" else _loaded(data_folder(name))


@cache
def library(name: str) -> tokenizers.Tokenizer:
    """Return the tokenizers library's own object."""
    return echo_library() if name == "echo" else tokenizers.Tokenizer.from_file(str(data_folder(name) / FILE))


def echo_library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(echo_json())


def spells_byte(name: str, token_id: int) -> bool:
    """Return true if the id is a byte token of a sentencepiece tokenizer."""
    token = library(name).id_to_token(token_id) if token_id >= 0 else None
    return name != "echo" and token is not None and _is_byte(token)


@cache
def special_ids(name: str) -> list[int]:
    return sorted(i for i, token in library(name).get_added_tokens_decoder().items() if token.special)


@cache
def _loaded_by_transformers(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def reference_tokenizer(name: str) -> Any:
    """Return the tokenizer that transformers loads from the same files."""
    return _loaded_by_transformers(data_folder(name))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), skip: bool = True) -> str:
    """Decode `ids` as a stream, in chunks that end at `cuts`, or one by one."""
    decoder = tokenizer.new_decoder(skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)] if cuts else range(len(ids) + 1)
    deltas = [decoder.push(ids[a:b]) for a, b in pairwise(edges)]
    return "".join(deltas) + decoder.flush()


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first (of several, begins first), and that stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def decode_byte_fallback(tokens: Sequence[str | None]) -> str:
    """Return the documented text of sentencepiece tokens (`None`: no text): valid characters at the beginning of a run
    of bytes are kept, the rest of an invalid run becomes one U+FFFD a byte."""
    spelled = "".join(
        token.replace("\u2581", " ") if not _is_byte(token) else f"\0{token[3:5]}" for token in tokens if token
    )
    return re.sub(r"(?:\0..)+", lambda run: _run_text(bytes.fromhex(run[0].replace("\0", ""))), spelled)


def _is_byte(token: str) -> bool:
    return re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None


def _run_text(run: bytes) -> str:
    for valid in range(len(run), -1, -1):
        try:
            return run[:valid].decode() + "\ufffd" * (len(run) - valid)
        except UnicodeDecodeError:
            continue
    raise AssertionError("the empty run is valid")
