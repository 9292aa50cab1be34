"""The CPU engine computes prompts with images: its logits are those of transformers, and they have the same bits
whether a prompt is computed whole or in chunks, alone or with others, with a cached image or without."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.engine import cpu_loading
from minisgl.engine.api import ImageCounts, ImageRun
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.message import AddRequest, ToEngine
from minisgl.prompt_image import FIRST_VIRTUAL_ID, PromptImage
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array
from tests.conftest import CONTROL_PLANES
from tests.helpers.engines import Collector, load
from tests.helpers.models import LOGITS_WITHIN, save, tiny_model
from tests.helpers.packed_checkpoints import FORMATS, pack_checkpoint
from tests.helpers.processor import cpu_flags
from tests.helpers.vision import FAMILIES, gemma, idefics3, prompt_of, random_image, saved, seer, their_logits

pytestmark = pytest.mark.any_cpu

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=6, logprobs=3, ignore_eos=True)
PROMPTS: dict[str, Sequence[int | PromptImage]] = {
    "portrait": [5, random_image(12, 4), 7],
    "panorama": [5, random_image(2, 30), 7],
    "smallest, alone": [random_image(2, 2)],
    "at the end": [9, random_image(6, 8)],
    "several": [3, random_image(2, 2), 1, random_image(8, 4), 2, random_image(4, 16), 1, random_image(10, 10), 9],
    "one twice": [2, random_image(4, 4), 3, random_image(4, 4), 4],
    "text": [20],
}
LONG = prompt_of([6, random_image(8, 6), 4, random_image(6, 10), 5])
A, B = random_image(8, 8), random_image(8, 8, seed=1)
SQUARES: dict[str, Sequence[int | PromptImage]] = {
    "between": [5, A, 7],
    "alone": [A],
    "at the end": [9, A],
    "several": [1, A, 1, B, 40, random_image(8, 8, seed=2), 9],
    "one twice": [2, A, 3, A, 4],
    "text": [20],
}
LONG_SQUARES = prompt_of([6, A, 4, B, 5])
OF_SQUARES: dict[str, Callable[..., Any]] = {
    "gemma3": gemma,
    "smolvlm": idefics3,
    "idefics3": partial(idefics3, "Idefics3ForConditionalGeneration"),
}
"""Models whose images are squares of one size; those of the others have any size."""
each_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)
each_model = pytest.mark.parametrize("model", [*FAMILIES, "gemma3", "smolvlm"], indirect=True)
TOWERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in (*FAMILIES, "gemma3", "smolvlm")),
    *(("qwen3-vl", {"deepstack_visual_indexes": taps}, {}) for taps in ([1], [])),
    ("gemma3", {"layer_norm_eps": 0.5, "vision_use_head": True}, {"sliding_window": 3}),
    ("gemma3", {"hidden_size": 144}, {"sliding_window": 40, "head_dim": 24}),
    ("idefics3", {"layer_norm_eps": 0.5, "hidden_size": 144}, {"tie_word_embeddings": True}),
]
"""Models, with settings of their towers and of their text models."""


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[Any]
    cached: int


def made(name: str, **settings: Any) -> Any:
    return OF_SQUARES.get(name, partial(seer, name))(**settings)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return made(getattr(request, "param", "qwen3-vl"))


@pytest.fixture(scope="module")
def long(model: Any) -> tuple[Int32Array, tuple[PromptImage, ...]]:
    """Return a prompt with two images that the model reads."""
    return LONG if model.config.model_type.startswith("qwen") else LONG_SQUARES


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("seer"))


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def collector(folder: Path, *, wakes: bool = False, **settings: Any) -> Collector:
    engine, config = load("cpu", folder, **{"num_pages": 200, "page_size": 4, "num_threads": 1, **settings})
    return Collector(engine, config, wakes=wakes)


def request(req_id: int, prompt: tuple[Int32Array, tuple[PromptImage, ...]], **changes: Any) -> AddRequest:
    ids, images = prompt
    own = {name: changes.pop(name) for name in ("num_generated",) if name in changes}
    sampling = msgspec.structs.replace(GREEDY, **changes)
    return AddRequest(req_id, ids.tobytes(), sampling, images=images, **own)


def finish(collector: Collector, requests: Sequence[ToEngine]) -> dict[int, Answer]:
    """Return the answers of all requests, which arrive at once."""
    collector.forget()
    collector.loop.step(requests)
    while not collector.loop.idle:
        collector.loop.step([])
        collector.plane.check()
    ids = [one.req_id for one in requests if isinstance(one, AddRequest)]
    return {
        i: Answer(collector.tokens[i], collector.logprobs[i], collector.cached[i]) for i in ids if i in collector.tokens
    }


def counts(collector: Collector) -> ImageCounts:
    assert isinstance(collector.engine, CpuEngine)
    found = collector.engine.image_counts()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def answer(folder: Path, long: Any) -> Iterator[Answer]:
    """Return the answer to `long` in a single chunk."""
    one = collector(folder)
    yield finish(one, [request(0, long)])[0]
    one.close()


@pytest.fixture(
    params=["avx2", *(pytest.param(one, marks=pytest.mark.wide) for one in ("scalar", "avxvnni", "avx512", "amx"))]
)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"scalar": "", "avx2": "avx2", "avxvnni": "avx_vnni", "avx512": "avx512_vnni", "amx": "amx_int8"}
    if (needs := flags[request.param]) and needs not in cpu_flags():
        pytest.skip(f"this processor has no {needs}")
    monkeypatch.setenv("MINISGL_CPU_ISA", request.param)


@pytest.mark.parametrize(("name", "tower", "text"), TOWERS)
@pytest.mark.usefixtures("isa")
def test_logits_equal_transformers_at_every_position(
    name: str, tower: dict[str, Any], text: dict[str, Any], tmp_path: Path
) -> None:
    model, prompts = made(name, tower=tower, **text), SQUARES if name in OF_SQUARES else PROMPTS
    engine, _ = load("cpu", saved(model, tmp_path), num_pages=64, num_threads=2)
    assert isinstance(engine, CpuEngine) and engine.info.sees
    for case, parts in prompts.items():
        ids, images = prompt_of(parts)
        ours = torch.from_numpy(np.frombuffer(engine.rust.prompt_logits(ids, images), np.float32).reshape(len(ids), -1))
        torch.testing.assert_close(ours, their_logits(model, ids, images), rtol=0, atol=LOGITS_WITHIN, msg=case)
    runs = len({image.digest for parts in prompts.values() for image in parts if isinstance(image, PromptImage)})
    assert (found := engine.rust.image_counts()) is not None and found[0] == runs
    engine.close()


@each_family
@pytest.mark.parametrize(("slice_s", "threads"), [(0.0, 1), (0.0, 3), (1e-5, 3), (2e-4, 1), (60.0, 2)])
def test_a_tower_in_slices_is_the_whole_one(folder: Path, slice_s: float, threads: int) -> None:
    ids, images = prompt_of([5, random_image(18, 16), 7])
    one, other = (collector(folder, num_threads=count) for count in (threads, 1))
    assert isinstance(one.engine, CpuEngine) and isinstance(other.engine, CpuEngine)
    slices = 1
    while not (seen := one.engine.rust.see_ahead(images[0], True, slice_s))[0]:
        slices += 1
    if slice_s == 0:  # then each thread does one item of an operation, of which a layer has 7
        assert slices > 3 * 7 * (18 * 16 // 128) // threads
    assert slices == 1 or slice_s < 60
    assert one.engine.rust.prompt_logits(ids, images) == other.engine.rust.prompt_logits(ids, images)
    assert seen[1] is not None and (one.engine.rust.image_counts() or ())[:2] == (1, 0)
    one.close()
    other.close()


def test_features_stay_while_they_are_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_loading, "IMAGE_CACHE_BYTES", 0)  # only what is held stays
    one, (_, images) = collector(folder), prompt_of([5, random_image(8, 6), 7])
    assert isinstance(one.engine, CpuEngine)
    rust = one.engine.rust
    seen = rust.see_ahead(images[0], True, 60.0)
    assert rust.see_ahead(images[0], True, 0.0)[0], "they are held"
    num_runs, num_hits, num_images, num_bytes = rust.image_counts() or ()
    assert (num_runs, num_hits, num_images) == (1, 1, 1) and num_bytes > 0
    del seen
    assert not rust.see_ahead(images[0], True, 0.0)[0], "they are not held"
    assert rust.image_counts() == (1, 1, 0, 0)
    one.close()


@each_model
def test_generated_tokens_are_those_of_transformers(model: Any, long: Any, answer: Answer) -> None:
    ids, images = long
    theirs = their_logits(model, np.array([*ids, *answer.tokens], np.int32), images)[len(ids) - 1 : -1].log_softmax(-1)
    assert theirs.argmax(-1).tolist() == answer.tokens
    ours = [own for own, _, _ in answer.logprobs]
    assert ours == pytest.approx(theirs.max(-1).values.tolist(), abs=LOGITS_WITHIN)


def test_a_pixel_changes_the_answer(folder: Path, answer: Answer) -> None:
    one = collector(folder)
    other = finish(one, [request(0, prompt_of([6, random_image(8, 6, seed=1), 4, random_image(6, 10), 5]))])
    assert other[0].logprobs != answer.logprobs
    one.close()


@each_model
@pytest.mark.parametrize(("chunk", "page_size"), [(1, 1), (1, 4), (1, 16), (3, 4), (7, 1), (16, 4), (17, 4), (25, 16)])
def test_chunks_that_end_within_an_image_change_no_bit(
    folder: Path, long: Any, answer: Answer, plane: str, chunk: int, page_size: int
) -> None:
    """With pages of one token and chunks of one, a chunk ends at every position of each image."""
    one = collector(folder, max_prefill_length=chunk, page_size=page_size, cpu_backend=plane)
    found = finish(one, [request(0, long)])[0]
    assert (found.tokens, found.logprobs) == (answer.tokens, answer.logprobs)
    assert counts(one)[:2] == (2, 0), "features last until their image is computed"
    one.close()


@each_family
def test_a_cached_image_runs_no_tower_and_changes_no_bit(folder: Path, answer: Answer, plane: str) -> None:
    one = collector(folder, cpu_backend=plane)
    cold, warm = (finish(one, [request(i, LONG)])[i] for i in range(2))
    assert warm.cached >= len(LONG[0]) - 4 > LONG[1][-1].start + LONG[1][-1].num_tokens - 4
    assert cold.logprobs == warm.logprobs == answer.logprobs
    assert counts(one).num_runs == 2
    # a prefix that ends within the second image: its features are found by the digest
    within = finish(one, [request(2, prompt_of([6, LONG[1][0], 4, random_image(6, 10), 7], seed=0))])
    assert within[2].cached > LONG[1][-1].start and counts(one).num_runs == 2
    one.close()


@each_model
@pytest.mark.parametrize("chunk", [5, 64, 1000])
def test_other_requests_of_a_step_change_no_bit(
    folder: Path, long: Any, answer: Answer, plane: str, chunk: int
) -> None:
    one = collector(folder, cpu_backend=plane, max_prefill_length=chunk)
    others = PROMPTS if long is LONG else SQUARES
    prompts = [long, *(prompt_of(parts, seed=9) for parts in others.values())]
    together = finish(one, [request(i, prompt) for i, prompt in enumerate(prompts)])
    assert together[0].logprobs == answer.logprobs
    for i, prompt in enumerate(prompts):
        alone = collector(folder)
        assert finish(alone, [request(0, prompt)])[0].logprobs == together[i].logprobs
        alone.close()
    one.close()


@each_family
@pytest.mark.parametrize("ahead", [False, True])
def test_retracted_requests_go_on_with_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """With `ahead` the engine computes images before a step needs them, also those of a retracted request."""
    monkeypatch.setattr(cpu_loading, "IMAGE_CACHE_BYTES", 0)  # only what is held stays
    prompts = [prompt_of([3 + i, random_image(6, 4, seed=i), 4], seed=i) for i in range(8)]
    roomy = collector(folder)
    small = collector(folder, wakes=ahead, num_pages=24, max_seq_len=90, cpu_backend="python")
    small.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows are retracted
    assert isinstance(small.engine, CpuEngine)
    ended, see_ahead = list[bool](), small.engine.see_ahead

    def see(*args: Any) -> ImageRun:
        run = see_ahead(*args)
        ended.append(run.wait()[0])
        return run

    monkeypatch.setattr(small.engine, "see_ahead", see)
    requests = [request(i, prompt, max_tokens=30) for i, prompt in enumerate(prompts)]
    wanted, found = finish(roomy, requests), finish(small, requests)
    assert small.plane.stats().num_retracted_total > 0
    assert {i: one.logprobs for i, one in found.items()} == {i: one.logprobs for i, one in wanted.items()}
    num_runs = counts(small).num_runs
    assert num_runs > len(prompts), "evicted images are computed again"
    assert sum(ended) == (num_runs if ahead else len(prompts))
    roomy.close()
    small.close()


def test_evicted_features_are_computed_again(folder: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_loading, "IMAGE_CACHE_BYTES", 0)
    one = collector(folder, max_prefill_length=5, cache="naive")
    for i in range(3):
        assert finish(one, [request(i, LONG)])[i].logprobs == answer.logprobs
        assert counts(one) == (2 * i + 2, 0, 0, 0), "features that a request needs stay until it has passed them"
    one.close()


@each_model
def test_a_request_that_has_generated_elsewhere_goes_on(folder: Path, long: Any, answer: Answer) -> None:
    one = collector(folder)
    ids = np.array([*long[0], *answer.tokens[:3]], np.int32)
    rest = finish(one, [request(0, (ids, long[1]), num_generated=3)])[0]
    assert (rest.tokens, rest.logprobs) == (answer.tokens[3:], answer.logprobs[3:])
    one.close()


def test_stored_pages_of_an_image_need_no_tower(folder: Path, answer: Answer, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for runs in (2, 0):
        one = collector(folder, cache_dir=str(tmp_path), cache_size=1 << 24)
        found = finish(one, [request(0, LONG)])[0]
        assert found.logprobs == answer.logprobs and counts(one).num_runs == runs
        assert found.cached >= (0 if runs else len(LONG[0]) - 4)
        one.close()
    one = collector(folder, cache_dir=str(tmp_path), cache_size=1 << 24)
    other = finish(one, [request(0, prompt_of([6, random_image(8, 6, seed=1), 4, random_image(6, 10), 5]))])[0]
    assert other.cached == 4 and counts(one).num_runs == 2, "only the page of the text before the image is shared"
    one.close()


def test_a_tower_that_overflows_ends_only_its_own_request(tmp_path: Path) -> None:
    model = seer()
    with torch.no_grad():
        model.model.visual.merger.linear_fc2.bias[3] = float("inf")
    one = collector(saved(model, tmp_path))
    text = prompt_of([30])
    alone = finish(one, [request(0, text)])[0]
    found = finish(one, [request(1, LONG), request(2, text), request(3, LONG, max_tokens=1)])
    assert found.keys() == {2} and found[2].logprobs == alone.logprobs
    assert one.reasons[1] == one.reasons[3] == FinishReason.ERROR
    assert "the vision tower's output for an image is not finite" in one.errors[1]
    before = prompt_of([6])  # the text before the image, whose pages must not be those of the failed request
    assert finish(one, [request(4, before)])[4].tokens and counts(one).num_images == 0
    one.close()


def test_drafts_with_virtual_ids_are_rejected(folder: Path) -> None:
    """A draft copies how another sequence continued the same tokens, which may be by an image."""
    ids, images = prompt_of([10, random_image(6, 6), 2])
    ids[8:10] = 9
    answers, drafted = [], []
    for speculative in (None, "ngram:4"):
        one = collector(folder, speculative=speculative, max_running_requests=16, cpu_backend="python")
        launch = one.engine.launch

        def watched(plan: Any, buffers: Any, assigned: Any, launch: Any = launch) -> Any:
            decoded = buffers.ring[plan.ring_index].input_ids[: plan.num_decode_rows]
            drafted.append(int(np.count_nonzero(decoded >= FIRST_VIRTUAL_ID)))
            return launch(plan, buffers, assigned)

        one.engine.launch = watched  # type: ignore[assignment, method-assign]
        finish(one, [request(0, (ids, images))])
        answers.append(finish(one, [request(1, (ids[:8], ()), allowed_token_ids=(9,), max_tokens=20)])[1].logprobs)
        one.close()
    assert answers[0] == answers[1] and sum(drafted) > 0


def test_penalties_and_biases_ignore_virtual_ids(folder: Path, answer: Answer) -> None:
    one = collector(folder)
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "logit_bias": {5: 2.0},
        "min_p": 0.01,
        "bad_token_ids": ((4,),),
    }
    found = finish(one, [request(0, LONG, **params)])[0]
    assert len(found.tokens) == 6 and max(found.tokens) < 131
    one.close()


@pytest.mark.parametrize("settings", [{"quantization": "q8"}, {"weights_cache": 1 << 30}])
def test_converted_and_cached_weights_see(
    folder: Path, answer: Answer, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(cpu_loading, "MIN_CACHED_BYTES", 0)
    found, is_cached = [], "weights_cache" in settings
    for is_second in (False, True):
        one = collector(folder, **settings)
        found.append(finish(one, [request(0, LONG)])[0].logprobs)
        assert counts(one).num_runs == 2 and isinstance(one.engine, CpuEngine)
        about = one.engine.rust.about()
        assert about["mapped"] == (is_second and is_cached)
        for thread in threading.enumerate():
            if thread.name == "weights-cache":
                thread.join()
        files = list(tmp_path.glob("panels/*.panels"))
        assert len(files) == is_cached
        assert not files or files[0].stat().st_size >= about["weight_bytes"], "the tower's weights are in it"
        one.close()
    assert found[0] == found[1]
    assert (found[0] == answer.logprobs) == is_cached


def test_a_failed_step_holds_no_features(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a step holds the frames of that step until garbage collection."""
    monkeypatch.setattr(cpu_loading, "IMAGE_CACHE_BYTES", 0)  # only what is held stays
    one = collector(folder, wakes=True)
    launch = one.engine.launch

    def fail(plan: Any, buffers: Any, assigned: Any) -> Any:
        buffers.ring[plan.ring_index].input_ids[: plan.num_tokens] = 1 << 20  # beyond the vocabulary
        return launch(plan, buffers, assigned)

    gc.disable()
    try:
        monkeypatch.setattr(one.engine, "launch", fail)
        assert not finish(one, [request(0, LONG)]) and one.reasons[0] == FinishReason.ERROR
        monkeypatch.setattr(one.engine, "launch", launch)
        finish(one, [request(1, prompt_of([5]))])
        assert counts(one)[:3] == (2, 0, 0)
    finally:
        gc.enable()
    one.close()


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_a_quantized_folder_sees(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "cache_dir", lambda: tmp_path / "cache")
    model = seer(family, hidden_size=64, intermediate_size=96, tower={"out_hidden_size": 64})
    full, packed = saved(model, tmp_path / "full"), tmp_path / "packed"
    model.load_state_dict(pack_checkpoint(full, packed, FORMATS["packed-sym"]), strict=False)
    shutil.copy(full / "preprocessor_config.json", packed)
    engine, _ = load("cpu", packed, num_pages=64)
    assert isinstance(engine, CpuEngine) and engine.info.sees
    ours = np.frombuffer(engine.rust.prompt_logits(*LONG), np.float32).reshape(len(LONG[0]), -1)
    torch.testing.assert_close(torch.from_numpy(ours), their_logits(model, *LONG), rtol=0, atol=LOGITS_WITHIN)
    engine.close()


def test_halves_are_computed_in_float32(tmp_path: Path) -> None:
    folder = saved(seer().bfloat16(), tmp_path)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    engine, _ = load("cpu", folder, num_pages=64)
    assert isinstance(engine, CpuEngine)
    ours = np.frombuffer(engine.rust.prompt_logits(*LONG), np.float32).reshape(len(LONG[0]), -1)
    torch.testing.assert_close(torch.from_numpy(ours), their_logits(model, *LONG), rtol=0, atol=LOGITS_WITHIN)
    engine.close()


def _with(image: PromptImage, **changes: Any) -> tuple[Int32Array, tuple[PromptImage, ...]]:
    return LONG[0], (msgspec.structs.replace(image, **changes), *LONG[1][1:])


FIRST = LONG[1][0]
DAMAGED = {
    "rows x columns": (_with(FIRST, grid=(7, 6)), "images: a grid of 7 x 6 patches for 12 tokens"),
    "whole blocks": (_with(FIRST, grid=(16, 3)), "images: a grid of 16 x 3 patches"),
    "negative": (_with(FIRST, grid=(-8, -6)), "images: a grid of -8 x -6"),
    "pixels": (_with(FIRST, pixels=FIRST.pixels[1:]), "images: 2303 bytes of pixels"),
    "digest": (_with(FIRST, digest=b"x"), "a digest of 1"),
    "other digest": (_with(FIRST, digest=bytes(32)), "images: the ids at 6 are not those of the image"),
    "place": (_with(FIRST, start=5), "images: the ids at 5 are not those of the image"),
    "before the start": (_with(FIRST, start=-1), "images: 12 tokens at -1"),
    "beyond the end": ((LONG[0][:30], LONG[1]), "images: 15 tokens at 22 of 30, after 18"),
    "order": ((LONG[0], LONG[1][::-1]), "images: 12 tokens at 6 of 42, after 37"),
    "virtual ids of no image": ((LONG[0], LONG[1][:1]), "images: there are virtual ids of no image"),
    "virtual ids without images": ((LONG[0], ()), "tokens: ids must be at least 0 and below 131"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_an_image_that_does_not_fit_is_refused(folder: Path, answer: Answer, case: str) -> None:
    prompt, reason = DAMAGED[case]
    one = collector(folder)
    found = finish(one, [request(0, prompt), request(1, LONG)])
    assert found.keys() == {1} and found[1].logprobs == answer.logprobs
    assert reason in one.errors[0]
    one.close()


def test_images_are_refused_by_a_model_that_does_not_see(tmp_path: Path) -> None:
    one = collector(save(tiny_model("qwen3-tied"), tmp_path))
    assert not one.engine.info.sees
    assert finish(one, [request(0, LONG)]) == {} and one.errors[0] == "images: the model does not see"
    one.close()


def test_log_probabilities_of_prompts_with_images_are_refused(folder: Path) -> None:
    one = collector(folder)
    assert finish(one, [request(0, LONG, prompt_logprobs=1)]) == {}
    assert one.errors[0] == "images: prompt_logprobs are not supported with images"
    one.close()


def _copy(folder: Path, to: Path, weights: dict[str, torch.Tensor]) -> Path:
    for name in ("config.json", "preprocessor_config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    save_file(weights, to / "model.safetensors")
    return to


def test_a_folder_without_tensors_of_the_tower_does_not_see(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if "visual." not in name}
    engine, _ = load("cpu", _copy(folder, tmp_path, kept), num_pages=64)
    assert not engine.info.sees
    engine.close()


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_tensors_that_do_not_fit_the_tower_are_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.visual.blocks.1.attn.qkv.weight"
    if damage == "missing":
        del weights[name]
    else:
        weights[name if damage == "shape" else "model.visual.blocks.9.norm1.weight"] = torch.ones(4, 4)
    with pytest.raises(ConfigError, match=r"model\.visual\.blocks\.[19]\.(attn\.qkv|norm1)\.weight"):
        load("cpu", _copy(folder, tmp_path, weights), num_pages=64)
