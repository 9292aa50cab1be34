"""Loading and encoding, with transformers as the reference."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, processors

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.tokenizer import ChatTemplateError, Tokenizer, TokenizerError
from minisgl.tokenizer.early import EarlyTokenizer
from minisgl.tokenizer.echo import ECHO_BOS_ID, ECHO_EOS_ID, ECHO_VOCAB_SIZE
from minisgl.tokenizer.reference import ReferenceTokenizer
from tests.helpers.text import REAL, TEXTS, reference_tokenizer, tokenizer_named

USER = [{"role": "user", "content": "hi"}]


def write_model(folder: Path, **files: Any) -> Path:
    """A model folder with a tokenizer of two words that adds <s>, and further files (dots written as __)."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "hi": 2}, unk_token="</s>"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("special", [True, False])
def test_same_ids_as_transformers(name: str, special: bool) -> None:
    ours, theirs = tokenizer_named(name), reference_tokenizer(name)
    data = envs.data_dir()
    assert data is not None
    lines = (data / "prompts" / "mt_bench_questions.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [*TEXTS, *(turn for line in lines[:40] for turn in json.loads(line)["turns"])]
    expected = [theirs.encode(text, add_special_tokens=special) for text in texts]
    assert [ours.encode(text, special).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in ours.encode_batch(texts, special)] == expected
    assert [ours.decode(ids) for ids in expected] == [
        theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in expected
    ]


def test_ids_are_int32() -> None:
    assert Tokenizer.echo().encode("").dtype == Tokenizer.echo().encode("a").dtype == "int32"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_the_ids_of_the_echo_tokenizer_are_the_bytes(text: str) -> None:
    tokenizer = Tokenizer.echo()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_echo_tokenizer_has_its_two_special_tokens() -> None:
    tokenizer = Tokenizer.echo()
    assert tokenizer.encode("<|eos|>a<|bos|>").tolist() == [ECHO_EOS_ID, 97, ECHO_BOS_ID]
    assert tokenizer.num_ids == ECHO_VOCAB_SIZE
    assert tokenizer.apply_chat_template(USER) == "<user>hi</user>\n<assistant>"


def test_a_rendered_template_gets_no_special_tokens_twice(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = Tokenizer.load(write_model(tmp_path, tokenizer_config__json=config))
    assert tokenizer.encode("hi").tolist() == tokenizer.encode_batch(["hi"])[0].tolist() == [0, 2]
    assert tokenizer.encode_batch(["hi"], add_special_tokens=False)[0].tolist() == [2]
    text = tokenizer.apply_chat_template(USER)
    assert text == "<s>hi"
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == [0, 2]


@pytest.mark.parametrize("sequence", ["\ud800", "a\udfffb"])
def test_a_lone_surrogate_is_a_value_error(sequence: str) -> None:
    tokenizer = Tokenizer.echo()
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode(sequence)
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", sequence])


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    write_model(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("hi", add_special_tokens=False).tolist() == [2]
    assert len(Tokenizer.load(tmp_path).encode("<s><s><s><s>")) == 5
    assert len(ReferenceTokenizer(tmp_path / "tokenizer.json").encode("<s><s><s><s>")) == 5


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("engine", "named", "opened_by"),
    [("cpu", "model", ["early-tokenizer"]), ("cpu", "other", ["early-tokenizer", "main"]), ("echo", "model", ["main"])],
)
def test_a_tokenizer_is_loaded_once_while_the_engine_loads_unless_that_names_another_folder(
    engine: str, named: str, opened_by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name)
    opened: list[str] = []
    open_folder = Tokenizer.open

    def noted(*args: Any) -> Tokenizer:
        opened.append(threading.current_thread().name)
        return open_folder(*args)

    monkeypatch.setattr(Tokenizer, "open", noted)
    monkeypatch.setattr(threading.current_thread(), "name", "main")
    early = EarlyTokenizer(EngineConfig(model=str(tmp_path / "model"), engine=engine))
    assert early.take(str(tmp_path / named), lambda line: None).encode("hi", add_special_tokens=False).tolist() == [2]
    assert opened == opened_by


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_broken_file_is_named(tmp_path: Path, file: str) -> None:
    (write_model(tmp_path) / file).write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=file.replace(".", r"\.")):
        Tokenizer.load(tmp_path)
    assert issubclass(TokenizerError, ConfigError)  # what the command line shows without a traceback


@pytest.mark.parametrize("listed", [False, True])
def test_special_tokens_as_transformers_reads_them(tmp_path: Path, listed: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "image_token": "<s>",
        "add_bos_token": True,
    }
    if listed:
        config["added_tokens_decoder"] = {"0": {"content": "<s>", "special": True}}
    write_model(tmp_path, tokenizer_config__json=config, special_tokens_map__json={"bos_token": {"content": "<s>"}})
    ours = Tokenizer.load(tmp_path).special_tokens
    assert ours == transformers.AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    assert ("bos_token" in ours) is not listed


def test_the_template_file_of_older_processors_lies_between(tmp_path: Path) -> None:
    older = {"chat_template": "older {{ messages[0].content }}"}
    write_model(tmp_path, tokenizer_config__json={"chat_template": "config"}, chat_template__json=older)
    assert Tokenizer.load(tmp_path).apply_chat_template(USER) == "older hi"
    write_model(tmp_path, chat_template__jinja="file")
    assert Tokenizer.load(tmp_path).apply_chat_template(USER) == "file"


def test_a_template_file_without_a_template_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer_config__json={"chat_template": "config"}, chat_template__json={"template": "x"})
    with pytest.raises(TokenizerError, match=r"chat_template\.json: chat_template must be"):
        Tokenizer.load(tmp_path)


def named_in_config(folder: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    write_model(folder, tokenizer_config__json={"chat_template": templates})


def named_in_files(folder: Path) -> None:
    write_model(folder, tokenizer_config__json={"chat_template": "config"}, chat_template__jinja="plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}", encoding="utf-8")


@pytest.mark.parametrize("write", [named_in_config, named_in_files])
def test_tools_take_the_template_made_for_them(tmp_path: Path, write: Any) -> None:
    write(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(USER) == tokenizer.apply_chat_template(USER, tools=[]) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{"type": "function"}]) == "1"


def test_no_template_is_an_error_for_the_client(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path))
    with pytest.raises(ChatTemplateError, match=r"no chat template: use /v1/completions, or .* --chat-template"):
        tokenizer.apply_chat_template(USER)


def test_no_default_template_names_the_others(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": ""}]
    tokenizer = Tokenizer.load(write_model(tmp_path, tokenizer_config__json={"chat_template": templates}))
    with pytest.raises(ChatTemplateError, match="only rag"):
        tokenizer.apply_chat_template(USER)


def test_a_template_that_does_not_parse_leaves_completions_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, chat_template__jinja="{% for %}"))
    assert tokenizer.encode("hi").tolist() == [0, 2]
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="does not parse"):
            tokenizer.apply_chat_template(USER)


def test_without_the_extension_the_reference_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.NO_EXTENSION, "0")
    assert not isinstance(Tokenizer.echo().text, ReferenceTokenizer)
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    tokenizer = Tokenizer.echo()
    assert isinstance(tokenizer.text, ReferenceTokenizer)
    assert tokenizer.decode(tokenizer.encode("Paris").tolist()) == "Paris"


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = "import sys, minisgl.tokenizer; print({'torch', 'transformers'} & {m.split('.')[0] for m in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
