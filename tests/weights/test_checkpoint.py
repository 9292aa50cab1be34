"""Filling a model from safetensors and from seeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.models import load_config
from minisgl.models.decoder import Decoder, build_model
from minisgl.weights.checkpoint import dummy_weights, load_weights
from tests.helpers.models import CPU, DenseSequence, save, tiny_model


def _wanted() -> dict[str, Tensor]:
    return {"a.weight": torch.empty(2, 3), "b.weight": torch.empty(4), "c.weight": torch.empty(5)}


def _tensors() -> dict[str, Tensor]:
    return {name: torch.randn(target.shape) for name, target in _wanted().items()}


def test_values_are_copied_and_converted(tmp_path: Path) -> None:
    tensors, wanted = _tensors(), {name: target.bfloat16() for name, target in _wanted().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(wanted, tmp_path)
    assert all(torch.equal(wanted[name], tensors[name].bfloat16()) for name in tensors)


def test_a_tensor_may_stand_for_several(tmp_path: Path) -> None:
    whole = torch.empty(2, 3)
    wanted, stacked = {"0.w": whole[0], "1.w": whole[1], "c": torch.empty(1)}, {"both": (whole, ["0.w", "1.w"])}
    save_file({"both": torch.arange(6.0).view(2, 3), "c": torch.zeros(1)}, tmp_path / "model.safetensors")
    load_weights(wanted, tmp_path, stacked=stacked)
    assert torch.equal(wanted["1.w"], torch.tensor([3.0, 4.0, 5.0]))
    save_file({"0.w": torch.zeros(3), "c": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: 1\.w"):
        load_weights(wanted, tmp_path, stacked=stacked)
    save_file({"both": torch.zeros(3, 2), "c": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"both is \[3, 2\], not \[2, 3\]"):
        load_weights(wanted, tmp_path, stacked=stacked)


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    wrong = {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(4), "extra.weight": torch.zeros(1)}
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_weights(_wanted(), tmp_path)
    for part in (
        "1 missing: c.weight",
        "1 unknown: extra.weight",
        "1 of the wrong shape: a.weight is [3, 2], not [2, 3]",
    ):
        assert part in str(caught.value)


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    save_file({f"{i:03}.weight": torch.zeros(1) for i in range(200)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"200 unknown: 000\.weight") as caught:
        load_weights({}, tmp_path)
    assert "199.weight" not in str(caught.value)


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    surplus = {"lm_head.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file({**_tensors(), **surplus}, tmp_path / "model.safetensors")
    load_weights(_wanted(), tmp_path)


def test_an_untied_head_is_not_passed_over(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: lm_head\.weight"):
        load_weights({**_wanted(), "lm_head.weight": torch.empty(2)}, tmp_path)


def test_the_single_file_wins_over_other_copies(tmp_path: Path) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    wanted = _wanted()
    load_weights(wanted, tmp_path)
    assert torch.equal(wanted["c.weight"], tensors["c.weight"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no \\*.safetensors"),
        ({"model.safetensors": b"\x00" * 64}, "model.safetensors: "),
        ({"model.safetensors.index.json": b"{}"}, "not a safetensors index"),
        ({"model.safetensors.index.json": b"{"}, "not a safetensors index"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'}, "model-1.safetensors"),
    ],
)
def test_invalid_folders_are_refused(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_weights(_wanted(), tmp_path)


def test_progress_counts_every_tensor_once(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen3-tied"), tmp_path, shards=True)
    wanted = build_model(load_config(folder), dtype=torch.float32, device=CPU).checkpoint()
    seen: list[tuple[int, int]] = []
    load_weights(wanted, folder, lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(wanted)) for done in range(1, len(wanted) + 1)]


_PEAK = """
import sys, psutil, torch
from minisgl.weights.checkpoint import load_weights
names = [f"{i}.weight" for i in range(6)]
wanted = {name: torch.empty(8 << 20) for name in names}
before = psutil.Process().memory_info().rss
load_weights(wanted, sys.argv[1])
# not ru_maxrss: a child inherits its parent's
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
assert all(float(wanted[name][-1]) == i for i, name in enumerate(names))
print(peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_weights_and_one_shard(tmp_path: Path) -> None:
    weight_map = {f"{i}.weight": f"model-{i}.safetensors" for i in range(6)}
    for i, (name, file) in enumerate(weight_map.items()):
        save_file({name: torch.full((8 << 20,), float(i))}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    shard = 32 * 2**20
    assert int(done.stdout) < 6 * shard + shard + shard  # the last for what Python allocates beside it


def _dummy(seed: int, variant: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    tiny_model(variant).config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    model = build_model(load_config(folder), dtype=dtype, device=CPU)
    dummy_weights(model.checkpoint(), seed)
    return model


def test_dummy_weights_need_a_config_alone_and_stay_finite(tmp_path: Path) -> None:
    logits = DenseSequence(_dummy(0, "llama-bias-untied", tmp_path, torch.bfloat16)).extend([*range(3, 100)])
    assert logits.isfinite().all()
    assert logits.float().std() > 1e-3


def test_dummy_weights_depend_on_name_and_seed_only() -> None:
    forward, backward, other = _wanted(), dict(reversed(_wanted().items())), _wanted()
    dummy_weights(forward, 5)
    dummy_weights(backward, 5)
    dummy_weights(other, 6)
    assert all(torch.equal(forward[name], backward[name]) for name in forward)
    assert not any(torch.equal(forward[name], other[name]) for name in forward)
    same_shape = {"x.weight": torch.empty(5), "y.weight": torch.empty(5)}
    dummy_weights(same_shape, 5)
    assert not torch.equal(same_shape["x.weight"], same_shape["y.weight"])


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, -1])
def test_dummy_weights_accept_any_seed(seed: int) -> None:
    dummy_weights(_wanted(), seed)
