"""The CPU engine computes Gemma 3 with images, whose tokens attend to each other, even if several chunks have the
tokens of one image. The tests of all models that see are in test_cpu_engine_images.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from minisgl.config import ConfigError
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.llm import LLM
from minisgl.message import AbortRequest
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.reference import admission
from minisgl.step import FinishReason
from tests.conftest import CONTROL_PLANES
from tests.engine.test_cpu_engine_images import LONG_SQUARES as LONG
from tests.engine.test_cpu_engine_images import A, Answer, collector, finish, request
from tests.helpers.engines import load
from tests.helpers.models import LOGITS_WITHIN
from tests.helpers.sight import MARKED, TEMPLATE, seeing_json
from tests.helpers.vision import gemma, prompt_of, random_image, saved, their_logits

pytestmark = pytest.mark.any_cpu


@pytest.fixture(scope="module")
def model() -> Any:
    return gemma()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def answer(folder: Path) -> Answer:
    """Return the answer to `LONG` in a single chunk."""
    one = collector(folder)
    found = finish(one, [request(0, LONG)])[0]
    one.close()
    return found


def test_the_names_of_published_files_are_known(model: Any, folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): one.contiguous() for name, one in weights.items()
    }
    assert renamed.keys() != weights.keys()
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file(renamed, tmp_path / "model.safetensors")
    engine, _ = load("cpu", tmp_path, num_pages=64)
    assert isinstance(engine, CpuEngine)
    ours = np.frombuffer(engine.rust.prompt_logits(*LONG), np.float32).reshape(len(LONG[0]), -1)
    torch.testing.assert_close(torch.from_numpy(ours), their_logits(model, *LONG), rtol=0, atol=LOGITS_WITHIN)
    engine.close()
    save_file(renamed | {"vision_tower.more.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"vision_tower\.more\.weight"):
        load("cpu", tmp_path, num_pages=64)


def test_prefixes_that_end_within_an_image_are_those_of_the_whole(folder: Path, answer: Answer, plane: str) -> None:
    """Cached pages with a part of an image were computed with the whole image, even if the request ended within it."""
    one = collector(folder, max_prefill_length=4, cpu_backend=plane)
    for i in range(4):  # a request that is aborted in the middle leaves its pages
        one.forget()
        one.loop.step([request(i, LONG)])
        for _ in range(3):
            one.loop.step([])
        one.loop.step([AbortRequest(i)])
        while not one.loop.idle:
            one.loop.step([])
    found = finish(one, [request(9, LONG)])[9]
    assert 6 < found.cached < len(LONG[0]) and found.logprobs == answer.logprobs
    warm = finish(one, [request(10, LONG)])[10]
    assert warm.cached >= len(LONG[0]) - 4 and warm.logprobs == answer.logprobs
    # the cache has all pages of a prompt that ends with an image but the last
    other = finish(one, [request(11, prompt_of([6, A]))])[11]
    alone = collector(folder)
    assert other.cached == 20 and finish(alone, [request(0, prompt_of([6, A]))])[0].logprobs == other.logprobs
    alone.close()
    one.close()


def test_several_rows_of_a_step_end_within_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has pages of its own for the rest of its image."""
    one = collector(folder, cpu_backend="python")
    size_chunk, sized = admission.size_chunk, list[int]()

    def of_a_page(request: Any, tree: Any, room: admission.ChunkLimits, plan_chunks: Any) -> admission.Chunk:
        sized.append(room.step)
        return size_chunk(request, tree, dataclasses.replace(room, budget=min(room.budget, 4)), plan_chunks)

    monkeypatch.setattr(admission, "size_chunk", of_a_page)
    prompts = [prompt_of([1 + i, random_image(8, 8, seed=i), 4], seed=i) for i in range(6)]
    found = finish(one, [request(i, prompt) for i, prompt in enumerate(prompts)])
    assert max(sized.count(step) for step in sized) == 6, "each has a chunk in one step"
    one.close()
    monkeypatch.undo()
    for i, prompt in enumerate(prompts):
        alone = collector(folder)
        assert finish(alone, [request(0, prompt)])[0].logprobs == found[i].logprobs
        alone.close()


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_an_embedding_has_each_token_once(folder: Path, pooling: str) -> None:
    """The engine computes a chunk with the rest of its last image, but adds that rest to the embedding only once."""
    found = []
    for chunk in (4, 1000):
        one = collector(folder, max_prefill_length=chunk)
        one.loop.step([request(0, LONG, max_tokens=1, logprobs=None, ignore_eos=False, embedding=pooling)])
        while not one.loop.idle:
            one.loop.step([])
        assert one.errors == {}
        found.append(one.embeddings[0])
        one.close()
    assert found[0] == found[1]


def test_a_chat_has_the_text_of_the_processor_around_an_image(tmp_path: Path) -> None:
    """The processor replaces the template's marker of an image by the text around images that Gemma was trained on."""
    begin, *_ = names = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    folder = saved(gemma(vocab_size=261), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"image_token_index": 259}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(seeing_json(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace(MARKED, begin))
    picture = Image.linear_gradient("L").resize((48, 32)).convert("RGB")
    tokens = []
    with LLM(str(folder), engine="cpu", num_pages=256, page_size=4, log_level="error") as llm:
        for one in (picture, picture.transpose(Image.Transpose.ROTATE_180)):
            words = [{"type": "text", "text": text} for text in (f"What {begin}", "is it?")]
            content: list[Any] = [words[0], {"type": "image", "image": one}, words[1]]
            params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
            [found] = llm.chat([{"role": "user", "content": content}], params, progress=False)
            tokens.append(found.token_ids)
        before, after = (llm.tokenizer.encode(text).tolist() for text in ("<user>What ", "is it?</user>\n<assistant>"))
        line = llm.tokenizer.encode("\n\n").tolist()
        typed = list(begin.encode())  # the user's own text never has the token of an image
        assert found.prompt_token_ids == [*before, *typed, *line, 258, *[259] * 16, 260, *line, *after]
    assert tokens[0] != tokens[1]


def test_text_is_computed_as_by_the_text_model(folder: Path, tmp_path: Path) -> None:
    """A model that sees computes text to the bit as if it had no tower."""
    weights = {name: one for name, one in load_file(folder / "model.safetensors").items() if "language_model" in name}
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    answers = []
    for source in (folder, tmp_path):
        one = collector(source, max_prefill_length=7)
        assert one.engine.info.sees == (source == folder)
        answers.append(finish(one, [request(i, prompt_of([30 + i])) for i in range(3)]))
        one.close()
    assert answers[0] == answers[1]


def test_a_tower_that_overflows_ends_only_its_own_request(tmp_path: Path) -> None:
    """The next request gets the pages in which the rest of the failed image was computed."""
    model = gemma()
    with torch.no_grad():
        model.model.vision_tower.embeddings.patch_embedding.bias[3] = float("inf")
    one = collector(saved(model, tmp_path), max_prefill_length=8)
    text = prompt_of([30])
    alone = finish(one, [request(0, text)])[0]
    found = finish(one, [request(1, LONG), request(2, text), request(3, LONG)])
    assert found.keys() == {2} and found[2].logprobs == alone.logprobs
    assert one.reasons[1] == one.reasons[3] == FinishReason.ERROR
    one.close()
