"""What hosted runners do stays in commands that run anywhere; actionlint reads the rest: `make lint-workflows`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflow_steps_run_existing_commands_and_pinned_actions(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert used and [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", name)] == []
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {line.removeprefix("make ") for line in lines if line.startswith("make ")} <= targets
    assert [line for line in lines if line.startswith((".", "/")) and not (ROOT / line).is_file()] == []
    assert all(job["timeout-minutes"] <= 120 for job in jobs.values())


def test_ci_is_what_runs_here_and_a_release_tries_its_wheels() -> None:
    ci, release = (file.read_text(encoding="utf-8") for file in WORKFLOWS)
    assert "- run: .ci/run\n" in ci
    assert release.index("- run: make wheel\n") < release.index("- run: make wheel-test\n")
    assert "deploy/Dockerfile" in release
