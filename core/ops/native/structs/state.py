"""Recurrent layers, slots and logs as the structs of state.h."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ....errors import ModelLoadError
from ...batch import RaggedBatch
from ...mixers.conv import ConvWeights
from ...mixers.recurrent import RecurrentWeights, Rule
from ...state_pool import StatePool
from ..declarations import STRUCTS, address_of
from ..library import address

MAX_TAPS = 8  # must be equal to FT_MAX_TAPS of state.h
_RULES: dict[Rule, int] = {"delta": 0, "mamba2": 1, "lightning": 2}  # equal to the enum of state.h


class RecurrentStructs:
    """The ``ft_recurrence`` of a recurrent layer, and the tensors that it points to.

    Raises `ModelLoadError` for a convolution of more than `MAX_TAPS` taps.
    """

    def __init__(self, weights: RecurrentWeights) -> None:
        shape, taps = weights.shape, _taps_of(weights.conv)
        self._kept_alive = (weights, taps)
        self.struct = STRUCTS.ft_recurrence(
            rule=_RULES[weights.rule],
            num_key_heads=shape.num_key_heads,
            num_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            num_taps=shape.conv_len,
            is_tiled=shape.is_tiled,
            taps=taps.data_ptr(),
            decay=weights.decay.data_ptr(),
            dt_bias=weights.dt_bias.data_ptr(),
            norm=address(weights.norm),
            eps=weights.norm_eps,
            layer=weights.layer,
            most_beta=weights.most_beta,
            skip=address(weights.skip),
            taps_bias=address(weights.conv_bias),
            num_norms=weights.num_norms,
        )


class ConvStructs:
    """The ``ft_conv`` of a short convolution, and the tensors that it points to.

    Raises `ModelLoadError` for a convolution of more than `MAX_TAPS` taps.
    """

    def __init__(self, weights: ConvWeights) -> None:
        taps, bias = _taps_of(weights.conv), weights.bias
        self._kept_alive = (weights, taps)
        self.struct = STRUCTS.ft_conv(
            channels=weights.shape.channels,
            num_taps=weights.shape.conv_len,
            taps=taps.data_ptr(),
            bias=address(bias),
            layer=weights.layer,
        )


def _taps_of(conv: Tensor) -> Tensor:
    """Return taps ``[conv_len, channels]``: the kernels read neighbouring channels together."""
    conv_len = conv.shape[1]
    if conv_len > MAX_TAPS:
        raise ModelLoadError(
            f"the native kernels support convolutions of {MAX_TAPS} taps, not {conv_len}"
        )
    return conv.T.contiguous()


class StatesStructs:
    """The ``ft_states`` of a pass, and the arrays that it points to."""

    def __init__(self, batch: RaggedBatch, pool: StatePool) -> None:
        states = batch.states
        assert states is not None
        first_keeps = np.concatenate(([0], np.cumsum(states.keep_counts)))
        own = {
            "slot_of": states.slots,
            "log_of": states.logs,
            "final_stops": states.final_stops,
            "first_keeps": first_keeps,
            "keeps": states.keeps,
        }
        arrays = {name: np.ascontiguousarray(each, dtype=np.int64) for name, each in own.items()}
        self._kept_alive = (pool, arrays)
        self.struct = STRUCTS.ft_states(
            page_size=pool.page_size,
            ring=pool.ring,
            num_layers=len(pool.shapes),
            slots=pool.slots.data_ptr(),
            logs=pool.logs.data_ptr(),
            slot_bytes=pool.bytes_per_slot,
            log_bytes=pool.bytes_per_log,
            slot_fields=pool.slot_offsets.ctypes.data,
            log_fields=pool.log_offsets.ctypes.data,
            at=pool.at.data_ptr(),
            **{name: address_of(each) for name, each in arrays.items()},
        )
