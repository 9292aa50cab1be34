"""The model's MTP layer (multi-token prediction) on the CPU engine: its logits and drafts against transformers', and
answers with it and without."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import cpu_loading
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.llm import LLM
from minisgl.message import LoadAdapter
from minisgl.runner.build import build_engines
from minisgl.runner.drafting import DraftRequest, MtpDrafts
from minisgl.sampling_params import SamplingParams
from minisgl.step import Draft
from minisgl.tokenizer.echo import echo_json
from tests.helpers.adapters import TinyAdapter
from tests.helpers.engines import NEEDS_CPU, Collector, TimedRequest, greedy, load
from tests.helpers.models import LOGITS_WITHIN, TIE_WITHIN, save, tiny_model
from tests.helpers.mtp import GGUF_CONFIG, MTP_VARIANTS, mtp_folder, mtp_logits, write_mtp_gguf

pytestmark = [pytest.mark.any_cpu, NEEDS_CPU]

POOL: dict[str, Any] = {"page_size": 4, "num_pages": 400, "max_running_requests": 12}
NO_END: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None}
IDS = np.random.default_rng(5).integers(3, 131, 90).tolist()


@pytest.fixture(scope="module", params=MTP_VARIANTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A model, its MTP layer, and their folder."""
    return mtp_folder(request.param, tmp_path_factory.mktemp(request.param), **NO_END)


class Watched(MtpDrafts):
    """Drafts of the MTP layer, which are kept with the sequences they follow."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.draft_tokens)
        self.drafts: list[tuple[list[int], int]] = []
        self.num_asked = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().propose(requests)
        self.num_asked += len(requests)
        tokens = {request.req_id: request.tokens.tolist() for request in requests}
        self.drafts += [(tokens[draft.req_id], draft.tokens[0]) for draft in found]
        return found


def collector(folder: Path, *, mtp: bool, overlap: bool = True, **settings: Any) -> tuple[Collector, Watched | None]:
    engine, config = load("cpu", folder, speculative="mtp" if mtp else None, seed=1, **{**POOL, **settings})
    assert isinstance(engine, CpuEngine)
    watched = Watched(engine) if mtp else None
    return Collector(engine, config, overlap=overlap, guesses=watched), watched


def requests(**changes: Any) -> dict[int, tuple[list[int], SamplingParams]]:
    generator, found = np.random.default_rng(3), {}
    for i in range(6):
        prompt = generator.integers(3, 131, int(generator.integers(3, 60))).tolist()
        params = SamplingParams(temperature=0.7 if i % 2 else 0, seed=i, max_tokens=40, logprobs=1 if i > 1 else None)
        found[i] = (prompt, msgspec.structs.replace(params, frequency_penalty=0.5) if i == 5 else params)
    return found


def right_head(folder: Path, to: Path) -> Path:
    """Save a checkpoint whose MTP layer is always right: the model's layers add nothing, so that a token alone decides
    the next one, and the layer passes the next token's embedding on."""
    stored = load_file(folder / "model.safetensors")
    for name in stored:
        if name.startswith("model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            stored[name].zero_()
    hidden = len(stored["model.norm.weight"])
    layer = "model.layers.3"
    stored[f"{layer}.eh_proj.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    stored[f"{layer}.enorm.weight"] = torch.ones(hidden)
    stored[f"{layer}.shared_head.norm.weight"] = stored["model.norm.weight"].clone()
    to.mkdir()
    save_file(stored, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


def test_transformers_loads_the_same_checkpoint(made: tuple[Any, Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of our tiny checkpoints are those of published ones."""
    from transformers.modeling_layers import MtpModel

    model, mtp, folder = made
    names = re.compile(r"model\.layers\.3\.")  # transformers knows only the numbers of published ones
    monkeypatch.setattr(MtpModel, "get_mtp_weights_regex", lambda main_model: names)
    loaded = type(model).from_pretrained(folder)
    assert torch.equal(mtp_logits(loaded, MtpModel.from_pretrained(loaded), IDS), mtp_logits(model, mtp, IDS))


def test_logits_of_the_layer_equal_transformers(made: tuple[Any, Any, Path]) -> None:
    model, mtp, folder = made
    engine, _ = load("cpu", folder, speculative="mtp")
    assert isinstance(engine, CpuEngine)
    own = np.frombuffer(engine.rust.prompt_logits(np.array(IDS, np.int32)), np.float32)
    found = np.frombuffer(engine.rust.prompt_logits(np.array(IDS, np.int32), None, True), np.float32)
    engine.close()
    ours, wanted = torch.from_numpy(found.reshape(len(IDS), -1)[:-1].copy()), mtp_logits(model, mtp, IDS)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=LOGITS_WITHIN)
    with torch.inference_mode():
        plain = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(torch.from_numpy(own.reshape(plain.shape).copy()), plain, rtol=0, atol=LOGITS_WITHIN)


def test_a_gguf_file_has_the_same_layer(tmp_path: Path) -> None:
    model, mtp, folder = mtp_folder("glm4-moe", tmp_path, **GGUF_CONFIG)
    file = write_mtp_gguf(model, load_file(folder / "model.safetensors"), tmp_path / "model.gguf")
    engine, _ = load("cpu", file, speculative="mtp")
    assert isinstance(engine, CpuEngine)
    found = np.frombuffer(engine.rust.prompt_logits(np.array(IDS, np.int32), None, True), np.float32)
    engine.close()
    ours = torch.from_numpy(found.reshape(len(IDS), -1)[:-1].copy())
    torch.testing.assert_close(ours, mtp_logits(model, mtp, IDS), rtol=0, atol=LOGITS_WITHIN)


@pytest.mark.parametrize("chunk", [2048, 16])
def test_drafts_equal_transformers_after_each_step(made: tuple[Any, Any, Path], chunk: int) -> None:
    """Prompts come in one part and in several; the second time prefixes are found, and drafts of the cache accepted."""
    model, mtp, folder = made
    run, _ = collector(folder, mtp=True, overlap=False, max_prefill_length=chunk)
    prompts, num_drafts = {i: IDS[i : i + 20 + 9 * i] for i in range(3)}, 0
    for first in (0, 10):
        run.add({first + i: (prompt, greedy(16)) for i, prompt in prompts.items()})
        while not run.loop.idle:
            run.loop.step([])
            texts = {i: prompts[i % 10] + found for i, found in run.tokens.items() if i not in run.reasons}
            found = run.engine.draft_tokens([(i, len(text)) for i, text in texts.items()])
            for text, draft in zip(texts.values(), found, strict=True):
                row = mtp_logits(model, mtp, text)[-1]
                num_drafts += 1
                assert draft >= 0 and float(row.max() - row[draft]) <= TIE_WITHIN, "the layer's first choice"
    accepted = run.plane.stats().num_accepted_total
    run.close()
    assert accepted > 10 and num_drafts > 60


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_prefill_length": 16},
        {"kv_dtype": "q8", "quantization": "q8", "activations": "int8"},
        {"overlap": False},
    ],
)
def test_answers_have_the_same_bits_with_drafts_and_without(
    made: tuple[Any, Any, Path], settings: dict[str, Any]
) -> None:
    """The requests run twice: the second time their prompts are in the prefix cache."""
    found = []
    for mtp in (False, True):
        run, _ = collector(made[2], mtp=mtp, **settings)
        for time in range(2):
            run.run({10 * time + i: request for i, request in requests().items()})
        run.close()
        found.append(run)
    plain, drafting = found
    assert drafting.tokens == plain.tokens
    assert drafting.logprobs == plain.logprobs, "to the last bit"
    stats = drafting.plane.stats()
    assert stats.num_drafted_total > 20 and plain.plane.stats().num_drafted_total == 0
    assert stats.num_free_pages + stats.num_evictable_pages == POOL["num_pages"]


def test_aborts_and_retractions_change_no_other_answer(made: tuple[Any, Any, Path]) -> None:
    found = []
    for mtp in (False, True):
        run, _ = collector(made[2], mtp=mtp, num_pages=50, max_prefill_length=16)
        timed = [
            TimedRequest(i, 2 * i, prompt, params, 2 * i + 9 if i == 3 else -1)
            for i, (prompt, params) in requests().items()
        ]
        run.drive(timed)
        stats = run.plane.stats()
        assert stats.num_free_pages + stats.num_evictable_pages == 50
        assert stats.num_retracted_total > 0
        run.close()
        found.append({i: (run.tokens[i], run.logprobs.get(i)) for i in requests() if i != 3})
    assert found[0] == found[1]


def test_a_right_head_nearly_halves_the_steps(made: tuple[Any, Any, Path], tmp_path: Path) -> None:
    folder, found = right_head(made[2], tmp_path / "right"), []
    prompts = {i: IDS[i : i + 9] for i in range(3)}
    for mtp in (False, True):
        run, watched = collector(folder, mtp=mtp)
        run.run({i: (prompt, greedy(40)) for i, prompt in prompts.items()})
        run.close()
        found.append(run)
    assert watched is not None and len(watched.drafts) > 10
    assert found[0].tokens == found[1].tokens
    texts = [prompt + found[1].tokens[i] for i, prompt in prompts.items()]
    for tokens, draft in watched.drafts:
        assert [*tokens, draft] in [text[: len(tokens) + 1] for text in texts]
    stats = found[1].plane.stats()
    assert stats.num_accepted_total >= stats.num_drafted_total - 3 > 40, "but the last of each"
    assert found[1].loop.num_steps < 0.65 * found[0].loop.num_steps


def test_a_random_head_rests(made: tuple[Any, Any, Path]) -> None:
    run, watched = collector(made[2], mtp=True)
    for first in range(0, 60, 6):
        run.run({first + i: (IDS[first + i : first + i + 9], greedy(60)) for i in range(6)})
    run.close()
    assert watched is not None
    assert 0 < watched.num_asked < run.loop.num_steps / 6


def test_the_layer_rests_while_nobody_asks(made: tuple[Any, Any, Path]) -> None:
    """The rest begins after four steps without prompts; a question ends it with the next step."""
    run, _ = collector(made[2], mtp=True, overlap=False)
    engine, num_drafts = run.engine, []
    run.loop.guesses = None
    run.add({0: (IDS[:9], greedy(40))})
    while not run.loop.idle:
        run.loop.step([])
        if 0 in run.tokens and len(run.tokens[0]) > 20:
            num_drafts.append(engine.draft_tokens([(0, 9 + len(run.tokens[0]))])[0] >= 0)
    run.close()
    assert num_drafts[:4] == [False, True, True, True]


def test_an_overflow_in_the_layer_costs_drafts_only(made: tuple[Any, Any, Path], tmp_path: Path) -> None:
    """Keys and values of the layer are not finite then; other sequences use their pages later."""
    folder = tmp_path / "huge"
    shutil.copytree(made[2], folder)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.3.eh_proj.weight"][:] = 3e38
    save_file(stored, folder / "model.safetensors")
    found = []
    for mtp in (False, True):
        run, watched = collector(folder, mtp=mtp, num_pages=60)
        run.run(requests())
        run.run({10 + i: request for i, request in requests().items()})
        run.close()
        found.append((run.tokens, run.logprobs, run.reasons))
    assert found[0] == found[1]
    assert watched is not None and watched.num_asked > 0 and not watched.drafts


def test_rows_with_adapters_have_the_same_bits(tmp_path: Path) -> None:
    model, _, folder = mtp_folder("glm4-moe", tmp_path / "model", **NO_END)
    path, found = TinyAdapter(model, 1, targets=("q_proj", "v_proj")).save(tmp_path / "adapter"), []
    for mtp in (False, True):
        run, watched = collector(folder, mtp=mtp)
        run.loop.step([LoadAdapter(1, "a", str(path))])
        assert run.adapters == {1: "loaded"}, run.reasons_of_adapters
        asked = requests()
        run.run({i: (prompt, msgspec.structs.replace(one, adapter=i % 2)) for i, (prompt, one) in asked.items()})
        run.close()
        found.append((run.tokens, run.logprobs))
    assert found[0] == found[1]
    assert watched is not None and watched.drafts


def test_the_weights_cache_has_the_layer(
    made: tuple[Any, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with the layer adds it to the file of one without."""
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_loading, "MIN_CACHED_BYTES", 0)
    mapped, found = [], []
    for speculative in (None, "mtp", "mtp"):
        engine, _ = load("cpu", made[2], speculative=speculative, weights_cache=2**30, num_pages=30)
        assert isinstance(engine, CpuEngine)
        mapped.append(engine.rust.about()["mapped"])
        for thread in threading.enumerate():
            if thread.name == "weights-cache":
                thread.join()
        if speculative:
            found.append(engine.rust.prompt_logits(np.array(IDS, np.int32), None, True))
        engine.close()
    assert mapped == [False, False, True]
    assert found[0] == found[1]


def test_llm_drafts_and_stored_pages_have_the_layer(tmp_path: Path) -> None:
    """The last `LLM` finds the pages of the one before on disk."""
    _, _, folder = mtp_folder("glm4-moe", tmp_path / "model", vocab_size=258, max_position_embeddings=512)
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    params, prompt, found = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), IDS[:70], []
    for speculative in (None, "mtp", "mtp"):
        settings: dict[str, Any] = {"cache_dir": str(tmp_path / "pages")} if speculative else {}
        with LLM(
            str(folder), engine="cpu", num_pages=64, page_size=4, speculative=speculative, log_level="error", **settings
        ) as llm:
            found.append(llm.generate([prompt], params, progress=False)[0])
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert [one.num_cached_tokens for one in found] == [0, 0, 68]


def test_other_engines_and_models_are_refused_by_name(made: tuple[Any, Any, Path], tmp_path: Path) -> None:
    folder = save(tiny_model("llama-linear-mha"), tmp_path / "llama")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": str(folder)}, "--speculative mtp: LlamaForCausalLM: config.json names no MTP layer"),
        ({"model": "none", "engine": "echo"}, "--speculative mtp: --engine echo has no model"),
        (
            {"model": "none", "engine": "torch"},
            "--speculative mtp: cannot be used with --engine torch: use --engine cpu",
        ),
        ({"model": str(made[2]), "tp": 2}, "--speculative mtp: only the CPU engine has it, which has no --tp 2"),
        ({"model": str(made[2]), "engine": "cpu", "tp": 2}, "--tp 2: cannot be used with --engine cpu"),
    ]
    for settings, text in wrong:
        config = EngineConfig(**{"engine": "auto", "speculative": "mtp", **settings})
        with pytest.raises(ConfigError) as caught:
            build_engines(config, lambda text, done=0, total=0: None)
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="must be ngram:K, model:FILE\\[:K\\] or mtp"):
        EngineConfig(model="none", speculative="mtp:2").check()


def test_a_checkpoint_that_lacks_the_layer_is_refused(made: tuple[Any, Any, Path], tmp_path: Path) -> None:
    """Converters leave MTP layers out, and the configuration still names them."""
    stored = load_file(made[2] / "model.safetensors")
    save_file(
        {n: one for n, one in stored.items() if not n.startswith("model.layers.3.")}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text((made[2] / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model.layers.3.*eh_proj|model.layers.3.*enorm"):
        load("cpu", tmp_path, speculative="mtp")
    engine, _ = load("cpu", tmp_path)
    engine.close()


def test_the_layer_counts_towards_memory_and_start_says_so(made: tuple[Any, Any, Path]) -> None:
    lines, sizes, weights = list[str](), list[int](), list[int]()
    for speculative in (None, "mtp"):
        config = EngineConfig(model=str(made[2]), engine="cpu", num_pages=64, speculative=speculative)
        engine, drafts = build_engines(config, lambda text, done=0, total=0: lines.append(text))
        assert isinstance(engine, CpuEngine) and isinstance(drafts, MtpDrafts) == (speculative is not None)
        sizes.append(engine.pool_bytes)
        weights.append(engine.rust.about()["weight_bytes"])
        engine.close()
    hints = [line for line in lines if "MTP" in line]
    assert hints == [
        "one token a step: MTP layers, which predict further tokens, are not loaded: --speculative mtp "
        "drafts with the first"
    ]
    assert sizes[1] * 3 == sizes[0] * 4, "a layer more, of three"
    assert weights[1] > weights[0]
