"""Latent attention as the structs of latent.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, _Pointer, pointer

from ...weights import LatentWeights, PackedLinear
from ..declarations import STRUCTS
from .declared import norm_pointer
from .linear import linear_pointer, native


def latent_struct(weights: LatentWeights) -> Structure:
    """Return the ``ft_latent`` of a layer; it must not outlive the weights."""
    shape = weights.shape
    return STRUCTS.ft_latent(
        q_norm=norm_pointer(weights.q_norm),
        kv_norm=norm_pointer(weights.kv_norm),
        q_up=linear_pointer(weights.q_up),
        keys=_pointers(weights.keys),
        values=_pointers(weights.values),
        q_width=shape.q_rank or len(weights.keys) * shape.query_dim,
    )


def _pointers(weights: Sequence[PackedLinear]) -> Array[_Pointer[Structure]]:
    return (POINTER(STRUCTS.ft_linear_weight) * len(weights))(
        *(pointer(native(each).struct) for each in weights)
    )
