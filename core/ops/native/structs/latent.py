"""Latent attention as the structs of latent.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...weights import LatentWeights, PackedLinear
from .declared import NormStruct, norm_struct
from .linear import LinearStruct, NativeLinear

_I64 = ctypes.c_int64
_LINEAR, _NORM = ctypes.POINTER(LinearStruct), ctypes.POINTER(NormStruct)


class LatentStruct(ctypes.Structure):
    """``ft_latent``; lends the weights' memory."""

    _fields_ = (
        ("q_norm", _NORM),
        ("kv_norm", _NORM),
        ("q_up", _LINEAR),
        ("keys", ctypes.POINTER(_LINEAR)),
        ("values", ctypes.POINTER(_LINEAR)),
        ("q_width", _I64),
    )


def latent_struct(weights: LatentWeights) -> LatentStruct:
    """A layer's; it must not outlive the weights."""
    shape, num_heads = weights.shape, len(weights.keys)
    q_norm = None if weights.q_norm is None else ctypes.pointer(norm_struct(weights.q_norm))
    return LatentStruct(
        q_norm,
        ctypes.pointer(norm_struct(weights.kv_norm)),
        None if weights.q_up is None else _pointer(weights.q_up),
        _pointers(weights.keys),
        _pointers(weights.values),
        shape.q_rank or num_heads * shape.query_dim,
    )


def _pointers(weights: Sequence[PackedLinear]) -> ctypes.Array[ctypes._Pointer[LinearStruct]]:
    return (_LINEAR * len(weights))(*map(_pointer, weights))


def _pointer(weight: PackedLinear) -> ctypes._Pointer[LinearStruct]:
    assert isinstance(weight, NativeLinear)
    return ctypes.pointer(weight.struct)
