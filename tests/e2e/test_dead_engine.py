"""An engine that a device has killed ends its process with the reason, instead of hanging."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import zmq

from minisgl.config import EngineConfig
from minisgl.message import AddRequest, EngineFailed, EngineReady, decode_from_engine, encode
from minisgl.runner.process_config import ProcessConfig
from minisgl.sampling_params import SamplingParams

PROGRAM = """
from minisgl.engine.cuda_errors import step_failure
from minisgl.runner import process

build = process.build_engine

def build_mortal(*args, **settings):
    engine = build(*args, **settings)
    launch = engine.launch

    def launch_or_die(plan, buffers, bindings):
        if plan.num_rows:
            raise step_failure(plan.step, RuntimeError("CUDA error: misaligned address"))
        return launch(plan, buffers, bindings)

    engine.launch = launch_or_die
    return engine

process.build_engine = build_mortal
raise SystemExit(process.main())
"""


def test_a_dead_engine_ends_its_process_with_the_reason(tmp_path: Path) -> None:
    context = zmq.Context()
    to_engine, from_engine = (f"ipc://{tmp_path}/{name}" for name in ("to", "from"))
    outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    outbox.bind(to_engine)
    inbox.bind(from_engine)
    inbox.setsockopt(zmq.RCVTIMEO, 60_000)
    config = ProcessConfig(engine=EngineConfig(engine="echo"), to_engine=to_engine, from_engine=from_engine)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        reason = ""
        while not reason:
            for message in decode_from_engine(inbox.recv()):
                if isinstance(message, EngineReady):
                    sampling = SamplingParams(max_tokens=5, seed=0)
                    outbox.send(encode([AddRequest(1, np.arange(4, dtype=np.int32).tobytes(), sampling)]))
                if isinstance(message, EngineFailed):
                    reason = message.text
        assert "CUDA error: misaligned address: the CUDA engine cannot go on" in reason
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        context.destroy(linger=0)
