"""Rows with a grammar on the engines that compute models: they sample what it allows, whatever is beside them and
however the work is cut; the others keep their bits. The matchers are the test's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array
from tests.helpers.engines import NEEDS_CPU, Collector, assert_logprobs, greedy, load
from tests.helpers.grammars import PERSON, MockMatcher, matcher, of_regex, of_schema
from tests.helpers.models import save, tiny_model

pytestmark = pytest.mark.any_cpu

VOCAB, EOS = 131, 2


class Rising(MockMatcher):
    """Each id is above the one before by 1 to 9; the end comes where there is no such id, or behind `length` of them.
    It breaks at number `breaks`."""

    def __init__(self, length: int, breaks: int = -1) -> None:
        self.error = ""
        self.num_restarts = 0
        self._length, self._breaks = length, breaks
        self._ids: list[int] = []

    def allowed(self) -> list[int]:
        last = self._ids[-1] if self._ids else EOS
        above = [] if len(self._ids) == self._length else [*range(last + 1, min(VOCAB, last + 10))]
        return [EOS] if EOS in self._ids else above or [EOS]

    def restart(self, generated: Sequence[int]) -> None:
        self.num_restarts += 1
        self._ids = list(generated)

    def fill(self, mask: Int32Array) -> None:
        bits = [0] * (32 * len(mask))
        for token in [EOS] if self.error else self.allowed():
            bits[token] = 1
        for word in range(len(mask)):
            value = sum(bit << i for i, bit in enumerate(bits[32 * word : 32 * word + 32]))
            mask[word] = value - (value >> 31 << 32)

    def consume(self, token: int) -> None:
        if len(self._ids) == self._breaks or token not in self.allowed():
            self.error = f"{token} after {self._ids}"
        self._ids.append(token)


class Behind(MockMatcher):
    """A matcher that is not the library's own object."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        return self._matcher.error

    def restart(self, generated: Sequence[int]) -> None:
        self._matcher.restart(generated)

    def fill(self, mask: Int32Array) -> None:
        self._matcher.fill(mask)

    def consume(self, token: int) -> None:
        self._matcher.consume(token)


class Compiler(GrammarCompiler):
    def __init__(self, made: dict[str, Matcher]) -> None:
        super().__init__(None, VOCAB, (EOS,), threaded=False)
        self._made = made

    def _matcher(self, grammar: str) -> Matcher:
        return self._made[grammar]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    model = tiny_model("qwen3-tied")
    return save(model, tmp_path_factory.mktemp("grammar")), model


def params(grammar: str | None, i: int, temperature: float = 1.0, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=40, seed=i, temperature=temperature, grammar=grammar, logprobs=logprobs)


def is_rising(tokens: list[int]) -> bool:
    pairs = zip([EOS, *tokens], tokens[:-1], strict=False)
    return tokens[-1] == EOS and all(0 < after - before < 10 for before, after in pairs)


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_follow_their_grammar_and_other_rows_are_unchanged(
    engine_name: str, reference: tuple[Path, PreTrainedModel], overlap: bool
) -> None:
    """Chunks, evictions and retractions: the pool is too small for all."""
    engine, config = load(
        engine_name, reference[0], num_pages=24, page_size=4, max_running_requests=5, max_prefill_length=24
    )
    matchers: dict[str, Matcher] = {f"g{i}": Rising(12 + i) for i in range(9)}
    prompts = {i: [i + 3, 5, 6] * (3 + i % 4) for i in range(9)}
    mine = {i: (prompts[i], params(f"g{i}" if i % 3 else None, i, 0.0 if i == 4 else 1.0)) for i in prompts}
    crowd = Collector(engine, config, overlap=overlap, compiler=Compiler(matchers))
    crowd.plane.reserve_ratio = 0  # type: ignore[attr-defined]  # the estimate expects no output: rows will be retracted
    crowd.run(mine)
    assert crowd.plane.stats().num_retracted_total > 0
    for i, (prompt, sampling) in mine.items():
        alone = Collector(engine, config, compiler=Compiler({f"g{i}": Rising(12 + i)}))
        alone.run({i: (prompt, sampling)})
        assert alone.tokens[i] == crowd.tokens[i]
        if i % 3:
            assert is_rising(crowd.tokens[i]) and crowd.reasons[i] is FinishReason.STOP
    engine.close()
    assert sum(one.num_restarts for one in matchers.values() if isinstance(one, Rising)) > 6, "none was retracted"


def test_log_probabilities_are_those_of_the_model(engine_name: str, reference: tuple[Path, PreTrainedModel]) -> None:
    folder, model = reference
    engine, config = load(engine_name, folder, num_pages=60)
    collector = Collector(engine, config, compiler=Compiler({"g": Rising(6)}))
    collector.run({0: ([5, 6, 7], params("g", 0, logprobs=3)), 1: ([8, 9], params(None, 1, logprobs=2))})
    engine.close()
    for i, prompt in ((0, [5, 6, 7]), (1, [8, 9])):
        assert_logprobs(model, prompt, collector.tokens[i], collector.logprobs[i])


def test_a_matcher_that_breaks_ends_its_own_request_and_no_other(
    engine_name: str, reference: tuple[Path, PreTrainedModel]
) -> None:
    engine, config = load(engine_name, reference[0], num_pages=60)
    collector = Collector(engine, config, compiler=Compiler({"bad": Rising(9, breaks=4), "good": Rising(9)}))
    collector.run({0: ([5, 6], params("good", 0)), 1: ([5, 6], params("bad", 1)), 2: ([5, 6], greedy(20))})
    again = Collector(engine, config, compiler=Compiler({"good": Rising(9)}))
    again.run({0: ([5, 6], params("good", 0)), 2: ([5, 6], greedy(20))})
    engine.close()
    assert collector.reasons[1] is FinishReason.ERROR and "after [" in collector.errors[1]
    assert collector.reasons[0] is FinishReason.STOP and is_rising(collector.tokens[0])
    assert {i: collector.tokens[i] for i in again.tokens} == again.tokens


def test_a_matcher_of_the_library_and_one_of_python_give_the_same_tokens(
    engine_name: str, reference: tuple[Path, PreTrainedModel]
) -> None:
    """An engine may know the library's and ask them in a way of its own. The grammars' alphabet is bytes."""
    engine, config = load(engine_name, reference[0], num_pages=24, page_size=4, max_running_requests=5)
    grammars = {"0": of_regex("[a-f]{3,30}x?"), "1": of_schema(PERSON), "2": of_regex("(ab|cd|e){2,20}")}
    found = []
    wraps: tuple[Callable[[Matcher], Matcher], ...] = (lambda one: one, Behind)
    for wrap in wraps:
        matchers = {name: wrap(matcher(grammar, VOCAB, (EOS,))) for name, grammar in grammars.items()}
        collector = Collector(engine, config, compiler=Compiler(matchers))
        asked: dict[int, tuple[list[int], SamplingParams]] = {
            i: ([i + 3, 5, 6], params(str(i), i, float(i % 2))) for i in range(3)
        }
        collector.run({**asked, 3: ([9, 9], greedy(20))})
        found.append((collector.tokens, collector.reasons, collector.errors))
    engine.close()
    assert found[0] == found[1] and not found[0][2]
    assert re.fullmatch(b"[a-f]{3,30}x?", bytes(found[0][0][0][:-1])) or len(found[0][0][0]) == 40
    assert re.fullmatch(b"(ab|cd|e){2,20}", bytes(found[0][0][2][:-1])) or len(found[0][0][2]) == 40


class Raises(Rising):
    def fill(self, mask: Int32Array) -> None:
        raise ValueError("on purpose")


@NEEDS_CPU
def test_a_matcher_that_raises_in_the_cpu_engine_ends_its_own_request(reference: tuple[Path, PreTrainedModel]) -> None:
    engine, config = load("cpu", reference[0], num_pages=60)
    collector = Collector(engine, config, compiler=Compiler({"bad": Raises(9), "good": Rising(9)}))
    collector.run({0: ([5, 6], params("good", 0)), 1: ([5, 6], params("bad", 1))})
    engine.close()
    assert collector.reasons[1] is FinishReason.ERROR and "on purpose" in collector.errors[1]
    assert collector.reasons[0] is FinishReason.STOP and is_rising(collector.tokens[0])
