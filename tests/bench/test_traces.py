"""Traces: what is read of each format, and what is refused with its line and the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.traces import BLOCK, NAMES, TraceRequest, prompt_tokens, read_trace
from minisgl.config import ConfigError
from tests.helpers.bench import MOONCAKE, QWEN, lines


def test_reading_mooncake(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines(*MOONCAKE))
    assert read_trace(str(file)) == [
        TraceRequest(0.0, 512, 1, (1,)),
        TraceRequest(2.0, 1000, 9, (1, 2)),
        TraceRequest(3.0, 600, 3, (1, 3)),
    ]


def test_reading_azure(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    rows = "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,0,109"
    file.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)) + "\n")
    first, second = read_trace(str(file))
    assert first == TraceRequest(0.0, 374, 44) and (second.input_len, second.output_len) == (1, 109)
    assert second.arrival_s == pytest.approx(4.314579)


MOON = MOONCAKE[0]

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def test_reading_qwen(tmp_path: Path) -> None:
    """Seconds stay seconds, and a block has 16 tokens; the name of the file says nothing."""
    file = tmp_path / "qwen.log"
    file.write_text(lines(QWEN, {**QWEN, "timestamp": 60, "input_length": 16, "hash_ids": [4]}))
    assert read_trace(str(file)) == [TraceRequest(0.0, 16, 7, (4,), 16), TraceRequest(1.5, 33, 7, (4, 5, 6), 16)]
    short, long = (prompt_tokens(one, i, 1000) for i, one in enumerate(read_trace(str(file))))
    assert (short == long[:16]).all() and (long[:16] == long[16:32]).mean() < 0.5 and len(long) == 33


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}\n", "line 1: no timestamp, input_length"),
        ("not json\n", "line 1: no TIMESTAMP"),
        ('[{"conversations": []}]', "line 1: must not be a JSON list"),
        (lines({**MOON, "session_id": 3}), "line 1: has session_id and no chat_id"),
        (lines({key: QWEN[key] for key in QWEN if key != "turn"}), "line 1: has chat_id.* and no turn"),
        (lines(MOON, {**MOON, "hash_ids": [1]}, MOON), "line 2: hash_ids: 1 for an input_length of 600.* 2"),
        (lines(QWEN, {**QWEN, "hash_ids": [4, 5]}), "line 2: hash_ids: 2 for an input_length of 33.*16 tokens"),
        (lines({**MOON, "hash_ids": list(range(38))}), "line 1: hash_ids: 38 .* 512 tokens, which are 2"),
        (lines(MOON) + "\n{\n", "line 3: not JSON"),
        (lines(MOON) + "[]\n", "line 2: Expected `object`"),
        (lines(MOON, {"timestamp": 3}), "line 2: .*missing required field `input_length`"),
        (lines(QWEN, MOON), "line 2: .*missing required field `chat_id`"),
        (lines(MOON, QWEN), "line 2: .*unknown field `chat_id`"),
        (lines({**MOON, "timestamp": "0"}), "line 1: .*timestamp"),
        (lines({**MOON, "timestamp": -1}), "line 1: .*>= 0.*timestamp"),
        (lines({**MOON, "input_length": -600}), "line 1: .*>= 0.*input_length"),
        (lines({**MOON, "output_length": 2.5}), "line 1: Expected `int`.*output_length"),
        (lines({**MOON, "output_length": True}), "line 1: Expected `int`.*output_length"),
        (lines({**MOON, "hash_ids": "1, 3"}), "line 1: Expected `array`.*hash_ids"),
        (lines({**MOON, "hash_ids": [1, -3]}), "line 1: .*>= 0.*hash_ids"),
        ("A,B\n1,2\n", "line 1: no TIMESTAMP, ContextTokens"),
        (AZURE + "2023-11-16 18:15:46.7,12\n", "line 3: 2 fields"),
        (AZURE + "yesterday,12,1\n", "line 3: TIMESTAMP 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46.7,many,1\n", "line 3: ContextTokens 'many'"),
        (AZURE + "2023-11-16 18:15:46.7,12,-1\n", "line 3: GeneratedTokens '-1'"),
        ("x" * 200_000 + "\n", "line 1: field larger than field limit"),
        (AZURE + "2023-11-16 18:15:46.7,12," + "1" * 200_000, "line 3: field larger than field limit"),
        (lines(MOON) + '\n{"hash_ids": ' + "[" * 100_000, "line 3: Expected `int`"),
        ("", "no requests"),
        ("anything", "line 1: no TIMESTAMP"),
    ],
)
def test_invalid_traces_are_rejected_with_line_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=f"trace .*x.jsonl: {reason}"):
        read_trace(str(tmp_path / "x.jsonl"))


def test_missing_traces_say_where_they_should_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(str(tmp_path / "gone.csv"))
    monkeypatch.delenv("MINISGL_DATA", raising=False)
    with pytest.raises(ConfigError, match="MINISGL_DATA"):
        read_trace(next(iter(NAMES)))


def test_prompts_share_what_their_blocks_share() -> None:
    one, two, three = TraceRequest(0, 1500, 1, (1, 2, 3)), TraceRequest(0, 1400, 1, (1, 2, 4)), TraceRequest(0, 600, 1)
    a, b = prompt_tokens(one, 0, 1000), prompt_tokens(two, 1, 1000)
    assert a.dtype == np.int32 and len(a) == 1500 and a.min() >= 0 and a.max() < 1000
    assert (a[: 2 * BLOCK] == b[: 2 * BLOCK]).all() and (a[2 * BLOCK : 1400] == b[2 * BLOCK :]).mean() < 0.02
    assert len(set(a.tolist())) > 700
    assert (prompt_tokens(one, 7, 1000) == a).all() and (prompt_tokens(one, 0, 1000, seed=1) == a).mean() < 0.02
    c, d = prompt_tokens(three, 0, 1000), prompt_tokens(three, 1, 1000)
    assert (c == d).mean() < 0.02 and (c[:88] == c[512:]).mean() < 0.2
