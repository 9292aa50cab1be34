"""`minisgl batch`: a file of answers in the order of the requests; killed and run again each line is there once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import batches
from tests.helpers.e2e import Brake, until
from tests.helpers.forking import Minisgl
from tests.helpers.seconds import WAIT_S

MORE = ("--engine", "echo", "--model", "echo", "--num-pages", "2000")


def start(given: Path, output: Path, *more: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "minisgl", "batch", str(given), "-o", str(output), *MORE, *more]
    return Minisgl(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **env})


def run(given: Path, output: Path, *more: str) -> tuple[int, str]:
    process = start(given, output, *more)
    _, said = process.communicate(timeout=4 * WAIT_S)
    return process.returncode, said


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_invalid_batch_is_rejected_before_loading(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    code, said = run(given, output)
    assert code == 2 and f"minisgl batch: {given}: no such file" in said
    given.write_bytes(batches.jsonl([batches.request(0, "a"), {"custom_id": "b"}]))
    code, said = run(given, output)
    assert code == 2 and f"minisgl batch: {given}: line 2: method: required" in said
    given.write_bytes(batches.jsonl([batches.request(0, "a")]))
    output.write_text("")
    code, said = run(given, output)
    assert code == 2 and f"minisgl batch: -o {output}: exists already" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def num_answers(state: Path) -> int:
    """That are on the disk."""
    with contextlib.closing(sqlite3.connect(f"file:{state / 'state.sqlite'}?mode=ro", uri=True)) as db:
        found: int = db.execute("SELECT count(*) FROM answers").fetchone()[0]
        return found


def kills(folder: Path, num_kills: int, num_lines: int, chance: random.Random) -> None:
    given, output, brake = folder / "in.jsonl", folder / "out.jsonl", Brake(folder, 8000 // num_lines)
    state, prompts = output.with_name("out.jsonl.state"), batches.prompts(num_lines)
    lines = batches.requests(prompts)
    lines[17]["body"]["temperature"] = 9
    given.write_bytes(batches.jsonl(lines))
    for number in range(num_kills):
        process = start(given, output, "--max-running-requests", "5", **brake.env)  # lasts until the kill
        most = number * num_lines // num_kills + chance.randrange(1, num_lines // num_kills)

        def is_far_enough(most: int = most) -> bool:
            with contextlib.suppress(sqlite3.OperationalError):  # it is not there yet
                return num_answers(state) >= most
            return False

        until(is_far_enough, "it answers nothing")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate(timeout=WAIT_S)
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]  # its server ends because it has ended
        assert not output.exists()
    brake.release()
    code, said = run(given, output)
    assert code == 0 and f"{output}: {num_lines - 1} answers, 1 errors" in said, said
    found = read(output)
    assert [one["custom_id"] for one in found] == [f"line {i}" for i in range(num_lines)]
    assert found.pop(17)["response"]["status_code"] == 400
    want = batches.wanted(prompts)
    assert want.pop("line 17") and batches.texts(found) == want
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_killed_batch_continues_with_each_line_once(tmp_path: Path) -> None:
    kills(tmp_path, 1, 400, random.Random(1))


@pytest.mark.slow
def test_killed_and_run_again_and_again(tmp_path: Path) -> None:
    kills(tmp_path, 5, 2000, random.Random(2))
