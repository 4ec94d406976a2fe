"""A layer's mixer as the ``ft_mixer`` of step.c."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, Structure, _Pointer, pointer
from typing import Any, NamedTuple

from ...mixers.attention import AttentionWeights
from ...mixers.conv import ConvWeights
from ...mixers.latent import LatentWeights
from ...mixers.mixer import MixerWeights
from ...mixers.recurrent import DeltaWeights, LightningWeights, Mamba2Weights, RecurrentWeights
from ...weights import PackedLinear
from ..declarations import STRUCTS
from .declared import norm_pointer, rope_struct, rule_struct
from .linear import linear_pointer, native
from .state import ConvStructs, RecurrentStructs


class NativeMixer(NamedTuple):
    """The ``ft_mixer`` of a mixer, and the widths that ``ft_decoder`` needs.

    ``mixed``, ``gates``, ``read``: items per row of the kernel's input, gates and output.
    ``owner``: owner of the memory that the struct points to, for a mixer with states.
    """

    struct: Structure
    mixed: int = 0
    gates: int = 0
    read: int = 0
    owner: RecurrentStructs | ConvStructs | None = None


def is_compiled(weights: MixerWeights) -> bool:
    """Whether step.c computes this mixer."""
    return type(weights) in _MIXERS


def native_mixer(weights: MixerWeights) -> NativeMixer:
    """Return the structs of a mixer that step.c computes; they must not outlive the weights."""
    found = _MIXERS[type(weights)](weights)
    linears = weights.linears
    found.struct.first, found.struct.second = map(linear_pointer, (linears[0], linears[-1]))
    return found


def _attention(weights: AttentionWeights) -> NativeMixer:
    attention = STRUCTS.ft_attention(
        rope=rope_struct(
            weights.head_norm, weights.tables, writes=weights.has_keys, gate=weights.gate
        ),
        rule=rule_struct(weights.window, weights.cap, weights.sinks, is_mutual=weights.is_mutual),
        part=weights.kv.part,
        kv_layer=weights.kv.layer,
    )
    width = native(weights.qkv).out_features if weights.gate else 0
    return NativeMixer(STRUCTS.ft_mixer(attention=pointer(attention)), mixed=width)


def _latent(weights: LatentWeights) -> NativeMixer:
    shape = weights.shape
    latent = STRUCTS.ft_latent(
        q_norm=norm_pointer(weights.q_norm),
        kv_norm=norm_pointer(weights.kv_norm),
        q_up=linear_pointer(weights.q_up),
        keys=_pointers(weights.keys),
        values=_pointers(weights.values),
        q_width=shape.q_rank or len(weights.keys) * shape.query_dim,
    )
    attention = STRUCTS.ft_attention(
        rope=rope_struct(None, weights.tables, writes=True),
        part=weights.kv.part,
        kv_layer=weights.kv.layer,
        latent=pointer(latent),
    )
    return NativeMixer(STRUCTS.ft_mixer(attention=pointer(attention)))


def _pointers(weights: Sequence[PackedLinear]) -> Array[_Pointer[Structure]]:
    return (POINTER(STRUCTS.ft_linear_weight) * len(weights))(
        *(pointer(native(each).struct) for each in weights)
    )


def _recurrent(weights: RecurrentWeights) -> NativeMixer:
    rule = RecurrentStructs(weights)
    return NativeMixer(
        STRUCTS.ft_mixer(gates=linear_pointer(weights.gates), recurrence=pointer(rule.struct)),
        mixed=native(weights.in_proj).out_features,
        gates=0 if weights.gates is None else native(weights.gates).out_features,
        read=native(weights.out).in_features,
        owner=rule,
    )


def _conv(weights: ConvWeights) -> NativeMixer:
    conv = ConvStructs(weights)
    return NativeMixer(
        STRUCTS.ft_mixer(conv=pointer(conv.struct)),
        mixed=native(weights.in_proj).out_features,
        read=native(weights.out).in_features,
        owner=conv,
    )


_MIXERS: dict[type[MixerWeights], Callable[[Any], NativeMixer]] = {
    AttentionWeights: _attention,
    LatentWeights: _latent,
    DeltaWeights: _recurrent,
    Mamba2Weights: _recurrent,
    LightningWeights: _recurrent,
    ConvWeights: _conv,
}
