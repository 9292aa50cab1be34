"""Names on hubs, and the files that they mean."""

from __future__ import annotations

import pytest

from minisgl.config import ConfigError
from minisgl.weights.hub_names import SHORT, HubRequest, choose, full_name, mmprojs, parse, quant_of, similar_names

HF = "huggingface"
NAMES = {
    "a/b": HubRequest(HF, "a/b"),
    "a/b:Q4_K_M": HubRequest(HF, "a/b", quant="Q4_K_M"),
    "a/b/c/d.gguf": HubRequest(HF, "a/b", file="c/d.gguf"),
    "hf.co/a/b:UD-Q4_K_XL": HubRequest(HF, "a/b", quant="UD-Q4_K_XL"),
    "https://huggingface.co/a/b": HubRequest(HF, "a/b"),
    "https://huggingface.co/a/b/tree/main": HubRequest(HF, "a/b", "main"),
    "https://huggingface.co/a/b/blob/v1/c.gguf?download=true": HubRequest(HF, "a/b", "v1", file="c.gguf"),
    "https://modelscope.cn/models/a/b/resolve/master/c.gguf": HubRequest("modelscope", "a/b", "master", file="c.gguf"),
    "qwen3:4b": HubRequest(HF, "Qwen/Qwen3-4B-GGUF", quant="Q4_K_M"),
    "Qwen3": HubRequest(HF, "Qwen/Qwen3-4B-GGUF", quant="Q4_K_M"),
    "qwen3:8b-q8_0": HubRequest(HF, "Qwen/Qwen3-8B-GGUF", quant="Q8_0"),
    "justaname": None,
    "a/b/c": None,
    "a/../b": None,
    "a/b:": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_model_names_are_parsed(name: str) -> None:
    assert parse(name, "auto", None) == NAMES[name]


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("https://example.org/a/b", None, "must be an address of a hub"),
        ("https://huggingface.co/a", None, "must be the address of a repository"),
        ("https://huggingface.co/a/b/blob/main/README.md", None, "no GGUF file: name the repository, a/b"),
        ("https://huggingface.co/a/b/blob/main/c.gguf", "v2", "--revision v2: .* names another one"),
    ],
)
def test_invalid_addresses_are_refused(name: str, revision: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(name, "auto", revision)
    with pytest.raises(ConfigError, match="is on another hub"):
        parse("https://huggingface.co/a/b", "modelscope", None)


def test_short_names_are_whole_names() -> None:
    """The first of a family is its default."""
    for short, full in SHORT.items():
        wanted = parse(short, "auto", None)
        assert wanted is not None and full_name(short) == full and wanted.quant
        assert similar_names(short[:-1]).count(":") >= 1


QUANTS = {
    "Qwen3-4B-Q4_K_M.gguf": "Q4_K_M",
    "smollm2-1.7b-instruct-q4_k_m.gguf": "Q4_K_M",
    "Qwen3-4B-UD-Q4_K_XL.gguf": "UD-Q4_K_XL",
    "x-IQ4_XS.gguf": "IQ4_XS",
    "gpt-oss-20b-mxfp4.gguf": "MXFP4",
    "BF16/x-BF16-00001-of-00003.gguf": "BF16",
    "Q2_K/model.gguf": "Q2_K",
    "x.fp16.gguf": "FP16",
    "TriLM-TQ1_0.gguf": "TQ1_0",
    "x-Q1_0.gguf": "Q1_0",
    "x-nvfp4.gguf": "NVFP4",
    "plain.gguf": "plain",
}


@pytest.mark.parametrize("path", QUANTS)
def test_quantization_in_file_names_is_recognized(path: str) -> None:
    assert quant_of(path) == QUANTS[path]


@pytest.mark.parametrize(
    ("quant", "there", "chosen"),
    [
        (None, "F16 Q8_0 Q4_K_M Q2_K", "Q4_K_M"),
        (None, "F16 Q8_0 Q2_K", "Q8_0"),
        (None, "F16 Q2_K", "F16"),
        (None, "F16 IQ4_XS", "IQ4_XS"),
        (None, "IQ2_M Q3_K_S UD-IQ1_S UD-Q2_K_XL", "Q3_K_S"),
        (None, "UD-IQ1_S IQ3_M", "IQ3_M"),
        ("q4_k", "Q4_K_M Q4_K_S Q4_K", "Q4_K"),
        ("Q4_K_XL", "Q4_K_M UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("Q4_K", "Q4_K_M", None),
    ],
)
def test_file_of_a_repository_is_chosen(quant: str | None, there: str, chosen: str | None) -> None:
    paths = [f"x-{one}.gguf" for one in there.split()]
    wanted = HubRequest(HF, "a/b", quant=quant)
    if chosen is None:
        with pytest.raises(ConfigError, match="has no GGUF file in Q4_K: there are Q4_K_M"):
            choose(wanted, paths)
    else:
        assert choose(wanted, paths)[0] == f"x-{chosen}.gguf"


TOWERS = {
    ("x-Q4_0.gguf", "mmproj-F32.gguf mmproj-BF16.gguf mmproj-F16.gguf mmproj-Q8_0.gguf"): "F16 BF16 F32 Q8_0",
    ("x-Q8_0.gguf", "mmproj-x-Q8_0.gguf x.mmproj-q4_0.gguf mmproj-x-f32.gguf"): "f32 Q8_0 q4_0",
    ("Seer-VL-4B-Q4_0.gguf", "mmproj-Seer-2-4B-F16.gguf mmproj-Seer-VL-4B-F32.gguf"): "VL-4B-F32 2-4B-F16",
    ("q4/x-Q4_0.gguf", "mmproj-F16.gguf q4/mmproj-F32.gguf q8/mmproj-F16.gguf"): "q4/mmproj-F32 mmproj-F16",
    ("x.gguf", "x-mmprojector.txt imatrix.gguf mymmproj.gguf q4/mmproj.gguf"): "",
}
"""Models and other files of a repository, and the ends of the names of towers that may be theirs, by preference."""


@pytest.mark.parametrize(("model", "there"), TOWERS)
def test_towers_of_a_model_are_found_by_name(model: str, there: str) -> None:
    found = mmprojs(model, [*there.split(), model])
    ends = TOWERS[model, there].split()
    assert len(found) == len(ends)
    assert all(path.endswith(f"{end}.gguf") for path, end in zip(found, ends, strict=True)), found
    _, files = choose(HubRequest(HF, "a/b", file=model, mmproj=True), [*there.split(), model])
    assert files == [model, *found[:1]]


def test_a_folder_is_preferred_where_no_file_was_named() -> None:
    paths = [
        "config.json",
        "1_Pooling/config.json",
        "model.safetensors",
        "model-fp32.safetensors",
        "x-Q4_0.gguf",
        "a/b.json",
    ]
    assert choose(HubRequest(HF, "a/b"), paths) == (None, ["1_Pooling/config.json", "config.json", "model.safetensors"])
    assert choose(HubRequest(HF, "a/b", quant="Q4_0"), paths)[0] == "x-Q4_0.gguf"
    assert choose(HubRequest(HF, "a/b"), ["a.gguf", "tokenizer.json"], weights=False) == (None, ["tokenizer.json"])
