"""From tokens to text: what a request's state gives, however its tokens come; whom the processor notifies, and when."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minisgl.frontend.engine_client import InProcessClient
from minisgl.frontend.output_processor import Delta, OutputProcessor, RequestState, Subscriber, request_states
from minisgl.message import AddRequest, FinishRequest, StepTokens, ToEngine, TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from minisgl.tokenizer import Tokenizer
from tests.helpers.server import EOS, failed_step, one_token

PROMPT = np.array([1, 2, 3], np.int32)
TOKENIZER = Tokenizer.echo()


def states(sampling: SamplingParams, subscriber: Subscriber | None = None) -> list[RequestState]:
    return request_states([PROMPT], sampling, TOKENIZER, 100, subscriber or Subscriber(lambda: None))


def submitted(sampling: SamplingParams) -> tuple[InProcessClient, RequestState]:
    client = InProcessClient()
    [state] = client.submit([PROMPT], sampling, TOKENIZER, 100, Subscriber(lambda: None))
    return client, state


def output(client: InProcessClient, state: RequestState) -> Delta | None:
    """As the server and `LLM` do."""
    delta = state.take()
    if state.found_stop:
        client.finish(state)
    return delta


def posted(client: InProcessClient) -> list[ToEngine]:
    found: list[ToEngine] = []
    client.step(found.extend)
    return found


def joined(deltas: list[Delta | None]) -> tuple[str, str | None]:
    found = [delta for delta in deltas if delta is not None]
    return "".join(delta.text for delta in found), found[-1].finish_reason


@pytest.mark.parametrize("together", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("sampling", "text", "num_tokens", "reason"),
    [
        (SamplingParams(), "a STOP b", 9, "stop"),
        (SamplingParams(stop=("STOP",)), "a ", 6, "stop"),
        (SamplingParams(stop=("STOP",), min_tokens=7), "a STOP b", 9, "stop"),
        (SamplingParams(stop=("b!",)), "a STOP b", 9, "stop"),  # held back until the end
        (SamplingParams(stop=("O", "STO")), "a ", 5, "stop"),
    ],
)
def test_the_text_does_not_depend_on_how_many_tokens_come_together(
    together: int, sampling: SamplingParams, text: str, num_tokens: int, reason: str
) -> None:
    client, state = submitted(sampling)
    tokens = [*b"a STOP b", EOS]
    deltas: list[Delta | None] = []
    for at in range(0, len(tokens), together):
        for token in tokens[at : at + together]:
            client.receive([one_token(0, token, FinishReason.STOP if token == EOS else FinishReason.NONE)])
        deltas.append(output(client, state))
    assert joined(deltas) == (text, reason)
    assert len(state.token_ids) == num_tokens and state.finish_reason == reason
    assert output(client, state) is None and client.num_live == 0


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    client, state = submitted(SamplingParams(stop=("b",)))
    assert isinstance(posted(client)[0], AddRequest)
    client.receive([one_token(0, ord("a")), one_token(0, ord("b")), one_token(0, ord("c"))])
    assert output(client, state) == Delta(0, "a", "stop")
    assert posted(client) == [FinishRequest(0)]
    client.receive([one_token(0, ord("d"))])
    assert output(client, state) is None and state.token_ids == [*b"ab"]


def test_a_stop_token_has_no_text_and_no_log_probability() -> None:
    client, state = submitted(SamplingParams(logprobs=1))
    both = StepTokens(
        step=0,
        req_ids=np.zeros(2, np.int64).tobytes(),
        tokens=np.array([97, EOS], np.int32).tobytes(),
        reasons=np.array([FinishReason.NONE, FinishReason.STOP], np.int32).tobytes(),
        logprobs=tuple(TokenLogprobs(i, -0.5, (97,), (-0.5,)) for i in range(2)),
    )
    client.receive([both])
    delta = output(client, state)
    assert delta is not None and (delta.text, delta.finish_reason) == ("a", "stop")
    assert [(one.token_id, one.logprob, one.top) for one in delta.logprobs] == [(97, -0.5, ((97, -0.5),))]
    assert state.new_token_ids() == [97, EOS] and state.new_token_ids() == []


def test_each_choice_has_its_seed_and_limits_that_fit() -> None:
    found = states(SamplingParams(n=3, seed=5, min_tokens=200))
    assert [state.index for state in found] == [0, 1, 2]
    assert {(one.sampling.n, one.sampling.max_tokens, one.sampling.min_tokens) for one in found} == {(1, 97, 97)}
    seeds = [one.sampling.seed for one in found]
    assert len(set(seeds)) == 3 and seeds == [one.sampling.seed for one in states(SamplingParams(n=3, seed=5))]


def test_a_subscriber_is_notified_once_of_all_that_came() -> None:
    processor, notified = OutputProcessor(), list[str]()
    first, second = (Subscriber(lambda name=name: notified.append(name)) for name in "ab")  # type: ignore[misc]
    live = [*states(SamplingParams(n=2), second), *states(SamplingParams(), first)]
    for req_id, state in enumerate(live):
        processor.add(state, req_id)
    for req_id, _ in itertools.product((2, 1, 0), range(2)):
        processor.process(one_token(req_id, 97))
    processor.notify(1)
    assert notified == ["a"] and processor.is_due
    processor.notify()
    assert notified == ["a", "b"] and not processor.is_due
    assert [len(state.tokens) for state in live] == [2, 2, 2]


def test_a_lost_engine_notifies_every_subscriber() -> None:
    processor, notified = OutputProcessor(), list[int]()
    live = [states(SamplingParams(), Subscriber(lambda i=i: notified.append(i)))[0] for i in range(3)]  # type: ignore[misc]
    for req_id, state in enumerate(live):
        processor.add(state, req_id)
    processor.process(one_token(2, EOS, FinishReason.STOP))
    processor.fail("it died")
    assert sorted(notified) == [0, 1, 2] and not processor.is_due and not processor.live
    assert [(state.error, state.engine_gone) for state in live] == [("it died", True)] * 2 + [(None, False)]
    assert processor.num_waiting == processor.num_waiting_tokens == 0


def test_background_requests_do_not_count_as_waiting() -> None:
    processor = OutputProcessor()
    for req_id in range(3):
        [state] = states(SamplingParams())
        processor.add(state, req_id, background=req_id > 0)
    assert (processor.num_waiting, processor.num_background) == (1, 2)
    processor.process(one_token(1, EOS, FinishReason.STOP))
    assert (processor.num_waiting, processor.num_background) == (1, 1)
    processor.fail("it died")
    assert (processor.num_waiting, processor.num_background) == (0, 0)


def test_an_error_comes_with_the_text_before_it() -> None:
    client, state = submitted(SamplingParams(stop=("ab",)))
    client.receive([one_token(0, ord("a")), failed_step(0, "went wrong")])
    assert output(client, state) == Delta(0, "a", "error")
    assert state.error == "went wrong" and not state.engine_gone
