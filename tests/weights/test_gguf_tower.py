"""Vision towers in GGUF files: which file is a model's, what is refused, and what the pair of files computes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from PIL import Image

from minisgl import cli, envs
from minisgl.cli import doctor
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.images import read_processor
from minisgl.llm import LLM
from minisgl.prompt_image import PromptImage
from minisgl.receipt import weights_digest
from minisgl.runner.build import build_engine
from minisgl.sampling_params import SamplingParams
from minisgl.weights.gguf_folder import seeing_folder
from minisgl.weights.gguf_tower import may_see
from tests.helpers.gguf import TOKENS, Edit
from tests.helpers.image_files import picture
from tests.helpers.models import LOGITS_WITHIN
from tests.helpers.seeing_gguf import KINDS, MARKER, seer_of_files, write_text, write_tower
from tests.helpers.vision import MERGE, PATCH, prompt_of, random_image, saved, their_logits

pytestmark = pytest.mark.any_cpu
BEGIN, END = "<start_of_image>", "<end_of_image>"
NONE_BESIDE = "no mmproj-*.gguf beside the model: name one by --mmproj"
SEVERAL: dict[str, Sequence[int | PromptImage]] = {
    "qwen3-vl": [3, random_image(2, 6), 1, random_image(8, 4), 5],
    **dict.fromkeys(("gemma3", "smolvlm"), (3, random_image(8, 8), 1, random_image(8, 8, seed=1), 5)),
}
each_family = pytest.mark.parametrize("model", SEVERAL, indirect=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return seer_of_files(family=getattr(request, "param", "qwen3-vl"))


@pytest.fixture
def text(model: Any, tmp_path: Path) -> Path:
    return write_text(tmp_path / "a-seer-Q4_0.gguf", model)


def loaded(model: Path, **settings: Any) -> tuple[CpuEngine, list[str]]:
    """Return the engine, and what was said at its start."""
    said: list[str] = []
    settings = {"kv_dtype": "f32", "num_pages": 64, "num_threads": 1, **settings}
    config = EngineConfig(model=str(model), engine="cpu", **settings)
    engine = build_engine(config, lambda line, done=0, total=0: said.append(line))
    assert isinstance(engine, CpuEngine)
    return engine, said


def logits(engine: CpuEngine, parts: Sequence[int | PromptImage]) -> torch.Tensor:
    ids, images = prompt_of(parts)
    found = np.frombuffer(engine.rust.prompt_logits(ids, images), np.float32).reshape(len(ids), -1)
    return torch.from_numpy(found.copy())


def exchange_matrices(writer: GGUFWriter) -> None:
    """Give each matrix of an MLP the name of the other, as in the first published files of Gemma 3."""
    [tensors] = writer.tensors
    others = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    named = {re.sub("ffn_up|ffn_down", lambda found: others[found[0]], name): one for name, one in tensors.items()}
    writer.tensors = [named]


TOWERS: list[tuple[str, dict[str, Any], Edit | None]] = [
    *(("qwen3-vl", {"deepstack_visual_indexes": taps}, None) for taps in ([0, 2], [1], [])),
    *(("gemma3", {}, edit) for edit in (None, exchange_matrices)),
    ("gemma3", {"layer_norm_eps": 0.5}, None),
    ("smolvlm", {"layer_norm_eps": 0.5}, None),
]


@pytest.mark.parametrize(("family", "tower", "edit"), TOWERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_of_files_computes_what_transformers_does(
    kind: str, family: str, tower: dict[str, Any], edit: Edit | None, tmp_path: Path
) -> None:
    model, parts = seer_of_files(kind, family, **tower), SEVERAL[family]
    write_tower(tmp_path / "mmproj-x.gguf", model, kind, edit)
    engine, said = loaded(write_text(tmp_path / "x.gguf", model))
    assert engine.info.sees and "images: the vision tower has 3 layers, from mmproj-x.gguf" in said
    theirs = their_logits(model, *prompt_of(parts))
    torch.testing.assert_close(logits(engine, parts), theirs, rtol=0, atol=LOGITS_WITHIN)
    engine.close()


@each_family
def test_the_folder_describes_the_processor(model: Any, text: Path, tmp_path: Path) -> None:
    write_tower(tmp_path / "mmproj.gguf", model)
    folder, _ = seeing_folder(text, None)
    found = read_processor(folder, max_tokens=100)
    expected = read_processor(saved(model, tmp_path / "folder"), max_tokens=100)
    assert found is not None and expected is not None
    assert found.kind == expected.kind and found.marker_id == MARKER
    assert found.family.patch == PATCH and found.family.merge == MERGE
    np.testing.assert_array_equal(found.table, expected.table)
    config = json.loads((folder / "config.json").read_bytes())
    if "scale_factor" in config:
        assert config["scale_factor"] == 2 and found.prepare(picture(50, 20)) == expected.prepare(picture(50, 20))
    else:
        assert config.get("mm_tokens_per_image") == 16 or config["rope_scaling"]["mrope_section"] == [4, 2, 2]


def _set(key: str, value: Any) -> Edit:
    def edit(writer: GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    return edit


TYPE = "clip.projector_type"
WRONG: dict[str, tuple[Edit, str]] = {
    "type": (
        _set(TYPE, "gemma3"),
        r"clip\.projector_type: 'gemma3': must be 'qwen3vl_merger' for the architecture 'qwen3vl'",
    ),
    "text model": (
        _set("clip.vision.projection_dim", 64),
        r"clip\.vision\.projection_dim: 64: must be 48, as the text model's size",
    ),
    "deepstack": (
        _set("clip.vision.is_deepstack_layers", [True, False, False]),
        r"is_deepstack_layers: 1 layers: must be 2, as the text model's n_deepstack_layers",
    ),
    "epsilon": (_set("clip.vision.attention.layer_norm_epsilon", 1e-5), r"layer_norm_epsilon: 1e-05: must be 1e-06"),
    "activation": (_set("clip.use_gelu", False), r"clip\.use_gelu: must be true"),
    "size": (
        _set("clip.vision.patch_size", 8),
        r"tensor v\.patch_embd\.weight is \[32, 3, 4, 4\], not \[32, 3, 8, 8\]",
    ),
    "layers": (_set("clip.vision.block_count", 4), r"tensor v\.blk\.3\.ffn_up\.weight is missing"),
    "no tower": (_set("general.architecture", "llama"), r"architecture 'llama' is not imported: only clip"),
    "mean": (_set("clip.vision.image_mean", "x"), r"clip\.vision\.image_mean: \['x'\] is not a list of numbers"),
}


_MLP = r"tensor v\.blk\.2\.ffn_up\.weight is \[96, 64\], not \[95, 64\]"
WRONG_GEMMA: dict[str, tuple[Edit, str]] = {
    "type": (
        _set(TYPE, "gemma3nv"),
        r"clip\.projector_type: 'gemma3nv': must be 'gemma3' for the architecture 'gemma3'",
    ),
    "block": (_set("clip.vision.projector.scale_factor", 3), r"scale_factor: 3: must divide 8, the patches in a row"),
    "pixels": (_set("clip.vision.image_size", 33), r"image_size: 33: must be a multiple of the patch_size 4"),
    "size": (_set("clip.vision.image_size", 24), r"tensor v\.position_embd\.weight is \[64, 64\], not \[36, 64\]"),
    "inner": (_set("clip.vision.feed_forward_length", 95), _MLP),
}


@pytest.mark.parametrize(
    ("model", "edit", "said"),
    [*(("qwen3-vl", *one) for one in WRONG.values()), *(("gemma3", *one) for one in WRONG_GEMMA.values())],
    ids=[*WRONG, *(f"gemma3 {name}" for name in WRONG_GEMMA)],
    indirect=["model"],
)
def test_a_file_that_does_not_fit_is_refused_if_named_and_left_out_if_found(
    edit: Edit, said: str, model: Any, text: Path, tmp_path: Path
) -> None:
    wrong = write_tower(tmp_path / "mmproj-F16.gguf", model, edit=edit)
    with pytest.raises(ConfigError, match=rf"--mmproj {wrong}: mmproj-F16\.gguf: .*{said}"):
        seeing_folder(text, str(wrong))
    folder, reason = seeing_folder(text, None)
    assert reason.startswith("mmproj-F16.gguf: ") and read_processor(folder, max_tokens=1) is None
    write_tower(tmp_path / "mmproj-F32.gguf", model)  # the next one fits
    assert seeing_folder(text, None)[1] == ""


def test_a_damaged_file_is_refused(model: Any, text: Path, tmp_path: Path) -> None:
    whole = write_tower(tmp_path / "mmproj.gguf", model)
    whole.write_bytes(whole.read_bytes()[:-4000])
    for named, said in ((whole, "mmproj.gguf: .*tensor"), (tmp_path / "absent.gguf", "No such file")):
        with pytest.raises(ConfigError, match=said):
            loaded(text, mmproj=str(named))
    engine, lines = loaded(text)
    assert not engine.info.sees
    assert any(line.startswith("text only: the vision part is not loaded: ") and whole.name in line for line in lines)
    engine.close()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention.head_count", 3, r"num_heads: 3: must divide hidden_size 32 by fours"),
        ("image_mean", [0.5, 0.5], r"Expected `array` of length >= 3 - at `\$\.image_mean`"),
    ],
)
def test_an_impossible_tower_is_refused_by_its_file(
    key: str, value: Any, said: str, model: Any, text: Path, tmp_path: Path
) -> None:
    write_tower(tmp_path / "mmproj.gguf", model, edit=_set(f"clip.vision.{key}", value))
    with pytest.raises(ConfigError, match=rf"^mmproj\.gguf: .*{said}"):
        loaded(text)


def test_a_tensor_without_a_place_is_named(model: Any, text: Path, tmp_path: Path) -> None:
    write_tower(tmp_path / "mmproj.gguf", model, edit=lambda to: to.add_tensor("v.pre_ln.weight", np.ones(32, "f4")))
    with pytest.raises(ConfigError, match=r"no place for: v\.pre_ln\.weight"):
        loaded(text)


def test_the_start_says_why_a_model_does_not_see(model: Any, text: Path, tmp_path: Path) -> None:
    said = "text only: the vision part is not loaded: "
    engine, lines = loaded(text)
    assert said + NONE_BESIDE in lines and not engine.info.sees
    engine.close()
    tower = write_tower(tmp_path / "elsewhere.gguf", model)
    engine, lines = loaded(text, mmproj=str(tower))
    assert "images: the vision tower has 3 layers, from elsewhere.gguf" in lines and engine.info.sees
    engine.close()
    shutil.move(tower, tmp_path / "mmproj.gguf")
    engine, lines = loaded(text, mmproj="none")
    assert f"{said}--mmproj none" in lines and not engine.info.sees
    engine.close()


def test_the_commands_name_the_file(model: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> tuple[bool | None, str]:
        doctor.main(["--json", "--model", str(text)])
        found = {one["name"]: one for one in json.loads(capsys.readouterr().out) if one["section"] == "model"}
        return found["images"]["ok"], found["images"]["detail"]

    assert said() == (None, f"text only: the vision part is not loaded: {NONE_BESIDE}")
    write_tower(tmp_path / "mmproj.gguf", model)
    assert said() == (True, "the vision tower has 3 layers, from mmproj.gguf")
    assert cli.main(["model", str(text), "--operations"]) == 0
    assert capsys.readouterr().out.endswith("\nimages: the vision tower has 3 layers, from mmproj.gguf\n")


def test_llm_sees_with_files_and_another_tokenizer(model: Any, text: Path, tmp_path: Path) -> None:
    """Images of the API go by the processor that the folder describes."""
    tower = write_tower(tmp_path / "mmproj.gguf", model)
    picture = Image.linear_gradient("L").resize((300, 240)).convert("RGB")
    found = []
    ways: list[dict[str, Any]] = [{}, {"tokenizer": str(text)}, {"mmproj": str(tower)}]
    for settings in ways:
        with LLM(str(text), engine="cpu", log_level="error", num_pages=128, max_seq_len=2000, **settings) as llm:
            prompt = {"prompt": "Look: <|image_pad|> and say.", "multi_modal_data": {"image": picture}}
            [one] = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), progress=False)
            found.append((len(one.prompt_token_ids), one.outputs[0].token_ids))
    assert found[0] == found[1] == found[2] and found[0][0] > 900


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_a_gemma_3_without_the_token_of_images_sees(model: Any, text: Path, tmp_path: Path) -> None:
    """The first published files end before that token, which has no embedding."""
    (tmp_path / "old").mkdir()
    tokens = [*TOKENS[: MARKER - 1], BEGIN, *TOKENS[MARKER:-1], END]
    old = write_text(tmp_path / "old" / "old.gguf", model, _set("tokenizer.ggml.tokens", tokens))
    found = []
    for file in (text, old):
        write_tower(file.with_name("mmproj.gguf"), model)
        folder, _ = seeing_folder(file, None)
        marker = json.loads((folder / "config.json").read_bytes())["image_token_id"]
        with LLM(str(file), engine="cpu", log_level="error", num_pages=128) as llm:
            prompt = {"prompt": f"Look: {BEGIN} and say.", "multi_modal_data": {"image": Image.linear_gradient("L")}}
            [one] = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), progress=False)
        assert one.prompt_token_ids.count(marker) == 16
        found.append((marker, [*filter(lambda token: token != marker, one.prompt_token_ids)], one.outputs[0].token_ids))
    assert found[0][0] == MARKER and found[1][0] == len(TOKENS) and found[0][1:] == found[1][1:]
    write_text(old, model, _set("tokenizer.ggml.tokens", TOKENS))
    assert seeing_folder(old, None)[1].endswith("has no <start_of_image>, which stands for an image or around one")


def test_only_a_gemma_3_of_a_size_that_sees_asks_for_a_tower() -> None:
    kind = {"general.architecture": "gemma3"}
    assert [may_see(kind, {"num_hidden_layers": count}) for count in (18, 26, 34)] == [False, False, True]


def test_only_a_llama_with_the_tokens_of_tiles_asks_for_a_tower() -> None:
    kind = {"general.architecture": "llama"}
    found = [
        may_see({**kind, "tokenizer.ggml.tokens": tokens}, {}) for tokens in (["a"], ["<fake_token_around_image>"])
    ]
    assert found == [False, True] and not may_see(kind, {})


def test_a_folder_has_its_own_tower(model: Any, tmp_path: Path) -> None:
    folder = saved(model, tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"--mmproj x\.gguf: must be left out, or none"):
        loaded(folder, mmproj="x.gguf")
    engine, _ = loaded(folder, mmproj="none")
    assert not engine.info.sees
    engine.close()


def test_receipts_have_the_digest_of_both_files(model: Any, text: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(text), engine="cpu")
    alone = weights_digest(config)
    write_tower(tmp_path / "mmproj.gguf", model)
    assert weights_digest(config) != alone == weights_digest(EngineConfig(model=str(text), engine="cpu", mmproj="none"))
