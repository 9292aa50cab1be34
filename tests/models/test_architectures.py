"""Every real config, scaled down, with dummy weights: an engine that decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import ALONE
from minisgl.engine import dtypes
from minisgl.engine.loading import load_engine
from minisgl.llm import LLM
from minisgl.sampling_params import ParamError, SamplingParams
from minisgl.tokenizer import Tokenizer
from tests.helpers.engines import MODEL_ENGINES

NAMES = (
    "Llama-3.1-8B",
    "Llama-3.2-1B",
    "Qwen2-1.5B-Instruct",
    "Qwen3-30B-A3B-Instruct-2507",
    "Qwen3-4B-Instruct-2507",
)
SCALE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "num_hidden_layers": 3, "num_experts": 8}


def scaled_down(raw: dict[str, Any]) -> dict[str, Any]:
    """Smaller in every direction, with what is left of the ratio of heads to KV heads."""
    group = raw["num_attention_heads"] // raw["num_key_value_heads"]
    changes = {**SCALE, "num_key_value_heads": 2, "num_attention_heads": 2 * group, "head_dim": 16}
    changes |= {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "max_position_embeddings": 512}
    changes |= {"eos_token_id": 299, "bos_token_id": 298}
    return {**raw, **{name: value for name, value in changes.items() if name in raw or name == "head_dim"}}


def test_all_configs_are_named_here() -> None:
    if (data := envs.data_dir()) is None:
        pytest.skip(f"{envs.DATA} is not set")
    assert {file.name.removesuffix(".config.json") for file in (data / "configs").glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("engine", MODEL_ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_down_engine_decodes(name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (data := envs.data_dir()) is None:
        pytest.skip(f"{envs.DATA} is not set")
    raw = json.loads((data / "configs" / f"{name}.config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(scaled_down(raw)))
    monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: Tokenizer.echo())  # the folder has none
    limits = {"num_pages": 64, "max_running_requests": 4, "max_prefill_length": 16}
    with LLM(str(tmp_path), engine=engine, load_format="dummy", **limits) as llm:
        wanted = "bf16" if engine == "cpu" else dtypes.choose("auto", "bfloat16", torch.device("cpu"))[0]
        assert (llm.engine_info.name, llm.engine_info.dtype) == (engine, wanted)
        prompts = [[*range(length)] for length in (1, 20, 40)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), progress=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_what_is_for_cuda_devices_says_so_on_a_cpu(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "max_position_embeddings": 64}
    config |= {name: value for name, value in SCALE.items() if name != "num_experts"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineConfig(model=str(tmp_path), load_format="dummy", num_pages=8, device="cpu")
    lines: list[str] = []

    def report(text: str, done: int = 0, total: int = 0) -> None:
        lines.append(text)

    load_engine(settings, report, ALONE).close()
    assert not any("CUDA" in line for line in lines)
    flags = {"cuda_graph_max_bs": 8, "torch_compile": True}
    load_engine(msgspec.structs.replace(settings, **flags), report, ALONE).close()
    assert [line for line in lines if "CUDA" in line] == [
        f"{flag}: without an effect on cpu: for CUDA devices only"
        for flag in ("--cuda-graph-max-bs 8", "--torch-compile")
    ]


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_llm_knows_bad_words_by_its_tokenizer(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "max_position_embeddings": 64}
    config |= {name: value for name, value in SCALE.items() if name != "num_experts"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: Tokenizer.echo())
    asks: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "seed": 3, "allowed_token_ids": (97, 98, 32)}
    with LLM(str(tmp_path), engine=engine, load_format="dummy", num_pages=8) as llm:
        plain = llm.generate([[1, 2]], SamplingParams(**asks), progress=False)[0].text
        params = SamplingParams(**asks, bad_words=("ab",))
        kept = llm.generate([[1, 2]], params, progress=False)[0].text
        assert set(plain) == {"a", "b", " "} and "ab" in plain
        assert "b" in kept and set(kept) <= set(plain) and "ab" not in kept
        size = SCALE["vocab_size"]
        unknown: list[dict[str, Any]] = [
            {"bad_words": ("",)},
            {"allowed_token_ids": (1, size)},
            {"stop_token_ids": (size,)},
            {"logit_bias": {size: 1.0}},
            {"bad_token_ids": ((1, size), (2,))},
        ]
        for bad in unknown:
            with pytest.raises(ParamError, match=next(iter(bad))):
                llm.generate([[1, 2]], SamplingParams(**bad), progress=False)


@pytest.mark.parametrize("engine", MODEL_ENGINES)
def test_llm_samples_as_the_model_says(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "max_position_embeddings": 64}
    config |= {name: value for name, value in SCALE.items() if name != "num_experts"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 299}))
    generation = {"temperature": 0.5, "max_new_tokens": 7, "eos_token_id": [250, 251]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    monkeypatch.setattr(Tokenizer, "load", lambda *_, **__: Tokenizer.echo())
    with LLM(str(tmp_path), engine=engine, load_format="dummy", num_pages=8) as llm:
        assert llm.default_params == SamplingParams(temperature=0.5, max_tokens=7)
        first, second = (llm.generate([[1, 2, 3]], progress=False)[0].outputs[0] for _ in range(2))
        assert first.token_ids != second.token_ids
        for one in (first, second):  # the seeds are random: one of the three ids may end it early
            assert (one.finish_reason == "stop") == (len(one.token_ids) < 7 or one.token_ids[-1] in (250, 251, 299))
        # each of the three ids ends a request, and only where it may
        for eos in (250, 251, 299):
            wish = SamplingParams(logit_bias={eos: 100.0}, max_tokens=5)
            found = llm.generate([[1, 2, 3]], wish, progress=False)[0].outputs[0]
            assert (found.token_ids, found.finish_reason) == ([eos], "stop")
    with LLM(str(tmp_path), engine=engine, load_format="dummy", num_pages=8, generation_config="none") as llm:
        assert llm.default_params == SamplingParams()
        assert llm.engine_info.eos_ids == (250, 251, 299)


def test_llm_takes_a_chat_template() -> None:
    with LLM("none", engine="echo", chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}") as llm:
        output = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), progress=False)[0]
    assert bytes(output.prompt_token_ids) == b"<hi>"
    with pytest.raises(ConfigError, match=r"--chat-template missing\.jinja"):
        LLM("none", engine="echo", chat_template="missing.jinja")
