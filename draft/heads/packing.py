"""Matrices of a head in the layout of its target's kernels, and positions as these read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...core.model.decoder import OwnDecoder
from ...core.ops.base import HeadLayout, HeadNorm, MlpWeights, Norm, Ops, PackedLinear
from ...core.ops.batch import IntArray, RaggedBatch
from .head_kv import Written
from .layers import HeadConfig, Mlp, OutputLayer, Projections, RmsNorm


def can_pass(target: OwnDecoder) -> bool:
    """Whether the target's kernels compute a head's layers over head KV where it lies.

    Those of the CPU do: a row of theirs turns by another position than the one that it attends at.
    """
    ops = target.ops
    return target.device.type == "cpu" and ops.batch_device is None and ops.min_rows == 1


# -- linear layers --------------------------------------------------------------------------------


class _Packed(nn.Module):
    """A linear layer by the backend's own kernels."""

    def __init__(self, linear: nn.Linear, ops: Ops) -> None:
        super().__init__()
        self._packed = ops.pack_linear(linear.weight.detach().contiguous(), linear.bias)
        self._min_rows = ops.min_rows
        is_output = isinstance(linear, OutputLayer)
        self._kernel: Callable[[Tensor, PackedLinear], Tensor] = (
            ops.logits if is_output else ops.linear
        )

    def forward(self, x: Tensor) -> Tensor:
        return by_kernel(self._kernel, self._packed, self._min_rows, x)


def pack_linears(module: nn.Module, ops: Ops) -> None:
    """Lay out every linear layer of a module for the kernels; for inference only."""
    for name, each in module.named_children():
        if isinstance(each, nn.Linear):
            setattr(module, name, _Packed(each, ops))
        else:
            pack_linears(each, ops)


def by_kernel(
    kernel: Callable[[Tensor, PackedLinear], Tensor], packed: PackedLinear, min_rows: int, x: Tensor
) -> Tensor:
    """``[.., in_features] -> [.., out_features]``; kernels want ``min_rows`` rows at least."""
    if x.ndim == 2 and len(x) >= min_rows:
        return kernel(x.contiguous(), packed)
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    if count < min_rows:
        flat = torch.cat((flat, flat[-1:].expand(min_rows - count, -1)))
    return kernel(flat.contiguous(), packed)[:count].view(*x.shape[:-1], -1)


# -- layers ---------------------------------------------------------------------------------------


def head_layout(config: HeadConfig) -> HeadLayout:
    """How a row of packed queries, keys and values is cut into heads."""
    scale = config.head_dim**-0.5
    return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, scale)


def pack_qkv(attention: Projections, ops: Ops, *, has_bias: bool) -> PackedLinear:
    """Queries, keys and values side by side."""
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([part.weight for part in parts]).detach()
    if not has_bias:
        return ops.pack_linear(weight)
    return ops.pack_linear(weight, torch.cat([part.bias for part in parts]).detach())


def pack_mlp(mlp: Mlp, ops: Ops) -> MlpWeights:
    """A gated MLP, gate and factor side by side."""
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    return MlpWeights(
        ops.pack_linear(gate_up.detach()),
        ops.pack_linear(mlp.down_proj.weight.detach().contiguous()),
    )


def head_norm(attention: Projections) -> HeadNorm:
    """The norms of queries and keys, a row for each query head, then for each key head."""
    parts = ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
    rows, eps = list[Tensor](), 0.0
    for linear, norm in parts:
        assert norm is not None  # layers of a block have both
        heads = linear.out_features // attention.head_dim
        rows.append(norm.weight.detach().float().expand(heads, -1))
        eps = norm.eps
    return HeadNorm(torch.cat(rows).contiguous(), eps)


def plain_norm(norm: RmsNorm) -> Norm:
    """A norm as the kernels take it."""
    return Norm(norm.weight.detach().contiguous(), norm.eps)


# -- positions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Positions of several requests, one request's behind each other."""

    starts: IntArray  # [num_requests]
    lens: IntArray  # [num_requests]
    positions: IntArray  # [n]
    slots: IntArray  # [n]

    @classmethod
    def of(cls, written: Written) -> ContextRows:
        """The positions that are to be written."""
        positions = written.positions.numpy()
        return cls(positions[written.firsts], written.lens, positions, written.slots)

    def batch(self, page_size: int) -> RaggedBatch:
        """Lay them out for the kernels that write keys and values; no page is named to be read."""
        count = len(self.starts)
        return RaggedBatch(
            token_ids=torch.empty(len(self.slots), dtype=torch.int64),
            positions=torch.from_numpy(self.positions),
            slots=torch.from_numpy(self.slots),
            logit_rows=torch.empty(0, dtype=torch.int64),
            num_logits=0,
            page_size=page_size,
            starts=self.starts,
            lens=self.lens,
            first_rows=np.cumsum(self.lens) - self.lens,
            page_counts=np.ones(count, dtype=np.int64),
            pages=np.zeros(count, dtype=np.int64),
            tail_lens=np.zeros(count, dtype=np.int64),
            tails=np.zeros(0, dtype=np.int64),
        )
