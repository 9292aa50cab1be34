"""An engine that a device has killed ends its process with the reason, instead of hanging."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minisgl.config import EngineConfig
from minisgl.message import AddRequest, EngineFailed, EngineReady
from minisgl.runner.launch import ProcessConfig
from minisgl.sampling_params import SamplingParams
from tests.helpers.e2e import engine_process
from tests.helpers.peers import FrontEndPeer
from tests.helpers.seconds import WAIT_S

PROGRAM = """
from minisgl.engine.launched_step import step_failure
from minisgl.runner import build, process
from tests.helpers.seconds import WAIT_S

build_engine = build.build_engine

def build_mortal(*args, **settings):
    engine = build_engine(*args, **settings)
    launch = engine.launch

    def launch_or_die(plan, buffers, bindings):
        if plan.num_rows:
            raise step_failure(plan.step, RuntimeError("CUDA error: misaligned address"))
        return launch(plan, buffers, bindings)

    engine.launch = launch_or_die
    return engine

build.build_engine = build_mortal
raise SystemExit(process.main())
"""


def test_a_dead_engine_ends_its_process_with_the_reason(tmp_path: Path) -> None:
    config = ProcessConfig(engine=EngineConfig(engine="echo"), address=f"ipc://{tmp_path}/engine")
    with engine_process(config, "-c", PROGRAM) as process:
        with FrontEndPeer(config.address) as peer:
            peer.next(EngineReady)
            sampling = SamplingParams(max_tokens=5, seed=0)
            peer.send(AddRequest(1, np.arange(4, dtype=np.int32).tobytes(), sampling))
            reason = peer.next(EngineFailed).text
        assert "CUDA error: misaligned address: the torch engine cannot go on" in reason
        assert process.wait(WAIT_S) == 1
