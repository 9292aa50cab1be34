"""Sampling on a device: what tests/engine/test_sampler.py does not see."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.engine.device import DeviceSampler
from minisgl.sampling_params import SamplingParams
from tests.helpers.samplers import CPU, assign_all, assignment


def test_rows_of_nan_give_an_id_of_the_vocabulary() -> None:
    sampler = DeviceSampler(2, CPU)
    assign_all(sampler, [assignment(0, SamplingParams(temperature=1.0, seed=1), [1])])
    slots = np.zeros(1, np.int32)
    chosen = sampler.sample(
        torch.full((1, 9), float("nan")), torch.zeros(1).long(), torch.ones(1).long(), sampler.needs(slots)
    )
    assert 0 <= int(chosen) < 9
