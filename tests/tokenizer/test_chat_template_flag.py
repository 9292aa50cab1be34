"""`--chat-template`: a file or a text, before what the model brings."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.tokenizer import Tokenizer, read_chat_template
from tests.tokenizer.test_tokenizer import write_model

USER = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_the_flag_takes_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(str(file)) == read_chat_template(TEMPLATE) == TEMPLATE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no/such/file.jinja", "--chat-template no/such/file.jinja: No such file"),
        (".", "--chat-template .: Is a directory"),
        ("{% if %}", "--chat-template: does not parse: "),
    ],
)
def test_a_value_that_is_neither_file_nor_template_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_chat_template(given)
    assert message in str(caught.value)


def test_the_flag_replaces_all_of_the_model_s_templates(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path,
        tokenizer_config__json={
            "chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
        },
        chat_template__jinja="file",
    )
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert Tokenizer.open(folder).apply_chat_template(USER) == "file"
    own = Tokenizer.open(folder, TEMPLATE)
    assert own.apply_chat_template(USER) == own.apply_chat_template(USER, tools=[{}]) == "[hi]"


def test_a_flag_s_template_has_special_tokens_and_works_without_a_model() -> None:
    own = Tokenizer.open(None, "{{ bos_token }}{{ messages[0].content }}")
    assert own.apply_chat_template(USER) == f"{own.special_tokens['bos_token']}hi"
    assert Tokenizer.open(None).apply_chat_template(USER) == Tokenizer.echo().apply_chat_template(USER)
