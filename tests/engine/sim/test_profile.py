"""Profiles of the simulated engine: what a step costs, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.engine.sim.profile import Profile, Roofline, StepLoad, Table, load_profile, profile_names

TABLE = Table(rows=(1, 11), prefill_tokens=(0, 100), kv_len=(0, 1000), ms=(((1, 2), (11, 12)), ((3, 6), (13, 16))))
MODEL = {"layers": 2, "hidden": 8, "intermediate": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 50}
ROOFLINE = {
    "model": {**MODEL, "tied": True},
    "bandwidth": 1e6,
    "flops": 1e9,
    "memory": 1e6,
    "memory_ratio": 0.5,
    "overhead_us": 100,
    "layer_overhead_us": 10,
}


def roofline(**more: object) -> Roofline:
    return Profile(name="x", roofline=Roofline(**{**ROOFLINE, **more, "model": _model()})).check().roofline  # type: ignore[arg-type, return-value]


def _model() -> object:
    import msgspec

    from minisgl.engine.sim.profile import Model

    return msgspec.convert(ROOFLINE["model"], Model)


@pytest.mark.parametrize(
    ("name", "total", "without_embeddings"),
    [("qwen3-0.6b-h200", 0.6e9, 0.44e9), ("qwen3-8b-h200", 8.2e9, 6.95e9), ("qwen3-32b-tp4-h200", 32.8e9, 31.2e9)],
)
def test_sizes_are_those_of_the_model_cards(name: str, total: float, without_embeddings: float) -> None:
    found = load_profile(name).roofline
    assert found is not None
    assert found.model.weights == pytest.approx(total, rel=0.01)
    assert found.model.layer_weights == pytest.approx(without_embeddings, rel=0.01)


def test_decode_is_bound_by_memory() -> None:
    """By hand: 2 * (8 * 4 * 12 + 3 * 8 * 16) layer weights, 50 * 8 output; 2 * 2 * 2 * 4 KV values a token; bf16."""
    weights = 2 * (384 + 384) + 400
    kv = 32 * (70 + 2)
    assert roofline().seconds(StepLoad(2, 2, 2, 70, 70)) == pytest.approx(2 * (weights + kv) / 1e6 + 120e-6)


def test_prefill_is_bound_by_arithmetic() -> None:
    flops = 2 * (1536 * 1000 + 400 * 1) + 4 * 2 * 4 * 4 * 500_500
    load = StepLoad(1, 1000, 1, 1000, 500_500)
    assert roofline(bandwidth=1e9).seconds(load) == pytest.approx(flops / 1e9 + 120e-6)


def test_gpus_share_the_work_and_talk() -> None:
    one = roofline(bandwidth=1e9).seconds(StepLoad(1, 1000, 1, 1000, 500_500)) - 120e-6
    two = roofline(bandwidth=1e9, gpus=2, all_reduce_us=5, link_bandwidth=1e7)
    moved = 1000 * 8 * 2  # 2 * (2 - 1) / 2 = 1 of the activations
    expected = one / 2 + 120e-6 + 4 * (5e-6 + moved / 1e7)
    assert two.seconds(StepLoad(1, 1000, 1, 1000, 500_500)) == pytest.approx(expected)
    assert two.num_kv_tokens > 2 * roofline().num_kv_tokens  # the weights are there once


def test_a_null_step_takes_no_time() -> None:
    null = load_profile("null")
    assert not null.takes_time and null.seconds(StepLoad(512, 9000, 512, 10**6, 10**9)) == 0


@pytest.mark.parametrize("name", profile_names())
def test_more_work_never_takes_less(name: str) -> None:
    profile = load_profile(name)
    loads = [StepLoad(r, r, r, r * n, r * n) for r, n in ((1, 1), (1, 1000), (64, 1000), (256, 1000), (256, 9000))]
    times = [profile.seconds(load) for load in loads]
    assert times == sorted(times)


def test_a_table_gives_back_what_was_measured() -> None:
    for i, rows in enumerate(TABLE.rows):
        for j, prefill in enumerate(TABLE.prefill_tokens):
            for k, length in enumerate(TABLE.kv_len):
                found = TABLE.seconds(int(rows), int(rows + prefill), int(rows * length))
                assert found == pytest.approx(TABLE.ms[i][j][k] / 1e3)


@pytest.mark.parametrize(
    ("rows", "prefill", "kv_len", "ms"),
    [
        (6, 0, 0, 2.0),  # between rows
        (1, 50, 0, 6.0),  # between prefill tokens
        (1, 0, 500, 1.5),  # between lengths
        (6, 50, 500, 8.0),  # the middle of the cell
        (21, 0, 0, 5.0),  # beyond the last rows
        (1, 300, 0, 31.0),  # beyond the last prefill
        (1, 0, 4000, 5.0),  # beyond the last length
    ],
)
def test_a_table_is_linear_between_and_beyond(rows: int, prefill: int, kv_len: int, ms: float) -> None:
    assert TABLE.seconds(rows, rows + prefill, rows * kv_len) == pytest.approx(ms / 1e3)


def test_one_point_fits_everything() -> None:
    table = Table(rows=(4,), prefill_tokens=(0,), kv_len=(1, 3), ms=(((5, 7),),))
    assert table.seconds(1, 999, 2) == pytest.approx(0.006)


def test_profile_from_own_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"roofline": ROOFLINE, "eos_one_in": 9}))
    text = "name: other\ntable: {rows: [1], prefill_tokens: [0], kv_len: [1], ms: [[[4]]]}\n"
    (tmp_path / "table.yaml").write_text(text)
    (tmp_path / "exponent.yaml").write_text(json.dumps({"roofline": {**ROOFLINE, "flops": "1e9"}}))
    mine = load_profile(str(tmp_path / "mine.json"))
    assert mine.name == "mine" and mine.eos_one_in == 9 and mine.pool_tokens == roofline().num_kv_tokens
    other = load_profile(str(tmp_path / "table.yaml"))
    assert other.name == "other" and other.seconds(StepLoad(8, 8, 8, 80, 80)) == 0.004
    assert load_profile(str(tmp_path / "exponent.yaml")).roofline == mine.roofline


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tabel: {}", "tabel"),
        ("[1, 2]", "object"),
        ("{", "flow"),
        ("eos_one_in: -1", "eos_one_in"),
        ("context_len: 1", "context_len"),
        (json.dumps({"roofline": {**ROOFLINE, "flops": 0}}), "roofline.flops"),
        (json.dumps({"roofline": {**ROOFLINE, "memory_ratio": 1.5}}), "memory_ratio"),
        (json.dumps({"roofline": {**ROOFLINE, "memory": 1000}}), "no memory"),
        (json.dumps({"roofline": {**ROOFLINE, "model": {**MODEL, "layers": 0, "tied": True}}}), "model.layers"),
        ("table: {rows: [2, 1], prefill_tokens: [0], kv_len: [1], ms: [[[4]], [[5]]]}", "table.rows"),
        ("table: {rows: [1, 2], prefill_tokens: [0], kv_len: [1], ms: [[[4]]]}", "table.ms"),
        ("table: {rows: [1], prefill_tokens: [0, 1], kv_len: [1], ms: [[[4]]]}", "prefill_tokens"),
        ("table: {rows: [1], prefill_tokens: [0], kv_len: [1], ms: [[[-4]]]}", "table.ms[0][0]"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--sim-profile") as error:
        load_profile(str(file))
    assert complaint in str(error.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="qwen3-8b-h200"):
        load_profile("qwen4")
