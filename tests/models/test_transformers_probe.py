"""What is seen of transformers' layers before they serve: what they ask of attention, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.models.transformers_model import TransformersModel
from minisgl.models.transformers_probe import probe
from tests.helpers.models import tiny_case
from tests.helpers.variants import CASES, TINY, Model

pytestmark = pytest.mark.any_cpu


def looked_at(model: Any) -> TransformersModel:
    made = TransformersModel(model)
    with torch.inference_mode():
        probe(made, type(model).__name__, TINY["vocab_size"])
    return made


def case(architecture: str, **settings: Any) -> Any:
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    return tiny_case(Model(architecture, "", settings))


def test_probe_records_attention_parameters() -> None:
    [gemma] = [one for one in CASES if one.architecture == "Gemma2ForCausalLM"]
    layers = looked_at(tiny_case(gemma)).attention
    assert [layer.window for layer in layers] == [9, None, 9, None]
    assert {layer.softcap for layer in layers} == {2.0}
    assert {layer.scale for layer in layers} == {10**-0.5}
    assert {(layer.heads, layer.kv_heads, layer.k_dim, layer.v_dim) for layer in layers} == {(4, 2, 16, 16)}


def test_a_window_that_only_the_mask_knows_is_seen() -> None:
    [phimoe] = [one for one in CASES if one.architecture == "PhimoeForCausalLM"]
    assert {layer.window for layer in looked_at(tiny_case(phimoe)).attention} == {9}


@pytest.mark.parametrize(
    ("architecture", "settings", "says"),
    [
        ("BertLMHeadModel", {}, "is not causal"),
        ("DogeForCausalLM", {}, "neither causal nor that of a sliding window"),
        ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 16}, "argument s_aux"),
    ],
)
def test_unsupported_attention_arguments_are_refused(architecture: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"{architecture}: .*{says}"):
        looked_at(case(architecture, **settings))


class _Sum(torch.nn.Module):
    """What came before in the same forward, added up: a state that no page holds."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1)


class _Places(torch.nn.Module):
    """Positions by the place in the forward, whatever it is told."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1]).unsqueeze(1)


class _NotFinite(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0


class _Raises(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise IndexError("out of luck")


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (_Sum, "in steps it differs from transformers' own attention, by"),
        (_Places, "in steps it differs"),
        (_NotFinite, "not finite in float32: choose another --dtype"),
        (_Raises, "its forward fails: IndexError: out of luck"),
    ],
)
def test_a_model_that_keeps_more_than_pages_do_is_refused(broken: Callable[[], torch.nn.Module], says: str) -> None:
    model = case("Olmo2ForCausalLM")
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = torch.nn.Sequential(mlp, broken())
    with pytest.raises(ConfigError, match=says):
        looked_at(model)


def test_another_window_than_that_of_the_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second probe alone: a window that was overlooked."""
    made = looked_at(case("Starcoder2ForCausalLM", sliding_window=4))
    assert {layer.window for layer in made.attention} == {4}
    monkeypatch.setattr("minisgl.models.transformers_probe._window", lambda mask, tokens: None)
    with pytest.raises(ConfigError, match="in steps it differs"):
        looked_at(case("Starcoder2ForCausalLM", sliding_window=4))


def test_a_body_without_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = case("Olmo2ForCausalLM")
    monkeypatch.setattr(model.model, "forward", lambda input_ids, use_cache: None)
    with pytest.raises(ConfigError, match="has no argument position_ids"):
        looked_at(model)


def test_model_without_attention_registry_is_refused() -> None:
    model = case("Olmo2ForCausalLM")
    model.model.layers = torch.nn.ModuleList()
    model.config.num_hidden_layers = 0
    with pytest.raises(ConfigError, match="no layer uses"):
        looked_at(model)
