"""NativeStep: all layers of a decoder in one call, during which the GIL is free."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..base import (
    DecoderWeights,
    ForwardPlan,
    HeadLayout,
    LayersOutput,
    LayerWeights,
    PackedLinear,
    Rope,
)
from ..batch import Taps, Wanted
from ..kv_pool import KVPool
from .library import NativeLibrary
from .linear import LinearStruct, NativeLinear
from .plan import NativePlan

_I64, _PTR, _F32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
_LINEAR = ctypes.POINTER(LinearStruct)


class LayerStruct(ctypes.Structure):
    """``ft_layer`` of step.c."""

    _fields_ = (
        ("qkv", _LINEAR),
        ("o", _LINEAR),
        ("gate_up", _LINEAR),
        ("down", _LINEAR),
        ("input_norm", _PTR),
        ("post_norm", _PTR),
        ("head_norm", _PTR),
        ("window", _I64),
    )


class DecoderStruct(ctypes.Structure):
    """``ft_decoder`` of step.c."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        ("num_layers", _I64),
        ("embedding", _PTR),
        ("final_norm", _PTR),
        ("hidden", _I64),
        ("width", _I64),
        ("eps", _F32),
        ("head_eps", _F32),
    )


class NativeStep:
    """The layers of one decoder; lends the C side its weights, which must stay as they are."""

    def __init__(self, library: NativeLibrary, weights: DecoderWeights) -> None:
        self._library = library
        self._weights = weights  # alive as long as the structs point into them
        layers = (LayerStruct * len(weights.layers))(*map(_layer_struct, weights.layers))
        norms = (layer.head_norm for layer in weights.layers if layer.head_norm is not None)
        self._struct = DecoderStruct(
            layers,
            len(weights.layers),
            weights.embedding.data_ptr(),
            weights.final_norm.data_ptr(),
            weights.embedding.shape[1],
            _native(weights.layers[0].down).in_features,
            weights.norm_eps,
            next((norm.eps for norm in norms), 0.0),
        )

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

    def warm_up(self, pool: KVPool, heads: HeadLayout, rope: Rope, taps: Taps) -> None:
        """Nothing: the first call is as fast as any."""


def _layer_struct(layer: LayerWeights) -> LayerStruct:
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return LayerStruct(
        *(ctypes.pointer(_native(weight).struct) for weight in linears),
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        None if layer.head_norm is None else layer.head_norm.weight.data_ptr(),
        layer.window or 0,
    )


def _native(weight: PackedLinear) -> NativeLinear:
    assert isinstance(weight, NativeLinear)
    return weight
