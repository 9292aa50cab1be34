"""The transport and metadata benchmarks compare things that do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmark.metadata import __main__ as metadata
from benchmark.metadata.loops import build
from benchmark.transport import __main__ as transport
from benchmark.transport.codecs import CODECS
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.backend import make_control_plane
from minisgl.step import Event


def test_every_codec_carries_the_same_facts() -> None:
    transport.check()


@pytest.mark.parametrize("part", ["decode_step", "decode_prompt"])
def test_a_codec_that_loses_something_is_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(CODECS["pickle"], part)

    def lossy(frame: bytes) -> object:
        return whole(frame)[:-1] if part == "decode_step" else (0, *whole(frame)[1:])

    monkeypatch.setitem(CODECS, "pickle", CODECS["pickle"]._replace(**{part: lossy}))
    with pytest.raises(AssertionError, match="pickle"):
        transport.check()


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_loops_write_what_a_control_plane_writes(page_size: int) -> None:
    config = ControlPlaneConfig(4096 // page_size * 4, page_size, 3, 64, 512)
    scenario = metadata.Scenario(make_control_plane("python", config), 3)
    tables = metadata.Tables()
    prompts: list[Event] = [metadata.arrival(i, length, 40) for i, length in enumerate((50, 7, 33))]
    kinds = set()
    for number in range(30):
        plan, _ = scenario.step(prompts if number == 0 else [])
        kinds.add((plan.num_decode_rows, plan.num_rows))
        found = build(tables.rows(scenario, plan), page_size)
        entry = scenario.plane.buffers.ring[plan.ring_index]
        for name, values in found.items():
            assert np.array_equal(getattr(entry, name)[: len(values)], values), (number, name)
    assert (3, 3) in kinds and len(kinds) > 1  # decode steps, and steps with prefill beside


def test_the_last_lines_are_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert metadata.main(["--steps", "3", "--out", str(tmp_path / "metadata")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["us"]
    assert all(value > 0 for by_name in found.values() for value in by_name.values())
    assert transport.main(["--rounds", "1", "--out", str(tmp_path / "transport")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["operations_per_s"]
    for name in ("metadata", "transport"):
        assert "| ---" in (tmp_path / name / "README.md").read_text()
        assert json.loads((tmp_path / name / "raw.json").read_text())["environment"]
