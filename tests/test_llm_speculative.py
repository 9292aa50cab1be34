"""`speculative`: whatever a request asks for, its answer is the one without."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.llm import LLM, RequestOutput
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.api import Stats

PROMPTS = [f"again and again and again {i}" for i in range(4)]
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stop strings": {"stop": ("rr", "tn"), "min_tokens": 9},
    "ends": {"ignore_eos": False, "max_tokens": 200},
    "log probabilities": {"logprobs": 3},
    "several": {"n": 3},
    "penalties": {"frequency_penalty": 0.5},
    "bad words": {"bad_words": ("tea",)},
    "a grammar": {"grammar": "start: /[a-z ]{40}/", "ignore_eos": False},
}
NOT_SPECULATED = ("penalties", "bad words", "a grammar")


def answers(asked: dict[str, Any], speculative: str | None, backend: str) -> tuple[list[RequestOutput], Stats]:
    """To each prompt twice: the second time the prefix cache knows how they go on."""
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "seed": 5, **asked})
    settings: dict[str, Any] = {"num_pages": 400, "page_size": 4, "log_level": "error", "cpu_backend": backend}
    with LLM("none", engine="echo", speculative=speculative, **settings) as llm:
        found = [one for _ in range(2) for one in llm.generate(PROMPTS, params, progress=False)]
        return found, llm._loop.control_plane.stats()


@pytest.mark.parametrize("backend", ["python", "rust_hotpath"])
@pytest.mark.parametrize("name", ASKED)
def test_speculation_changes_no_output(name: str, backend: str) -> None:
    (plain, _), (drafting, stats) = (answers(ASKED[name], speculative, backend) for speculative in (None, "ngram:5"))
    for one, other in zip(plain, drafting, strict=True):
        assert one.outputs == other.outputs
    assert stats.num_free_pages + stats.num_evictable_pages == 400
    if name in NOT_SPECULATED:
        assert stats.num_drafted_total == 0
    else:
        assert stats.num_accepted_total > 20


WRONG = dict.fromkeys(
    ("ngram", "ngram:0", "ngram:-1", "ngram:100", "eagle:4", "4", "", "model:", "model:a:0", "model:a:100"),
    r"must be ngram:K, model:FILE\[:K\] or mtp, with K from 1 to 99",
)
WRONG |= {"ngram:8": "--max-running-requests must be above 8"}
WRONG |= {"model:a:3": "speculative=model:a:3: --engine echo has no model"}


@pytest.mark.parametrize("value", WRONG)
def test_invalid_speculative_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[value]):
        LLM("none", engine="echo", speculative=value, max_running_requests=8)
