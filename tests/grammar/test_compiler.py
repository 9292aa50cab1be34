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
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import Matcher
from minisgl.tokenizer import Tokenizer
from tests.helpers.grammars import PERSON, compiler, matcher, of_regex, of_schema
from tests.helpers.seconds import WAIT_S

A = of_regex("a+")


def test_what_is_submitted_is_taken_once() -> None:
    made = compiler()
    for key in (3, 1):
        made.submit(key, A)
    taken = made.take()
    assert [one.key for one in taken] == [3, 1] and not made.take()
    first, second = (one.matcher for one in taken)
    assert first is not None and second is not None and first is not second
    first.consume(98)
    assert first.error and not second.error, "one broken matcher has broken another of the same grammar"


@pytest.mark.parametrize("grammar", ["", "rubbish", "start: /(/", '{"grammars": 3}', "start: nothing", "start: <|no|>"])
def test_what_is_wrong_with_a_grammar_is_one_line(grammar: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = compiler()
    made.submit(1, grammar)
    (one,) = made.take()
    assert one.matcher is None and one.error and "\n" not in one.error
    assert capfd.readouterr() == ("", "")


def test_a_model_without_an_end_has_no_grammars() -> None:
    made = compiler(eos_ids=())
    made.submit(1, A)
    assert "end of sequence" in made.take()[0].error


def test_a_folder_without_a_tokenizer_is_an_answer(tmp_path: object) -> None:
    made = GrammarCompiler(str(tmp_path), VOCAB_SIZE, (EOS_ID,), threaded=False)
    made.submit(1, A)
    (one,) = made.take()
    assert one.matcher is None and one.error


def test_the_thread_wakes_whoever_waits() -> None:
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


def test_one_that_is_cancelled_is_never_taken() -> None:
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


def test_nothing_is_there_before_the_first_grammar() -> None:
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


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 320])
def test_both_forms_of_the_library_allow_the_same(seed: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a token that may not come, in some: the error is the same, too."""
    grammar = of_schema(PERSON) if seed % 2 else of_regex("(ab|[^c]{2,5})*x?")
    ours = matcher(grammar, vocab_size)
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)
    theirs = matcher(grammar, vocab_size)
    rng, masks = random.Random(seed), 0
    while masks < 80 and not theirs.error:
        may = mask_of(ours, vocab_size)
        assert may == mask_of(theirs, vocab_size)
        token = rng.choice(may) if rng.random() < 0.98 else rng.randrange(EOS_ID)
        ours.consume(token)
        theirs.consume(token)
        assert ours.error == theirs.error
        masks += 1
    assert mask_of(ours, vocab_size) == mask_of(theirs, vocab_size)


def mask_of(made: Matcher, vocab_size: int) -> list[int]:
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
    text = Tokenizer.open(None).to_json()
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
