"""Import of GGUF files that the test writes itself, laid out as llama.cpp's converter does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.models import load_config
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.weights import gguf_import
from minisgl.weights.gguf_import import import_gguf
from minisgl.weights.sources import resolve_model
from tests.helpers_models import LOGITS_WITHIN, DenseSequence, load, reference_logits, tiny_model

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# no merge leads to "xyz"
TOKENS = [*sorted(ByteLevel.alphabet()), "Ġ4", "42", "xyz", "<|start|>", "<tool>"]
START, TOOL = len(TOKENS) - 2, len(TOKENS) - 1
Edit = Callable[[GGUFWriter], None]


def _quiet(text: str, done: int = 0, total: int = 0) -> None:
    pass


def _interleave(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Each head's rows 0, 1, .. h, h + 1, .. become 0, h, 1, h + 1, .. as llama.cpp wants them."""
    size = len(values) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return values[order]


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_LAYER[rest]}.{kind}"


def _write_gguf(
    file: Path,
    model: Any,
    arch: str = "llama",
    *,
    pre: str = "smollm",
    kind: str = "gpt2",
    quantise: GGMLQuantizationType = GGMLQuantizationType.F32,
    edit: Edit | None = None,
) -> Path:
    config = model.config
    writer = GGUFWriter(file, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 4])
    writer.add_token_merges(["Ġ 4", "4 2"])
    writer.add_eos_token_id(START)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = values.numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = _interleave(array, heads)
        stored = quantise if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(array, stored), raw_dtype=stored)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _model(variant: str, **changes: Any) -> Any:
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "intermediate_size": 128}
    return tiny_model(variant, vocab_size=len(TOKENS), attention_bias=False, mlp_bias=False, **{**plain, **changes})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def _folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("variant", "arch", "changes"),
    [
        ("llama3-tied", "llama", {}),
        ("llama-bias-untied", "llama", {"num_key_value_heads": 1}),
        ("qwen3-tied", "qwen3", {}),
        ("qwen3-untied", "qwen3", {}),
    ],
)
def test_logits_equal_those_of_the_model_in_the_file(
    variant: str, arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = _model(variant, **changes)
    folder = resolve_model(str(_write_gguf(tmp_path / "m.gguf", model, arch)), _quiet)
    ids = list(range(3, 90))
    logits = DenseSequence(load(folder)).extend(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids), rtol=0, atol=LOGITS_WITHIN)


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

    model = _model("qwen3-untied", rope_parameters=rope)
    folder = resolve_model(str(_write_gguf(tmp_path / "m.gguf", model, "qwen3", edit=edit)), _quiet)
    ids = list(range(3, 90))
    logits = DenseSequence(load(folder)).extend(ids)
    torch.testing.assert_close(logits, reference_logits(model, ids), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.parametrize("quantise", [GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_quantised_values_are_taken_exactly(quantise: GGMLQuantizationType, tmp_path: Path) -> None:
    model = _model("qwen3-untied")
    folder = import_gguf(_write_gguf(tmp_path / "m.gguf", model, "qwen3", quantise=quantise), _quiet)
    imported = load_file(folder / "model.safetensors")
    assert imported.keys() == model.state_dict().keys()
    for name, values in model.state_dict().items():
        exact = values.numpy()
        if exact.ndim == 2:
            exact = gguf.dequantize(gguf.quantize(exact, quantise), quantise)
        np.testing.assert_array_equal(imported[name], exact)


def test_the_config_says_what_the_file_says(tmp_path: Path) -> None:
    config = load_config(import_gguf(_write_gguf(tmp_path / "m.gguf", _model("llama3-tied")), _quiet))
    assert (config.architecture, config.tie_word_embeddings, config.dtype) == ("LlamaForCausalLM", True, "bfloat16")
    assert (config.max_position, config.rope.theta, config.eos_ids) == (256, 5000.0, (START,))


def _tokenizer(tmp_path: Path, pre: str, edit: Edit | None = None) -> Tokenizer:
    file = _write_gguf(tmp_path / f"{pre}.gguf", _model("llama3-tied", num_hidden_layers=1), pre=pre, edit=edit)
    return Tokenizer.load(import_gguf(file, _quiet))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["a", "Ġ", "4", "2"]), ("gpt-2", ["a", "Ġ4", "2"]), ("llama-bpe", ["a", "Ġ", "42"])],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert [TOKENS[i] for i in _tokenizer(tmp_path, pre).encode("a 42")] == pieces


@pytest.mark.parametrize(("pre", "pieces"), [("llama-bpe", ["xyz"]), ("smollm", ["x", "y", "z"])])
def test_only_llama_3_takes_a_known_word_without_merges(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert [TOKENS[i] for i in _tokenizer(tmp_path, pre).encode("xyz")] == pieces


def test_special_tokens_and_chat_template(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "smollm")
    ids = tokenizer.encode("<|start|>x<tool>").tolist()
    assert (ids[0], ids[-1], len(ids)) == (START, TOOL, 3)
    assert tokenizer.decode(ids) == "x<tool>"  # user-defined tokens are text
    assert tokenizer.special_tokens == {"eos_token": "<|start|>"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize("add", [True, False])
def test_the_bos_token_is_added_if_the_file_says_so(add: bool, tmp_path: Path) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(START)
        writer.add_add_bos_token(add)

    tokenizer = _tokenizer(tmp_path, "llama-bpe", edit)
    assert (tokenizer.encode("x")[0] == START) == add
    assert tokenizer.encode("x", add_special_tokens=False)[0] != START


def test_a_file_is_imported_once_and_known_by_its_content(tmp_path: Path, cache: Path) -> None:
    steps: set[str] = set()

    def said(text: str, done: int = 0, total: int = 0) -> None:
        steps.add(text)

    model = _model("llama3-tied")
    first = import_gguf(_write_gguf(tmp_path / "a.gguf", model), said)
    again = import_gguf(_write_gguf(tmp_path / "b.gguf", model), said)
    assert again == first
    assert steps == {"importing a.gguf, once"}
    other = import_gguf(_write_gguf(tmp_path / "b.gguf", _model("qwen3-tied"), "qwen3"), said)
    assert sorted(_folders(cache)) == sorted([first, other])


def test_an_import_that_fails_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, exact, calls = _write_gguf(tmp_path / "m.gguf", _model("llama3-tied")), gguf.dequantize, []

    def dequantize(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return exact(*args)

    monkeypatch.setattr(gguf_import, "dequantize", dequantize)
    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, _quiet)
    assert _folders(cache) == []
    assert import_gguf(file, _quiet).is_dir()


def test_what_a_killed_importer_left_is_removed(tmp_path: Path, cache: Path) -> None:
    model = _model("llama3-tied")
    folder = import_gguf(_write_gguf(tmp_path / "m.gguf", model), _quiet)
    left = cache / f"{folder.name}.abc.partial"
    folder.rename(left)
    assert import_gguf(tmp_path / "m.gguf", _quiet) == folder
    assert _folders(cache) == [folder]


def test_two_importers_at_once_do_the_work_once(tmp_path: Path) -> None:
    file = _write_gguf(tmp_path / "m.gguf", _model("llama3-tied"))
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


def _longrope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def _sharper_yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_attn_factors(1.5)


def _rope_freqs(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))


def _odd_tensor(writer: GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones(8, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "falcon"}, "architecture 'falcon' is not imported: only llama, qwen3"),
        ({"pre": "tekken"}, "'tekken' is not known: only smollm"),
        ({"kind": "llama"}, "'llama' is not imported: only gpt2"),
        ({"edit": _longrope}, "rope.scaling.type: 'longrope'"),
        ({"edit": _sharper_yarn}, "rope.scaling.attn_factor: 1.5"),
        ({"edit": _rope_freqs}, "scaled rotary embeddings"),
        ({"edit": _odd_tensor}, r"unknown tensor blk\.0\.ffn_gate_exps"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    file = _write_gguf(tmp_path / "m.gguf", _model("llama3-tied"), **change)
    with pytest.raises(ConfigError, match=message):
        import_gguf(file, _quiet)
    assert _folders(cache) == []


@pytest.mark.parametrize("content", [b"", b"no such magic, surely", b"GGUF\x03\x00\x00\x00\x01"])
def test_a_file_that_is_not_gguf(content: bytes, tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.gguf: not a GGUF file"):
        import_gguf(file, _quiet)
    assert _folders(cache) == []
