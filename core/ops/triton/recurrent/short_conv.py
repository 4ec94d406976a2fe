"""A gated short convolution by kernels."""

from __future__ import annotations

from torch import Tensor

from ...mixers.conv import ConvWeights
from ...state_pool import StatePool
from .inputs_kernels import short_conv_kernel
from .layer_memory import CHANNELS_TILE, LayerMemory, keep_inputs
from .pass_states import PassStates


def short_conv(mixed: Tensor, weights: ConvWeights, states: PassStates, pool: StatePool) -> Tensor:
    """Compute `Ops.short_conv`; the caller must call `record_positions` afterwards."""
    channels, taps = weights.shape
    memory, at = LayerMemory.of(pool, weights.layer), states.at[weights.layer]
    mixed = mixed.contiguous()
    b, _, x = mixed.chunk(3, dim=1)
    inputs = b * x
    out = mixed.new_empty((len(mixed), channels))
    short_conv_kernel[(len(mixed), -(-channels // CHANNELS_TILE))](
        inputs, mixed, weights.conv.contiguous(), inputs if weights.bias is None else weights.bias,
        memory.tail, memory.inputs, out, states.rows, states.segments, at,
        **memory.input_strides, CHANNELS=channels, TAPS=taps, TILE=CHANNELS_TILE,
        HAS_BIAS=weights.bias is not None,
    )  # fmt: skip
    keep_inputs(inputs, channels, taps, memory, states, at)
    return out
