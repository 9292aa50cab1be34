"""Tokenizers of GGUF files beside llama.cpp's own: random texts of all scripts, the same ids."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import sentencepiece
import tokenizers
from gguf import GGUFWriter
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, normalizers, pre_tokenizers, trainers

from minisgl.tokenizer.echo import char_to_byte
from minisgl.weights.gguf_config import Fields
from minisgl.weights.gguf_tokenizer import PRE, tokenizer_files
from tests.helpers.clients import environment
from tests.helpers.gguf import Edit, write_gguf
from tests.helpers.llama_cpp import FILES
from tests.helpers.models import tiny_model

pytestmark = pytest.mark.slow

NUM_TEXTS = 2_000
ROOT = Path(__file__).parents[2]
GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text(encoding="utf-8"))
_TOKENIZER = """
import ctypes, json, sys
folder, texts, *files = sys.argv[1:]
library = ctypes.CDLL(f"{folder}/xllamacpp/xllamacpp.abi3.so")
class Params(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_byte * 512)]  # more than llama_model_params has, which is the last argument
pointer, number = ctypes.c_void_p, ctypes.c_int32
quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda level, text, _: None)
library.llama_log_set(quiet, None)
library.llama_model_default_params.restype = Params
library.llama_model_load_from_file.restype = library.llama_model_get_vocab.restype = pointer
library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
library.llama_model_get_vocab.argtypes = library.llama_model_free.argtypes = [pointer]
library.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, number, pointer, number, ctypes.c_bool, ctypes.c_bool]
with open(texts, encoding="utf-8") as opened:
    encoded = [text.encode() for text in json.load(opened)]
room = (number * 1_000_000)()
for file in files:
    model = library.llama_model_load_from_file(file.encode(), library.llama_model_default_params())
    assert model, file
    vocab = library.llama_model_get_vocab(model)
    counts = (library.llama_tokenize(vocab, text, len(text), room, len(room), False, True) for text in encoded)
    print(json.dumps([room[:count] for count in counts]), flush=True)
    library.llama_model_free(model)
"""


def tokenized(files: Sequence[Path], texts: Path) -> Iterator[list[list[int]]]:
    """The ids of the texts in a JSON file by each of some models, without what stands before and behind every prompt;
    by the library that the server is made of, since a request takes a hundred times as long."""
    folder = str(environment("llama-cpp", FILES))
    command = [sys.executable, "-c", _TOKENIZER, folder, str(texts), *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for _ in files:
            yield json.loads(process.stdout.readline())
    assert process.returncode == 0


# fmt: off
SCRIPTS = (
    (0x41, 0x5A), (0x61, 0x7A), (0xA1, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x58A), (0x591, 0x5F4), (0x600, 0x6FF), (0x780, 0x7B1), (0x900, 0x97F), (0x980, 0x9FE), (0xA01, 0xA76),
    (0xB82, 0xBFA), (0xC00, 0xC7F), (0xD02, 0xD7F), (0xE01, 0xE5B), (0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F),
    (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137C), (0x13A0, 0x13FD), (0x1780, 0x17F9), (0x1800, 0x18AA),
    (0x1E00, 0x1FFE), (0x3041, 0x30FF), (0x3105, 0x318E), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xFF01, 0xFFDC), (0x10330, 0x1034A), (0x10400, 0x1044F), (0x1E900, 0x1E95F), (0x20000, 0x2A6D6),
)
SIGNS = (
    (0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0x2010, 0x205E), (0x20A0, 0x20BF), (0x2100, 0x214F),
    (0x2190, 0x23FF), (0x2500, 0x27BF), (0x3001, 0x303F), (0xFE30, 0xFE4F), (0x1F300, 0x1F64F),
)
DIGITS = (
    (0x30, 0x39), (0x660, 0x669), (0x966, 0x96F), (0xE50, 0xE59), (0xFF10, 0xFF19), (0x2150, 0x2189), (0xB2, 0xB3),
)
MARKS = ((0x300, 0x36F), (0x93A, 0x94D), (0x5B0, 0x5C7), (0x64B, 0x65F), (0x200C, 0x200D), (0xFE0F, 0xFE0F))
SPACES = (
    " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\u0085",
    " " * 17,
)
WHOLE = (
    "'s", "'LL", "'Re", "\u2019s", "don't", "it'd", "I'M", "<|start|>", "<|tool_x|>", "<|start", "|>", "<sentinel:12>",
    "\ufffd", "\ufffd\ufffd", "\x00", "\x7f", "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "e\u0301", "\u1e69\u0323", "camelCase", "XMLHttpRequest",
    "snake_case", "\u00c9cole", "\u01c5", "\ufb01",
)
# fmt: on


def _words() -> list[str]:
    """Of what does not change: a licence, and texts that were kept."""
    known = [(ROOT / "LICENSE").read_text(encoding="utf-8"), *GOLDEN["texts"]]
    return [piece for text in known for piece in re.findall(r"\s?\S+|\s+", text)]


def texts(count: int, seed: int) -> list[str]:
    rng, words = random.Random(seed), _words()

    def chars(ranges: tuple[tuple[int, int], ...], most: int) -> str:
        low, high = rng.choice(ranges)
        found = (chr(rng.randint(low, high)) for _ in range(rng.randint(1, most)))
        return "".join(char for char in found if unicodedata.category(char) not in ("Cn", "Cs"))

    kinds: list[Callable[[], str]] = [
        lambda: rng.choice(words),
        lambda: "".join(rng.choice(words) for _ in range(4)),
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 12))),
        lambda: rng.choice(SPACES),
        lambda: chars(SCRIPTS, 8),
        lambda: chars(SCRIPTS, 3) + chars(MARKS, 2),
        lambda: chars(DIGITS, 6),
        lambda: chars(SIGNS, 3),
        lambda: rng.choice(WHOLE),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.randint(1, 7))) for _ in range(count)]


class Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[int]
    merges: list[str]
    more: Mapping[str, Any] = MappingProxyType({})
    """Of the metadata, by the end of its key."""

    def metadata(self, kind: str, pre: str) -> dict[str, Any]:
        found = {"model": kind, "pre": pre, "tokens": self.tokens, "token_type": self.types, "merges": self.merges}
        return {f"tokenizer.ggml.{name}": value for name, value in (found | dict(self.more)).items() if value != []}

    def edit(self, kind: str, pre: str) -> Edit:
        def put(writer: GGUFWriter) -> None:
            values = writer.kv_data[0]
            for key in [key for key in values if key.startswith("tokenizer.")]:
                del values[key]
            for key, value in self.metadata(kind, pre).items():
                if key.endswith("charsmap"):
                    writer.add_precompiled_charsmap(bytes(value))
                else:
                    kinds = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
                    kinds.get(type(value), writer.add_uint32)(key, value)
            if "eos_token_id" not in self.more:
                writer.add_eos_token_id(len(self.tokens) - 2)

        return put


MARKED = (["<|start|>", "<|tool_x|>"], [3, 4])


def of_bytes() -> Vocabulary:
    """Every end of a character is a token with every begin of another, so wherever a text is not split, some merge
    tells; and words that no merges lead to."""
    letters = {byte: letter for letter, byte in char_to_byte().items()}
    plain, within = [*range(32, 127), 9, 10, 13, 0], range(0x80, 0xC0)
    pairs = [letters[one] + letters[other] for one in (*plain, *within) for other in (*plain, *range(0xC2, 0xF5))]
    random.Random(11).shuffle(pairs)
    words = sorted({word.replace(" ", letters[32]) for word in _words() if re.fullmatch(r" ?[A-Za-z]{3,9}", word)})
    tokens = list(dict.fromkeys([*(letters[byte] for byte in range(256)), *pairs, *words]))
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    return Vocabulary([*tokens, *MARKED[0]], [1] * len(tokens) + MARKED[1], merges)


def of_chars() -> Vocabulary:
    """The same of the text itself: pairs of some characters, and bytes for the others."""
    rng = random.Random(12)
    plain = [*map(chr, range(33, 127)), "\u2581", "\n", "\t"]
    others = [chr(rng.randint(*one)) for one in (*SCRIPTS, *MARKS, *DIGITS, *SIGNS) for _ in range(12)]
    chars = list(dict.fromkeys([*plain, *(one for one in others if unicodedata.category(one) not in ("Cn", "Cs"))]))
    pairs = [one + other for one in plain for other in plain]
    pairs = list(dict.fromkeys([*pairs, *(rng.choice(chars) + rng.choice(chars) for _ in range(4000)), "\n\n\n"]))
    rng.shuffle(pairs)
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *chars, *pairs]
    types = [6] * 256 + [1] * (len(tokens) - 256)
    return Vocabulary([*tokens, *MARKED[0]], types + MARKED[1], [f"{pair[0]} {pair[1:]}" for pair in pairs])


def of_words() -> Vocabulary:
    """WordPiece as BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    found.train_from_iterator(
        [*_words(), *texts(3000, 77)], trainers.WordPieceTrainer(vocab_size=6000, special_tokens=special)
    )
    pieces = sorted(found.get_vocab(), key=found.get_vocab().__getitem__)[len(special) :]
    tokens = [*special, *(piece[2:] if piece.startswith("##") else f"\u2581{piece}" for piece in pieces)]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "bos_token_id": 2, "seperator_token_id": 3, "eos_token_id": 3}
    return Vocabulary(tokens, [3] * len(special) + [1] * len(pieces), [], ids)


def of_unigrams() -> Vocabulary:
    """Sentencepiece's with its usual normal form."""
    words, model = _words(), io.BytesIO()
    lines = [" ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line.replace("\n", " ") for line in [*lines, *texts(4000, 78)]),
        model_writer=model,
        vocab_size=4000,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    )
    stored = sentencepiece_model_pb2.ModelProto()
    stored.ParseFromString(model.getvalue())
    pieces, charsmap = stored.pieces, list(stored.normalizer_spec.precompiled_charsmap)
    more: dict[str, Any] = {"scores": [piece.score for piece in pieces], "precompiled_charsmap": charsmap}
    more |= {"add_space_prefix": True, "remove_extra_whitespaces": True, "eos_token_id": 1, "unknown_token_id": 2}
    return Vocabulary([piece.piece for piece in pieces], [piece.type for piece in pieces], [], more)


def _any(text: str, fits: Callable[[str, str], bool]) -> bool:
    return any(fits(char, unicodedata.category(char)) for char in text)


def _case(text: str) -> bool:
    """llama.cpp has `[^a-z]` and `[^A-Z]` where the models have classes of letters, and no marks among them."""
    return _any(text, lambda char, kind: char > "\x7f" and (kind in ("Lu", "Ll", "Lt") or kind[0] == "M"))


def _capitals(text: str) -> bool:
    """llama.cpp has one class of letters where the models have two."""
    return _case(text) or re.search(r"[^\W\d_][A-Z]", text) is not None


def _kimi(text: str) -> bool:
    """Nor are numerals Han there."""
    return _capitals(text) or _any(text, lambda char, kind: "\u2e80" < char < "\u3040" and kind in ("Nl", "Lm", "So"))


def _spaces(text: str) -> bool:
    """llama.cpp replaces those beyond ASCII before it looks at ranges."""
    return _any(text, lambda char, _: char > "\x7f" and char.isspace())


def _digits(text: str) -> bool:
    """`\\d` and `\\b` know only ASCII there."""
    return _any(text, lambda char, kind: char > "\x7f" and kind[0] == "N")


def _before_digits(text: str) -> bool:
    """llama.cpp looks on behind the end of what an expression is tried on, and joins what none fits."""
    before = (one for one, other in itertools.pairwise(text) if other.isdigit())
    return (
        re.search(r"\s\s\d", text) is not None or _digits(text) or _any("".join(before), lambda _, kind: kind[0] == "C")
    )


def _aya(text: str) -> bool:
    """And words end elsewhere there."""
    behind = "".join(other for one, other in itertools.pairwise(text) if one.isdigit() and not other.isdigit())
    return _capitals(text) or _before_digits(text) or _any(behind, lambda _, kind: kind[0] == "L" or kind == "Pc")


def _newlines(text: str) -> bool:
    """More of them than the longest token of newlines has: llama.cpp merges these, and we take the longest first."""
    return "\n" * 4 in text


def _graphemes(text: str) -> bool:
    """The normal form is of characters with all that joins them, as the models' own tokenizers have it."""
    return _any(text, lambda char, kind: kind[0] == "M" or char in "\u200c\u200d\x85" or "\u3131" <= char <= "\u318e")


def _bert(text: str) -> bool:
    """Marks of all scripts are dropped and syllables taken apart, other spaces are spaces, Adlam has two cases, and
    punctuation is by another version of Unicode."""
    signs = "\u09fd\u0a76\u0c77\u0c84"
    others = _any(
        text,
        lambda char, _: (
            (char > "\u02ff" and len(unicodedata.normalize("NFD", char)) > 1) or char >= "\U0001e900" or char in signs
        ),
    )
    return others or _graphemes(text) or _spaces(text)


def _unigrams(text: str) -> bool:
    """And a run of digits may be cut in two ways that are as likely; parts of Korean syllables join there, too."""
    korean = (("\u1100", "\u11ff"), ("\uac00", "\ud7a3"), ("\uffa0", "\uffdc"))
    joins = _any(text, lambda char, _: any(first <= char <= last for first, last in korean))
    return joins or _graphemes(text) or re.search(r"\d\d", text) is not None


KNOWN: dict[str, Callable[[str], bool]] = {
    "bert": _bert,
    "t5": _unigrams,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"), _case),
    "granite-embed-multi-97m": _case,
    "kimi-k2": _kimi,
    "youtu": _capitals,
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _aya),
    **dict.fromkeys(("deepseek-coder", "deepseek-llm"), _spaces),
    "superbpe": _digits,
    "afmoe": _before_digits,
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _newlines),
}
"""By name: texts that llama.cpp may split otherwise, where its expression only comes near the model's, as ours is."""


def differences(folder: Path, kind: str, name: str, count: int) -> list[str]:
    """Of so many texts those that llama.cpp has other ids for."""
    known = texts(count, seed=sum(name.encode()))
    if kind == "gpt2" and PRE[name].nfc:  # which llama.cpp does not make
        known = [unicodedata.normalize("NFC", text) for text in known]
    (folder / "texts.json").write_text(json.dumps(known), encoding="utf-8")
    words = {"bert": of_words, "t5": of_unigrams, "gemma4": of_chars}.get(kind, of_bytes)()
    if kind == "gpt2" and PRE[name].of_text:
        words = of_chars()
    model = tiny_model("llama3-tied", vocab_size=len(words.tokens), num_hidden_layers=1, hidden_size=32)
    file = write_gguf(folder / "model.gguf", model, edit=words.edit(kind, name))
    metadata = {"general.architecture": "llama", **words.metadata(kind, name)}
    ours = tokenizers.Tokenizer.from_str(tokenizer_files(Fields(metadata))["tokenizer.json"])
    found = [one.ids for one in ours.encode_batch(known, add_special_tokens=False)]
    (expected,) = tokenized([file], folder / "texts.json")
    return [text for text, one, other in zip(known, found, expected, strict=True) if one != other]


OTHERS = ("gemma4", "bert", "t5")
FIRST = {pre: name for name, pre in reversed(PRE.items())}
"""Names of one row are the same to us: of one all texts, of the others a half."""


@pytest.mark.parametrize(("kind", "name"), [*(("gpt2", name) for name in PRE), *zip(OTHERS, OTHERS, strict=True)])
def test_ids_are_those_of_llama_cpp(kind: str, name: str, tmp_path: Path, times: int) -> None:
    is_first = kind != "gpt2" or FIRST[PRE[name]] == name
    found = differences(tmp_path, kind, name, NUM_TEXTS * times // (1 if is_first else 2))
    strange = [text for text in found if not KNOWN.get(name, lambda _: False)(text)]
    assert not strange, (len(strange), min(strange, key=len))
    # some are in few of many texts
    assert found or times < 10 or name not in KNOWN, "a difference that is known and is none any more"
