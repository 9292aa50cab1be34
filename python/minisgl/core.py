"""Alias for mini-sglang's import path: `from minisgl.core import SamplingParams`."""

from minisgl.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
