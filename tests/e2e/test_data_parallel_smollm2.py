"""Meaning with several engines: the embedded model, and answers that outlive their engine.

A moved request's tokens are computed again as a prompt, and the CPU engine may round that otherwise than a decode
step: only answers of which each token is sure (`tests/helpers/meaning.py`) are the same for certain.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.data_parallel import engine_processes, pool
from tests.helpers.e2e import Brake, serving, until
from tests.helpers.meaning import CAPITALS, embedded_model, told_capital
from tests.helpers.seconds import WAIT_S

embedded_model()


@pytest.mark.any_cpu
def test_answers_outlive_their_engine(tmp_path: Path) -> None:
    brake, flags = Brake(tmp_path, 0), ("--model", "smollm2", "--dp", "2", "--routing", "rr", "--num-pages", "512")
    with serving(*flags, env=brake.env) as server:

        def ask(country: str) -> str:
            return told_capital(server.url, country, WAIT_S)

        alone = {country: ask(country) for country in CAPITALS}
        assert all(city in alone[country] for country, city in CAPITALS.items())
        with ThreadPoolExecutor(12) as threads:
            brake.hold(500)  # so that no answer ends before the kill
            together = threads.map(ask, list(CAPITALS) * 3)
            until(lambda: min(pool(server)["loads"]) > 0, "an engine has nothing to do")
            engine_processes(server)[0].kill()
            brake.release()
            assert list(together) == [alone[country] for country in CAPITALS] * 3
        assert pool(server)["num_moved_total"] > 0
