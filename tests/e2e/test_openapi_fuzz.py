"""Schemathesis over the server's own OpenAPI page: no 5xx, answers match their schemas and stated codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.e2e import serving

CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"


# Ollama's routes that change the models: 501 is all that they answer, and the page says so.
NEVER = r"^/api/(pull|push|create|copy|delete)$"


@pytest.mark.slow
def test_fuzzed_requests_conform_to_the_openapi_page(times: int, tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))  # else batches are a 501
    with serving("--engine", "echo", "--max-seq-len", "512", "--no-access-log", *state) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
        options = ["--max-examples", str(70 * times), "--seed", "1", "--no-color", "--exclude-path-regex", NEVER]
        run = subprocess.run([*command, *options], text=True, capture_output=True, timeout=1200, check=False)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        tested = re.search(r"(\d+) generated, \1 passed", run.stdout)
        assert tested is not None and int(tested.group(1)) > 800 * times, run.stdout[-2000:]
