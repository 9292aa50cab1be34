"""Import of GGUF files that the test writes itself, laid out as llama.cpp's converter does."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.models import load_config
from minisgl.weights import gguf_import
from minisgl.weights.gguf_import import import_gguf
from minisgl.weights.sources import resolve_model
from tests.helpers.gguf import START, numbers_of, quiet, write_gguf, written_model
from tests.helpers.models import LOGITS_WITHIN, DenseSequence, load, reference_logits
from tests.helpers.variants import LLAMA3_ROPE

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
# so that blocks of 256 numbers fit
OF_256 = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def _folders(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*") if path.is_dir()]


@pytest.mark.parametrize(
    ("variant", "arch", "changes"),
    [
        ("llama3-tied", "llama", {}),
        ("llama-bias-untied", "llama", {"num_key_value_heads": 1}),
        ("qwen3-tied", "qwen3", {}),
        ("qwen3-untied", "qwen3", {}),
        ("qwen2-tied", "qwen2", {}),
        ("qwen2-tied", "qwen2vl", {}),
        ("qwen3-untied", "qwen3vl", {}),
        ("smollm3-tied", "smollm3", {}),
        ("gemma3-tied", "gemma3", {}),
        ("gemma3-tied", "gemma3", {"tie_word_embeddings": False, "rope_parameters": GEMMA3_ROPE}),
        ("mistral", "llama", {}),
        ("mistral-window", "llama", {}),
        ("qwen3-moe", "qwen3moe", {}),
        ("qwen3-moe", "qwen3moe", {"mlp_only_layers": [1]}),
        ("llama3-tied", "llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama-bias-untied", "llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_logits_equal_those_of_the_model_in_the_file(
    variant: str, arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = written_model(variant, **changes)
    folder = resolve_model(str(write_gguf(tmp_path / "m.gguf", model, arch)), quiet)
    ids = list(range(3, 90))
    logits = DenseSequence(load(folder)).extend(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.parametrize(
    ("key", "number", "windows"),
    [
        ("sliding_window_pattern", 2, [9, None, 9, None, 9, None, 9]),
        ("sliding_window_pattern", 1, [None] * 7),
        ("sliding_window", 0, [None] * 7),
        ("sliding_window", 12, [12, 12, 12, 12, 12, None, 12]),
    ],
)
def test_the_layers_of_gemma_with_a_window(key: str, number: int, windows: list[int | None], tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(f"gemma3.attention.{key}", None)
        writer.add_uint32(f"gemma3.attention.{key}", number)

    folder = import_gguf(write_gguf(tmp_path / "m.gguf", written_model("gemma3-tied"), "gemma3", edit=edit), quiet)
    assert list(load_config(folder).windows) == windows


def test_capped_logits_of_gemma_are_refused(tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_final_logit_softcapping(30.0)

    file = write_gguf(tmp_path / "m.gguf", written_model("gemma3-tied"), "gemma3", edit=edit)
    with pytest.raises(ConfigError, match=r"gemma3\.final_logit_softcapping: 30\.0 is not imported"):
        import_gguf(file, quiet)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_stretched_context(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0, "factor": 8.0}
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": 32, "beta_fast": 9.0}

    def edit(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(8.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(32)
            writer.add_rope_scaling_yarn_beta_fast(9.0)

    model = written_model("qwen3-untied", rope_parameters=rope)
    folder = resolve_model(str(write_gguf(tmp_path / "m.gguf", model, "qwen3", edit=edit)), quiet)
    ids = list(range(3, 90))
    logits = DenseSequence(load(folder)).extend(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.parametrize("quantise", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_quantised_values_are_taken_exactly(quantise: str, tmp_path: Path) -> None:
    _compare_values(tmp_path, written_model("qwen3-untied"), GGMLQuantizationType[quantise])


@pytest.mark.parametrize("quantise", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0", "IQ3_S"])
def test_values_of_blocks_of_256_are_taken_exactly(quantise: str, tmp_path: Path) -> None:
    _compare_values(tmp_path, written_model("qwen3-untied", **OF_256), GGMLQuantizationType[quantise])


def test_a_type_that_only_the_library_knows_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = written_model("qwen3-untied", **OF_256)
    file = write_gguf(tmp_path / "m.gguf", model, "qwen3", quantise=GGMLQuantizationType["IQ3_S"])
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"m\.gguf: .*weight: .*IQ3_S.* needs gguf, which is not installed: "):
        import_gguf(file, quiet)


def _compare_values(tmp_path: Path, model: Any, quantise: GGMLQuantizationType) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, "qwen3", quantise=quantise)
    imported = load_file(import_gguf(file, quiet) / "model.safetensors")
    assert imported.keys() == model.state_dict().keys()
    exact = numbers_of(file)
    for name in ("model.embed_tokens", "lm_head", "model.layers.2.mlp.down_proj", "model.layers.1.input_layernorm"):
        *_, last = parts = name.split(".")
        whole = {"embed_tokens": "token_embd", "lm_head": "output"}
        own = {"down_proj": "ffn_down", "input_layernorm": "attn_norm"}
        expected = exact[f"{whole[last]}.weight" if last in whole else f"blk.{parts[2]}.{own[last]}.weight"]
        np.testing.assert_array_equal(imported[f"{name}.weight"], expected)


def test_imported_config_has_the_file_metadata(tmp_path: Path) -> None:
    config = load_config(import_gguf(write_gguf(tmp_path / "m.gguf", written_model("llama3-tied")), quiet))
    assert (config.architecture, config.tie_word_embeddings, config.dtype) == ("LlamaForCausalLM", True, "bfloat16")
    assert (config.max_position, config.ropes[0].theta, config.eos_ids) == (256, 5000.0, (START,))


def test_a_file_is_imported_once_and_known_by_its_content(tmp_path: Path, cache: Path) -> None:
    steps: set[str] = set()

    def said(text: str, done: int = 0, total: int = 0) -> None:
        steps.add(text)

    model = written_model("llama3-tied")
    first = import_gguf(write_gguf(tmp_path / "a.gguf", model), said)
    again = import_gguf(write_gguf(tmp_path / "b.gguf", model), said)
    assert again == first
    assert steps == {"importing a.gguf, once"}
    other = import_gguf(write_gguf(tmp_path / "b.gguf", written_model("qwen3-tied"), "qwen3"), said)
    assert sorted(_folders(cache)) == sorted([first, other])


def test_an_import_that_fails_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, exact, calls = write_gguf(tmp_path / "m.gguf", written_model("llama3-tied")), gguf_import.decode, []

    def decode(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return exact(*args)

    monkeypatch.setattr(gguf_import, "decode", decode)
    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, quiet)
    assert _folders(cache) == []
    assert import_gguf(file, quiet).is_dir()


def test_files_of_a_killed_importer_are_removed(tmp_path: Path, cache: Path) -> None:
    model = written_model("llama3-tied")
    folder = import_gguf(write_gguf(tmp_path / "m.gguf", model), quiet)
    left = cache / f"{folder.name}.abc.partial"
    folder.rename(left)
    assert import_gguf(tmp_path / "m.gguf", quiet) == folder
    assert _folders(cache) == [folder]


def test_two_importers_at_once_do_the_work_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("llama3-tied"))
    second_works, found = threading.Event(), list[Path]()
    second = threading.Thread(target=lambda: found.append(import_gguf(file, lambda *_: second_works.set())))

    def on_work(text: str, done: int = 0, total: int = 0) -> None:
        if done:
            return
        second.start()
        assert not second_works.wait(0.3)  # it waits for the lock all the while

    found.append(import_gguf(file, on_work))
    second.join()
    assert found[0] == found[1]
    assert not second_works.is_set()


def _sharper_yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_attn_factors(1.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "bloom"}, "architecture 'bloom' is not imported: only .*llama"),
        ({"pre": "nobodys"}, "'nobodys' is not known: only default"),
        ({"kind": "rwkv"}, "'rwkv' is not imported: only gpt2"),
        ({"edit": lambda to: to.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)}, "rope.scaling.type: 'longrope'"),
        ({"edit": _sharper_yarn}, "rope.scaling.attn_factor: 1.5"),
        ({"edit": lambda to: to.add_attention_scale(0.5)}, r"llama\.attention\.scale: 0\.5 is not imported: only 0"),
        ({"edit": lambda to: to.add_tensor("blk.0.odd.weight", np.ones(8, np.float32))}, r"unknown tensor blk\.0\.odd"),
    ],
)
def test_unsupported_files_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("llama3-tied"), **change)
    with pytest.raises(ConfigError, match=message):
        import_gguf(file, quiet)
    assert _folders(cache) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"no such magic, surely", "not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00\x01", "the file ends in the counts"),
    ],
)
def test_a_file_that_is_not_gguf(content: bytes, message: str, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"m\.gguf: {message}"):
        import_gguf(file, quiet)
    assert _folders(cache) == []
