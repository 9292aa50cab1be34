"""Random orders of requests with images on the CPU engine: each answer is, to the bit, that of the request alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.engine import cpu_engine, cpu_loading
from minisgl.engine.cpu_engine import CpuEngine
from minisgl.engine.worker import ForwardThread
from minisgl.message import AbortRequest, AddRequest, ClearCache, FromEngine, StepTokens, ToEngine
from minisgl.prompt_image import PromptImage
from minisgl.runner.build import build_fallback
from minisgl.scheduler.reference.admission import RATIO_MIN
from minisgl.scheduler.wrapped import make_faulty
from minisgl.step import FinishReason, Int32Array
from tests.conftest import CONTROL_PLANES
from tests.engine.test_cpu_engine_images import Answer, counts, finish, request
from tests.helpers.engines import Collector, load
from tests.helpers.vision import gemma, prompt_of, random_image, saved, seer

pytestmark = pytest.mark.any_cpu

NUM_SEEDS, NUM_SEEDS_SLOW, NUM_TALKS, NUM_TURNS, MOST_TOKENS, ROOMY = 20, 2_000, 300, 3, 16, 1 << 20
LAYERS, WINDOWS = ([kind, "full_attention"] for kind in ("linear_attention", "sliding_attention"))
FAMILIES: dict[str, Any] = {
    "qwen3-vl": lambda: seer(num_hidden_layers=2, tower={"depth": 1, "deepstack_visual_indexes": [0]}),
    "qwen3.5": lambda: seer("qwen3.5", num_hidden_layers=2, layer_types=LAYERS, tower={"depth": 1, "hidden_size": 32}),
    "gemma3": lambda: gemma(num_hidden_layers=2, layer_types=WINDOWS, tower={"num_hidden_layers": 1}),
}
OF_PAGES = {"retracted", "evicted_pages", "loaded_pages"}
OTHERS = {"cached", "found", "again", "abort", "error", "restarted", "continued", "replaced"}
Prompt = tuple[Int32Array, tuple[PromptImage, ...]]


class Running(Collector):
    """An engine with its step loop. `broken`: when its scheduler breaks; `failed`: the step whose forward fails;
    `ahead`: images are computed beside steps."""

    def __init__(self, folder: Path, *, broken: str = "", failed: int = -1, ahead: bool = False, **settings: Any):
        engine, config = load("cpu", folder, num_threads=1, **settings)
        super().__init__(engine, config, overlap=config.overlap, wakes=ahead)
        assert isinstance(engine, CpuEngine)
        self.failed, launch = failed, engine.launch
        self.plane.reserve_ratio = RATIO_MIN  # type: ignore[attr-defined]  # it expects short answers, and retracts
        if broken:
            self.loop._control_plane = make_faulty(self.plane, broken)
            self.loop._fallback = lambda: build_fallback(config, engine.info)

        def launch_or_fail(plan: Any, buffers: Any, assigned: Any) -> Any:
            ids = buffers.ring[plan.ring_index].input_ids
            ids[: plan.num_tokens if plan.step == failed else 0] = 1 << 20  # beyond the vocabulary
            return launch(plan, buffers, assigned)

        engine.launch = launch_or_fail  # type: ignore[method-assign]

    def deliver(self, messages: Sequence[FromEngine]) -> None:
        self.take([one for one in messages if isinstance(one, StepTokens)])


class Talks:
    """Prompts with images, and the answer to each by an engine without caches, in a single chunk."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self.folder = family, saved(FAMILIES[family](), folder)
        grids = [(8, 8)] * 2 if family == "gemma3" else [(2, 2), (4, 4), (4, 8), (8, 4), (8, 8)]
        self.images = [random_image(*grid, seed=i) for i, grid in enumerate(grids * 2)]
        self.alone = Running(self.folder, cache="naive", num_pages=64, max_prefill_length=512)
        self.turns: dict[tuple[int, int], tuple[Prompt, Answer]] = {}

    def turn(self, talk: int, turn: int) -> tuple[Prompt, Answer]:
        """Return the prompt of a turn (the one before, the beginning of its answer, and more) and its answer."""
        if (talk, turn) not in self.turns:
            rng, own = Random(f"{talk} {turn}"), Random(talk).sample(self.images, 2)
            parts: list[Any] = [rng.choice([rng.randint(1, 9), *own]) for _ in range(rng.randint(1, 2 if turn else 4))]
            ids, images = prompt_of(parts, seed=rng.randint(0, 3))
            if turn:
                (before, earlier), answer = self.turn(talk, turn - 1)
                start = [*before, *answer.tokens[: rng.randint(1, MOST_TOKENS)]]
                moved = [msgspec.structs.replace(one, start=len(start) + one.start) for one in images]
                ids, images = np.array([*start, *ids], np.int32), (*earlier, *moved)
            answer = finish(self.alone, [request(0, (ids, images), max_tokens=MOST_TOKENS)])[0]
            self.turns[talk, turn] = (ids, images), answer
        return self.turns[talk, turn]


@dataclass
class Asked:
    """A request that arrives in a step of a life, and is aborted so many steps later (-1: never)."""

    add: AddRequest
    wanted: Answer
    got: list[int]
    life: int
    arrives: int
    aborted: int
    is_over: bool = False

    def messages(self, life: int, step: int) -> Iterator[ToEngine]:
        if step == (self.arrives if life == self.life else 0):
            tokens = self.add.tokens + np.array(self.got, np.int32).tobytes()
            yield msgspec.structs.replace(self.add, tokens=tokens, num_generated=len(self.got))
        if self.aborted >= 0 and (life, step) == (self.life, self.arrives + self.aborted):
            yield AbortRequest(self.add.req_id)

    def collect(self, running: Running) -> str:
        """Compare what an engine sent with the answer. Returns how the request ended."""
        i, first = self.add.req_id, len(self.got)
        self.got += running.tokens.get(i, [])
        assert self.got == self.wanted.tokens[: len(self.got)], f"{i}: {self.got}, not {self.wanted.tokens}"
        assert running.logprobs.get(i, []) == self.wanted.logprobs[first : len(self.got)], i
        reason, text = running.reasons.get(i, FinishReason.NONE), f"the forward of step {running.failed} failed"
        self.is_over = reason is not FinishReason.NONE
        assert reason is not FinishReason.LENGTH or len(self.got) == self.add.sampling.max_tokens
        assert reason is not FinishReason.ERROR or running.errors[i].startswith(text), running.errors
        return reason.name.lower()


def draw_settings(rng: Random, family: str, longest: int, pages: str) -> dict[str, Any]:
    size, on_disk, has_states = rng.choice([1, 2, 4, 4, 8, 16]), rng.random() < 0.35, family == "qwen3.5"
    return {
        "page_size": size,
        "num_pages": -(-longest // size) + rng.randint(0, 12 // size + 1),
        "max_seq_len": longest,
        "max_running_requests": rng.randint(3, 8),
        "max_prefill_length": rng.choice([1, 3, 5, 8, 13, 30, 200]),
        "overlap": rng.random() < 0.7,
        "cpu_backend": rng.choice(CONTROL_PLANES),
        "cache": "lru" if on_disk else rng.choice(["lru", "lfu", "naive"]),
        "speculative": None if has_states else rng.choice([None, None, "ngram:2"]),
        "checkpoint_interval": size * rng.randint(1, 4) if has_states else None,
    } | ({"cache_dir": pages, "cache_size": 1 << 24} if on_disk else {})


def draw_request(rng: Random, talks: Talks, req_id: int, talk: int, life: int) -> Asked:
    (prompt, wanted), max_tokens = talks.turn(talk, rng.randrange(NUM_TURNS)), rng.randint(1, MOST_TOKENS)
    more = {"priority": rng.randint(-1, 1), "background": rng.random() < 0.2}
    add = msgspec.structs.replace(request(req_id, prompt, max_tokens=max_tokens), **more)
    got = wanted.tokens[: rng.randrange(max_tokens)] if rng.random() < 0.2 else []
    arrives, aborted = rng.choice([0, 0, rng.randint(0, 20)]), rng.choice([rng.randint(0, 12), -1, -1, -1])
    return Asked(add, wanted, got, life, arrives, aborted)


def run_order(rng: Random, talks: Talks, pages: str, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Run requests that share talks in the lives of one to three engines, some of which are killed on the way."""
    found, num_lives, some = Counter[str](), rng.randint(1, 3), rng.choices(range(NUM_TALKS), k=rng.randint(1, 3))
    asked = [draw_request(rng, talks, i, rng.choice(some), rng.randrange(num_lives)) for i in range(rng.randint(2, 9))]
    longest = max(len(one.add.tokens) // 4 for one in asked) + MOST_TOKENS + 1
    settings, room = draw_settings(rng, talks.family, longest, pages), rng.choice([0, 7_000, ROOMY])
    # forwards in this thread, which is quicker
    patch.setattr(cpu_engine, "ForwardThread", lambda name, threaded: ForwardThread(name, threaded=False))
    patch.setattr(cpu_loading, "IMAGE_CACHE_BYTES", room)  # 16 tokens take 3 or 6 KiB
    for life in range(num_lives):
        killed = rng.randint(1, 30) if life + 1 < num_lives and rng.random() < 0.5 else -1
        broken = f"{rng.choice(['schedule', 'commit'])}:{rng.randint(0, 20)}:{rng.choice(['before', 'after'])}"
        failed = rng.randint(0, 15) if rng.random() < 0.2 else -1
        broken, ahead = broken if rng.random() < 0.15 else "", Random(broken).random() < 0.5
        running = Running(talks.folder, broken=broken, failed=failed, ahead=ahead, **settings)
        mine, cleared = [one for one in asked if not one.is_over and one.life <= life], rng.randint(0, 60)
        found.update({"restarted": life > 0, "continued": sum(bool(one.got) for one in mine)})
        step, last = 0, max((one.arrives + max(0, one.aborted) for one in mine), default=0)
        while step != killed and (step <= last or not running.loop.idle):
            of_all = (message for one in mine for message in one.messages(life, step))
            running.loop.step([*of_all, *[ClearCache()] * (step == cleared)])
            running.loop.control_plane.check()
            step += 1
        found.update(one.collect(running) for one in mine)
        found["cached"] += sum(map(bool, running.cached.values()))
        assert step == killed or all(one.is_over for one in mine)
        for one in mine:
            one.is_over |= one.life == life and 0 <= one.aborted < step - one.arrives  # its client is gone
        if step != killed:
            found.update(check_rest(running, room, len({image.digest for one in mine for image in one.add.images})))
        running.loop.close()
        running.close()
    return found


def check_rest(running: Running, room: int, num_digests: int) -> dict[str, int]:
    """Check that nothing is held after all requests have ended, and that the tower ran only for new images."""
    finish(running, [request(1_000_000, prompt_of([1]), max_tokens=1)])  # drops features of aborted requests
    stats, images, replaced = running.loop.control_plane.stats(), counts(running), running.loop.num_failovers
    assert (stats.num_live, stats.num_held_pages, stats.num_protected_pages) == (0, 0, 0)
    # slots of a scheduler that broke keep images until they are assigned again
    assert replaced or max(images.num_bytes, images.num_images) <= room, images
    assert images.num_runs <= num_digests or room < ROOMY, f"{images} of {num_digests} images"
    more = {"again": images.num_runs > num_digests, "found": images.num_hits, "replaced": replaced}
    return more | {name: getattr(stats, f"num_{name}_total") for name in OF_PAGES}


@pytest.fixture(scope="module", params=FAMILIES)
def talks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    return Talks(request.param, tmp_path_factory.mktemp("seer"))


def run_seeds(talks: Talks, seeds: Iterable[int], folder: Path) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir=folder) as pages:
            try:
                found.update(run_order(Random(seed), talks, pages, patch))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert all(found[name] for name in OF_PAGES | OTHERS), f"these orders test too little: {found}"


def test_seeded(talks: Talks, tmp_path: Path) -> None:
    run_seeds(talks, [*range(NUM_SEEDS), 5173], tmp_path)  # the last: a failed forward left wrong pages on disk


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_seeded_long(talks: Talks, times: int, tmp_path: Path) -> None:
    run_seeds(talks, range(1_000_000, 1_000_000 + times * NUM_SEEDS_SLOW), tmp_path)
