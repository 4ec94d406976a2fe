"""NativeStep: all layers of a decoder in one call, during which the GIL is free."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..base import (
    SILU,
    DecoderWeights,
    ExpertWeights,
    ForwardPlan,
    HeadLayout,
    LayersOutput,
    LayerWeights,
    MlpWeights,
    Norm,
    PackedLinear,
    Rope,
)
from ..batch import Taps, Wanted
from ..kv_pool import KVPool
from .experts import ExpertStructs
from .library import NativeLibrary
from .linear import LinearStruct, NativeLinear
from .plan import NativePlan
from .structs import (
    ActivationStruct,
    NormStruct,
    RuleStruct,
    TurnStruct,
    activation_struct,
    norm_struct,
    rule_struct,
    turn_struct,
)

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_LINEAR, _NORM = ctypes.POINTER(LinearStruct), ctypes.POINTER(NormStruct)


class LayerStruct(ctypes.Structure):
    """``ft_layer`` of step.c."""

    _fields_ = (
        ("qkv", _LINEAR),
        ("o", _LINEAR),
        ("gate_up", _LINEAR),
        ("down", _LINEAR),
        ("attention_norm", _NORM),
        ("attention_out_norm", _NORM),
        ("mlp_norm", _NORM),
        ("mlp_out_norm", _NORM),
        ("turn", TurnStruct),
        ("rule", RuleStruct),
        ("activation", ActivationStruct),
        ("is_parallel", _I64),
        ("experts", _PTR),
    )


class DecoderStruct(ctypes.Structure):
    """``ft_decoder`` of step.c."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("num_layers", _I64),
        ("embedding", _PTR),
        ("final_norm", _NORM),
        ("hidden", _I64),
        ("width", _I64),
    )


class NativeStep:
    """The layers of one decoder; lends the C side its weights, which must stay as they are."""

    def __init__(self, library: NativeLibrary, weights: DecoderWeights) -> None:
        self._library = library
        self._weights = weights  # alive as long as the structs point into them
        self._norms: list[NormStruct] = []  # likewise
        self._experts: list[ExpertStructs] = []
        layers = (LayerStruct * len(weights.layers))(*map(self._layer, weights.layers))
        mlps = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MlpWeights)]
        width = max((_native(mlp.down).in_features for mlp in mlps), default=0)
        self._struct = DecoderStruct(
            layers,
            len(weights.layers),
            weights.embedding.data_ptr(),
            self._lent(weights.final_norm),
            weights.embedding.shape[1],
            width,
        )

    def _layer(self, layer: LayerWeights) -> LayerStruct:
        norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
        gate_up = down = experts = None
        activation = SILU
        if isinstance(layer.mlp, ExpertWeights):
            self._experts.append(ExpertStructs(layer.mlp))
            experts = self._experts[-1].address
        else:
            gate_up, down = layer.mlp.linears
            activation = layer.mlp.activation
        linears = (layer.qkv, layer.o, gate_up, down)
        return LayerStruct(
            *(None if each is None else ctypes.pointer(_native(each).struct) for each in linears),
            *map(self._lent, norms),
            turn_struct(layer.head_norm, layer.tables),
            rule_struct(layer.window, layer.cap, layer.sinks),
            activation_struct(activation),
            layer.is_parallel,
            experts,
        )

    def _lent(self, norm: Norm | None) -> object:
        if norm is None:
            return None
        self._norms.append(norm_struct(norm))
        return ctypes.pointer(self._norms[-1])

    def __call__(self, token_ids: Tensor, plan: ForwardPlan, wanted: Wanted) -> LayersOutput:
        """Compute token ids ``[T]``; writes KV to the pool. Raises MemoryError."""
        assert isinstance(plan, NativePlan)
        token_ids = token_ids.contiguous()
        out = torch.empty((plan.num_rows, self._struct.hidden), dtype=plan.dtype)
        num_taps, at, tapped = len(wanted.taps), None, None
        if num_taps:
            at = (_I64 * num_taps)(*wanted.taps)
            tapped = torch.empty((plan.num_rows, num_taps * self._struct.hidden), dtype=plan.dtype)
        failed = self._library.c.ft_forward(
            ctypes.byref(self._struct), token_ids.data_ptr(), *plan.pointers, out.data_ptr(),
            num_taps, at, None if tapped is None else tapped.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the activations of a step")
        return LayersOutput(out, taps=tapped)

    def warm_up(self, pool: KVPool, heads: HeadLayout, ropes: tuple[Rope, ...], taps: Taps) -> None:
        """Nothing: the first call is as fast as any."""


def _native(weight: PackedLinear) -> NativeLinear:
    assert isinstance(weight, NativeLinear)
    return weight
