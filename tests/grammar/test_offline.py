"""The offline API's way to ask for a form."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import BaseModel

from minisgl import LLM, SamplingParams, structured_outputs
from minisgl.sampling_params import ParamError


class City(BaseModel):
    name: str
    people: int
    twins: list[str] = []


@pytest.mark.parametrize("seed", range(3))
def test_outputs_fit_the_grammar(seed: int) -> None:
    with LLM("none", engine="echo", num_pages=512, page_size=16, log_level="error") as llm:
        grammars = [
            structured_outputs(json=City),
            structured_outputs(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2}),
            structured_outputs(json='{"enum": ["a", 1, null]}'),
            structured_outputs(json_object=True, whitespace_pattern=""),
            structured_outputs(regex="[a-f]{3}-[0-9]+"),
            structured_outputs(choice=("yes", "no")),
            structured_outputs(grammar='root ::= "x" root | "y"'),
        ]
        each = [SamplingParams(grammar=one, seed=seed, max_tokens=2000) for one in grammars]
        found = llm.generate(["a prompt"] * len(each), each, progress=False)
    done = [one.text if one.outputs[0].finish_reason == "stop" else None for one in found]
    assert all(one.outputs[0].finish_reason in ("stop", "length") for one in found)
    checks = [
        City.model_validate_json,
        lambda text: len(json.loads(text)) >= 2,
        lambda text: json.loads(text) in ("a", 1, None) or 1 / 0,
        json.loads,
        re.compile("[a-f]{3}-[0-9]+").fullmatch,
        ("yes", "no").index,
        re.compile("x*y").fullmatch,
    ]
    for check, text in zip(checks, done, strict=True):
        assert text is None or check(text) is not None
    assert sum(text is not None for text in done) >= 5


def test_an_invalid_grammar_is_an_error_at_once() -> None:
    with pytest.raises(ParamError, match=r"^json: Invalid type"):
        structured_outputs(json={"type": "text"})
    with pytest.warns(UserWarning, match=r"not enforced: json\.uniqueItems"):
        structured_outputs(json={"uniqueItems": True})
    with pytest.raises(ParamError, match="give one of json and regex"):
        structured_outputs(json={}, regex="a")
    with pytest.raises(TypeError, match="give one of"):
        structured_outputs()
    with pytest.raises(ParamError, match="ignore_eos: cannot stand beside a grammar"):
        SamplingParams(grammar=structured_outputs(regex="a"), ignore_eos=True).check()
