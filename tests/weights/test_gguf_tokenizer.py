"""The tokenizer that a GGUF file brings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from gguf import GGUFWriter
from sentencepiece import sentencepiece_model_pb2

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.tokenizer.echo import char_to_byte
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.gguf_config import Fields
from minisgl.weights.gguf_folder import gguf_folder
from minisgl.weights.gguf_import import import_gguf
from minisgl.weights.gguf_tokenizer import PRE, end_ids, pre_tokenizer_of, tokenizer_files
from tests.helpers.gguf import START, TOKENS, TOOL, Edit, quiet, write_gguf, written_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def _tokenizer(tmp_path: Path, pre: str, edit: Edit | None = None) -> Tokenizer:
    file = write_gguf(tmp_path / f"{pre}.gguf", written_model("llama3-tied", num_hidden_layers=1), pre=pre, edit=edit)
    return Tokenizer.load(import_gguf(file, quiet))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["a", "Ġ", "4", "2"]), ("gpt-2", ["a", "Ġ4", "2"]), ("llama-bpe", ["a", "Ġ", "42"])],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert [TOKENS[i] for i in _tokenizer(tmp_path, pre).encode("a 42")] == pieces


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["xyz"]), ("smollm", ["x", "y", "z"])])
def test_only_llama_3_takes_a_known_word_without_merges(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert [TOKENS[i] for i in _tokenizer(tmp_path, pre).encode("xyz")] == pieces


def test_special_tokens_and_chat_template(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "smollm")
    ids = tokenizer.encode("<|start|>x<tool>").tolist()
    assert (ids[0], ids[-1], len(ids)) == (START, TOOL, 3)
    assert tokenizer.decode(ids) == "x<tool>"  # user-defined tokens are text
    assert tokenizer.special_tokens == {"eos_token": "<|start|>"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize("own", [True, False])
def test_templates_by_name_are_those_of_a_folder(tmp_path: Path, own: bool) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_string("tokenizer.chat_template.tool_use", "tools: {{ tools[0].function.name }}")
        writer.add_string("tokenizer.chat_template.rag", "rag")

    file = write_gguf(tmp_path / "a.gguf", written_model("llama3-tied", num_hidden_layers=1), pre="smollm", edit=edit)
    config = json.loads((gguf_folder(file, own_tokenizer=own) / "tokenizer_config.json").read_text())
    assert [one["name"] for one in config["chat_template"]] == ["default", "rag", "tool_use"]
    if own:
        tokenizer = Tokenizer.load(gguf_folder(file))
        said = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(said) == "hi"
        tools = [{"type": "function", "function": {"name": "save"}}]
        assert tokenizer.apply_chat_template(said, tools=tools) == "tools: save"


@pytest.mark.parametrize("add", [True, False])
def test_the_bos_token_is_added_if_the_file_says_so(add: bool, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(START)
        writer.add_add_bos_token(add)

    tokenizer = _tokenizer(tmp_path, "llama-bpe", edit)
    assert (tokenizer.encode("x")[0] == START) == add
    assert tokenizer.encode("x", add_special_tokens=False)[0] != START


def test_the_eos_token_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "smollm", lambda writer: writer.add_add_eos_token(True))
    ids = tokenizer.encode("x").tolist()
    assert len(ids) == 2 and ids[1] == START  # embedding models read the vector of it


_TEXT = """A server keeps a tree of prefixes. Every page of the tree is counted; a page that nobody reads is given back.
Prompts that begin alike share their pages, and answers grow behind them token by token, 1 2 3 and 42 and 1,000.
Ein Satz mit Umlauten: schöne Grüße. Une phrase, déjà vue. The tree, the tree, the page, the pages, the server serves.
"""


def _trained(tmp_path: Path, **settings: Any) -> sentencepiece.SentencePieceProcessor:
    source = tmp_path / "text.txt"
    source.write_text(_TEXT * 3, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(source),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=420,
        byte_fallback=True,
        user_defined_symbols=["<tool>"],
        control_symbols=["<turn>"],
        minloglevel=2,
        **{"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False} | settings,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))


def _metadata(model: sentencepiece.SentencePieceProcessor, prefix: bool) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""
    kinds = []
    for i in range(len(model)):
        kind = 2 if model.IsUnknown(i) else 3 if model.IsControl(i) else 5 if model.IsUnused(i) else 1
        kinds.append(6 if model.IsByte(i) else 4 if model.IdToPiece(i) == "<tool>" else kind)
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.IdToPiece(i) for i in range(len(model))],
        "tokenizer.ggml.scores": [model.GetScore(i) for i in range(len(model))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_cuts_as_the_library_does(prefix: bool, tmp_path: Path) -> None:
    model = _trained(tmp_path, add_dummy_prefix=prefix)
    for name, content in tokenizer_files(Fields(_metadata(model, prefix))).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    words = [*_TEXT.split(), "größer", "日本", "🙂", "  ", "tree\n", "1,0", "<tool>"]
    rng = random.Random(8)
    for _ in range(300):
        text = rng.choice((" ", "", "  ")).join(rng.choice(words) for _ in range(rng.randint(1, 12)))
        if (
            prefix and "<tool>" in text
        ):  # tokenizer.json writes a space behind it, too, as all do that are made of these
            continue
        expected = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == expected, text
        assert tokenizer.decode(expected) == text
    assert tokenizer.encode("tree")[0] == model.bos_id()  # these files mean it unless they say otherwise
    turn = model.PieceToId("<turn>")
    assert tokenizer.encode("<turn>tree", add_special_tokens=False)[0] == turn


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_unigrams_are_those_of_sentencepiece(rule: str, tmp_path: Path) -> None:
    settings = {"model_type": "unigram", "normalization_rule_name": rule, "remove_extra_whitespaces": True}
    model = _trained(tmp_path, hard_vocab_limit=False, **settings)
    stored = sentencepiece_model_pb2.ModelProto()
    stored.ParseFromString((tmp_path / "sp.model").read_bytes())
    metadata = _metadata(model, True) | {"tokenizer.ggml.model": "t5", "tokenizer.ggml.remove_extra_whitespaces": True}
    if charsmap := stored.normalizer_spec.precompiled_charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = [byte - 256 if byte > 127 else byte for byte in charsmap]
    found = tokenizers.Tokenizer.from_str(tokenizer_files(Fields(metadata))["tokenizer.json"])
    for text in ("The tree  of pages ", " größer ﬁ ①", "日本 🙂\u0085", "tree\tpage", "1,0", "", *_TEXT.split()):
        assert found.encode(text, add_special_tokens=False).ids == model.encode(text), text
        assert found.encode(text).ids == [*model.encode(text), model.eos_id()]
    assert found.decode(model.encode("a tree, größer 🙂")) == "a tree, größer 🙂"


def test_word_pieces(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁un", "able", "s", "▁世", "▁!", "▁e"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 4 + [1] * 7,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
    }

    def pieces(text: str, **more: Any) -> list[str]:
        found = tokenizers.Tokenizer.from_str(tokenizer_files(Fields(metadata | more))["tokenizer.json"])
        return [tokens[i] for i in found.encode(text).ids]

    text = "The unables世!É  [SEP] x"
    around = ["[CLS]", "▁the", "▁un", "able", "s", "▁世", "▁!", "▁e", "[SEP]", "[UNK]", "[SEP]"]
    assert pieces(text) == around
    assert pieces("The É", **{"tokenizer.ggml.normalizer.lowercase": False}) == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.unknown_token_id: 100: must be below 11"):
        pieces(text, **{"tokenizer.ggml.unknown_token_id": 100})


def test_scores_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    metadata = _metadata(_trained(tmp_path), True)
    metadata["tokenizer.ggml.scores"].pop()
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores: has 419 scores for 420 tokens"):
        tokenizer_files(Fields(metadata))


@pytest.mark.parametrize("name", sorted(name for name, pre in PRE.items() if not pre.of_text))
def test_every_name_splits_and_loses_nothing(name: str) -> None:
    text = "Ab1234's éÀ 世界かな12 <|=\n\n  x_y\t!foo ½ नमस्ते"
    pieces = [piece for piece, _ in pre_tokenizer_of(PRE[name].patterns).pre_tokenize_str(text)]
    known = char_to_byte()
    assert bytes(known[char] for piece in pieces for char in piece).decode() == text and len(pieces) > 5


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("default", "a|b1234", ["a", "|", "b", "123", "4"]),
        ("gpt-2", "a|b1234", ["a", "|", "b", "1234"]),
        ("starcoder", "b12 's", ["b", "1", "2", " '", "s"]),
        ("llama4", "don't x1234", ["don't", " x", "123", "4"]),
        ("tekken", "don't aB", ["don", "'t", " a", "B"]),
        ("qwen35", "a\u0301b", ["a\u0301b"]),
        ("deepseek-v3", "日本x _ab12345", ["日本", "x", " _", "ab", "123", "45"]),
        ("kimi-k2", "日本abc", ["日本", "abc"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("seed-coder", "a!\n", ["a", "!", "\n"]),
        ("bloom", "a b,c", ["a", " b", ",", "c"]),
        ("viking", "a12", ["a", "1", "2"]),
    ],
)
def test_names_split_as_their_models_do(name: str, text: str, pieces: list[str]) -> None:
    known = char_to_byte()
    found = pre_tokenizer_of(PRE[name].patterns).pre_tokenize_str(text)
    assert [bytes(known[char] for char in piece).decode() for piece, _ in found] == pieces


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre: 'odd' is not known: only default, .*smaug-bpe"):
        _tokenizer(tmp_path, "odd")


def _ends(tokens: list[str], types: list[int] | None = None, **ids: int) -> list[str]:
    metadata = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    metadata |= {"general.architecture": "qwen2", "tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.token_type"] = types or [3] * len(tokens)
    return [tokens[i] for i in end_ids(Fields(metadata))]


def test_a_fill_in_the_middle_completion_ends() -> None:
    tokens = ["x", "<|endoftext|>", "<|im_end|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    assert set(_ends(tokens, eos=2)) == set(tokens) - {"x", "<|fim_middle|>"} and _ends(tokens, eos=2)[0] == tokens[2]


def test_ends_by_key_and_by_text() -> None:
    assert _ends(["a", "b", "c", "d"], eos=1, eot=2, eom=3, fim_pad=9) == ["b", "c", "d"]
    assert _ends(["<|end|>", "<|return|>", "<|call|>"], eos=1) == ["<|return|>", "<|call|>"]  # harmony's messages
    assert _ends(["</s>", "<eos>", "<|tool_response>"], eos=1) == ["<eos>", "<|tool_response>"]
    assert _ends(["</s>", "<|im_end|>", "x"], types=[1, 1, 3], eos=2) == ["x", "<|im_end|>"]  # the first is HTML


def test_gemma_4_merges_text(tmp_path: Path) -> None:
    tokens = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "▁ab", "\n\n", "\n", "<bos>"]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [6] * 256 + [1] * 7 + [3],
        "tokenizer.ggml.merges": ["▁ a", "▁a b"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
    }
    for name, content in tokenizer_files(Fields(metadata)).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode(" ab\n\n\né a").tolist()
    assert [tokens[i] for i in ids] == ["<bos>", "▁ab", "\n\n", "\n", "<0xC3>", "<0xA9>", "▁a"]
    assert tokenizer.decode(ids) == " ab\n\n\né a"


GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text(encoding="utf-8"))
"""Texts, and what llama.cpp's server made of them with each name, over one vocabulary whose merges reach across every
place where a pattern may split (worklog/2026-11-first-week.md#2026-11-25-gguf-tokenizers)."""


@pytest.mark.parametrize("name", sorted(GOLDEN["ids"]))
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    tokens: list[str] = GOLDEN["tokens"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": GOLDEN["merges"],
    }
    found = tokenizers.Tokenizer.from_str(tokenizer_files(Fields(metadata))["tokenizer.json"])
    for text, ids in zip(GOLDEN["texts"], GOLDEN["ids"][name], strict=True):
        assert found.encode(text).ids == ids, text
