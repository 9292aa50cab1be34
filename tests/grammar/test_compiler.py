"""Grammars become matchers: in a thread, each its own, and what cannot is an answer."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from minisgl import _rust
from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.grammar.compiler import Compiled, GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.tokenizer.echo import echo_json
from tests.helpers.grammars import PERSON, compiler, matcher, of_regex, of_schema
from tests.helpers.seconds import WAIT_S

A = of_regex("a+")


def test_each_submitted_grammar_has_one_result() -> None:
    made = compiler()
    for key in (3, 1):
        made.submit(key, A)
    taken = made.take()
    assert [one.key for one in taken] == [3, 1] and not made.take()
    first, second = (one.matcher for one in taken)
    assert first is not None and second is not None and first is not second
    first.consume(98)
    mask_of(first)
    assert first.error and not second.error, "one broken matcher has broken another of the same grammar"


@pytest.mark.parametrize("grammar", ["", "rubbish", "start: /(/", '{"grammars": 3}', "start: nothing", "start: <|no|>"])
def test_a_grammar_error_is_one_line(grammar: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = compiler()
    made.submit(1, grammar)
    (one,) = made.take()
    assert one.matcher is None and one.error and "\n" not in one.error
    assert capfd.readouterr() == ("", "")


def test_a_model_without_an_end_has_no_grammars() -> None:
    made = compiler(eos_ids=())
    made.submit(1, A)
    assert "end-of-sequence" in made.take()[0].error


def test_a_folder_without_a_tokenizer_is_an_answer(tmp_path: object) -> None:
    made = GrammarCompiler(str(tmp_path), VOCAB_SIZE, (EOS_ID,), threaded=False)
    made.submit(1, A)
    (one,) = made.take()
    assert one.matcher is None and one.error


def test_the_thread_calls_wake() -> None:
    woken = threading.Event()
    made = GrammarCompiler(None, VOCAB_SIZE, (EOS_ID,), wake=woken.set)
    made.submit(7, A)
    assert woken.wait(WAIT_S)
    (one,) = made.take()
    assert one.key == 7 and one.matcher is not None
    made.submit(8, "rubbish")
    made.wait()
    assert made.take()[0].error
    made.close()
    made.close()


def test_a_cancelled_key_has_no_result() -> None:
    made = GrammarCompiler(None, VOCAB_SIZE, (EOS_ID,))
    for key in range(20):
        made.submit(key, A)
    for key in range(0, 20, 2):
        made.cancel(key)
    taken: list[int] = []
    while len(taken) < 10:
        made.wait()
        taken += [one.key for one in made.take()]
    assert sorted(taken) == list(range(1, 20, 2))
    made.close()


class Counting(GrammarCompiler):
    """Compiles when the test says so; what, in order."""

    def __init__(self) -> None:
        super().__init__(None, VOCAB_SIZE, (EOS_ID,))
        self.may, self.begun, self.compiled = threading.Semaphore(0), threading.Semaphore(0), list[str]()

    def _matcher(self, grammar: str) -> Matcher:
        self.begun.release()
        self.may.acquire()
        self.compiled.append(grammar)
        return super()._matcher(grammar)

    def gather(self, count: int) -> list[Compiled]:
        found: list[Compiled] = []
        while len(found) < count:
            self.wait()
            found += self.take()
        return found


def test_a_grammar_is_compiled_once_for_all_who_have_it_and_others_wait_for_no_more() -> None:
    """18 KB times 1,024 choices kept everybody else's grammars waiting for 89 s."""
    made = Counting()
    for key in range(100):
        made.submit(key, A)
    made.submit(100, of_regex("b"))
    for _ in range(2):
        made.begun.acquire()  # at once, in two threads
    for _ in range(2):
        made.may.release()
    found = made.gather(101)
    assert sorted(made.compiled) == sorted([A, of_regex("b")])
    assert sorted(one.key for one in found) == list(range(101))
    matchers = {id(one.matcher) for one in found}
    assert len(matchers) == 101
    made.submit(101, A)  # a later request
    assert made.gather(1)[0].matcher is not None and len(made.compiled) == 2
    made.close()


def test_a_job_that_all_have_cancelled_is_not_started() -> None:
    made = Counting()
    for key, grammar in enumerate([of_regex("a"), of_regex("b"), of_regex("c"), of_regex("d"), of_regex("d")]):
        made.submit(key, grammar)
    for _ in range(2):
        made.begun.acquire()  # a and b
    made.cancel(2)
    made.cancel(3)
    made.may.release(5)
    assert sorted(one.key for one in made.gather(3)) == [0, 1, 4]
    assert of_regex("c") not in made.compiled and made.compiled.count(of_regex("d")) == 1
    made.close()


def test_the_cache_of_grammars_stays_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler()
    made.submit(0, A)
    size = made._num_kept_bytes
    assert size > 1000
    monkeypatch.setattr("minisgl.grammar.compiler.MAX_KEPT_BYTES", 5 * size)
    for key in range(1, 40):
        made.submit(key, of_regex("a+" + "b" * key))
    assert 1 < len(made._kept) <= 5 and made._num_kept_bytes <= 5 * size
    assert [one.error for one in made.take()] == [""] * 40


AMBIGUOUS = "start: e\ne: e e e | e e | W\nW: /[a-z ]{1,4}/\n"  # a mask takes the longer, the longer the text is


def test_a_mask_that_takes_long_is_made_outside_and_is_the_same() -> None:
    tokenizer = _rust.GrammarTokenizer(echo_json(), VOCAB_SIZE, [EOS_ID])
    patient = _rust.GrammarMatcher(tokenizer, AMBIGUOUS)
    hasty, rng, mask = patient.copy(), random.Random(3), np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    tokens, num_late = list[int](), 0

    def tried(made: Matcher, left_s: float) -> list[int] | None:
        filled = made.try_fill(mask, left_s)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() if filled else None

    for _ in range(400):
        expected = mask_of(patient)
        found = tried(hasty, 1.0)
        if found is None:
            num_late += 1
            assert tried(hasty, 1.0) is None, "it takes no shorter"
            hasty.prepare()
            found = tried(hasty, 0.0)
        assert found == expected
        tokens.append(rng.choice(expected[:-1]))
        patient.consume(tokens[-1])
        hasty.consume(tokens[-1])
    assert 0 < num_late < 400
    returned = patient.copy()
    returned.restart(tokens)
    assert tried(returned, 1.0) is None, "400 tokens at once: it is given up in the middle"
    returned.prepare()
    assert tried(returned, 0.0) == mask_of(patient) and not returned.error


def test_a_request_whose_masks_take_too_long_in_all_ends_with_the_limit() -> None:
    text = echo_json()
    made = _rust.GrammarMatcher(_rust.GrammarTokenizer(text, VOCAB_SIZE, [EOS_ID], 0.01), AMBIGUOUS)
    for _ in range(5000):
        made.consume(97)
        if mask_of(made) == [EOS_ID] and made.error:
            break
    assert made.error == "its grammar took more than 0.01 s of processor time, the limit of a request"
    other = made.copy()
    assert not other.error and len(mask_of(other)) > 20


def test_nothing_is_imported_before_the_first_grammar() -> None:
    program = (
        "import sys, threading\n"
        "from minisgl.grammar.compiler import GrammarCompiler\n"
        "from minisgl.engine.echo import EchoEngine\n"
        "from minisgl.runner.loop import StepLoop\n"
        "made = GrammarCompiler(None, 258, (256,))\n"
        "assert not made.take() and threading.active_count() == 1\n"
        "assert 'llguidance' not in sys.modules\n"
        "made.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_matcher_may_go_to_another_thread() -> None:
    """It is compiled in one and used in another."""
    made = GrammarCompiler(None, VOCAB_SIZE, (EOS_ID,))
    made.submit(1, A)
    made.wait()
    matcher = made.take()[0].matcher
    assert matcher is not None
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    thread = threading.Thread(target=lambda: matcher.fill(mask))
    thread.start()
    thread.join()
    made.close()
    assert mask.any() and not matcher.error


def mask_of(made: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    made.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_the_extension_writes_no_mask_of_another_size() -> None:
    made, mask = matcher(of_regex("a")), np.full(8, -1, np.int32)
    with pytest.raises(BufferError):
        made.fill(mask)
    assert (mask == -1).all() and mask_of(made, VOCAB_SIZE) == [97]


@pytest.mark.parametrize("work", ["tokenizer", "grammar", "check"])
def test_others_run_while_a_tokenizer_is_built_and_a_grammar_compiled(work: str) -> None:
    """Else all streams of the process stand still meanwhile. Nobody is made to give the GIL away here."""
    text = echo_json()
    tokenizer, grammar = _rust.GrammarTokenizer(text, VOCAB_SIZE, [EOS_ID]), of_schema(PERSON)
    go, ran, interval = threading.Lock(), list[bool](), sys.getswitchinterval()

    def other() -> None:
        with go:
            ran.append(True)

    with go:
        thread = threading.Thread(target=other)
        thread.start()
        sys.setswitchinterval(1000)
    try:
        for _ in range(2000):  # the other may be slow to wake
            if work == "tokenizer":
                _rust.GrammarTokenizer(text, VOCAB_SIZE, [EOS_ID])
            elif work == "check":
                _rust.check_grammar(grammar, 100_000, 32, b"")
            else:
                _rust.GrammarMatcher(tokenizer, grammar)
            if ran:
                break
        assert ran, "the GIL was held"
    finally:
        sys.setswitchinterval(interval)
        thread.join()
