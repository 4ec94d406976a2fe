"""The policy for KV packing that the options ask for.

KV packing drops the KV of some tokens of long answers.
"""

from __future__ import annotations

from pathlib import Path

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest
from ....core.execution.packing.policies import KeepPolicy, KeepWindow
from ....core.execution.packing.triattention import KeepByTriAttention, QueryStats, attention_ropes
from ....core.model.decoder import Decoder, OwnDecoder


def keep_policy_of(config: EngineConfig, target: Decoder) -> KeepPolicy | None:
    """Return the policy for KV packing that the options ask for; None if packing is off.

    Raises `InvalidRequest` for a model whose KV cannot be packed, and for statistics of another
    model.
    """
    if (asked := config.packing()) is None:
        return None
    if (why := _unsuited(target)) is not None:
        raise InvalidRequest(f"kv_evict does not support a model with {why}", param="kv_evict")
    if asked[0] == "window" or config.kv_evict_stats is None:
        return KeepWindow()
    assert isinstance(target, OwnDecoder)
    try:
        ropes = attention_ropes(target)
    except ValueError as error:
        message = f"kv_evict: triattention does not support {error}"
        raise InvalidRequest(message, param="kv_evict") from None
    stats = QueryStats.load(Path(config.kv_evict_stats).expanduser(), target)
    return KeepByTriAttention(stats, ropes)


def _unsuited(target: Decoder) -> str | None:
    """Return the feature of the model that prevents KV packing; None if nothing prevents it."""
    if target.path != "own" or not isinstance(target, OwnDecoder):
        return "transformers' modules"
    if target.states:
        return "recurrent states"
    if any(layer.window is not None for layer in target.config.layers):
        return "windows by layer"
    if len(target.shapes) > 1:
        return "pages of several layouts"
    return None
