"""The tokenizer that a GGUF file brings."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from minisgl import envs
from minisgl.tokenizer.tokenizer import Tokenizer
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
