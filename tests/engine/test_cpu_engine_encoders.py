"""Encoders on the CPU engine, against transformers on tiny random checkpoints that it wrote: every architecture, on
every instruction set that this machine has, whole and in chunks, alone and in a crowd."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import ConfigError
from minisgl.models.architectures import ENCODERS as NATIVE
from minisgl.models.config import load_config
from minisgl.sampling_params import POOLINGS, SamplingParams
from tests.helpers import our_models
from tests.helpers.encoders import hidden_states, pooled, tiny_encoder
from tests.helpers.engines import Collector, greedy, load, vectors
from tests.helpers.models import save
from tests.helpers.variants import ENCODERS

pytestmark = pytest.mark.any_cpu

WITHIN = 1e-4


@pytest.fixture(scope="module", params=ENCODERS)
def reference(request: pytest.FixtureRequest) -> Any:
    return tiny_encoder(request.param)


@pytest.fixture(scope="module")
def folder(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("encoder"))


def asks(pooling: str) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0, seed=0, embedding=pooling)


def prompts() -> list[list[int]]:
    """One of a single token, one as long as the positions of most."""
    generator = np.random.default_rng(4)
    return [generator.integers(6, 131, n).tolist() for n in (40, 1, 16, 90, 2, 65)]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, others))


def test_every_encoder_is_here_and_on_the_page() -> None:
    """After a change: `python -m tests.helpers.our_models`."""
    figures, page = our_models.recorded(), our_models.PAGE.read_text(encoding="utf-8")
    assert {name for variant in figures["encoders"] for name in our_models.names_of(variant)} == {*NATIVE}
    assert our_models.written(page, figures) == page
    assert max(figures["encoders"].values()) < WITHIN


def test_vectors_are_those_of_transformers(reference: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list(itertools.product(prompts(), POOLINGS))
    found = []
    for isa in ("scalar", "avx2", "avx512"):
        monkeypatch.setenv("MINISGL_CPU_ISA", isa)
        with suppress(ConfigError):  # not on this processor
            found.append(vectors(folder, asked))
    assert all(same(one, found[0]) for one in found)
    theirs = {len(prompt): hidden_states(reference, prompt) for prompt in prompts()}
    for (prompt, pooling), ours in zip(asked, found[0], strict=True):
        torch.testing.assert_close(ours, pooled(theirs[len(prompt)], pooling), rtol=0, atol=WITHIN)


def test_encoder_results_do_not_depend_on_chunks_batch_or_pages(folder: Path) -> None:
    asked = [(prompt, "mean") for prompt in prompts()]
    whole = vectors(folder, asked)
    for settings in ({"max_prefill_length": 7}, {"page_size": 4}, {"max_running_requests": 2, "num_threads": 2}):
        assert same(vectors(folder, asked, **settings), whole)
    for one, expected in zip(asked, whole, strict=True):
        assert same(vectors(folder, [one]), [expected])


def test_encoder_refuses_text_generation(folder: Path) -> None:
    engine, config = load("cpu", folder, num_pages=40)
    assert engine.info.kind == "encoder"
    collector = Collector(engine, config)
    collector.run({0: ([7, 8, 9], greedy(3)), 1: ([7, 8], asks("mean"))})
    collector.close()
    assert "encoder" in collector.errors[0] and set(collector.embeddings) == {1}


def test_encoder_pages_are_freed_after_each_request(folder: Path) -> None:
    engine, config = load("cpu", folder, num_pages=40)
    collector = Collector(engine, config)
    collector.run({i: (list(range(10 * i + 2, 10 * i + 36)), asks("mean")) for i in range(4)})
    assert len(collector.embeddings) == 4
    assert collector.plane.stats().num_free_pages == 40
    collector.close()


@pytest.mark.parametrize("field", ["position_embedding_type", "feed_forward_type"])
def test_other_kinds_of_layers_are_refused(field: str, tmp_path: Path) -> None:
    folder = save(tiny_encoder("jina-bert"), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, field: "original"}))
    with pytest.raises(ConfigError, match=f"{field}: 'original' is not supported"):
        load("cpu", folder)


def test_as_many_tokens_as_positions(reference: Any, folder: Path) -> None:
    most = load_config(folder).max_position
    prompt = np.random.default_rng(3).integers(6, 131, most).tolist()
    (ours,) = vectors(folder, [(prompt, "cls")])
    theirs = hidden_states(reference, prompt)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=WITHIN)


def test_a_folder_of_pages_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an encoder cannot use stored pages"):
        load("cpu", folder, cache_dir=str(tmp_path))
