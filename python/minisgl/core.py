"""`from minisgl.core import SamplingParams`: where people who come from mini-sglang look for it."""

from minisgl.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
