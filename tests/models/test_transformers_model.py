"""A model of transformers' layers by itself: its head, its padding, and what it says of its forward."""

from __future__ import annotations

import pytest
import torch

from minisgl.models.transformers_model import TransformersModel
from minisgl.models.transformers_probe import probe
from tests.helpers.models import tiny_case
from tests.helpers.variants import TINY, Model

pytestmark = pytest.mark.any_cpu

SCALED = Model("CohereForCausalLM", "", {"logit_scale": 0.3})
CAPPED = Model("Gemma2ForCausalLM", "", {"final_logit_softcapping": 3.0, "head_dim": 16, "sliding_window": 9})
BIASED = Model("PhiForCausalLM")
OPT = Model("OPTForCausalLM", "", {"ffn_dim": 112, "word_embed_proj_dim": 64})


@pytest.mark.parametrize("case", [SCALED, CAPPED, BIASED, OPT], ids=lambda case: case.architecture)
def test_the_head_is_theirs_in_float32(case: Model) -> None:
    """Scales, soft caps and biases; of weights in bfloat16, too, whose own logits are rounded."""
    exact = tiny_case(case)
    model = tiny_case(case).bfloat16()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    made = TransformersModel(model)
    hidden = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        found = made.logits(hidden)
        expected = TransformersModel(exact).logits(hidden.float())
    assert found.dtype is torch.float32 and found.shape == (5, TINY["vocab_size"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padding_to_few_token_counts_does_not_change_results() -> None:
    made = TransformersModel(tiny_case(Model("Olmo2ForCausalLM")).bfloat16())
    sizes: list[tuple[int, int]] = []
    lengths: list[int] = []
    made.body.register_forward_hook(lambda module, args, out: lengths.append(out[0].shape[1]))
    with torch.inference_mode():
        probe(made, "Olmo2ForCausalLM", TINY["vocab_size"])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            sizes.append((len(q), len(k)))
            return q

        lengths.clear()
        for n in (1, 17, 33):
            assert made.forward(torch.arange(n), torch.arange(n), attend).shape == (n, 64)
    assert sizes == [(n, n) for n in (1, 17, 33) for _ in range(3)]
    assert lengths == [1, 18, 36]


def test_a_layer_that_is_not_asked_is_an_error() -> None:
    made = TransformersModel(tiny_case(Model("Olmo2ForCausalLM")))
    with torch.inference_mode():
        probe(made, "Olmo2ForCausalLM", TINY["vocab_size"])
        made.attention = made.attention[:-1]
        with pytest.raises(RuntimeError, match="asked 3 times, not 2"):
            made.forward(torch.arange(4), torch.arange(4), lambda layer, q, k, v: q)
