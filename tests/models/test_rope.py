"""YaRN and dynamic scaling: the tables that stretch a context, against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from minisgl.config import ConfigError
from minisgl.models import parse_config
from minisgl.models.rope import inverse_frequencies
from tests.helpers.models import tiny_model
from tests.helpers.variants import CONFIG, VARIANTS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_attention_factor() -> None:
    def factor(**change: Any) -> float:
        return parse_config({**CONFIG, "rope_scaling": {**YARN, **change}}).ropes[0].attention_factor

    assert factor() == factor(mscale=1.0) == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(mscale=1.0, mscale_all_dim=1.0) == factor(factor=1.0) == 1.0
    assert factor(attention_factor=0.25, mscale=1.0, mscale_all_dim=2.0) == 0.25


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="it takes the factor from the context lengths")
@pytest.mark.parametrize("name", [name for name in VARIANTS if "yarn" in name])
@pytest.mark.parametrize(
    "change", [{}, {"beta_fast": 4.0, "beta_slow": 3.9}, {"factor": 1.0}, {"attention_factor": 0.7}]
)
def test_yarn_tables_equal_transformers(name: str, change: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = tiny_model(name).config
    theirs.rope_parameters |= change
    frequencies, attention = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = parse_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    torch.testing.assert_close(
        torch.from_numpy(inverse_frequencies(ours.ropes[0], ours.head_dim, 64)), frequencies, rtol=1e-6, atol=0
    )
    assert ours.ropes[0].attention_factor == pytest.approx(attention)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}


@pytest.mark.parametrize("length", [1, 64, 65, 100, 256])
def test_dynamic_tables_equal_transformers_at_their_length(length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = tiny_model("llama3-tied", max_position_embeddings=64, rope_parameters=DYNAMIC).config
    frequencies, attention = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), length)
    ours = parse_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    found = torch.from_numpy(inverse_frequencies(ours.ropes[0], ours.head_dim, length))
    torch.testing.assert_close(found, frequencies, rtol=1e-6, atol=0)
    assert ours.ropes[0].attention_factor == attention == 1.0


def test_context_length_with_dynamic_and_yarn_scaling() -> None:
    dynamic = parse_config({**CONFIG, "max_position_embeddings": 64, "rope_scaling": DYNAMIC})
    assert [dynamic.context_len(length) for length in (None, 10, 64, 256)] == [64, 10, 64, 256]
    with pytest.raises(ConfigError, match="--max-seq-len 257: must be at most 256, the context of 64 with its dynamic"):
        dynamic.context_len(257)
    with pytest.raises(ConfigError, match=r"rope_type dynamic: factor 0\.5 must be at least 1"):
        parse_config({**CONFIG, "rope_scaling": {**DYNAMIC, "factor": 0.5}})
    with pytest.raises(ConfigError, match="rope_type dynamic: alpha: 1000: a fixed scale"):
        parse_config({**CONFIG, "rope_scaling": {**DYNAMIC, "alpha": 1000}})
    with pytest.raises(ConfigError, match="original_max_position_embeddings: 16: must equal"):
        parse_config({**CONFIG, "rope_scaling": {**DYNAMIC, "original_max_position_embeddings": 16}})
    with pytest.raises(ConfigError, match="--max-seq-len 65: must be at most 64, the context"):
        parse_config({**CONFIG, "max_position_embeddings": 64}).context_len(65)
