"""Metrics under vLLM's names, for routers and dashboards that read only such names.

This module counts nothing: it copies families of `EngineMetrics`, and gives them the names and
labels that they have in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from .families import PREFIX

VLLM_PREFIX = "vllm:"
VLLM_NAMES: Mapping[str, str] = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "num_preemptions": "num_preemptions",
    "kv_cache_usage_perc": "kv_cache_usage_perc",
    "cache_config_info": "cache_config_info",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "step_num_tokens": "iteration_tokens_total",
    "request_success": "request_success",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "spec_decode_num_drafts": "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}
"""Our names and the names of vLLM 0.30, both without their prefixes and the suffixes of samples."""


class VllmNames(Collector):
    """Collector of the metrics that vLLM has, too, with vLLM's names and labels."""

    def __init__(self, ours: Collector, model_name: str) -> None:
        self._ours = ours
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Return the present values; called by the registry."""
        for family in self._ours.collect():
            name = VLLM_NAMES.get(family.name.removeprefix(PREFIX))
            if name is not None:
                yield self._renamed(family, VLLM_PREFIX + name)

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
        return renamed


def render_vllm(ours: Collector, model_name: str) -> bytes:
    """Return the metrics under vLLM's names in Prometheus's text format.

    They are appended to the metrics under foretoken's names.
    """
    return generate_latest(VllmNames(ours, model_name))
