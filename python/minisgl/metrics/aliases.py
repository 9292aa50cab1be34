"""The same values under the names that dashboards made for vLLM ask for, with the labels by which they choose.

Invariants: an alias has the value, type and buckets of its source at the same scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

VLLM: dict[str, tuple[str, ...]] = {
    "minisgl:requests_running": ("vllm:num_requests_running",),
    "minisgl:requests_waiting": ("vllm:num_requests_waiting",),
    "minisgl:kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "minisgl:retractions": ("vllm:num_preemptions",),
    "minisgl:prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "minisgl:cached_tokens": ("vllm:prefix_cache_hits",),
    "minisgl:drafted_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "minisgl:accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "minisgl:generated_tokens": ("vllm:generation_tokens",),
    "minisgl:requests_finished": ("vllm:request_success",),
    "minisgl:ttft_seconds": ("vllm:time_to_first_token_seconds",),
    "minisgl:itl_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "minisgl:e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "minisgl:queue_seconds": ("vllm:request_queue_time_seconds",),
    "minisgl:prompt_length_tokens": ("vllm:request_prompt_tokens",),
    "minisgl:answer_length_tokens": ("vllm:request_generation_tokens",),
}
"""By family; counters get their `_total` from the client library. The second names are older ones of the same."""
_LABELS = {"reason": "finished_reason"}
_NOT_A_SUCCESS = ("error",)


class AliasCollector(Collector):
    def __init__(self, sources: Sequence[Collector], model_name: str) -> None:
        self._sources = sources
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for source in self._sources:
            for family in source.collect():
                for name in VLLM.get(family.name, ()):
                    yield self._renamed(family, name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            if sample.labels.get("reason") in _NOT_A_SUCCESS:
                continue
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()} | self._labels
            alias.samples.append(Sample(name + sample.name.removeprefix(family.name), labels, sample.value))
        return alias
