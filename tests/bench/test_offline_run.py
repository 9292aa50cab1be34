"""One run of the step loop under measurement: a seed decides everything, and the parts add up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from minisgl.bench import offline_run
from minisgl.bench.offline_run import OfflineJob, run_job
from minisgl.config import ConfigError, EngineConfig

ECHO = EngineConfig(engine="echo", num_pages=256, page_size=4, max_running_requests=8, max_seq_len=512)

JOB = OfflineJob(engine=ECHO, num_sequences=6, input_len=(5, 40), output_len=(3, 9), seed=7)


def test_a_seed_decides_everything() -> None:
    again = msgspec.structs.replace(JOB)
    assert [r.tokens for r in JOB.requests(1000)] == [r.tokens for r in again.requests(1000)]
    other = msgspec.structs.replace(JOB, seed=8)
    assert [r.tokens for r in JOB.requests(1000)] != [r.tokens for r in other.requests(1000)]


def test_the_ranges_are_closed() -> None:
    inputs, outputs = msgspec.structs.replace(JOB, num_sequences=2000).lengths()
    assert (inputs.min(), inputs.max(), outputs.min(), outputs.max()) == (5, 40, 3, 9)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_run_adds_up(overlap: bool) -> None:
    found = run_job(msgspec.structs.replace(JOB, engine=msgspec.structs.replace(ECHO, overlap=overlap)))
    inputs, outputs = JOB.lengths()
    assert (found["num_input_tokens"], found["num_output_tokens"]) == (inputs.sum(), outputs.sum())
    assert found["output_tok_s"] == pytest.approx(outputs.sum() / found["wall_s"])
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_s"])
    assert all(value >= 0 for value in found["seconds"].values())


def test_the_tokens_are_those_of_the_engine_whatever_the_batch() -> None:
    alone = msgspec.structs.replace(JOB, engine=msgspec.structs.replace(ECHO, max_running_requests=1))
    assert run_job(JOB)["tokens_sha256"] == run_job(alone)["tokens_sha256"]


def test_a_sequence_that_is_cut_short_is_no_result() -> None:
    short = msgspec.structs.replace(ECHO, max_seq_len=20)
    with pytest.raises(ConfigError, match=r"does not fit|cut short"):
        run_job(msgspec.structs.replace(JOB, engine=short))


def test_a_slow_call_shows_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes inside commit belongs to commit, and to nothing else."""
    clock = iter(range(10**9))
    monkeypatch.setattr(offline_run.time, "perf_counter_ns", lambda: next(clock))
    inner = offline_run.build_control_plane

    def slow(*args: Any) -> Any:
        plane = inner(*args)
        commit = plane.commit

        def commit_slowly(*args: Any) -> Any:
            for _ in range(100):
                next(clock)
            return commit(*args)

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return commit_slowly if name == "commit" else getattr(plane, name)

        return Slow()

    monkeypatch.setattr(offline_run, "build_control_plane", slow)
    found = run_job(JOB)
    assert found["step_us"]["commit"]["mean"] == pytest.approx(0.101)
    assert found["step_us"]["schedule"]["mean"] == pytest.approx(0.001)
    assert found["scheduler_step_us"] == pytest.approx(0.102)
