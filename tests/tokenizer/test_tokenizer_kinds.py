"""Which decoder a tokenizer gets, on small tokenizers of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minisgl.tokenizer import Tokenizer
from tests.helpers.text import streamed

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁the", "▁a", "b", "字", "▁▁", "<0x4", "é"]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def tokenizer_of(tokens: list[str], decoder: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer.from_json(backend.to_str())


LITERAL = {
    "llama": LLAMA,
    "nested": decoders.Sequence([decoders.Sequence([decoders.Replace("▁", " ")]), LLAMA]),
    "metaspace": decoders.Metaspace(prepend_scheme="never"),
    "metaspace always": decoders.Metaspace(prepend_scheme="always"),
}


@pytest.mark.parametrize("kind", LITERAL)
def test_sentencepiece_in_a_text_that_goes_on(kind: str) -> None:
    """Only the very first space of a text is stripped, so behind another word nothing is."""
    tokenizer = tokenizer_of([*PIECES, *BYTES], LITERAL[kind])
    word = PIECES.index("b")

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, len(PIECES) + 2), max_size=12))
    def check(ids: list[int]) -> None:
        ids = [i if i < len(PIECES) else len(PIECES) + 0x41 + i for i in ids]  # some bytes, all of them ASCII
        assert "b" + streamed(tokenizer, ids) == tokenizer.decode([word, *ids])

    check()


def test_only_a_byte_fallback_reads_byte_tokens() -> None:
    assert streamed(tokenizer_of(BYTES, decoders.Metaspace()), [0x41]) == "<0x41>"
    assert streamed(tokenizer_of(BYTES, LLAMA), [0x41]) == "A"


def test_an_invalid_byte_leaves_delivered_characters_alone() -> None:
    """The one place where the stream differs from the whole text, which judges a run of bytes in hindsight."""
    tokenizer = tokenizer_of([*BYTES, "b"], LLAMA)
    ids = [*"字".encode(), 0xFF, *"字".encode(), 256]
    assert tokenizer.decode(ids) == "\ufffd" * 7 + "b"
    assert streamed(tokenizer, ids) == "字" + "\ufffd" * 4 + "b"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("▁+"), " "), decoders.Fuse()]),
        None,
    ],
)
def test_other_decoders_get_a_window(decoder: Any) -> None:
    tokens = ["the", "##se", "▁a", "b▁", "字"]
    tokenizer = tokenizer_of(tokens, decoder)
    ids = [0, 1, 2, 3, 4, 99, 0, 1] * 3
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_a_window_stays_short() -> None:
    """The work for an id does not grow with the text, also where it all looks unfinished: else this takes minutes."""
    tokenizer = tokenizer_of(["\ufffd", "b"], decoders.WordPiece())
    ids = [0] * 5000 + [1] * 5000
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_an_added_token_of_a_byte_level_tokenizer_is_its_own_text() -> None:
    """Added tokens are not spelled in the alphabet of bytes."""
    backend = tokenizers.Tokenizer(models.WordLevel({"Ġa": 0, "å": 1, "ŃĹ": 2}, unk_token="Ġa"))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["<｜user｜>", "two words"])
    backend.add_special_tokens(["<｜end▁of▁text｜>"])
    tokenizer = Tokenizer.from_json(backend.to_str())
    ids = [0, 3, 1, 2, 4, 5]
    assert streamed(tokenizer, ids) == " a<｜user｜>字two words"
    assert streamed(tokenizer, ids, skip=False) == tokenizer.decode(ids, skip_special_tokens=False)
