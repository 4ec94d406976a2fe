"""Recurrent layers, slots and logs as the structs of state.h."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from ....errors import ModelLoadError
from ...batch import RaggedBatch
from ...state_pool import StatePool
from ...weights import ConvWeights, DeltaWeights, RecurrentWeights
from .linear import LinearStruct

MAX_TAPS = 8  # as in state.h
_I64, _PTR, _F32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class RuleStruct(ctypes.Structure):
    """``ft_recurrence``; lends the weights' memory."""

    _fields_ = (
        ("num_key_heads", _I64),
        ("num_heads", _I64),
        ("key_dim", _I64),
        ("value_dim", _I64),
        ("num_taps", _I64),
        ("is_tiled", _I64),
        ("taps", _PTR),
        ("decay", _PTR),
        ("dt_bias", _PTR),
        ("norm", _PTR),
        ("eps", _F32),
        ("layer", _I64),
        ("skip", _PTR),
        ("taps_bias", _PTR),
        ("num_norms", _I64),
    )


class RecurrentStruct(ctypes.Structure):
    """``ft_recurrent`` of step.c."""

    _fields_ = (
        ("first", ctypes.POINTER(LinearStruct)),
        ("gates", ctypes.POINTER(LinearStruct)),
        ("second", ctypes.POINTER(LinearStruct)),
        ("rule", RuleStruct),
    )


class ConvStruct(ctypes.Structure):
    """``ft_conv``; lends the weights' memory."""

    _fields_ = (
        ("channels", _I64),
        ("num_taps", _I64),
        ("taps", _PTR),
        ("bias", _PTR),
        ("layer", _I64),
    )


class StatesStruct(ctypes.Structure):
    """``ft_states``; lends the pool's memory and the pass's arrays."""

    _fields_ = (
        ("page_size", _I64),
        ("ring", _I64),
        ("num_layers", _I64),
        ("slots", _PTR),
        ("logs", _PTR),
        ("slot_bytes", _I64),
        ("log_bytes", _I64),
        ("slot_fields", _PTR),
        ("log_fields", _PTR),
        ("at", _PTR),
        ("slot_of", _PTR),
        ("log_of", _PTR),
        ("final_stops", _PTR),
        ("first_keeps", _PTR),
        ("keeps", _PTR),
    )


class RecurrentStructs:
    """Lends the C side a recurrent layer; keeps alive what it points to.

    Raises `ModelLoadError` for a convolution of more taps than the kernels have room for.
    """

    def __init__(self, weights: RecurrentWeights) -> None:
        shape, taps = weights.shape, _taps_of(weights.conv)
        self._lends = (weights, taps)
        vectors = (taps, weights.decay, weights.dt_bias, weights.norm)
        self._struct = RuleStruct(
            shape.num_key_heads,
            shape.num_value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.conv_len,
            shape.is_tiled,
            *(None if vector is None else vector.data_ptr() for vector in vectors),
            weights.norm_eps,
            weights.layer,
            *_of_mamba2(weights),
        )

    @property
    def pointer(self) -> object:
        """Pointer for an argument of a C function."""
        return ctypes.byref(self._struct)

    def recurrent(self, *linears: LinearStruct) -> RecurrentStruct:
        """The layer as a decoder's."""
        return RecurrentStruct(*map(ctypes.pointer, linears), self._struct)


def _of_mamba2(weights: RecurrentWeights) -> tuple[int | None, int | None, int]:
    """The fields that only Mamba-2 has."""
    if isinstance(weights, DeltaWeights):
        return None, None, 0
    bias = None if weights.conv_bias is None else weights.conv_bias.data_ptr()
    return weights.skip.data_ptr(), bias, weights.num_norms


class ConvStructs:
    """Lends the C side a layer of a short convolution; keeps alive what it points to.

    Raises `ModelLoadError` as `RecurrentStructs` does.
    """

    def __init__(self, weights: ConvWeights) -> None:
        taps, bias = _taps_of(weights.conv), weights.bias
        self._lends = (weights, taps)
        self.struct = ConvStruct(
            *weights.shape,
            taps.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.layer,
        )


def _taps_of(conv: Tensor) -> Tensor:
    """``[conv_len, channels]``: neighbouring channels are read together."""
    conv_len = conv.shape[1]
    if conv_len > MAX_TAPS:
        raise ModelLoadError(
            f"the native kernels support convolutions of {MAX_TAPS} taps, not {conv_len}"
        )
    return conv.T.contiguous()


class StatesStructs:
    """Lends the C side the states of a pass; keeps alive what it points to."""

    def __init__(self, batch: RaggedBatch, pool: StatePool) -> None:
        states = batch.states
        assert states is not None
        first_keeps = np.concatenate(([0], np.cumsum(states.keep_counts)))
        own = (states.slots, states.logs, states.final_stops, first_keeps, states.keeps)
        arrays = [np.ascontiguousarray(values, dtype=np.int64) for values in own]
        self._lends = (pool, arrays)
        self._struct = StatesStruct(
            pool.page_size,
            pool.ring,
            len(pool.shapes),
            pool.slots.data_ptr(),
            pool.logs.data_ptr(),
            pool.bytes_per_slot,
            pool.bytes_per_log,
            pool.slot_offsets.ctypes.data,
            pool.log_offsets.ctypes.data,
            pool.at.data_ptr(),
            *(values.ctypes.data for values in arrays),
        )

    @property
    def address(self) -> int:
        """Address for a field of another struct."""
        return ctypes.addressof(self._struct)
