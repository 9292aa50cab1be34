"""Two texts as one prompt, as tokenizers of BERT and of RoBERTa say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from minisgl.frontend.pairs import JUDGED, SCORING, Pairs, judged, judging, score
from minisgl.tokenizer import Tokenizer
from tests.helpers.text import TEXTS, tokenizer_named
from tests.helpers.variants import CARD_PREFIX, CARD_SUFFIX

WORDS = {word: i for i, word in enumerate(["[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d"])}
CLS, SEP, A, B, C, D = 0, 1, 3, 4, 5, 6


def tokenizer(pair: str | None) -> Tokenizer:
    made = Library(models.WordLevel(WORDS, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
    if pair is not None:
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    return Tokenizer.from_json(made.to_str())


@pytest.mark.parametrize(
    ("pair", "between"), [("[CLS] $A [SEP] $B:1 [SEP]:1", [SEP]), ("[CLS] $A [SEP] [SEP] $B [SEP]", [SEP, SEP])]
)
def test_pairs_have_the_tokenizer_s_format(pair: str, between: list[int]) -> None:
    known = tokenizer(pair)
    pairs = Pairs.of(known)
    one, other = (known.encode(text, add_special_tokens=False) for text in ("c d", "d a b"))
    whole = [CLS, C, D, *between, D, A, B, SEP]
    assert pairs.prompt(one, other).tolist() == whole == known.encode_pair("c d", "d a b").tolist()
    assert pairs.prompt(one, other, len(whole)).tolist() == whole
    assert pairs.prompt(one, other, len(whole) - 2).tolist() == [CLS, C, D, *between, D, SEP]
    assert pairs.prompt(one, other, len(whole) - 4).tolist() == [CLS, C, *between, SEP]


def test_the_parts_of_what_is_judged_are_cut_where_the_tokenizer_cuts() -> None:
    """Beside Qwen3-Reranker's model card, which encodes both texts as one."""
    known = tokenizer_named("qwen3")

    def ids(text: str) -> list[int]:
        return known.encode(text, add_special_tokens=False).tolist()

    more = ("\u0301 a mark that joins", "\n\na line", "!?", ":", "..\n")
    for instruction, query, document in itertools.combinations((*TEXTS, *more), 3):
        texts = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        whole = [*ids(CARD_PREFIX), *ids(texts), *ids(CARD_SUFFIX)]
        one, other = (np.array(ids(text), np.int32) for text in judged(query, document))
        assert Pairs(ids(judging(instruction)), (), ids(JUDGED)).prompt(one, other).tolist() == whole, texts


def test_texts_that_nothing_stands_between_are_side_by_side() -> None:
    known = tokenizer(None)
    assert Pairs.of(known).prompt(np.array([C], np.int32), np.array([D], np.int32)).tolist() == [C, D]


def test_score_requests_return_the_head_s_output() -> None:
    assert SCORING.check().embedding == "score"
    assert score(np.array([0.5, -2.0], "<f4").tobytes()) == [0.5, -2.0]
