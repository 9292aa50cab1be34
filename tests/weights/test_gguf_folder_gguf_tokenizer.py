"""The tokenizer that a GGUF file brings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGUFWriter

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights.gguf_config import Fields
from minisgl.weights.gguf_folder import tokenizer_files
from minisgl.weights.gguf_import import import_gguf
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


@pytest.mark.parametrize("add", [True, False])
def test_the_bos_token_is_added_if_the_file_says_so(add: bool, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(START)
        writer.add_add_bos_token(add)

    tokenizer = _tokenizer(tmp_path, "llama-bpe", edit)
    assert (tokenizer.encode("x")[0] == START) == add
    assert tokenizer.encode("x", add_special_tokens=False)[0] != START


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
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        control_symbols=["<turn>"],
        minloglevel=2,
        **settings,
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


def test_scores_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    metadata = _metadata(_trained(tmp_path), True)
    metadata["tokenizer.ggml.scores"].pop()
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores: 419 scores of 420 tokens"):
        tokenizer_files(Fields(metadata))
