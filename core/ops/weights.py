"""DecoderWeights: what the operations of a step read, in the layout of their backend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import HeadNorm, PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, with Q, K and V packed into one matrix and gate and up into another."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    head_norm: HeadNorm | None
    o: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None  # positions that a row sees, itself included; None: all before it


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights, in the layout of the ops that will use them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: PackedLinear
    norm_eps: float
