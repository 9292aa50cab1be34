"""Pages on disk of requests with adapters: the same adapter finds its own, by whatever name and in whatever process;
nobody else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl._rust import PageStore
from tests.helpers.adapters import TinyAdapter
from tests.helpers.models import save, tiny_model
from tests.helpers.stores import counts, store_of

pytestmark = pytest.mark.any_cpu

SIZE = 8
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True, logprobs=3)
PROMPT = np.random.default_rng(7).integers(3, 250, 77).tolist()
BORDER = 72  # up to where it need not be computed
SETTINGS: dict[str, Any] = {
    "engine": "cpu",
    "log_level": "error",
    "page_size": SIZE,
    "num_pages": 100,
    "max_seq_len": 200,
    "max_running_requests": 4,
}
Answer = tuple[list[int], Any]


@dataclass
class World:
    """A model, folders of adapters, and what each answers without a store; "": the model."""

    model: Path
    adapters: dict[str, str]
    cold: dict[str, Answer]

    @contextmanager
    def opened(self, store: Path | None, names: dict[str, str], **settings: Any) -> Iterator[LLM]:
        """`names`: what the adapters are called."""
        lora = {name: self.adapters[which] for name, which in names.items()}
        folder = None if store is None else str(store)
        with LLM(str(self.model), **SETTINGS, cache_dir=folder, lora=lora, **settings) as llm:
            yield llm


@pytest.fixture(scope="module", params=["qwen3-tied", "lfm2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    place = tmp_path_factory.mktemp("adapters")
    model = tiny_model(request.param, vocab_size=258)
    folder = save(model, place / "model", tokenizer=True)
    first, second = TinyAdapter(model, 1), TinyAdapter(model, 2)
    adapters = {
        "a": first.save(place / "a"),
        "b": second.save(place / "b"),
        "a, scaled": first.save(place / "scaled", lora_alpha=3.0),  # the same tensors
    }
    found = World(folder, {name: str(path) for name, path in adapters.items()}, {})
    with found.opened(None, {name: name for name in adapters}, cache="naive") as llm:
        found.cold = {which: ask(llm, which)[0] for which in ("", *adapters)}
    tokens = [tuple(one[0]) for one in found.cold.values()]
    assert len(set(tokens)) == len(tokens), "each changes the text"
    return found


def ask(llm: LLM, lora: str) -> tuple[Answer, int]:
    """Tokens with the bits of their log probabilities; how many tokens of the prompt were not computed."""
    (found,) = llm.generate([PROMPT], PARAMS, lora=lora or None, progress=False)
    return (found.token_ids, found.outputs[0].logprobs), found.num_cached_tokens


@pytest.mark.parametrize("cpu_backend", ["python", "rust_hotpath"])
def test_an_adapter_finds_its_own_pages_by_another_name(world: World, tmp_path: Path, cpu_backend: str) -> None:
    with world.opened(tmp_path, {"x": "a", "y": "b", "z": "a, scaled"}, cpu_backend=cpu_backend) as llm:
        for name, which in (("", ""), ("x", "a"), ("y", "b"), ("z", "a, scaled")):
            assert ask(llm, name) == (world.cold[which], 0), "none finds those of another one"
    with world.opened(tmp_path, {"z": "b", "y": "a", "x": "a, scaled"}, cpu_backend=cpu_backend) as llm:
        for name, which in (("z", "b"), ("", ""), ("x", "a, scaled"), ("y", "a")):
            assert ask(llm, name) == (world.cold[which], BORDER)
        before = counts(llm)
        assert ask(llm, "y") == (world.cold["a"], BORDER)
        assert counts(llm) == before, "the tree has it: nothing is read"
    assert PageStore.verify(str(tmp_path))[3] == 0


def test_pages_of_another_adapter_with_the_same_name_are_not_found(world: World, tmp_path: Path) -> None:
    with world.opened(tmp_path, {}) as llm:
        assert ask(llm, "")[1] == 0
        for which, cached in (("a", 0), ("b", 0), ("a", BORDER), ("a, scaled", 0), ("b", BORDER)):
            llm.load_lora("x", world.adapters[which])
            assert ask(llm, "x") == (world.cold[which], cached)
            llm.unload_lora("x")
            store_of(llm).flush(60.0)


def test_retracted_request_resumes_in_its_own_namespace(world: World, tmp_path: Path) -> None:
    """Prompts of less than a page, and long answers in a small pool: what is loaded was generated, and evicted."""
    prompts = [[3 + number] * (SIZE - 1) for number in range(6)]
    names: list[str | None] = [None, "a", "b"] * 2
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)

    def answers(cache: Path | None, num_pages: int) -> tuple[list[list[int]], int, int]:
        lora = {name: world.adapters[name] for name in ("a", "b")}
        settings = SETTINGS | {"num_pages": num_pages, "max_running_requests": 6, "max_seq_len": 80}
        with LLM(str(world.model), **settings, cache_dir=cache and str(cache), lora=lora) as llm:
            found = [one.token_ids for one in llm.generate(prompts, params, lora=names, progress=False)]
            stats = llm._loop.control_plane.stats()
            return found, stats.num_retracted_total, stats.num_loaded_pages_total

    expected = answers(None, 60)[0]
    assert answers(tmp_path / "cache", 60) == (expected, 0, 0)
    found, num_retracted, num_loaded = answers(tmp_path / "cache", 20)
    assert found == expected
    has_states = "lfm2" in (world.model / "config.json").read_text(encoding="utf-8")
    assert num_retracted > 0 and (num_loaded > 0 or has_states), "of those that are in the tree still, none is loaded"


def test_instruction_sets_of_equal_bits_share_an_adapters_pages(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_CPU_ISA", "scalar")
    with world.opened(tmp_path, {"x": "a"}) as llm:
        found = ask(llm, "x")
    monkeypatch.setenv("MINISGL_CPU_ISA", "avx2")
    with world.opened(tmp_path, {"x": "a"}) as llm:
        assert ask(llm, "x") == (found[0], BORDER)
    monkeypatch.setenv("MINISGL_CPU_ISA", "scalar")
    with world.opened(tmp_path, {"x": "a"}) as llm:
        assert ask(llm, "x") == (found[0], BORDER)
