"""What an application is asked to be: on the command line all is text; what cannot be is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from minisgl.ray.args import Args


def test_words_of_a_command_line() -> None:
    args = Args.model_validate({"model": "smollm2", "replicas": "2", "flags": "--dp 2 --api-key 'a b'"})
    ((name, one),) = args.by_name().items()
    assert (name, one.replicas) == ("smollm2", 2)
    assert one.server_flags(name) == [
        *("--model", "smollm2", "--served-model-name", "smollm2", "--resumable"),
        *("--dp", "2", "--api-key", "a b"),
    ]


def test_several_models_start_from_what_is_said_for_all() -> None:
    args = Args.model_validate(
        {
            "flags": ["--engine", "echo"],
            "replicas": 3,
            "models": {"small": {"model": "a"}, "large": {"model": "b", "tp": 2, "gpus": 2, "replicas": 1}},
        }
    )
    models = args.by_name()
    assert list(models) == ["small", "large"]
    assert [one.replicas for one in models.values()] == [3, 1]
    assert models["large"].server_flags("large") == [
        *("--model", "b", "--served-model-name", "large", "--tp", "2", "--resumable", "--engine", "echo"),
    ]


def test_model_name_differs_from_model() -> None:
    assert list(Args(model="a/b", name="chat").by_name()) == ["chat"]
    assert "--served-model-name" in Args(model="a").server_flags("x")
    named = Args(model="a", flags=["--served-model-name", "y"])
    assert named.server_flags("x").count("--served-model-name") == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"flags": "--port 80"}, "--port: is set by the replica itself"),
        ({"flags": "--tp=2"}, "--tp=2: is set by the replica itself"),
        ({"tp": 2, "gpus": 1}, "gpus: 1: must be at least tp"),
        ({"replicas": 5, "max_replicas": 4}, "replicas: 5: must be between"),
        ({"models": {"a": {"replicas": 0}}}, "models.a.replicas"),
        ({"models": {"a": {"what": 0}}}, "models.a.what"),
        ({"kv_use": 1.5}, "kv_use"),
        ({"routing": "cache"}, "routing"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason.replace("(", "\\(")):
        Args.model_validate(given)
