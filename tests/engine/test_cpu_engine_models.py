"""The CPU engine's models against transformers, on tiny random checkpoints that it wrote: every architecture, on every
instruction set that this machine has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from minisgl import _rust
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.models.config import load_config
from minisgl.models.decoder import build_model
from minisgl.weights.checkpoint import load_weights
from tests.helpers.gguf import write_gguf, written_model
from tests.helpers.models import (
    CPU,
    LOGITS_WITHIN,
    DenseSequence,
    flatten,
    published,
    reference_logits,
    save,
    tiny_model,
)
from tests.helpers.models import load as decoder_of
from tests.helpers.processor import cpu_flags
from tests.helpers.variants import ON_CPU, VARIANTS, VISION

pytestmark = pytest.mark.any_cpu

IDS = torch.randint(3, 131, (100,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=[*VARIANTS, *ON_CPU])
def reference(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("checkpoint"))


def load(folder: Path, said: list[str] | None = None, **settings: Any) -> CpuEngine:
    lines = [] if said is None else said
    config = EngineConfig(model=str(folder), **{"num_pages": 64, **settings})
    return load_cpu_engine(config, lambda text, done=0, total=0: lines.append(text))


def logits(engine: CpuEngine, ids: list[int]) -> torch.Tensor:
    found = np.frombuffer(engine.rust.prompt_logits(np.array(ids, np.int32)), np.float32)
    engine.close()
    return torch.from_numpy(found.reshape(len(ids), -1).copy())


def assert_alike(engine: CpuEngine, reference: Any) -> None:
    torch.testing.assert_close(logits(engine, IDS), reference_logits(reference, IDS), rtol=0, atol=LOGITS_WITHIN)


@pytest.fixture(
    params=["avx2", *(pytest.param(one, marks=pytest.mark.wide) for one in ("scalar", "avxvnni", "avx512", "amx"))]
)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MINISGL_CPU_ISA", request.param)
    flags = {"scalar": "", "avx2": "avx2", "avxvnni": "avx_vnni", "avx512": "avx512_vnni", "amx": "amx_int8"}
    needs = flags[request.param]
    if needs and needs not in cpu_flags():
        pytest.skip(f"this processor has no {needs}")
    yield request.param


@pytest.mark.parametrize("quantization", [None, "q8"])
@pytest.mark.parametrize("variant", ["qwen3-tied", "qwen3-moe"])
def test_flat_names_in_parts_of_mixed_types(variant: str, tmp_path: Path, quantization: str | None) -> None:
    """Embedding models are saved so (Qwen3-Embedding)."""
    reference = tiny_model(variant)
    usual, plain = save(reference, tmp_path / "usual", shards=True), save(reference, tmp_path / "flat", shards=True)
    numbers = flatten(plain)
    save_file(numbers, usual / "model.safetensors")
    (usual / "model.safetensors.index.json").unlink()
    expected, found = (logits(load(one, kv_dtype="f32", quantization=quantization), IDS) for one in (usual, plain))
    # AMX's tiles take a tensor of bfloat16 in one part, and what is joined in float32 in three
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if "amx_int8" in cpu_flags() else 0)
    if quantization is None:
        with_torch = DenseSequence(decoder_of(plain)).extend(IDS)
        torch.testing.assert_close(with_torch, expected, rtol=0, atol=LOGITS_WITHIN)


def test_logits_equal_transformers(reference: Any, folder: Path, isa: str) -> None:
    assert_alike(load(folder, kv_dtype="f32"), reference)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its tables change once more")
def test_a_dynamic_context_is_as_long_as_asked_for(tmp_path: Path) -> None:
    """For a text of that length; shorter ones have the same frequencies here, and others there."""
    reference = tiny_model("llama-dynamic", max_position_embeddings=40)
    folder = save(reference, tmp_path)
    with pytest.raises(ConfigError, match="--max-seq-len 161: must be at most 160, the context of 40"):
        load(folder, max_seq_len=161)
    wanted = reference_logits(reference, IDS)
    ours = logits(load(folder, kv_dtype="f32", max_seq_len=len(IDS)), IDS)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=LOGITS_WITHIN)
    with torch.inference_mode():
        model = build_model(load_config(folder), dtype=torch.float32, device=CPU, max_position=len(IDS))
        load_weights(model.checkpoint(), folder)
    torch.testing.assert_close(DenseSequence(model).extend(IDS), wanted, rtol=0, atol=LOGITS_WITHIN)


def test_f16_kv_error_stays_below_bound(reference: Any, folder: Path) -> None:
    """The tiny models' logits are large, so is what a rounded key does to them: the bar is on probabilities."""
    ours = logits(load(folder), IDS).log_softmax(-1)
    theirs = reference_logits(reference, IDS).log_softmax(-1)
    assert float((ours - theirs).abs().max()) < 0.05
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 1e-5


def test_q4_kv_loses_more_than_q8_within_bound(tmp_path: Path, isa: str) -> None:
    reference = tiny_model("mistral")
    theirs = reference_logits(reference, IDS).log_softmax(-1)
    kl = []
    for kv_dtype in ("q8", "q4"):
        ours = logits(load(save(reference, tmp_path), kv_dtype=kv_dtype), IDS).log_softmax(-1)
        kl.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    assert kl[0] < kl[1] < 0.1, kl
    with pytest.raises(ConfigError, match=r"--kv-dtype q4: the model has heads of 16 elements, .*: choose q8"):
        load(save(tiny_model("qwen3-untied"), tmp_path / "small"), kv_dtype="q4")


def test_rounding_to_bfloat16_is_seen_and_small(reference: Any, folder: Path, isa: str) -> None:
    theirs = reference_logits(reference, IDS).log_softmax(-1)
    ours = logits(load(folder, kv_dtype="f32", activations="bf16"), IDS).log_softmax(-1)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    assert 1e-9 < kl < (8e-3 if isa == "amx" else 2e-3), kl  # AMX rounds the weights, too; 5.4e-3 was seen


def test_shards_whose_tensors_are_of_mixed_types(tmp_path: Path) -> None:
    reference = tiny_model("qwen3-moe")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().half())  # each type holds it
    kinds = itertools.cycle((torch.float32, torch.float16, torch.bfloat16))
    folder = save(reference, tmp_path, shards=True)
    for shard in folder.glob("*.safetensors"):
        save_file({name: tensor.to(next(kinds)) for name, tensor in load_file(shard).items()}, shard)
    assert_alike(load(folder, kv_dtype="f32"), reference)


def test_a_page_holds_what_each_layer_keeps(tmp_path: Path) -> None:
    """Keys and values of two heads of 16, 32 and 16 numbers; three more layers attend to those."""
    engine = load(save(tiny_model("gemma4"), tmp_path), kv_dtype="f32", page_size=16)
    assert engine.pool_bytes == engine.info.num_pages * 4 * 16 * 2 * 2 * (16 + 32 + 16)
    engine.close()


def test_experts_in_one_tensor_are_the_same(tmp_path: Path) -> None:
    reference = tiny_model("qwen3-moe")
    apart = logits(load(save(reference, tmp_path / "apart")), IDS)
    together = logits(load(save(reference, tmp_path / "together", original_names=False)), IDS)
    assert torch.equal(apart, together)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    reference, said = tiny_model("glm4-moe"), list[str]()
    file = save(reference, tmp_path) / "model.safetensors"
    save_file({**load_file(file), "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, file)
    assert_alike(load(tmp_path, said, kv_dtype="f32"), reference)
    assert any(line.startswith("one token a step: MTP layers, which predict further tokens,") for line in said)


def test_pages_hold_latents_once_for_all_heads(tmp_path: Path) -> None:
    save(tiny_model("deepseek2"), tmp_path)
    said: list[str] = []
    load(tmp_path, said, num_pages=2**16, page_size=16, kv_dtype="f32").close()
    layers, latent, rotated = 3, 32, 8
    size = 2**16 * 16 * layers * (latent + rotated) * 4 // 2**20
    assert f"KV pool: 65536 pages of 16 tokens, {size} MiB at most" in said


def test_distinct_head_is_used_even_if_config_ties_it(tmp_path: Path) -> None:
    reference = tiny_model("llama-bias-untied")
    folder = save(reference, tmp_path)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    assert_alike(load(folder, kv_dtype="f32"), reference)


def test_published_mxfp4_is_read_and_held_as_it_is(isa: str, tmp_path: Path) -> None:
    reference = tiny_model("gpt-oss", intermediate_size=96)
    size = published(reference, tmp_path)
    engine = load(tmp_path, kv_dtype="f32")
    assert dict(engine.rust.about()["kinds"])["mxfp4"] <= 1.03 * size
    assert_alike(engine, reference)
    with pytest.raises(ConfigError, match="--quantization q8: the weights are quantized already"):
        load(tmp_path, quantization="q8")


def test_experts_that_lie_transposed_are_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization q8: GptOssForCausalLM: experts that lie transposed"):
        load(save(tiny_model("gpt-oss"), tmp_path), quantization="q8")


@pytest.mark.parametrize("packed", [False, True], ids=["full", "mxfp4"])
def test_made_up_experts_are_of_the_kind_of_the_file(packed: bool, tmp_path: Path) -> None:
    reference = tiny_model("gpt-oss", intermediate_size=96)
    if packed:
        published(reference, tmp_path)
    else:
        save(reference, tmp_path)
    engine = load(tmp_path, load_format="dummy")
    assert ("mxfp4" in dict(engine.rust.about()["kinds"])) == packed
    assert torch.isfinite(logits(engine, IDS)).all()


@pytest.mark.parametrize(
    "variant",
    [
        "gemma2-caps",
        "stablelm",
        "cohere",
        "arcee",
        "qwen2-moe",
        "ministral3",
        "glm4-moe",
        "gpt-oss",
        "deepseek3-yarn",
        "falcon-7b",
        "gemma3n",
        "gemma4",
        "llama4",
        "qwen3-next",
        "qwen3.5",
        "qwen3.5-moe",
        "lfm2",
        "lfm2-bias",
        "granite-hybrid",
        "falcon-h1-norm",
        "nemotron-h-moe",
        "mamba2",
    ],
)
def test_instruction_sets_do_not_change_results(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = save(tiny_model(variant), tmp_path), []
    for isa in ("scalar", "avx2", "avx512"):
        monkeypatch.setenv("MINISGL_CPU_ISA", isa)
        with suppress(ConfigError):  # not on this processor
            found.append(logits(load(folder), IDS))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_thread_count_does_not_change_results(folder: Path, threads: int) -> None:
    assert torch.equal(logits(load(folder, num_threads=threads), IDS), logits(load(folder, num_threads=2), IDS))


@pytest.mark.parametrize("original_names", [False, True], ids=["names-of-5", "names-of-4"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("which", VISION)
def test_text_model_of_a_vision_model_is_loaded(which: str, tied: bool, original_names: bool, tmp_path: Path) -> None:
    reference = tiny_model(which, tie_word_embeddings=tied)
    folder = save(reference, tmp_path, original_names=original_names)
    said: list[str] = []
    assert_alike(load(folder, said, kv_dtype="f32"), reference)
    assert any(line.startswith("text only: the vision part is not loaded: ") for line in said)


def test_quantized_text_model_of_a_vision_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file of blocks as from the names of a text model."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    reference = tiny_model("mistral3")
    folders = [save(reference, tmp_path / str(old), original_names=old) for old in (False, True)]
    one, other = (logits(load(folder, quantization="q8"), IDS) for folder in folders)
    assert torch.equal(one, other)
    theirs = reference_logits(reference, IDS).log_softmax(-1)
    assert float((theirs.exp() * (theirs - one.log_softmax(-1))).sum(-1).mean()) < 1e-2


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("llama-bias-untied", "llama"),
        ("mistral-window", "llama"),
        ("qwen2-tied", "qwen2"),
        ("qwen3-untied", "qwen3"),
        ("qwen3-moe", "qwen3moe"),
        ("smollm3-tied", "smollm3"),
        ("gemma3-tied", "gemma3"),
    ],
)
def test_gguf_file_gives_the_logits_of_its_checkpoint(
    variant: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    reference = written_model(variant)
    file = write_gguf(tmp_path / "m.gguf", reference, arch)
    assert_alike(load(file, kv_dtype="f32"), reference)


def test_vision_tensors_of_a_gguf_file_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ollama's files have it, beside the language model."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    reference = written_model("gemma3-tied")
    file = write_gguf(
        tmp_path / "m.gguf",
        reference,
        "gemma3",
        edit=lambda writer: writer.add_tensor("v.patch_embedding.weight", np.ones((4, 8), np.float32)),
    )
    said: list[str] = []
    assert_alike(load(file, said, kv_dtype="f32"), reference)
    assert any(line.startswith("text only: the vision part is not loaded: ") for line in said)


@pytest.mark.parametrize("kind", [kind for kind in _rust.GGUF_TYPES if kind != "Q2_0"])  # which gguf-py cannot write
def test_blocks_are_computed_as_they_are(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the numbers that they stand for, in full: attention, experts, embedding and head."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    reference = written_model("qwen3-moe", num_hidden_layers=1, **sizes)
    found = []
    for decoded in (False, True):
        file = tmp_path / f"{decoded}.gguf"
        write_gguf(file, reference, "qwen3moe", quantise=GGMLQuantizationType[kind], decoded=decoded)
        found.append(logits(load(file, kv_dtype="f32"), IDS).double().log_softmax(-1))
    kl = float((found[1].exp() * (found[1] - found[0])).sum(-1).mean())
    assert kl < 1e-9, kl


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = save(tiny_model("qwen2-tied"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)
