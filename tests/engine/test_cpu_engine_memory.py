"""The CPU engine takes little memory: a load takes the weights in panels, without the file's pages, and an image takes
what the plan of the pool has counted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl import envs
from minisgl.bench.random_models import SHAPES, write_random
from tests.helpers.vision import saved, seer

SHAPE = replace(
    SHAPES["smollm2-1.7b"], layers=16, hidden=1024, heads=16, kv_heads=16, inner=4096, vocab=2048, context=512
)
PEAK = """
import sys
from minisgl.config import EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
def bytes_of(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
config = dict(engine="cpu", num_pages=16, num_threads=1)
load_cpu_engine(EngineConfig(model=sys.argv[1], **config), print)  # what is made once is made now
before = bytes_of("VmRSS")
load_cpu_engine(EngineConfig(model=sys.argv[2], **config), print)
print(bytes_of("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(300)
def test_peak_memory_of_loading_is_the_file_and_one_layer(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write_random(small, replace(SHAPE, layers=1), "q4_k_m")
    write_random(large, SHAPE, "q4_k_m")
    env = {**os.environ, envs.CACHE: str(tmp_path / "cache")}
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    size = large.stat().st_size
    # a layer is a sixteenth, panels take a sixtieth more than blocks, and the file's pages would be as much again
    assert int(done.stdout.splitlines()[-1]) < 1.3 * size


IMAGE = """
import sys
from minisgl.config import EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
from tests.helpers.vision import random_image
def bytes_of(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
config = EngineConfig(model=sys.argv[1], engine="cpu", num_pages=16, num_threads=2, max_image_tokens=576)
engine = load_cpu_engine(config, lambda text, done=0, total=0: print(text))
engine.rust.see_ahead(random_image(2, 2), True, 60.0)
before = bytes_of("VmRSS")
assert engine.rust.see_ahead(random_image(48, 48), True, 60.0)[0]
print(bytes_of("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(300)
def test_peak_memory_of_an_image_is_what_the_start_says(tmp_path: Path) -> None:
    tower = {"hidden_size": 512, "intermediate_size": 2048, "depth": 2, "deepstack_visual_indexes": [0]}
    folder = saved(seer(tower=tower), tmp_path)
    command = [sys.executable, "-c", IMAGE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, peak = done.stdout.splitlines()
    (said,) = (int(found[1]) for line in lines if (found := re.search(r" (\d+) MiB for an image of 576 tokens", line)))
    assert 0.8 * said < int(peak) / 2**20 < 1.1 * said, said
