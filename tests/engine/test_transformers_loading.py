"""Whole engines on transformers' layers: every token's logits beside transformers' own, and what is refused at the
start. What is seen here is the list of docs/features.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.torch_engine import TorchEngine
from minisgl.engine.transformers_loading import load_transformers_model
from minisgl.llm import LLM
from minisgl.runner.build import build_engine
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer
from tests.helpers import our_models
from tests.helpers.engines import Collector, assert_greedy, greedy, load
from tests.helpers.gguf import write_gguf, written_model
from tests.helpers.models import save, tiny_case
from tests.helpers.seconds import WAIT_S
from tests.helpers.their_models import WITHIN, compare
from tests.helpers.variants import CASES, CONFIG, REFUSED, Model

pytestmark = pytest.mark.any_cpu

OLMO = Model("OlmoForCausalLM")
# One of each kind of attention, positions and experts; the others in CI.
QUICK = ("BioGpt", "DeepseekV3", "Gemma2", "Mixtral", "Phi")
QUICK_AND_SLOW = [
    case if case.architecture.removesuffix("ForCausalLM") in QUICK else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
]
GEMMA = next(case for case in CASES if case.architecture == "Gemma2ForCausalLM")


@pytest.mark.parametrize("case", QUICK_AND_SLOW, ids=lambda case: case.name)
def test_logits_are_those_of_transformers(case: Model, tmp_path: Path) -> None:
    """Of prefill, chunks, decode, prefix hits and batches."""
    model = tiny_case(case)
    assert compare(model, save(model, tmp_path)) <= WITHIN


def test_page_lists_the_models_that_were_tested() -> None:
    """After a change: `python -m tests.helpers.our_models`."""
    page = our_models.PAGE.read_text(encoding="utf-8")
    assert our_models.written(page, our_models.recorded()) == page
    refused = page.partition("refused by name, with the reason")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert [one.architecture for one in REFUSED if f"`{one.architecture}`" not in refused] == []


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model = tiny_case(OLMO)
    return save(model, tmp_path_factory.mktemp("olmo")), model


def lines_of(config: EngineConfig) -> list[str]:
    lines: list[str] = []

    def report(text: str, done: int = 0, total: int = 0) -> None:
        lines.append(text)

    build_engine(config, report).close()
    return lines


def test_auto_uses_transformers_without_native_layers(olmo: tuple[Path, Any]) -> None:
    engine, _ = load("auto", olmo[0], num_pages=8)
    assert isinstance(engine, TorchEngine) and "layers of transformers" in engine.info.details
    assert engine.info.name == "torch"
    engine.close()
    lines = lines_of(EngineConfig(model=str(olmo[0]), num_pages=8))
    assert any("OlmoForCausalLM: the layers are those of transformers" in line for line in lines)


def test_auto_uses_native_layers_where_available(tmp_path: Path) -> None:
    folder = save(tiny_case(Model("LlamaForCausalLM")), tmp_path)
    for impl, theirs in (("auto", False), ("native", False), ("transformers", True)):
        engine, _ = load("torch", folder, num_pages=8, model_impl=impl)
        assert ("transformers" in engine.info.details) == theirs
        engine.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine": "cpu", "model_impl": "transformers"}, "transformers: cannot be used with --engine cpu"),
        ({"engine": "torch", "model_impl": "native"}, "OlmoForCausalLM is not supported: only LlamaForCausalLM"),
        ({"engine": "cpu"}, "OlmoForCausalLM is not supported.*--model-impl transformers"),
        ({"engine": "torch", "tp": 2}, "--tp 2: .*transformers' layers, which cannot be sharded: .*--dp 2"),
        ({"engine": "torch", "max_seq_len": 300}, "--max-seq-len 300: must be at most 256, the context"),
        ({"engine": "torch", "attention_backend": "flashinfer"}, "--attention-backend flashinfer: .*CUDA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_models_are_refused_at_the_start(
    olmo: tuple[Path, Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        lines_of(EngineConfig(model=str(olmo[0]), num_pages=8, **settings))


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", written_model("llama3-tied"))
    with pytest.raises(ConfigError, match=r"--model-impl transformers: .*m\.gguf is a GGUF file"):
        lines_of(EngineConfig(model=str(file), model_impl="transformers"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("unknown", r"1 unknown: model\.layers\.9\.weight"),
        ("misshaped", r"up_proj\.weight"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(change: str, says: str, olmo: tuple[Path, Any], tmp_path: Path) -> None:
    """Where transformers would go on with random numbers."""
    name, tensors = "model.layers.1.mlp.up_proj.weight", load_file(olmo[0] / "model.safetensors")
    if change == "missing":
        del tensors[name]
    elif change == "unknown":
        tensors["model.layers.9.weight"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    (tmp_path / "config.json").write_bytes((olmo[0] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=says):
        lines_of(EngineConfig(model=str(tmp_path), num_pages=8))


def test_weights_that_are_not_there_are_an_error(olmo: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo[0] / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"no \*\.safetensors: convert the weights, or try --load-format dummy"):
        lines_of(EngineConfig(model=str(tmp_path), num_pages=8))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        lines_of(EngineConfig(model=str(tmp_path), num_pages=8))


def test_limited_context_reports_the_reason(tmp_path: Path) -> None:
    case = next(one for one in CASES if "longrope" in one.notes)
    folder, impl = save(tiny_case(case), tmp_path), "transformers"
    lines = lines_of(EngineConfig(model=str(folder), model_impl=impl, num_pages=8))
    assert "context: 128 tokens at most: rope_type longrope has other frequencies for longer texts" in lines
    with pytest.raises(ConfigError, match="--max-seq-len 200: must be at most 128, the context, because rope_type"):
        lines_of(EngineConfig(model=str(folder), model_impl=impl, num_pages=8, max_seq_len=200))


def test_text_model_reports_left_out_tensors(tmp_path: Path) -> None:
    folder = save(tiny_case(next(one for one in CASES if one.vision is not None)), tmp_path)
    assert any(line.startswith("text only: ") for line in lines_of(EngineConfig(model=str(folder), num_pages=8)))


def test_the_engine_for_devices_takes_it_too(tmp_path: Path) -> None:
    """On a device of the CPU, where its graphs would run as they are: there are none."""
    model = tiny_case(GEMMA)
    folder, prompt = save(model, tmp_path), [5, 6, 7, 8] * 9
    engine, config = load("torch", folder, device="inline", num_pages=64, page_size=4, max_prefill_length=16)
    assert not engine.info.graph_sizes
    collector = Collector(engine, config)
    collector.run({0: (prompt, greedy(12)), 1: (prompt[:5], greedy(12))})
    engine.close()
    assert_greedy(model, prompt, collector.tokens[0])
    assert_greedy(model, prompt[:5], collector.tokens[1])


def test_nothing_is_compiled(olmo: tuple[Path, Any]) -> None:
    config = EngineConfig(model=str(olmo[0]), torch_compile=True)
    with pytest.raises(ConfigError, match="--torch-compile: not supported with transformers' layers"):
        load_transformers_model(config, olmo[0], torch.device("cuda"), lambda text, done=0, total=0: None)


def test_native_models_do_not_import_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = (
        "import sys\n"
        "from minisgl.config import EngineConfig\n"
        "from minisgl.runner.build import build_engine\n"
        f"config = EngineConfig(model={str(tmp_path)!r}, engine='torch', load_format='dummy', num_pages=8)\n"
        "build_engine(config, lambda text, done=0, total=0: None).close()\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.split() == ["True", "False"]


def test_random_weights_are_those_of_the_seed(olmo: tuple[Path, Any]) -> None:
    """And in bfloat16 a model serves, too."""
    found = []
    for seed in (1, 1, 2):
        config = EngineConfig(model=str(olmo[0]), load_format="dummy", seed=seed, dtype="bfloat16", num_pages=8)
        engine = build_engine(config, lambda text, done=0, total=0: None)
        assert engine.info.dtype == "bfloat16"
        collector = Collector(engine, config)
        collector.run({0: ([3, 4, 5], greedy(8))})
        engine.close()
        found.append(collector.tokens[0])
    assert found[0] == found[1] and len(found[0]) == 8


def test_llm_has_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_case(Model("LlamaForCausalLM"))
    monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: Tokenizer.echo())
    settings: dict[str, Any] = {"dtype": "float32", "num_pages": 16, "log_level": "error"}
    with LLM(str(save(model, tmp_path)), model_impl="transformers", **settings) as llm:
        assert "transformers" in llm.engine_info.details
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        [output] = llm.generate([[9, 8, 7]], params, progress=False)
    assert_greedy(model, [9, 8, 7], output.token_ids)
    with pytest.raises(msgspec.ValidationError, match="model_impl"):
        LLM(str(tmp_path), model_impl="vllm")


def test_a_config_that_is_damaged_is_an_error(olmo: tuple[Path, Any], tmp_path: Path) -> None:
    raw = json.loads((olmo[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": None}))
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        lines_of(EngineConfig(model=str(tmp_path), load_format="dummy", num_pages=8))
