"""Declared differences as the structs of decoder.h."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ...weights import Activation, HeadNorm, Norm, Tables
from ..library import DTYPES

_I32, _I64, _PTR, _F32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class NormStruct(ctypes.Structure):
    """``ft_norm`` of decoder.h; lends the tensors' memory."""

    _fields_ = (
        ("weight", _PTR),
        ("bias", _PTR),
        ("eps", _F32),
        ("weight_dtype", _I32),
        ("is_layer", _I32),
    )


class TurnStruct(ctypes.Structure):
    """``ft_turn`` of decoder.h; lends the norm's memory."""

    _fields_ = (
        ("norm", _PTR),
        ("eps", _F32),
        ("is_whole", _I32),
        ("q_table", _I64),
        ("k_table", _I64),
        ("writes", _I32),
        ("is_behind", _I32),
        ("gate", _I64),
    )


class RuleStruct(ctypes.Structure):
    """``ft_rule`` of decoder.h; lends the sinks' memory."""

    _fields_ = (("window", _I64), ("sinks", _PTR), ("cap", _F32), ("is_mutual", _I32))


class ActivationStruct(ctypes.Structure):
    """``ft_activation`` of decoder.h."""

    _fields_ = (("kind", _I32), ("gated", _I32), ("limit", _F32))


_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu2": 3}


def norm_struct(norm: Norm) -> NormStruct:
    """A norm as the kernels take it."""
    dtype = DTYPES[norm.weight.dtype]
    return NormStruct(norm.weight.data_ptr(), _at(norm.bias), norm.eps, dtype, norm.is_layer)


def turn_struct(
    norm: HeadNorm | None, tables: Tables, *, writes: bool, gate: int = 0
) -> TurnStruct:
    """The turning of queries and keys, as the kernels take it.

    ``writes``: the rows have keys and values, which go to the pool. ``gate``: items behind these.
    """
    if norm is None:
        return TurnStruct(None, 0.0, 0, *tables, writes, 0, gate)
    norm_at = norm.weight.data_ptr()
    return TurnStruct(norm_at, norm.eps, norm.whole, *tables, writes, norm.is_behind, gate)


def rule_struct(
    window: int | None, cap: float | None, sinks: Tensor | None, *, is_mutual: bool = False
) -> RuleStruct:
    """Build the struct that says which keys a row sees and how scores are capped."""
    return RuleStruct(window or 0, _at(sinks), cap or 0.0, is_mutual)


def activation_struct(activation: Activation) -> ActivationStruct:
    """An activation as the kernels take it."""
    return ActivationStruct(_ACTIVATIONS[activation.kind], activation.gated, activation.limit)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
