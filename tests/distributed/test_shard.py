"""Every architecture cut among ranks against itself uncut: logits, weights, and what a rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import ALONE, Group
from minisgl.engine.loading import check_ranks, fitting_ranks
from minisgl.models import load_config
from minisgl.models.decoder import Decoder, build_model
from minisgl.weights import checkpoint
from minisgl.weights.checkpoint import dummy_weights, load_weights, whole_shape
from tests.helpers.models import CPU, LOGITS_WITHIN, DenseSequence, save, tiny_model
from tests.helpers.ranks import on_ranks
from tests.helpers.variants import VARIANTS

PROMPT = [(7 * i + 3) % 131 for i in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save(tiny_model(name), root / name) for name in VARIANTS}


def _load(folder: Path, group: Group = ALONE) -> Decoder:
    with torch.inference_mode():
        model = build_model(load_config(folder), dtype=torch.float32, device=CPU, group=group)
        load_weights(model.checkpoint(), folder, stacked=model.stacked(), shards=model.shards())
    return model


def _logits(model: Decoder) -> torch.Tensor:
    sequence = DenseSequence(model)
    return torch.cat((sequence.extend(PROMPT[:25]), sequence.extend(PROMPT[25:]), sequence.extend([5])))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_one_rank(variant: str, size: int, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = _logits(_load(folders[variant]))
    found = on_ranks(size, tmp_path, lambda group: _logits(_load(folders[variant], group)))
    assert (found[0] - expected).abs().max() <= LOGITS_WITHIN
    assert not any(logits.any() for logits in found[1:])  # they only give theirs


def test_stacked_experts_are_sharded_like_separate_ones(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3-moe"), tmp_path / "model", original_names=False)
    expected = _logits(_load(folder))
    found = on_ranks(2, tmp_path, lambda group: _logits(_load(folder, group)))
    assert (found[0] - expected).abs().max() <= LOGITS_WITHIN


@pytest.mark.parametrize("variant", ["llama-bias-untied", "qwen3-moe"])
def test_the_ranks_hold_the_whole_and_dummy_weights_are_its_parts(
    variant: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    def build(group: Group) -> Decoder:
        model = build_model(load_config(folders[variant]), dtype=torch.float32, device=CPU, group=group)
        dummy_weights(model.checkpoint(), 3, model.shards())
        return model

    whole, parts = build(ALONE).checkpoint(), on_ranks(2, tmp_path, build)
    for name, expected in whole.items():
        pieces = [part.checkpoint()[name] for part in parts]
        shards = [part.shards().get(name) for part in parts]
        if shards[0] is None:
            assert torch.equal(pieces[0], expected)
            continue
        assert torch.equal(torch.cat(pieces, shards[0].dim), expected), name
        assert whole_shape(pieces[1], shards[1]) == tuple(expected.shape)
    held = sum(t.numel() for t in parts[1].checkpoint().values())
    assert held < 0.55 * sum(t.numel() for t in whole.values())


def test_a_rank_reads_its_shard_only(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}

    class Watched:
        def __init__(self, name: str, inner: object) -> None:
            self._name, self._inner = name, inner

        def get_shape(self) -> list[int]:
            return self._inner.get_shape()  # type: ignore[attr-defined, no-any-return]

        def __getitem__(self, index: object) -> torch.Tensor:
            found: torch.Tensor = self._inner[index]  # type: ignore[index]
            read[self._name] = read.get(self._name, 0) + found.numel()
            return found

    opened = checkpoint.safe_open

    class WatchedFile:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._opened = opened(*args, **kwargs)  # type: ignore[arg-type]

        def __enter__(self) -> WatchedFile:
            self._file = self._opened.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._opened.__exit__(*error)  # type: ignore[arg-type]

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_slice(self, name: str) -> Watched:
            return Watched(name, self._file.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            found: torch.Tensor = self._file.get_tensor(name)
            read[name] = found.numel()
            return found

    def count(group: Group) -> dict[str, int]:
        model = _load(folders["qwen3-untied"], group)
        return {name: tensor.numel() for name, tensor in model.checkpoint().items()}

    wanted = on_ranks(2, tmp_path, count)[1]

    class RankOne:  # loads alone: no collective takes part
        rank, size = 1, 2

    monkeypatch.setattr(checkpoint, "safe_open", WatchedFile)
    _load(folders["qwen3-untied"], RankOne())  # type: ignore[arg-type]
    assert read == wanted


@pytest.mark.parametrize(
    ("variant", "ranks", "what"), [("qwen3-tied", 3, "num_attention_heads: 4"), ("mistral", 8, "4")]
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    variant: str, ranks: int, what: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=rf"--tp {ranks}: .*{what}.* choose --tp 1, 2, 4"):
        check_ranks(folders[variant], ranks)
    for fits in (1, 2, 4):
        check_ranks(folders[variant], fits)


def test_kv_heads_must_divide_or_be_divided_by_ranks(tmp_path: Path) -> None:
    folder = save(tiny_model("mistral", num_attention_heads=12, num_key_value_heads=6, intermediate_size=96), tmp_path)
    with pytest.raises(ConfigError, match=r"--tp 4: .*num_key_value_heads: 6.* choose --tp 1, 2, 3, 6, 12"):
        check_ranks(folder, 4)


@pytest.mark.parametrize(
    ("devices", "settings", "ranks", "reason"),
    [
        (0, {}, 1, "no CUDA device"),
        (1, {}, 1, "one CUDA device"),
        (2, {}, 2, "2 CUDA devices"),
        (7, {}, 4, "7 CUDA devices"),
        (8, {}, 4, "4 equal parts"),
        (4, {"device": "cuda:1"}, 2, "3 CUDA devices"),
        (8, {"device": "cpu"}, 1, "no CUDA device"),
        (8, {"torch_compile": True}, 1, "--torch-compile"),
        (8, {"model_impl": "transformers"}, 1, "transformers' layers"),
    ],
)
def test_auto_ranks_use_devices_that_the_model_can_be_sharded_over(
    monkeypatch: pytest.MonkeyPatch,
    folders: dict[str, Path],
    devices: int,
    settings: dict[str, Any],
    ranks: int,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    config = EngineConfig(model=str(folders["qwen3-tied"]), engine="torch", tp="auto", **settings)
    found, why = fitting_ranks(config, lambda text, done=0, total=0: None)
    assert found == ranks and reason in why
