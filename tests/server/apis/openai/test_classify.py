"""What is made of the numbers of a head, and of models without labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minisgl.server.apis.openai.classify import Labels, own_labels
from minisgl.server.core.errors import ApiError
from tests.helpers.server import frontend

NUMBERS = [0.5, -2.0, 800.0]


@pytest.mark.parametrize(
    ("problem", "numbers", "wanted"),
    [
        (None, NUMBERS, torch.softmax(torch.tensor(NUMBERS), 0).tolist()),
        ("single_label_classification", NUMBERS[:2], torch.softmax(torch.tensor(NUMBERS[:2]), 0).tolist()),
        ("multi_label_classification", NUMBERS, torch.sigmoid(torch.tensor(NUMBERS)).tolist()),
        (None, NUMBERS[:1], torch.sigmoid(torch.tensor(NUMBERS[:1])).tolist()),
        ("regression", NUMBERS, NUMBERS),
    ],
)
def test_scores_become_probabilities(problem: str | None, numbers: list[float], wanted: list[float]) -> None:
    assert Labels({}, problem).probabilities(numbers) == pytest.approx(wanted)


def test_labels_have_the_names_of_the_config_or_of_transformers(tmp_path: Path) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "good"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    labels = own_labels(str(tmp_path))
    assert [labels.name(i) for i in range(2)] == ["good", "LABEL_1"]
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ApiError, match="it scores pairs of texts and has no labels"):
        own_labels(str(tmp_path / "judge"))


def test_a_model_that_gives_no_scores_is_named() -> None:
    with frontend() as running, running.http() as client:
        refused = client.post("/v1/classify", json={"input": "a"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "model", refused.text
        refused = client.post("/v1/classify", json={"input": [3, -1]})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("input"), refused.text
