"""Every limit, default and range has one owner: lowered there, before a server is imported, it is lower for both front
ends, which refuse the same requests in the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.bodies import CHAT, COMPLETION, GENERATE
from tests.helpers.gateway import has_gateway

HI = {"role": "user", "content": "say:hi"}
PART = [{"type": "text", "text": "say:"}]
LONG: list[Any] = ["x" * 40_000] * 2  # the shape of short bodies is nobody's care
CASES: list[tuple[str, Any, str, dict[str, Any], dict[str, Any]]] = [
    # a bound, or the least and the most of a range; where; what fits, and what does not
    ("max_stop_strings", 2, CHAT, {"stop": ["x", "y"]}, {"stop": ["x", "y", "z"]}),
    ("max_stop_chars", 3, CHAT, {"stop": "xyz"}, {"stop": "xyzz"}),
    ("max_stop_token_ids", 1, CHAT, {"stop_token_ids": [5]}, {"stop_token_ids": [5, 6]}),
    ("max_logit_bias", 1, CHAT, {"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1, "6": 1}}),
    ("max_values", 9000, CHAT, {"unheard": [0] * 100}, {"unheard": [0] * 40_000}),
    ("max_containers", 50, CHAT, {"unheard": [[]] * 30}, {"messages": [{**HI, "unheard": LONG + [[]] * 60}]}),
    ("max_messages", 2, CHAT, {"messages": [HI] * 2}, {"messages": [HI] * 3}),
    ("max_parts", 2, CHAT, {"messages": [{**HI, "content": PART * 2}]}, {"messages": [{**HI, "content": PART * 3}]}),
    ("max_prompts", 2, COMPLETION, {"prompt": ["a", "b"]}, {"prompt": ["a", "b", "c"]}),
    ("max_choices", 5, COMPLETION, {"prompt": ["a", "b"], "n": 2}, {"prompt": ["a", "b"], "n": 3}),
    ("max_logprob_entries", 9, CHAT, {"logprobs": True, "max_tokens": 9}, {"logprobs": True, "max_tokens": 10}),
    ("completion_tokens", 3, COMPLETION, {"min_tokens": 3}, {"min_tokens": 4}),
    ("generate_tokens", 4, GENERATE, {"min_tokens": 4}, {"min_tokens": 5}),
    ("max_tokens", (2, None), CHAT, {"max_tokens": 2}, {"max_tokens": 1}),
    ("min_tokens", (0, 5), CHAT, {"min_tokens": 5}, {"min_tokens": 6}),
    ("temperature", (0, 1), CHAT, {"temperature": 1}, {"temperature": 1.5}),
    ("top_k", (3, None), CHAT, {"top_k": 3}, {"top_k": 2}),
    ("top_p", (0.5, 1), CHAT, {"top_p": 0.5}, {"top_p": 0.25}),
    ("min_p", (0, 0.5), CHAT, {"min_p": 0.5}, {"min_p": 0.75}),
    ("n", (1, 3), CHAT, {"n": 3}, {"n": 4}),
    ("logprobs", (0, 2), COMPLETION, {"logprobs": 2, "max_tokens": 3}, {"logprobs": 3, "max_tokens": 2}),
    ("frequency_penalty", (-1, 1), CHAT, {"frequency_penalty": 1}, {"frequency_penalty": 1.5}),
    ("presence_penalty", (-1, 1), CHAT, {"presence_penalty": -1}, {"presence_penalty": -1.5}),
    ("repetition_penalty", (0, 2), CHAT, {"repetition_penalty": 2}, {"repetition_penalty": 2.5}),
    ("logit_bias", (-5, 5), CHAT, {"logit_bias": {"5": -5}}, {"logit_bias": {"5": -5.5}}),
]
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI]},
    COMPLETION: {"prompt": "say:hi"},
    GENERATE: {"prompt": "say:hi"},
}


def ask_all() -> list[Any]:
    """To be called in a process of its own: what both front ends say to both bodies of each case, and how many of the
    two the gateway answers by itself, where the limits are the lowered ones."""
    import msgspec

    from minisgl import sampling_params as owner

    bounds = {name: value for name, value, *_ in CASES if not isinstance(value, tuple)}
    owner.BOUNDS = msgspec.structs.replace(owner.BOUNDS, **bounds)
    for name, value, *_ in CASES:
        if isinstance(value, tuple) and name != "logit_bias":
            least, most = value
            owner.RANGES[name] = msgspec.structs.replace(owner.RANGES[name], least=least, most=most)
        elif isinstance(value, tuple):
            owner.LOGIT_BIAS = owner.Range(*value)

    from minisgl.metrics import server_metrics

    server_metrics.SECONDS, server_metrics.TOKENS = (0.5, 60.0), (2,)

    from tests.helpers.server import MODEL, frontend

    def num_answered(readings: Any) -> int:
        return sum(count for _, reason, count in readings["requests"] if not reason)

    found: list[Any] = []
    with (
        frontend(front_end="rust", max_seq_len=2048) as rust,
        frontend(max_seq_len=2048) as python,
        rust.http() as one,
        python.http() as other,
    ):
        assert rust.gateway is not None
        for name, _, path, *bodies in CASES:
            before = num_answered(rust.gateway.readings())
            answers = []
            for body in bodies:
                asked = {"model": MODEL, "seed": 1, **PLAIN[path], **body}
                both = [http.post(path, json=asked) for http in (one, other)]
                answers.append([(answer.status_code, answer.json().get("error")) for answer in both])
            found.append((name, answers, num_answered(rust.gateway.readings()) - before))
        histograms = rust.gateway.readings()["histograms"]
        found.append([len(histograms[name]["counts"]) for name in ("ttft", "prompt")])
        assert one.get("/metrics").text.count("minisgl:ttft_seconds_bucket") == 3
    return found


@pytest.mark.skipif(not has_gateway(), reason="the extension has no gateway")
def test_each_lowered_limit_holds_in_both_servers() -> None:
    code = "import json; from tests.gateway.test_lowered_limits import ask_all; print(json.dumps(ask_all()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *cases, buckets = json.loads(ran.stdout)
    assert buckets == [3, 2]
    for name, ((one, other), refused), num_answered in cases:
        assert one == other == [200, None] and num_answered == 1, (name, one, other, num_answered)
        assert refused[0] == refused[1] and refused[0][0] == 400, (name, refused)
