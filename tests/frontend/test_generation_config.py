"""generation_config.json as sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.frontend.generation_config import read_defaults, show_defaults
from minisgl.sampling_params import SamplingParams


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_every_field_by_its_own_name(tmp_path: Path) -> None:
    raw = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    found = read_defaults(write(tmp_path, {**raw, "max_new_tokens": 2048, "do_sample": True}), "auto", "a/model")
    assert found == {**raw, "max_tokens": 2048}
    assert SamplingParams(**found).check().top_k == 20


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5"}, {}),
        ({"temperature": None, "top_k": None}, {}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"temperature": 1, "top_k": 5.0}, {"temperature": 1.0, "top_k": 5}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
    ],
)
def test_generation_config_values_are_read(raw: dict[str, Any], found: dict[str, Any], tmp_path: Path) -> None:
    assert read_defaults(write(tmp_path, raw), "auto", "a/model") == found


def test_no_defaults_without_the_file_or_with_none(tmp_path: Path) -> None:
    assert read_defaults(tmp_path, "auto", "a/model") == read_defaults(None, "auto", "a/model") == {}
    assert read_defaults(write(tmp_path, {"temperature": "broken"}), "none", "a/model") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "generation_config.json: "),
        ([], "must be a JSON object"),
        ({"temperature": -1}, "temperature: must be between 0 and 2: correct it, or use --generation-config none"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1"),
        ({"top_p": "0.9"}, "top_p: '0.9' is no number: use --generation-config none"),
        ({"top_k": 2.5}, "top_k: 2.5 is no integer"),
        ({"top_k": True}, "top_k: True is no integer"),
        ('{"top_k": Infinity}', "top_k: inf is no integer"),
        ('{"temperature": NaN}', "temperature: must be between"),
    ],
)
def test_invalid_generation_configs_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_defaults(write(tmp_path, content), "auto", "a/model")
    assert message in str(caught.value)


def test_the_embedded_model_is_sampled_as_its_makers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "made_of_it", {"eos_token_id": 2})
    assert read_defaults(folder, "auto", "smollm2") == {"temperature": 0.2, "top_p": 0.9}
    assert read_defaults(folder, "none", "smollm2") == read_defaults(None, "auto", "smollm2") == {}
    own = write(tmp_path / "smollm2", {"temperature": 0.7})
    assert read_defaults(own, "auto", "smollm2") == {"temperature": 0.7}


def test_defaults_are_shown_for_the_log() -> None:
    assert show_defaults({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"
