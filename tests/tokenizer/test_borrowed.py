"""`--tokenizer`: another folder's in place of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import AddedToken, models

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.borrowed import text_folder
from minisgl.tokenizer.tokenizer import FILE
from tests.helpers.e2e import serving
from tests.helpers.gguf import TOKENS, quiet, write_gguf, written_model
from tests.helpers.model_hub import Repo, model_hub

PROMPT = "hello world"
IDS = [7, 3]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    yield


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A GGUF file whose name of splitting nobody knows."""
    return write_gguf(tmp_path / "m.gguf", written_model("llama3-tied", num_hidden_layers=1), pre="odd")


def words(folder: Path, *, last: int = len(TOKENS) - 1, special: bool = False, **files: str) -> Path:
    """A tokenizer of words, whose last id is `last`; and files beside it, dots written as __."""
    folder.mkdir()
    found = tokenizers.Tokenizer(
        models.WordLevel({"world": 3, "hello": 7, "unknown": 9, "last": last}, unk_token="unknown")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.decoder = tokenizers.decoders.ByteLevel()  # grammars want one that says which bytes a token is
    if special:
        found.add_special_tokens([AddedToken("last", special=True)])
    found.save(str(folder / FILE))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_an_unknown_name_is_refused_unless_a_tokenizer_is_given(tmp_path: Path, unknown: Path, engine: str) -> None:
    settings: dict[str, Any] = {"engine": engine, "log_level": "error", "num_pages": 8}
    with pytest.raises(ConfigError, match=r"'odd' is not known: only .*--tokenizer takes that of another folder"):
        LLM(str(unknown), **settings)
    with LLM(str(unknown), tokenizer=str(words(tmp_path / "words")), **settings) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=2, temperature=0), progress=False)
        assert output.prompt_token_ids == IDS
        assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"  # the file's own


def test_a_server_and_its_grammars_use_the_borrowed_tokenizer(tmp_path: Path, unknown: Path) -> None:
    found = words(tmp_path / "words", chat_template__jinja="hello hello {{ messages[0].content }}")
    with serving("--model", str(unknown), "--engine", "cpu", "--num-pages", "8", "--tokenizer", str(found)) as server:
        tokens = httpx.post(server.url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        body = {"messages": [{"role": "user", "content": "world"}], "max_tokens": 1, "guided_regex": "hello"}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body).json()
    assert tokens == IDS and "usage" in answer, answer
    assert answer["usage"]["prompt_tokens"] == 3, "the template of the tokenizer's folder"
    assert answer["choices"][0]["message"]["content"] == "hello"


def test_a_hub_tokenizer_has_no_weights(tmp_path: Path, unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = (words(tmp_path / "words") / FILE).read_bytes()
    with model_hub() as hub:
        hub.repos = {"some/one": Repo({"config.json": b"{}", FILE: file, "model.safetensors": b"x"})}
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        with LLM(str(unknown), engine="cpu", log_level="error", num_pages=8, tokenizer="some/one") as llm:
            assert llm.tokenizer.encode(PROMPT).tolist() == IDS
        assert not [one.path for one in hub.asked if one.path.endswith("safetensors")]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    model, rows = tmp_path / "model", len(TOKENS)
    model.mkdir()
    large = words(tmp_path / "large", last=rows)
    with pytest.raises(ConfigError, match=rf"the tokenizer has {rows + 1} ids, the model only {rows} embeddings"):
        text_folder(EngineConfig(tokenizer=str(large)), model, rows, quiet)
    marked = words(tmp_path / "marked", last=rows, special=True)  # Gemma's has such an id, of images
    assert Tokenizer.load(text_folder(EngineConfig(tokenizer=str(marked)), model, rows, quiet)).num_ids == rows + 1


def test_the_folder_follows_its_files(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    (model / "preprocessor_config.json").write_text("{}")
    other = words(tmp_path / "other", chat_template__jinja=TEMPLATE)
    config = EngineConfig(tokenizer=str(other))
    first = text_folder(config, model, 500, quiet)
    assert text_folder(config, model, 500, quiet) == first
    assert (first / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert (first / "preprocessor_config.json").exists(), "the model sees with another tokenizer, too"
    (other / "chat_template.jinja").write_text(TEMPLATE + "!")
    assert text_folder(config, model, 500, quiet) != first
    assert text_folder(EngineConfig(), model, 500, quiet) == model


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"tokenizer": " "}, "--tokenizer: is empty"), ({"tokenizer": "a", "engine": "echo"}, "used with --engine echo")],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings).check()
