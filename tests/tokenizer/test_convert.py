"""Folders without a tokenizer.json: what transformers makes of the other files, once, in a process of its own."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import transformers

from minisgl import envs
from minisgl.tokenizer import Tokenizer, TokenizerError, convert
from tests.helpers.text import TEXTS

CORPUS = [f"The cat number {i} sat on the mat, naïve café No. {i * 7}: don't panic!" for i in range(120)]
Encode = Callable[[str], list[int]]


def _texts() -> list[str]:
    draw = random.Random(5)
    alphabet = "abcdeé θ漢🙂0123456789 \n'.,-▁Ġ"
    return [*TEXTS, *("".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(150))]


def _configure(folder: Path, model_type: str, tokenizer_class: str, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    text = json.dumps({"tokenizer_class": tokenizer_class, "chat_template": "{{ bos_token }}!", **config})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _sentencepiece(folder: Path) -> Encode:
    """Llama 2's kind."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=3,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    _configure(folder, "llama", "LlamaTokenizer", bos_token="<s>", eos_token="</s>")
    encoder = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return lambda text: list(encoder.encode(text))


def _vocab_and_merges(folder: Path) -> Encode:
    """GPT-2's kind."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=380, min_frequency=1, show_progress=False)
    trained.save_model(str(folder))
    _configure(folder, "gpt2", "GPT2Tokenizer", bos_token="the", eos_token="the")
    return lambda text: list(trained.encode(text).ids)


def _tiktoken(folder: Path) -> Encode:
    """Llama 3's original kind: lines of base64 and rank."""
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([i]): i for i in range(256)}
    for merged in ("th", "he", "at", "the", " t", "ca", "cat", "12"):
        ranks[merged.encode()] = len(ranks)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tokenizer.model").write_text("".join(lines), encoding="ascii")
    _configure(folder, "llama", "PreTrainedTokenizerFast", bos_token="<|b|>", eos_token="<|e|>")
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: list(encoding.encode(text, disallowed_special=()))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    return made


@pytest.mark.parametrize("write", [_sentencepiece, _vocab_and_merges, pytest.param(_tiktoken, marks=pytest.mark.slow)])
def test_ids_are_those_of_transformers_and_of_the_library_that_made_the_files(
    write: Callable[[Path], Encode], folder: Path
) -> None:
    said: list[str] = []
    encode = write(folder)
    files = sorted(folder.iterdir())
    ours = Tokenizer.load(folder, said.append)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for special in (True, False):
        expected = [theirs.encode(text, add_special_tokens=special) for text in _texts()]
        assert [ours.encode(text, special).tolist() for text in _texts()] == expected
    # to sentencepiece special tokens are text, and a space in front gets another one
    texts = [text for text in _texts() if "<s>" not in text and not text.startswith((" ", "\u2581"))]
    assert [ours.encode(text, add_special_tokens=False).tolist() for text in texts] == [encode(text) for text in texts]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == f"{ours.special_tokens['bos_token']}!"
    assert len(said) == 1
    assert "converting the tokenizer of model" in said[0]
    assert sorted(folder.iterdir()) == files
    again = Tokenizer.load(folder, said.append)
    assert again.encode("the cat").tolist() == ours.encode("the cat").tolist()
    assert len(said) == 1


def test_a_failed_conversion_gives_its_reason(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_PROGRAM", "raise ImportError('you need another library')")
    (folder / "tokenizer.model").write_bytes(b"neither the one nor the other")
    what = r"model: no tokenizer\.json, and transformers makes none of tokenizer\.model: ImportError: you need another"
    with pytest.raises(TokenizerError, match=what):
        Tokenizer.load(folder)
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_without_transformers_it_is_said_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _vocab_and_merges(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(TokenizerError, match=r"model: no tokenizer.json, .*: make install$"):
        Tokenizer.load(folder)


def test_a_folder_without_tokenizer_files_is_an_error(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, and no files"):
        Tokenizer.load(folder)


def test_a_cache_that_cannot_be_written_to_is_named(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "file" / "cache"))
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(envs.EnvError, match=r"MINISGL_CACHE: .*is not a folder"):
        Tokenizer.load(folder)


def _fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for transformers; the folders that it was asked to convert."""
    asked: list[Path] = []

    def conversion(folder: Path, partial: Path) -> None:
        asked.append(folder)
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0}, unk_token="hi"))
        backend.save(str(partial / "tokenizer.json"))

    monkeypatch.setattr(convert, "_convert", conversion)
    return asked


def test_several_at_once_convert_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _fake_conversion(monkeypatch)
    (folder / "vocab.json").write_text("{}")
    threads = [threading.Thread(target=Tokenizer.load, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [folder]


def test_other_files_are_converted_anew_and_the_same_are_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _fake_conversion(monkeypatch)
    (folder / "vocab.json").write_text("{}")
    Tokenizer.load(folder)
    moved = folder.rename(tmp_path / "moved")
    (moved / "model.safetensors").write_bytes(b"weights")
    (moved / "chat_template.jinja").write_text("hi", encoding="utf-8")
    assert Tokenizer.load(moved).apply_chat_template([{"role": "user", "content": ""}]) == "hi"
    assert len(asked) == 1
    (moved / "tokenizer_config.json").write_text("{}")
    Tokenizer.load(moved)
    assert len(asked) == 2
