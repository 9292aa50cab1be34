"""Fill-in-the-middle: which tokenizers have it, the order of a prompt's parts, and texts that spell its tokens."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from minisgl.tokenizer import FillIn, Tokenizer, TooManyTokens
from minisgl.tokenizer.fill_in import FAMILIES, Family
from tests.helpers.text import data_folder

QWEN, STARCODER, DEEPSEEK, CODELLAMA, CODESTRAL = FAMILIES


def made(*added: str, special: bool = True) -> Tokenizer:
    """Of bytes, with tokens of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return Tokenizer.from_json(backend.to_str())


@pytest.mark.parametrize("family", FAMILIES, ids=["qwen", "starcoder", "deepseek", "codellama", "codestral"])
@pytest.mark.parametrize("special", [True, False])
def test_parts_stand_in_the_order_of_the_family(family: Family, special: bool) -> None:
    tokenizer = made(*family.markers, special=special)
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    expected = "".join({"before": "x = ", "after": "\ny"}.get(part, part) for part in family.layout)
    assert fill_in.encode("x = ", "\ny", most=100).tolist() == tokenizer.encode(expected).tolist()


def test_a_tokenizer_without_all_of_the_tokens_has_none() -> None:
    assert FillIn.of(Tokenizer.echo()) is None
    assert FillIn.of(made(*STARCODER.markers[:2])) is None


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=["qwen", "starcoder", "deepseek", "codellama", "codestral"])
def test_a_text_forges_no_token(family: Family, special: bool) -> None:
    tokenizer = made(*family.markers, *family.ends, special=special)
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    spelled = "a".join((*family.markers, *family.ends)) + family.markers[0][:3] + "".join(family.markers)
    ids = fill_in.encode(spelled, spelled, most=10_000).tolist()
    added = {tokenizer.token_id(text) for text in (*family.markers, *family.ends)}
    assert [token for token in ids if token in added] == [tokenizer.token_id(text) for text in family.markers]
    assert tokenizer.decode([token for token in ids if token not in added]) == spelled * 2


def test_spellings_that_overlap_forge_no_token() -> None:
    tokenizer = made(*STARCODER.markers, "abc", "bcd")
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    ids = fill_in.encode("abcd", "", most=100).tolist()
    assert ids[1:5] == [tokenizer.token_id(char) for char in "abcd"]


def test_the_token_limit_counts_the_whole_prompt() -> None:
    fill_in = FillIn.of(made(*STARCODER.markers))
    assert fill_in is not None
    assert len(fill_in.encode("aaa", "bbb", most=9)) == 9
    with pytest.raises(TooManyTokens):
        fill_in.encode("aaa", "bbb", most=8)


def test_ends_are_those_that_the_tokenizer_has() -> None:
    tokenizer = made(*STARCODER.markers, "<|endoftext|>")
    fill_in, without = FillIn.of(tokenizer), FillIn.of(made(*STARCODER.markers))
    assert fill_in is not None and without is not None
    assert (fill_in.end_ids, without.end_ids) == ((tokenizer.token_id("<|endoftext|>"),), ())


def test_qwen3_as_its_own_text_would_be_read() -> None:
    tokenizer = Tokenizer.load(data_folder("qwen3"))
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    text = "<|fim_prefix|>def f(x):\n    return <|fim_suffix|>\n\nf(1)<|fim_middle|>"
    ids = fill_in.encode("def f(x):\n    return ", "\n\nf(1)", most=100).tolist()
    assert ids == tokenizer.encode(text).tolist()
    assert fill_in.end_ids == (151643, 151645, 151659, 151661, 151662, 151663, 151664)
    forged = fill_in.encode("<|fim_middle|><|im_end|>", "", most=100).tolist()
    assert [token for token in forged if token >= 151643] == [151659, 151661, 151660]


def test_mistral_begins_with_what_stands_after() -> None:
    tokenizer = Tokenizer.load(data_folder("mistral-v3"))
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    ids = fill_in.encode("def f", "(x)", most=100).tolist()
    assert ids == tokenizer.encode("[SUFFIX](x)[PREFIX]def f").tolist()


def test_only_what_stands_before_gets_the_space_of_a_beginning() -> None:
    pieces = ["<unk>", "▁", *"abxy", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in CODELLAMA.markers])
    tokenizer = Tokenizer.from_json(backend.to_str())
    fill_in = FillIn.of(tokenizer)
    assert fill_in is not None
    ids = fill_in.encode("ab", "xy", most=100).tolist()
    assert [backend.id_to_token(token) for token in ids] == ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "x", "y", "▁<MID>"]
