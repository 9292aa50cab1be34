"""The ids are those of the tokenizers library: whole texts, long ones in pieces, and parts from the cache."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from minisgl import envs
from minisgl._rust import TextTokenizer
from minisgl.tokenizer import Tokenizer, TokenizerError, TooManyTokens
from minisgl.tokenizer.echo import echo_json
from minisgl.tokenizer.tokenizer import FILE
from tests.helpers.text import REAL, TEXTS, data_folder, library, tokenizer_named

NAMES = (*REAL, "echo")
SPECIAL = {
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</think>", "<|im_", "<|im_start|"],
    "mistral-v3": ["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "<unk>", "[INST"],
    "echo": ["<|eos|>", "<|bos|>", "<|eos", "|>"],
}
WORDS = st.sampled_from(
    ["the", " of", "don't", " 12345", "\n", "\n\n", " ", "   ", "\t", "é", "漢字", "👩‍👩‍👧", "ﬁ", "́", "ा", "▁", "Ġ"]
)


@cache
def prompts() -> list[str]:
    data = envs.data_dir()
    if data is None:
        pytest.skip(f"{envs.DATA} is not set: no real prompts")
    lines = (data / "prompts" / "mt_bench_questions.jsonl").read_text(encoding="utf-8").splitlines()
    found = [turn for line in lines for turn in json.loads(line)["turns"]]
    lines = (data / "prompts" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    return found + [json.loads(line)["answer"] for line in lines[:200]]


def texts_of(name: str) -> st.SearchStrategy[str]:
    part = st.one_of(st.sampled_from(SPECIAL[name]), WORDS, st.text(max_size=8))
    return st.lists(part, max_size=12).map("".join)


def reference(one: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    return list(one.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
def test_ids_of_real_prompts(name: str, special: bool) -> None:
    for text in [*TEXTS, *(prompts() if name != "echo" else [])]:
        expected = reference(library(name), text, special)
        assert tokenizer_named(name).encode(text, special).tolist() == expected
        assert tokenizer_named(name).encode(text, special).tolist() == expected  # from the cache


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), special=st.booleans())
def test_ids_of_any_text(name: str, data: st.DataObject, special: bool) -> None:
    text = data.draw(texts_of(name))
    assert tokenizer_named(name).encode(text, special).tolist() == reference(library(name), text, special)


@cache
def forgetful(name: str) -> TextTokenizer:
    return TextTokenizer(text=library(name).to_str(), cache_bytes=1 << 13)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_conversation_that_grows_has_the_ids_of_the_whole(name: str, data: st.DataObject) -> None:
    """Whatever is known of its parts, in a cache that holds a few of them at most."""
    ours, text = forgetful(name), ""
    for part in data.draw(st.lists(texts_of(name), max_size=8)):
        text += data.draw(st.sampled_from(SPECIAL[name])) + part
        assert ours.encode(text, False).tolist() == reference(library(name), text, False)
    assert ours.cache_stats()["bytes_held"] <= 1 << 13


@pytest.mark.parametrize("name", NAMES)
def test_long_texts_have_the_reference_s_ids(name: str) -> None:
    choose = random.Random(1)
    source = prompts() if name != "echo" else ["some words here", "\n", "12 34"]
    for _ in range(3):
        text = " ".join(choose.choices(source, k=1200 if name != "echo" else 20_000))[:400_000]
        assert tokenizer_named(name).encode(text, False).tolist() == reference(library(name), text, False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("special", [True, False])
def test_too_many_tokens_is_an_error(name: str, special: bool) -> None:
    ours = tokenizer_named(name)
    for text in ["a b c d e f", SPECIAL[name][0] * 6, "a b" + SPECIAL[name][0] + "c d"]:
        count = len(reference(library(name), text, special))
        assert len(ours.encode(text, special, most=count)) == count
        with pytest.raises(TooManyTokens, match="tokens"):
            ours.encode(text, special, most=count - 1)


def test_a_next_turn_costs_its_new_part() -> None:
    ours = TextTokenizer(file=data_folder("qwen3") / FILE)
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in prompts()[:64]]
    ours.encode("".join(turns[:-1]), False)
    before = ours.cache_stats()
    ours.encode("".join(turns), False)
    after = ours.cache_stats()
    assert after["bytes_encoded"] - before["bytes_encoded"] <= len(turns[-1].encode())
    assert after["bytes_hit"] - before["bytes_hit"] >= len("".join(turns[:-1]).encode()) - 64 * 30


def test_threads_share_a_tokenizer_and_its_cache() -> None:
    ours, forgets = (TextTokenizer(text=echo_json(), cache_bytes=size) for size in (1 << 14, 0))
    texts = [f"<|bos|>{i % 17}<|eos|>{i % 40}" for i in range(1200)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: bytes(ours.encode(text, False)), texts))
    assert found == [bytes(forgets.encode(text, False)) for text in texts] and ours.cache_stats()["hits"] > 0
    assert forgets.cache_stats()["bytes_held"] == 0


def test_what_is_used_stays_in_a_cache_that_is_full() -> None:
    ours = TextTokenizer(text=echo_json(), cache_bytes=1 << 14)
    for number in range(2000):
        ours.encode("<|bos|>kept<|eos|>", False)
        ours.encode(f"<|bos|>passing {number}<|eos|>", False)
        assert ours.cache_stats()["bytes_held"] <= 1 << 14
    stats = ours.cache_stats()
    assert (stats["hits"], stats["misses"], stats["bytes_hit"]) == (1999, 2001, 1999 * 4)
    ours.encode("x" * (1 << 14), False)  # would take all of it
    assert ours.cache_stats()["bytes_held"] == stats["bytes_held"]


@pytest.mark.parametrize("name", NAMES)
def test_token_bytes_are_those_of_the_reference(name: str) -> None:
    """Against decoding them alone, where that is a text."""
    ours, theirs = tokenizer_named(name), library(name)
    assert ours.num_ids == max(theirs.get_vocab(with_added_tokens=True).values()) + 1
    assert ours.special_ids == {i for i, token in theirs.get_added_tokens_decoder().items() if token.special}
    for i in range(-2, ours.num_ids + 3, 7 if name != "echo" else 1):
        text = theirs.decode([i], skip_special_tokens=False) if i >= 0 else ""
        if "\ufffd" not in text and name != "mistral-v3":  # which strips a first space
            assert ours.token_bytes(i).decode() == text == ours.decode([i], skip_special_tokens=False)


# -------------------------------------------------------------------------------------------------- other tokenizers


def backend(**settings: Any) -> tokenizers.Tokenizer:
    """A small sentencepiece-like BPE with some of the parts that make cutting wrong or right."""
    letters = "abcdefghijklmnopqrstuvwxyz▁<>|. "
    vocab = {char: i for i, char in enumerate(letters)} | {f"<0x{i:02X}>": 64 + i for i in range(256)}
    merges = [("▁", "a"), ("a", "b"), ("b", "c")]
    for left, right in merges:
        vocab[left + right] = len(vocab) + 100
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, dropout=settings.get("dropout"))
    )
    if (normalizer := settings.get("normalizer")) is not None:
        made.normalizer = normalizer
    if (pre_tokenizer := settings.get("pre_tokenizer")) is not None:
        made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(settings.get("added", []))
    if settings.get("around"):
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>"))]
        )
    return made


KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (True, {}),
    "around": (True, {"around": True}),
    "prepend": (True, {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])}),
    "metaspace always": (True, {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")}),
    "metaspace never": (True, {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never", split=False)}),
    "metaspace first": (False, {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")}),
    "first, inside a sequence": (
        False,
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
            )
        },
    ),
    "lowercase": (True, {"normalizer": normalizers.Lowercase()}),
    "strip": (True, {"normalizer": normalizers.Strip()}),
    "bytes": (True, {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}),
    "takes spaces": (False, {"added": [AddedToken("<x>", lstrip=True, normalized=False)]}),
    "single word": (False, {"added": [AddedToken("ab", single_word=True, normalized=False)]}),
    "normalized": (True, {"added": [AddedToken("ab", normalized=True)], "normalizer": normalizers.Lowercase()}),
    "within each other": (True, {"added": [AddedToken("<s>a", normalized=False), AddedToken("s>", normalized=False)]}),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<s>", "</s>", "<x>", "ab", "AB", " ", "a", "s>", "b c", "é", ".", "1"]), max_size=14
    ),
    special=st.booleans(),
)
def test_other_tokenizers_have_the_reference_s_ids(kind: str, parts: list[str], special: bool) -> None:
    """With a cache where it is exact, without one where it is not."""
    theirs, ours = both(kind)
    assert ours.caches == KINDS[kind][0]
    text = "".join(parts)
    for _ in range(2):
        assert ours.encode(text, special).tolist() == reference(theirs, text, special)


@cache
def both(kind: str) -> tuple[tokenizers.Tokenizer, TextTokenizer]:
    theirs = backend(**KINDS[kind][1])
    return theirs, TextTokenizer(text=theirs.to_str())


def test_a_broken_tokenizer_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_json("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        TextTokenizer(file="/nowhere/tokenizer.json")
