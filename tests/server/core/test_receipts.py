"""What a request's answers add to their receipts."""

from __future__ import annotations

import numpy as np

from minisgl.frontend.output_processor import Delta, Logprob, RequestState, Subscriber
from minisgl.receipt import Model, Numerics
from minisgl.sampling_params import SamplingParams
from minisgl.server.core.receipts import ReceiptBuilder
from minisgl.tokenizer import Tokenizer
from tests.helpers.server import check_error, frontend


def test_of_what_another_server_computed_nobody_knows_the_probabilities() -> None:
    """An answer that went on here after the death of a server: a digest of a part would be of no answer."""
    model, numerics = Model("a", None, "b", "c"), Numerics("cpu", "exact", "f16", None, "exact", 1)
    answers, params = ReceiptBuilder(model, numerics, None), SamplingParams(max_tokens=2, seed=1)
    for index in (0, 1):
        for was_elsewhere in (index == 1, False):
            one = Delta(index, "a", None, (Logprob(5, -0.5, ()),))
            answers.add(one, was_elsewhere=was_elsewhere)
    whole, partly = (
        answers.of(RequestState(index, np.array([1], np.int32), params, Tokenizer.echo(), Subscriber(lambda: None)))
        for index in (0, 1)
    )
    assert whole.logprobs is not None and partly.logprobs is None
    assert whole.prompt == partly.prompt and whole.digest() != partly.digest()


def test_an_engine_whose_results_depend_on_the_batch_gives_no_receipts() -> None:
    with frontend() as server, server.http() as http:
        error = check_error(http.post("/v1/completions", json={"prompt": "say:a", "receipt": True}), 400)
    assert (error["param"], error["code"]) == ("receipt", "unsupported_value")
    assert "the engine scripted computes results that depend on the batch: use --engine cpu" in error["message"]
