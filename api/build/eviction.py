"""Eviction inside a sequence, as the options ask for it."""

from __future__ import annotations

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.execution.eviction import EvictionPolicy, WindowEviction
from ...core.model.decoder import Decoder


def eviction_of(config: EngineConfig, target: Decoder) -> EvictionPolicy | None:
    """Make the policy that the options ask for; None without one.

    Raises `InvalidRequest` for a model whose KV cannot be packed.
    """
    if config.kv_eviction() is None:
        return None
    if (why := _unsuited(target)) is not None:
        raise InvalidRequest(f"kv_evict does not support a model with {why}", param="kv_evict")
    return WindowEviction()


def _unsuited(target: Decoder) -> str | None:
    """Name what keeps a model's KV from being packed; None: nothing does."""
    if target.path != "own":
        return "transformers' modules"
    if target.states:
        return "recurrent states"
    if any(layer.window is not None for layer in target.config.layers):
        return "windows by layer"
    if len(target.shapes) > 1:
        return "pages of several layouts"
    return None
