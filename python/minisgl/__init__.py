"""minisgl: a compact LLM inference server.

`LLM`, `SamplingParams` and `structured_outputs` are the offline API. `LLM` is imported on first use, because it imports
torch and the HTTP process must stay free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minisgl.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minisgl.grammar.offline import structured_outputs
    from minisgl.llm import LLM, Completion, RequestOutput

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams", "structured_outputs"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion", "RequestOutput"):
        from minisgl import llm

        return getattr(llm, name)
    if name == "structured_outputs":
        from minisgl.grammar.offline import structured_outputs

        return structured_outputs
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
