"""Settings of the server by the names of vLLM's configuration, which trainers read."""

from __future__ import annotations

from ...serving.answers import Free
from ...serving.serving_context import Service


def vllm_config(service: Service) -> Free:
    """Return the settings that a trainer reads from vLLM's /server_info.

    Log-probabilities are of the model's raw logits, which vLLM calls ``raw_logprobs``.
    ``weight_transfer_config`` is None if weight updates are not allowed.
    """
    allowed = service.llm.config.allow_weight_updates
    return {
        "model_config": {
            "model": service.model,
            "max_model_len": service.llm.built.max_model_len,
            "logprobs_mode": "raw_logprobs",
        },
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
        "weight_transfer_config": {"backend": "safetensors"} if allowed else None,
    }
