"""Fold: factors and row orders of a family that are applied to its weights at load time.

So all families use the kernels of Llama's decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.mixers.recurrent import RecurrentShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Factors and stored layouts of a family's weights.

    Weights are multiplied by factors in float32 and rounded once, to the weights' dtype.
    ``fused_qkv``, ``fused_gate_up``: the files store these matrices fused, as the kernels do.
    ``interleaved``: RoPE rotates pairs of neighbouring dimensions of a head, whereas the kernels
    pair the two halves. ``rounds_embed_scale``: the embedding's factor is first rounded to the
    weights' dtype. ``norm_offset``: added to the weights of all norms, which are then float32.
    """

    embed_scale: float = 1.0  # factor on the embedding

    # Factor on the outputs of attention and MLP; the routing weights of experts include it.
    residual_scale: float = 1.0
    attention_out_scale: float = 1.0  # additional factor on the attention output
    mixer_out_scale: float = 1.0  # additional factor on the Mamba-2 output
    gate_scale: float = 1.0  # factor on the gate of an MLP
    mlp_out_scale: float = 1.0  # additional factor on the MLP output
    logit_scale: float = 1.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved: bool = False
    rounds_embed_scale: bool = False
    norm_offset: float = 0.0


NO_FOLD = Fold()


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> Tensor:
    """Return the order of a head's dimensions for the kernels' RoPE, [head_dim].

    The kernels pair the dimensions of a head's first half with its second half. The family rotates
    the first ``rotary_dim`` dimensions, in neighbouring pairs if ``interleaved``, otherwise in
    halves. The other dimensions are divided between the two halves, with frequency 0.
    """
    turning = torch.arange(rotary_dim)
    first, second = turning.view(-1, 2).T if interleaved else turning.view(2, -1)
    still = torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat((first, still[0], second, still[1]))


def qkvz_order(shape: RecurrentShape) -> Tensor:
    """Return the order that sorts rows stored by key head into queries, keys, values and z.

    The result is [2 * key heads * key_dim + 2 * value heads * value_dim].
    """
    width = shape.num_value_heads // shape.num_key_heads * shape.value_dim
    return _apart(shape.num_key_heads, [shape.key_dim, shape.key_dim, width, width])


def qkv_order(shape: RecurrentShape) -> Tensor:
    """Return the order that sorts rows stored by head into queries, keys, values, [num_rows]."""
    return _apart(shape.num_key_heads, [shape.key_dim, shape.key_dim, shape.value_dim])


def mamba_widths(shape: RecurrentShape) -> list[int]:
    """Return the numbers of rows for z, x, B, C and dt in Mamba-2's input matrix, in this order."""
    values, keys = shape.value_width, shape.num_key_heads * shape.key_dim
    return [values, values, keys, keys, shape.num_value_heads]


def mamba_orders(shape: RecurrentShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return three orders that the kernels need for Mamba-2.

    The files store the input matrix in the order z, x, B, C, dt, and the convolution's channels in
    the order x, B, C. The result has the indices of the matrix rows C, B, x, z; of the matrix rows
    dt; and of the channels C, B, x.
    """
    widths = mamba_widths(shape)
    z, x, b, c, dt = torch.split(torch.arange(sum(widths)), widths)
    mixed = torch.cat((c, b, x))
    return torch.cat((mixed, z)), dt, mixed - shape.value_width


def ba_order(shape: RecurrentShape) -> Tensor:
    """Return the order that sorts rows stored by key head into b, then a, [2 * value heads]."""
    group = shape.num_value_heads // shape.num_key_heads
    return _apart(shape.num_key_heads, [group, group])


def _apart(num_heads: int, widths: list[int]) -> Tensor:
    """Return the order that sorts rows stored by head into parts, such as queries and keys.

    ``widths``: number of rows of each part in one head.
    """
    rows = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return ``factor`` rounded to a dtype."""
    return float(torch.tensor(factor, dtype=dtype))


def scaled(weight: Tensor, factor: float) -> Tensor:
    """Return ``weight * factor`` in the weight's dtype, computed in float32."""
    return weight if factor == 1.0 else (weight.float() * factor).to(weight.dtype)


def scaled_rows(weight: Tensor, counts: Sequence[int], factors: Sequence[float]) -> Tensor:
    """Multiply the first ``counts[0]`` rows of a matrix by ``factors[0]``, and so on."""
    each = torch.tensor(factors).repeat_interleave(torch.tensor(counts)).to(weight.device)
    return (weight.float() * each.unsqueeze(1)).to(weight.dtype)
