"""What cannot be right through transformers' code is refused by name, with the reason, from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from minisgl.config import ConfigError
from minisgl.models import ARCHITECTURES, is_native
from minisgl.models.transformers_config import find_transformers_source
from tests.helpers.variants import REFUSED, TINY_THEIRS

pytestmark = pytest.mark.skipif(transformers.__version__ < "5", reason="seen with transformers 5")


def write(folder: Path, architecture: str, **settings: Any) -> Path:
    """config.json as transformers would write it, or as it stands for a class that it has not."""
    kind = getattr(transformers, architecture, None)
    raw = {**TINY_THEIRS, **settings, "architectures": [architecture]}
    if kind is not None:
        raw["model_type"] = kind.config_class.model_type
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.architecture)
def test_a_refusal_names_the_reason(refused: Any, tmp_path: Path) -> None:
    if not hasattr(transformers, refused.architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {refused.architecture}")
    with pytest.raises(ConfigError, match=refused.says) as raised:
        find_transformers_source(write(tmp_path, refused.architecture, **refused.settings))
    assert refused.architecture in str(raised.value) and transformers.__version__ in str(raised.value)
    native = refused.architecture in ARCHITECTURES
    assert ("--engine cpu" in str(raised.value), "no engine supports it" in str(raised.value)) == (native, not native)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no such class"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, "code of their own .* not run"),
    ],
)
def test_unknown_transformers_class_is_refused(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"MadeUpForCausalLM: .*{says}"):
        find_transformers_source(write(tmp_path, "MadeUpForCausalLM", **settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: 'gptq': use the unquantised"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_invalid_config_is_an_error(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        find_transformers_source(write(tmp_path, "Olmo2ForCausalLM", **settings))


def test_nothing_is_imported_from_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "configuration.py").write_text("raise SystemExit('it ran')\n")
    mapped = {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"}
    found = find_transformers_source(write(tmp_path, "Olmo2ForCausalLM", auto_map=mapped))
    assert found.kind is transformers.Olmo2ForCausalLM


def test_transformers_source_has_engine_properties(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    found = find_transformers_source(write(tmp_path, "Gemma2ForCausalLM", eos_token_id=5, dtype="bfloat16"))
    assert (found.vocab_size, found.context_len, found.limited_by) == (TINY_THEIRS["vocab_size"], 256, "")
    assert (found.eos_ids, found.dtype, found.text_half) == ((5, 7), "bfloat16", False)


_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("architecture", "rope", "context_len"),
    [
        ("Olmo2ForCausalLM", {"rope_type": "dynamic", "factor": 4.0}, 256),
        ("Phi3ForCausalLM", {"rope_type": "longrope", "original_max_position_embeddings": 64, **_FACTORS}, 64),
        ("Olmo2ForCausalLM", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_frequencies_that_would_change_end_the_context(
    architecture: str, rope: dict[str, Any], context_len: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"rope_parameters": {**rope, "rope_theta": 10_000.0}}
    if rope["rope_type"] == "longrope":
        settings["original_max_position_embeddings"] = 64
    found = find_transformers_source(write(tmp_path, architecture, **settings))
    assert found.context_len == context_len
    assert (rope["rope_type"] in found.limited_by) == (context_len < 256)


def test_model_impl_chooses_native_or_transformers_layers(tmp_path: Path) -> None:
    native, other = tmp_path / "native", tmp_path / "other"
    for folder, architecture in ((native, "LlamaForCausalLM"), (other, "Gemma2ForCausalLM")):
        folder.mkdir()
        write(folder, architecture)
    assert [is_native(native, impl) for impl in ("auto", "native", "transformers")] == [True, True, False]
    assert [is_native(other, impl) for impl in ("auto", "native", "transformers")] == [False, True, False]
