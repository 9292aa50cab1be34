"""Long texts: how few tokens they can have, and ids piece by piece, against encoding the whole.

No tokenizer here gives a text fewer tokens than its bound says, nor other ids in pieces.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minisgl.tokenizer import Tokenizer, TooManyTokens
from tests.helpers.text import REAL, echo_library, library

CORPUS = [
    "the cat sat on the mat and it's the best, don't you think so?",
    "aaaa bbbb      12345",
    "Übung\n\n\nüber é…",
] * 3
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(regex: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), byte_level])


PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "prefix-space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "qwen": split(QWEN),
    "llama": split(LLAMA),
    "o200k": split(O200K),
}
CUT = [f"{name}{'-nfc' if nfc else ''}" for name in PRE_TOKENIZERS for nfc in (False, True)]


@functools.cache
def backend(name: str) -> tokenizers.Tokenizer:
    """A tokenizer trained on a few words, with special tokens around a text and one within."""
    if name in REAL:
        return library(name)
    kind = name.removesuffix("-nfc")
    if kind == "bytes":
        return echo_library()
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = PRE_TOKENIZERS[kind]
    found.decoder = decoders.ByteLevel()
    if name.endswith("-nfc"):
        found.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "<end>"])
    found.train_from_iterator(CORPUS, trainer)
    found.add_tokens(["fun"])
    template = processors.TemplateProcessing(single="<s> $A <end>", special_tokens=[("<s>", 0), ("<end>", 1)])
    found.post_processor = template
    return found


@functools.cache
def ours(name: str) -> Tokenizer:
    return of(backend(name))


def of(one: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.from_json(one.to_str())


def text_of_bits() -> st.SearchStrategy[str]:
    bits = [
        "a",
        "e",
        "the",
        " the",
        "cat ",
        " ",
        "  ",
        "\n",
        "\t",
        "'s",
        "'",
        "12",
        "9",
        ".",
        ",",
        "é",
        "e\u0301",
        "fun",
    ]
    bits += [
        "\u0323\u0307",
        "\u212b",
        "\u1100\u1161\u11a8",
        "字",
        "😀",
        "<s>",
        "<end>",
        "\u00a0",
        "\u3000",
        "x y",
        "\r\n",
    ]
    return st.lists(st.one_of(st.sampled_from(bits), st.text(max_size=3)), max_size=60).map("".join)


@pytest.mark.parametrize("name", [*CUT, *(name for name in REAL if name != "mistral-v3")])
@settings(max_examples=60, deadline=None)
@given(text=text_of_bits(), size=st.integers(2, 12))
def test_pieces_have_the_ids_of_the_whole(name: str, text: str, size: int) -> None:
    whole = backend(name)
    found = ours(name).text.pieces(text, size)
    assert "".join(found) == text
    ids = [token for piece in found for token in whole.encode(piece, add_special_tokens=False).ids]
    assert ids == whole.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["bytes", *CUT, *REAL])
@settings(max_examples=60, deadline=None)
@given(text=text_of_bits(), repeat=st.integers(1, 5))
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str, repeat: int) -> None:
    least = ours(name).text.min_tokens(text * repeat, 0)
    assert least <= len(backend(name).encode(text * repeat, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", [*CUT, *REAL])
def test_which_tokenizers_may_be_fed_in_pieces(name: str) -> None:
    assert cuts(ours(name)) is (name != "mistral-v3")


def cuts(tokenizer: Tokenizer) -> bool:
    return len(tokenizer.text.pieces("the cat and the mat", 2)) > 1


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen-nfc"])
def test_a_long_text_has_the_same_ids_and_stops_at_the_limit(name: str, special: bool) -> None:
    tokenizer = ours(name)
    text = "the cat and the mat, fun isn't it? <end> 12 e\u0301 " * 4000
    expected = backend(name).encode(text, add_special_tokens=special).ids
    assert tokenizer.encode(text, special, most=len(expected)).tolist() == expected
    texts = [text, "a b", text[:50], text]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, special)] == [
        backend(name).encode(one, add_special_tokens=special).ids for one in texts
    ]
    plain = text.replace("<end>", "end")
    count = len(backend(name).encode(plain, add_special_tokens=special).ids)
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(plain, special, most=count // 2)
    assert caught.value.at_least and count // 2 < caught.value.count < count * 3 / 4


def test_a_short_text_is_counted_to_its_end() -> None:
    text = "the cat <end> and the mat " * 9
    count = len(backend("gpt2").encode(text).ids)
    with pytest.raises(TooManyTokens) as caught:
        ours("gpt2").encode(text, most=count - 5)
    assert (caught.value.count, caught.value.at_least) == (count, False)


@pytest.mark.parametrize("text", [" " * 100_000, "a" * 100_000, "😀" * 25_000, "a, " * 33_000])
@pytest.mark.parametrize("name", ["bytes", "gpt2", "qwen-nfc"])
def test_a_text_that_cannot_fit_is_not_encoded(name: str, text: str) -> None:
    tokenizer = ours(name)
    before = tokenizer.text.cache_stats()["bytes_encoded"]
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(text, most=1000)
    assert caught.value.at_least and 1000 < caught.value.count <= len(backend(name).encode(text).ids)
    assert tokenizer.text.cache_stats()["bytes_encoded"] == before
    with pytest.raises(TooManyTokens):
        tokenizer.encode_batch(["a", text], most=1000)


def no_bound() -> dict[str, tokenizers.Tokenizer]:
    vocab = {"<unk>": 0, "a": 1, "<0x61>": 2}
    word = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    drops = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fused = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True))
    strips = echo_library()
    strips.normalizer = normalizers.Strip()
    removes = echo_library()
    removes.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), removes.pre_tokenizer])
    return {"words": word, "drops": drops, "fused": fused, "strips": strips, "removes": removes}


@pytest.mark.parametrize("name", list(no_bound()))
def test_a_tokenizer_that_can_drop_text_has_no_bound(name: str) -> None:
    assert of(no_bound()[name]).text.min_tokens("a" * 1000, 0) == 0


def test_bytes_that_a_vocabulary_lacks_do_not_count() -> None:
    """Published ones leave out bytes that no text of theirs had; what is written with them has no token."""
    vocab = {"a": 0, "b": 1, "ab": 2, "Ġ": 3}
    one = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text, least in (("ab" * 500, 500), ("abc" * 500, 500), ("c" * 1000, 0), (" " * 9 + "zzz", 9)):
        assert of(one).text.min_tokens(text, 0) == least <= len(one.encode(text).ids)


def test_a_token_that_takes_spaces_along_has_no_bound() -> None:
    one = echo_library()
    one.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    text = "a" + " " * 50 + "<mask>"
    assert of(one).text.min_tokens(text, 0) == 0 and len(one.encode(text).ids) == 2
    assert of(one).text.min_tokens(text[:-1], 0) == 50


def test_one_unknown_token_a_character() -> None:
    one = tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>"))
    for text in ("😀" * 9, "a" * 9, "b " * 9):
        assert 0 < of(one).text.min_tokens(text, 0) <= len(one.encode(text).ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.add_tokens(["end of"]),
        lambda one: one.add_tokens([AddedToken("x", rstrip=True)]),
        lambda one: one.add_tokens([AddedToken("x", single_word=True)]),
        lambda one: setattr(one, "normalizer", normalizers.Prepend("_")),
        lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False)),
        lambda one: setattr(one, "pre_tokenizer", split(r"\p{L}+ \p{L}+|\s+")),
    ],
)
def test_where_a_cut_could_change_ids_there_is_none(change: Any) -> None:
    one = tokenizers.Tokenizer.from_str(backend("gpt2").to_str())
    assert cuts(of(one))
    change(one)
    assert not cuts(of(one))
