"""Fold: what of a family's arithmetic goes into its weights when they are loaded.

The kernels know none of it: they compute Llama's decoder on the folded weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.weights import RecurrentShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Factors are multiplied into weights in float32 and rounded once, to the weights' dtype.

    ``fused_qkv``, ``fused_gate_up``: the files hold these matrices in one, as the kernels do.
    ``interleaved``: RoPE turns neighbouring items of a head; the kernels turn its halves.
    ``rounds_embed_scale``: the embedding's factor is rounded to the weights' dtype before.
    ``norm_offset``: what is added to the weights of all norms, which then are float32.
    """

    embed_scale: float = 1.0  # of the embedding's rows
    # Of what a layer adds to the stream, twice; what experts add has it in the router's weights.
    residual_scale: float = 1.0
    attention_out_scale: float = 1.0  # of what attention adds to it, besides
    mixer_out_scale: float = 1.0  # of what Mamba-2 adds to it, besides
    gate_scale: float = 1.0  # of the gate of an MLP
    mlp_out_scale: float = 1.0  # of what an MLP adds to the stream, besides
    logit_scale: float = 1.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    interleaved: bool = False
    rounds_embed_scale: bool = False
    norm_offset: float = 0.0


NO_FOLD = Fold()


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> Tensor:
    """The items of a head in the order in which turning its halves turns what the family turns.

    ``rotary_dim`` items turn, in neighbouring pairs or by halves. The others go to both halves
    behind them, where the frequencies are 0. [head_dim]
    """
    turning = torch.arange(rotary_dim)
    first, second = turning.view(-1, 2).T if interleaved else turning.view(2, -1)
    still = torch.arange(rotary_dim, head_dim).view(2, -1)
    return torch.cat((first, still[0], second, still[1]))


def qkvz_order(shape: RecurrentShape) -> Tensor:
    """Rows of queries, keys, values and z of all heads, where those of a key head lie together.

    [2 * key heads * key_dim + 2 * value heads * value_dim]
    """
    width = shape.num_value_heads // shape.num_key_heads * shape.value_dim
    return _apart(shape.num_key_heads, [shape.key_dim, shape.key_dim, width, width])


def mamba_widths(shape: RecurrentShape) -> list[int]:
    """Rows of Mamba-2's matrix for z, x, B, C and dt."""
    values, keys = shape.value_width, shape.num_key_heads * shape.key_dim
    return [values, values, keys, keys, shape.num_value_heads]


def mamba_orders(shape: RecurrentShape) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of Mamba-2's matrix z, x, B, C, dt: those of C, B, x, z and those of dt; channels of its
    convolution of x, B, C in the order C, B, x.
    """
    widths = mamba_widths(shape)
    z, x, b, c, dt = torch.split(torch.arange(sum(widths)), widths)
    mixed = torch.cat((c, b, x))
    return torch.cat((mixed, z)), dt, mixed - shape.value_width


def ba_order(shape: RecurrentShape) -> Tensor:
    """Rows of b, then of a, where those of a key head lie together, [2 * value heads]."""
    group = shape.num_value_heads // shape.num_key_heads
    return _apart(shape.num_key_heads, [group, group])


def _apart(num_heads: int, widths: list[int]) -> Tensor:
    """Rows of the parts of all heads, part after part, where they lie head after head."""
    rows = torch.arange(num_heads * sum(widths)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, widths, dim=1)])


def rounded(factor: float, dtype: torch.dtype) -> float:
    """The nearest number of a dtype."""
    return float(torch.tensor(factor, dtype=dtype))


def scaled(weight: Tensor, factor: float) -> Tensor:
    """``weight * factor`` in its own dtype, by way of float32."""
    return weight if factor == 1.0 else (weight.float() * factor).to(weight.dtype)


def scaled_rows(weight: Tensor, counts: Sequence[int], factors: Sequence[float]) -> Tensor:
    """A matrix whose first ``counts[0]`` rows are multiplied by ``factors[0]``, and so on."""
    each = torch.tensor(factors).repeat_interleave(torch.tensor(counts)).to(weight.device)
    return (weight.float() * each.unsqueeze(1)).to(weight.dtype)
