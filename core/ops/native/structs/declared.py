"""Norms, RoPE, attention rules and activations as the structs of decoder.h."""

from __future__ import annotations

import ctypes
from ctypes import Structure

from torch import Tensor

from ...weights import Activation, HeadNorm, Norm, Tables
from ..declarations import STRUCTS
from ..library import DTYPES, address

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}


def norm_struct(norm: Norm) -> Structure:
    """Return the ``ft_norm`` of a norm, whose tensors must outlive it."""
    return STRUCTS.ft_norm(
        weight=norm.weight.data_ptr(),
        bias=address(norm.bias),
        eps=norm.eps,
        weight_dtype=DTYPES[norm.weight.dtype],
        is_layer=norm.is_layer,
    )


def norm_pointer(norm: Norm | None) -> ctypes._Pointer[Structure] | None:
    """Return a pointer to a new ``ft_norm``, or None without a norm."""
    return None if norm is None else ctypes.pointer(norm_struct(norm))


def rope_struct(norm: HeadNorm | None, tables: Tables, *, writes: bool, gate: int = 0) -> Structure:
    """Return the ``ft_rope`` of a layer: the RoPE tables and norm of its queries and keys.

    ``writes``: the rows have keys and values, which are written to the pool. ``gate``: number of
    gate items after the values.
    """
    q_table, k_table = tables
    rope = STRUCTS.ft_rope(q_table=q_table, k_table=k_table, writes=writes, gate=gate)
    if norm is not None:
        rope.norm, rope.eps = norm.weight.data_ptr(), norm.eps
        rope.over_all_heads, rope.is_after_rope = norm.whole, norm.is_after_rope
    return rope


def rule_struct(
    window: int | None, cap: float | None, sinks: Tensor | None, *, is_mutual: bool = False
) -> Structure:
    """Return the ``ft_rule`` that says which keys a row sees and how scores are capped."""
    return STRUCTS.ft_rule(
        window=window or 0, sinks=address(sinks), cap=cap or 0.0, is_mutual=is_mutual
    )


def activation_struct(activation: Activation) -> Structure:
    """Return the ``ft_activation`` of an activation."""
    return STRUCTS.ft_activation(
        kind=_ACTIVATIONS[activation.kind], gated=activation.gated, limit=activation.limit
    )
