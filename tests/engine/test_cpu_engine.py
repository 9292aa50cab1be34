"""The CPU engine by its steps: rows do not see each other, pages may lie anywhere, failures leave it usable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.engine.api import SlotAssignment
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.models.config import load_config, tensor_names
from minisgl.sampling_params import SamplingParams
from minisgl.step import NOT_FINITE
from tests.helpers.models import published, save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB = 131
ROWS = 64
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=1000, logprobs=5)


@pytest.fixture(
    scope="module",
    params=[
        "llama-linear-mha",
        "qwen3-tied",
        "mistral-window",
        "qwen3-moe",
        "gemma2-caps",
        "qwen2-moe",
        "cohere",
        "glm4-moe",
        "gpt-oss",
        "deepseek3-yarn",
        "gpt-bigcode",
        "gemma4",
        "gemma4-moe",
        "llama4",
        "lfm2",
        "lfm2-bias",
        "lfm2-moe",
        "qwen3-next",
        "qwen3.5",
        "granite-hybrid",
        "falcon-h1",
        "nemotron-h-moe",
        "mamba2",
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param == "gpt-oss":  # with experts in MXFP4
        published(tiny_model(request.param, intermediate_size=96), folder)
        return folder
    return save(tiny_model(request.param), folder)


class Driver:
    """Sequences in slots, each with pages of its own, step by step."""

    def __init__(self, folder: Path, *, page_size: int = 16, pages: int = 1024, **settings: Any) -> None:
        config = EngineConfig(
            model=str(folder), page_size=page_size, num_pages=pages, max_running_requests=ROWS, **settings
        )
        self.engine: CpuEngine = load_cpu_engine(config, lambda text, done=0, total=0: None)
        self._page_size = page_size
        self._free = np.random.default_rng(5).permutation(pages).astype(np.int32).tolist()
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._assignments: list[SlotAssignment] = []
        self._begins: list[tuple[int, int]] = []
        self.has_states = self.engine.info.num_checkpoints is not None

    def bind(self, slot: int, tokens: list[int], *, share: int | None = None, checkpoint: int = -1) -> None:
        """`share`: the first whole pages are those of that slot. `checkpoint`: what a state begins with."""
        self._begins.append((slot, checkpoint))
        needed = -(-(len(tokens) + 40) // self._page_size)
        first = [] if share is None else self.tables[share][: len(tokens) // 2 // self._page_size]
        self.tables[slot] = first + [self._free.pop() for _ in range(needed - len(first))]
        self.lengths[slot] = len(first) * self._page_size
        self._assignments.append(SlotAssignment(slot, 100 + slot, GREEDY, np.array(tokens, np.int32), len(tokens)))

    def step(
        self, parts: dict[int, list[int] | None], saves: Sequence[tuple[int, int, int]] = ()
    ) -> tuple[dict[int, int], dict[int, tuple[float, ...]]]:
        """`parts`: slot -> the tokens that it computes, None: the one it sampled. Decode rows first. `saves` of states:
        slot, tokens, checkpoint. Returns tokens and their log probabilities by slot."""
        assignments, self._assignments = self._assignments, []
        order = sorted(parts, key=lambda slot: parts[slot] is not None)
        ids, positions, out_loc, pages, updates = [], [], [], [], []
        for slot in order:
            own = parts[slot] or [-(slot + 1)]
            start = self.lengths[slot]
            ids += own
            positions += range(start, start + len(own))
            table = self.tables[slot]
            out_loc += [
                table[at // self._page_size] * self._page_size + at % self._page_size
                for at in range(start, start + len(own))
            ]
            self.lengths[slot] = start + len(own)
        for assignment in assignments:
            updates += [assignment.slot, 0, len(self.tables[assignment.slot])]
            pages += self.tables[assignment.slot]
        array = [
            np.array(one, np.int32)
            for one in (
                ids,
                positions,
                out_loc,
                order,
                [self.lengths[slot] for slot in order],
                [len(parts[slot] or [0]) for slot in order],
                range(len(order)),
                updates,
                pages,
            )
        ]
        num_decode, freed = sum(parts[slot] is None for slot in order), np.zeros(0, np.int32)
        begins, self._begins = self._begins, []
        states = [begins, [(order.index(slot), *rest) for slot, *rest in saves]] if self.has_states else [[], []]
        flat = [np.array(one, np.int32).reshape(-1) for one in states]
        tokens, logprobs, *_ = self.engine.rust.step(*array, num_decode, assignments, freed, *flat)
        assert logprobs is not None
        rows, own_logprobs, _, top = logprobs
        found = {order[row]: (own, *best) for row, own, best in zip(rows, own_logprobs, top, strict=True)}
        return dict(zip(order, tokens.tolist(), strict=True)), found


@pytest.fixture
def prompts() -> dict[int, list[int]]:
    generator = np.random.default_rng(11)
    return {slot: generator.integers(3, VOCAB, int(generator.integers(1, 60))).tolist() for slot in range(ROWS)}


def run(driver: Driver, prompts: dict[int, list[int]], steps: int = 6) -> list[Any]:
    for slot, tokens in prompts.items():
        driver.bind(slot, tokens)
    seen = [driver.step(dict(prompts))]
    seen += [driver.step(dict.fromkeys(prompts)) for _ in range(steps)]
    driver.engine.close()
    return seen


@pytest.mark.parametrize("activations", ["exact", "bf16", "int8"])
def test_row_alone_equals_row_in_batch_of_64(folder: Path, prompts: dict[int, list[int]], activations: str) -> None:
    settings: dict[str, Any] = {"activations": activations}
    if activations == "int8" and load_config(folder).packing is None:
        if "experts_down_transposed" in tensor_names(load_config(folder))["checkpoint"]:
            pytest.skip("experts that lie transposed are not quantized")
        settings["quantization"] = "q8"
    crowd = run(Driver(folder, **settings), prompts)
    for slot in (0, 17, 63):
        alone = run(Driver(folder, **settings), {slot: prompts[slot]})
        for mine, all_of_them in zip(alone, crowd, strict=True):
            assert mine[0][slot] == all_of_them[0][slot]
            assert mine[1][slot] == all_of_them[1][slot], "log probabilities are equal to the last bit"


@pytest.mark.parametrize("page_size", [1, 4])
def test_page_size_does_not_change_results(folder: Path, prompts: dict[int, list[int]], page_size: int) -> None:
    few = {slot: prompts[slot] for slot in range(4)}
    assert run(Driver(folder, page_size=page_size, pages=16_384 // page_size), few) == run(Driver(folder), few)


def test_chunks_and_shared_prefixes_do_not_change_results(folder: Path) -> None:
    tokens = np.random.default_rng(2).integers(3, VOCAB, 70).tolist()
    driver = Driver(folder, page_size=4)
    driver.bind(0, tokens)
    whole = driver.step({0: tokens}, [(0, 32, 7), (0, 5, 6), (0, 70, 5)])
    driver.bind(1, tokens)
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 70)):
        chunked = driver.step({1: tokens[start:end]})
    driver.bind(2, tokens, share=0, checkpoint=7)
    shared = driver.step({2: tokens[driver.lengths[2] :]})
    assert driver.lengths[2] == 70 and whole[1][0] == chunked[1][1] == shared[1][2]
    together = [driver.step({0: None, 1: None, 2: None}) for _ in range(5)]
    for _, logprobs in together:
        assert logprobs[0] == logprobs[1] == logprobs[2]
    driver.engine.close()


def test_states_are_wiped_with_the_pages(tmp_path: Path) -> None:
    driver = Driver(save(tiny_model("lfm2"), tmp_path))
    tokens = [9, 8, 7, 6, 5]
    driver.bind(0, tokens)
    cold = driver.step({0: tokens}, [(0, 3, 1)])
    driver.bind(1, tokens, checkpoint=1)
    assert driver.step({1: tokens})[1][1] != cold[1][0], "it begins with a state that is not its own"
    with pytest.raises(RuntimeError, match="input_ids"):
        driver.step({1: [VOCAB]})
    for slot, checkpoint in ((2, 1), (3, -1)):
        driver.bind(slot, tokens, checkpoint=checkpoint)
        assert driver.step({slot: tokens})[1][slot] == cold[1][0]
    driver.engine.close()


def test_steps_with_states_for_a_model_without_are_refused(driver: Driver) -> None:
    driver.bind(0, [5])
    driver.has_states = True
    with pytest.raises(RuntimeError, match="no recurrent layers"):
        driver.step({0: [5]})


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(save(tiny_model("qwen2-tied"), tmp_path))
    yield driver
    driver.engine.close()


@pytest.mark.parametrize(
    ("index", "values", "named"),
    [
        (0, [VOCAB], "input_ids"),
        (0, [-900], "input_ids"),
        (1, [-1], "positions"),
        (2, [10**9], "out_loc"),
        (3, [ROWS + 1], "req_slots"),
        (4, [10**6], "seq_lens"),
        (5, [2], "extend_lens"),
        (6, [1], "sample_rows"),
        (7, [0, 0, 9999], "page_table_updates"),
    ],
)
def test_a_step_that_points_out_of_bounds_is_refused(driver: Driver, index: int, values: list[int], named: str) -> None:
    driver.bind(0, [5])
    driver.step({0: [5]})
    good = [[5], [1], [1], [0], [2], [1], [0], [], []]
    arrays = [np.array(values if at == index else one, np.int32) for at, one in enumerate(good)]
    with pytest.raises(RuntimeError, match=named):
        driver.engine.rust.step(*arrays, 0, [], *[np.zeros(0, np.int32)] * 3)
    driver.bind(1, [7, 8])
    assert driver.step({1: [7, 8]})[0][1] >= 0, "the engine goes on"


def test_overflow_fails_only_its_own_row(tmp_path: Path) -> None:
    import torch

    model = tiny_model("qwen3-untied")
    with torch.no_grad():
        model.model.embed_tokens.weight[9, 3] = float("inf")
    driver = Driver(save(model, tmp_path))
    driver.bind(0, [5, 6, 7])
    before = driver.step({0: [5, 6, 7]})
    driver.bind(1, [5, 9, 7])
    driver.bind(2, [5, 6, 7])
    tokens, logprobs = driver.step({1: [5, 9, 7], 2: [5, 6, 7]})
    assert tokens == {1: NOT_FINITE, 2: before[0][0]} and logprobs == {2: before[1][0]}
    driver.engine.close()


def test_closed_engine_raises_an_error(driver: Driver) -> None:
    driver.engine.close()
    driver.engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        driver.engine.rust.about()
