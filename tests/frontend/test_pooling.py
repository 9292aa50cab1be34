"""What a model's files say of its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.frontend.pooling import own_pooling, own_prompts
from minisgl.weights.gguf_folder import gguf_folder
from tests.helpers.gguf import write_gguf, written_model

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}


def module(number: int, kind: str) -> dict[str, str]:
    return {"path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"}


@pytest.mark.parametrize(
    ("modules", "pooling", "found", "why"),
    [
        (None, None, "mean", ""),
        (None, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last", ""),
        ([TRANSFORMER, module(1, "Pooling"), module(2, "Normalize")], {"pooling_mode_mean_tokens": True}, "mean", ""),
        (None, {"pooling_mode_cls_token": True}, "cls", ""),
        (None, {"pooling_mode_max_tokens": True}, None, "1_Pooling/config.json asks for max_tokens"),
        (None, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None, "mean_tokens and max_tokens"),
        (None, {}, None, "asks for nothing"),
        ([TRANSFORMER, module(1, "Pooling"), module(2, "Dense")], {"pooling_mode_mean_tokens": True}, "mean", ""),
        ([TRANSFORMER, module(1, "Pooling"), module(2, "CNN")], {"pooling_mode_mean_tokens": True}, None, "2_CNN"),
        ([{"path": 5}], None, None, "KeyError('type')"),
    ],
    ids=str,
)
def test_pooling_is_read_from_a_folder(tmp_path: Path, modules: Any, pooling: Any, found: str | None, why: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for name, content in {"modules.json": modules, "1_Pooling/config.json": pooling}.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    name, text = own_pooling(str(tmp_path))
    assert name == found and why in text and bool(why) == bool(text)


@pytest.mark.parametrize(
    ("kind", "found", "why"),
    [
        (-1, "mean", ""),
        (0, None, "none"),
        (1, "mean", ""),
        (2, "cls", ""),
        (3, "last", ""),
        (4, None, "rank"),
    ],
)
def test_pooling_is_read_from_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, found: str | None, why: str
) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    model = written_model("qwen3-tied", num_hidden_layers=1)

    def written(kind: int) -> Path:
        edit = (lambda writer: writer.add_uint32("qwen3.pooling_type", kind)) if kind >= 0 else None
        return write_gguf(tmp_path / "m.gguf", model, "qwen3", edit=edit)

    name, text = own_pooling(str(gguf_folder(written(kind))))
    assert name == found and why in text and bool(why) == bool(text)
    with pytest.raises(ConfigError, match=r"qwen3\.pooling_type: 7: must be at most 4"):
        gguf_folder(written(7))


def test_prompts_by_name(tmp_path: Path) -> None:
    assert own_prompts(str(tmp_path)).of(None) == "" and own_prompts(None).texts == {}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": {"query": "search_query: ", "document": ""}, "default_prompt_name": None}))
    prompts = own_prompts(str(tmp_path))
    assert [prompts.of(name) for name in (None, "query", "document")] == ["", "search_query: ", ""]
    with pytest.raises(KeyError):
        prompts.of("passage")
    file.write_text(json.dumps({"prompts": {"query": "q: "}, "default_prompt_name": "query"}))
    assert own_prompts(str(tmp_path)).of(None) == "q: "
    for odd in ("[]", "{", '{"prompts": 5}', '{"default_prompt_name": "query"}'):
        file.write_text(odd)
        assert own_prompts(str(tmp_path)).of(None) == ""
