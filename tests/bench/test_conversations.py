"""Request files with text: ShareGPT's conversations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench.workloads import (
    WorkloadSettings,
    make_workload,
)
from minisgl.config import ConfigError
from tests.helpers.bench import bodies, prompt_of

SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Why is the sky blue?"},
            {"from": "gpt", "value": "Because air scatters blue light."},
            {"from": "human", "value": "And red?"},
            {"from": "gpt", "value": "Less."},
            {"from": "human", "value": "Thanks"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "The rest of another."}]},
    {"id": "c", "conversations": []},
    {"id": "d", "conversations": [{"from": "user", "value": "Hi"}, {"from": "bard", "value": "Hello to you"}]},
]


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpts_conversations(tmp_path: Path, as_lines: bool) -> None:
    path = tmp_path / "sharegpt"
    path.write_text("\n".join(map(json.dumps, SHAREGPT)) if as_lines else json.dumps(SHAREGPT, indent=1))
    made = make_workload(str(path), WorkloadSettings(num_requests=6))
    assert sorted(made.chains) == [1, 1, 2, 2] and made.arrivals is None
    assert made.left_out == {"conversations without a question and an answer": 2}
    asked = {prompt_of(body): body["max_tokens"] for body in bodies(str(path), WorkloadSettings(num_requests=6))}
    assert asked == {
        "system: Be brief.\nuser: Why is the sky blue?": 8,  # a token for four bytes of the answer
        "system: Be brief.\nuser: Why is the sky blue?\nassistant: Because air scatters blue light.\nuser: And red?": 2,
        "user: Hi": 3,
    }
    short = make_workload(str(path), WorkloadSettings(num_requests=4, turns=1, output_len=(1, 2)))
    assert short.chains == (1, 1, 1, 1) and {one.output_len for one in short.requests} == {2}
    with pytest.raises(ConfigError, match="--input-len"):
        make_workload(str(path), WorkloadSettings(input_len=(1, 2)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no conversation has a question"),
        ("[{]", "Expecting property name"),
        ('[{"id": 3}]', "conversation 1: has no list `conversations`"),
        ('[{"conversations": [{"from": "tool", "value": ""}]}]', "conversation 1, turn 1: `from` 'tool'"),
        ('[{"conversations": [{"from": "gpt", "value": 4}]}]', "conversation 1, turn 1: `value` 4"),
        ('[{"conversations": [{"from": ["human"], "value": "Hi"}]}]', "conversation 1, turn 1: `from` .'human'."),
        ('{"conversations": []}\n{"id"', "line 2: not JSON"),
        ('{"conversations": []}\n' + "[" * 100_000, "line 2: not JSON"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"prompt": "Hi"}\n', "line 1: no timestamp"),
    ],
)
def test_files_that_are_no_workload(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=f"x.json: .*{reason}"):
        make_workload(str(tmp_path / "x.json"), WorkloadSettings())
    with pytest.raises(ConfigError, match="no such file, and none of random"):
        make_workload(str(tmp_path / "gone.json"), WorkloadSettings())
