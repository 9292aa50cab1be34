"""Which reasoning of earlier turns a chat template shows, and with which variable."""

from __future__ import annotations

import pytest

from minisgl.tokenizer import ChatTemplate
from minisgl.tokenizer.thoughts import Kept, kept
from tests.helpers.chat_templates import FORGETS, TOKENS, real_sources

CASES: dict[str, tuple[str, Kept]] = {
    "all": ("false", Kept(3, 3, None)),
    "none": ("true", Kept(0, 0, None)),
    "with a variable that keeps it": ("not keeps", Kept(0, 3, ("keeps", True))),
    "without a variable that drops it": ("drops is not defined or drops", Kept(0, 3, ("drops", False))),
    "of two variables the one that keeps more": (
        "not keeps and not (some and loop.index < 3)",
        Kept(0, 3, ("keeps", True)),
    ),
    "not by thinking less": ("enable_thinking is not defined", Kept(0, 0, None)),
}


@pytest.mark.parametrize(("forgets", "found"), CASES.values(), ids=CASES)
def test_kept_names_the_variable_with_which_a_template_shows_most(forgets: str, found: Kept) -> None:
    assert kept(ChatTemplate(FORGETS.replace("FORGETS", forgets), TOKENS)) == found


@pytest.mark.parametrize(
    ("name", "kwarg"),
    [
        ("huggingface_chat_templates_qwen3_6", ("preserve_thinking", True)),
        ("huggingface_chat_templates_nemotron_3_nano", ("truncate_history_thinking", False)),
        ("hfjs_zai-org_GLM-5.1", ("clear_thinking", False)),
        ("hfjs_Qwen_Qwen3.5-4B", None),
    ],
)
def test_kept_of_real_templates(name: str, kwarg: tuple[str, bool] | None) -> None:
    sources = real_sources()
    if name not in sources:
        pytest.skip("no chat_templates in the real data")
    found = kept(ChatTemplate(sources[name], TOKENS))
    assert found.kwarg == kwarg and found.shown < found.of
