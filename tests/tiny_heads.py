"""Configs of tiny heads for a tiny target."""

from __future__ import annotations

from typing import Any

from foretoken.core.model.config import DecoderConfig
from foretoken.core.model.rope import RopeSpec
from foretoken.draft.models.block import BlockConfig
from foretoken.draft.models.eagle import EagleConfig

TARGET = DecoderConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    rope=RopeSpec(),
    max_model_len=512,
    windows=(None,) * 4,
)


def _shape(target: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "taps": (1, 2, target.num_layers),
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rope": target.rope,
        "max_model_len": target.max_model_len,
    }


def block_config(target: DecoderConfig = TARGET, **changes: Any) -> BlockConfig:
    """Two layers, blocks of 4, a Markov head of rank 6."""
    usual = {"num_layers": 2, "block_size": 4, "mask_token_id": 3, "markov_rank": 6}
    return BlockConfig(**(_shape(target) | usual | changes))


def eagle_config(target: DecoderConfig = TARGET, **changes: Any) -> EagleConfig:
    """The one layer."""
    return EagleConfig(**(_shape(target) | {"num_layers": 1} | changes))
