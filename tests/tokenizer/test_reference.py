"""The text path in Python is the reference: the one in Rust gives the same ids, the same pieces of text and the same
stops, on real tokenizers and on small ones of each kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from minisgl import _rust
from minisgl.tokenizer import NotEncodable, TooManyTokens
from minisgl.tokenizer.echo import echo_json
from minisgl.tokenizer.reference import ReferenceDecoder, ReferenceTokenizer
from minisgl.tokenizer.tokenizer import FILE
from minisgl.utils.installed import find_smollm2
from minisgl.weights.gguf_folder import gguf_folder
from tests.helpers.text import TEXTS, data_folder

if TYPE_CHECKING:
    from minisgl._rust import TextDecoder

CASES = 60
"""Texts or streams of ids for each seed."""
BEYOND = (-1, 2**18, 2**31 - 1)
"""Ids that no vocabulary here has: models pad their embeddings."""


def small(decoder: decoders.Decoder | None) -> str:
    """Words and bytes, with special tokens around each text, in no real model's way."""
    words = ["<unk>", "the", "##se", "▁a", "b▁", "字", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<think>"])
    around = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", around)
    return str(backend.to_str())


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
)
SMALL: dict[str, Callable[[], str]] = {
    "echo": echo_json,
    "llama": lambda: small(LLAMA),
    "metaspace": lambda: small(decoders.Metaspace()),
    "wordpiece": lambda: small(decoders.WordPiece()),
    "byte fallback in a window": lambda: small(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    "none": lambda: small(None),
}
NAMES = (*SMALL, "smollm2", "qwen3", "mistral-v3")
"""Of these the last two skip without MINISGL_DATA."""


@cache
def both(name: str) -> tuple[ReferenceTokenizer, _rust.TextTokenizer]:
    if name in SMALL:
        text = SMALL[name]()
        return ReferenceTokenizer(text=text), _rust.TextTokenizer(text=text)
    folder = gguf_folder(find_smollm2()) if name == "smollm2" else data_folder(name)
    return ReferenceTokenizer(folder / FILE), _rust.TextTokenizer(folder / FILE)


@cache
def troublesome(name: str) -> list[int]:
    """Ids of bytes and single characters, and of all added tokens."""
    backend = both(name)[0].backend
    short = [i for token, i in backend.get_vocab().items() if len(token) == 1 or token.startswith("<0x")]
    return sorted({*short, *backend.get_added_tokens_decoder()})


def some_ids(name: str, rng: random.Random) -> list[int]:
    def one() -> int:
        kind = rng.random()
        if kind < 0.05:
            return rng.choice(BEYOND)
        return rng.choice(troublesome(name)) if kind < 0.7 else rng.randrange(both(name)[0].num_ids)

    return [one() for _ in range(rng.randrange(40))]


def some_text(name: str, rng: random.Random) -> str:
    """Parts of real texts, added tokens and characters of all planes, next to each other."""
    added = [token.content for token in both(name)[0].backend.get_added_tokens_decoder().values()]

    def one() -> str:
        kind = rng.random()
        if kind < 0.4:
            text = rng.choice(TEXTS)
            return text[rng.randrange(len(text) + 1) :][: rng.randrange(20)]
        if kind < 0.6 and added:
            return rng.choice(added)
        chars = (
            chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000)))) for _ in range(4)
        )
        return "".join(char for char in chars if not 0xD800 <= ord(char) < 0xE000)

    return "".join(one() for _ in range(rng.randrange(8)))


def chunks(ids: Sequence[int], rng: random.Random) -> list[list[int]]:
    found, at = [], 0
    while at < len(ids):
        size = rng.choice((1, 1, 2, 7))
        found.append(list(ids[at : at + size]))
        at += size
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_means_the_same(name: str) -> None:
    ours, theirs = both(name)
    assert ours.num_ids == theirs.num_ids and list(ours.special_ids) == list(theirs.special_ids)
    assert ours.leading_ids.tolist() == theirs.leading_ids.tolist()
    for i in (*range(ours.num_ids), *BEYOND):
        assert ours.token_bytes(i) == theirs.token_bytes(i), i
    for text in ("<s>", "</s>", "a", "the", "nothing like it"):
        assert ours.token_id(text) == theirs.token_id(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_texts_have_the_same_ids(name: str, seed: int, times: int) -> None:
    ours, theirs = both(name)
    rng = random.Random(f"ids {name} {seed}")
    for _ in range(CASES * times):
        text, other, special = some_text(name, rng), some_text(name, rng), rng.random() < 0.5
        ids = ours.encode(text, special)
        assert ids.dtype == theirs.encode(text, special).dtype
        assert ids.tolist() == theirs.encode(text, special).tolist(), repr(text)
        assert ours.encode_pair(text, other).tolist() == theirs.encode_pair(text, other).tolist(), repr((text, other))
        both_ids = [ids.tolist(), theirs.encode(other, special).tolist()]
        for one in (ours, theirs):
            assert [found.tolist() for found in one.encode_batch([text, other], special)] == both_ids
        skip = rng.random() < 0.5
        assert ours.decode(ids.tolist(), skip) == theirs.decode(ids.tolist(), skip)
        for one in (ours, theirs):
            assert one.encode(text, special, len(ids)).tolist() == ids.tolist()
            if len(ids):
                with pytest.raises(TooManyTokens):
                    one.encode(text, special, len(ids) - 1)


def pieces(decoder: ReferenceDecoder | TextDecoder, parts: Sequence[list[int]]) -> list[object]:
    return [*map(decoder.push, parts), decoder.flush()]


def places(decoder: ReferenceDecoder | TextDecoder, ids: Sequence[int]) -> list[object]:
    return [*map(decoder.place, ids), decoder.flush()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_streams_give_the_same_pieces(name: str, seed: int, times: int) -> None:
    ours, theirs = both(name)
    rng = random.Random(f"pieces {name} {seed}")
    for _ in range(CASES * times):
        ids, skip = some_ids(name, rng), rng.random() < 0.5
        parts = chunks(ids, rng)
        assert pieces(ours.decoder(skip), parts) == pieces(theirs.decoder(skip), parts), parts
        assert places(ours.decoder(skip), ids) == places(theirs.decoder(skip), ids), ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_streams_stop_at_the_same_place(name: str, seed: int, times: int) -> None:
    ours, theirs = both(name)
    rng = random.Random(f"stops {name} {seed}")
    num_stopped = 0
    for _ in range(CASES * times):
        ids = some_ids(name, rng)
        text = ours.decode(ids)
        begins = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(4))]
        stops = [text[at : at + rng.randrange(6)] + rng.choice(("", "", "x")) for at in begins]
        shown = rng.sample(list(ours.special_ids), min(len(ours.special_ids), rng.randrange(3)))
        min_tokens, by_token = rng.choice((0, 0, 1, 2, rng.randrange(40))), rng.random() < 0.5
        *parts, last = [*chunks(ids, rng), *([[]] if not ids or rng.random() < 0.3 else [])]
        takes = [*((part, False, False) for part in parts), (last, True, by_token)]
        said = takes, stops, shown, min_tokens
        streams = [one.stream(stops, shown, min_tokens) for one in (ours, theirs, ours, theirs, theirs)]
        mine, other, *pushed, whole = streams
        found, same = ([(*one.take(*what), one.matched_stop) for what in takes] for one in (mine, other))
        assert found == same and mine.stopped == other.stopped, said
        text, num_used = whole.take(ids, True, by_token and last != [])
        assert ("".join(one for one, _, _ in found), sum(used for _, used, _ in found)) == (text, num_used), said
        assert whole.matched_stop == mine.matched_stop, said
        assert [*map(pushed[0].push, parts)] == [*map(pushed[1].push, parts)], said
        num_stopped += mine.stopped
    assert num_stopped > 5


def test_what_cannot_be_encoded_is_an_error_of_both() -> None:
    text = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token=None)).to_str()
    for one in (ReferenceTokenizer(text=text), _rust.TextTokenizer(text=text)):
        for guards in ((), (1,)):
            with pytest.raises(NotEncodable, match=r"^the tokenizer has no ids for it: .*Missing"):
                one.encode("bb", guards=guards)
        with pytest.raises(UnicodeEncodeError):
            one.encode("\ud800")
    for kind in (ReferenceTokenizer, _rust.TextTokenizer):
        with pytest.raises(ValueError, match="the tokenizer cannot be read"):
            kind(text="{}")
