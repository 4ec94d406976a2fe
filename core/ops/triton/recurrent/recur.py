"""A recurrent layer by kernels: as many launches whatever rows and segments a pass has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...base import DeltaWeights, Mamba2Weights, RecurrentWeights
from ...state_pool import StatePool
from .kernels import (
    gated_norm_kernel,
    inputs_kernel,
    keep_inputs_kernel,
    log_kernel,
    products_kernel,
    recur_kernel,
)
from .pass_states import PassStates

VALUES = 32  # columns of S of a program
CHANNELS_TILE = 256  # of a program that keeps inputs
_BYTES = 4  # of a float32


class _Memory(NamedTuple):
    """A layer's fields in slot 0 and in log 0, flat; the others are strides behind."""

    state: Tensor
    tail: Tensor
    k: Tensor
    u: Tensor
    c: Tensor
    inputs: Tensor

    @classmethod
    def of(cls, pool: StatePool, layer: int) -> _Memory:
        """Views of all behind each field."""
        dtypes = (torch.float32, pool.dtype)
        slots = (_behind(pool.slots, int(at), dtype)
                 for at, dtype in zip(pool.slot_offsets[layer], dtypes, strict=True))  # fmt: skip
        dtypes = (*[torch.float32] * 3, pool.dtype)
        logs = (_behind(pool.logs, int(at), dtype)
                for at, dtype in zip(pool.log_offsets[layer], dtypes, strict=True))  # fmt: skip
        return cls(*slots, *logs)


def _behind(memory: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    return memory.view(-1)[at:].view(dtype)


def recur(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, states: PassStates, pool: StatePool
) -> Tensor:
    """See `Ops.recur`; the host is not told where the states stand behind it."""
    shape, memory = weights.shape, _Memory.of(pool, weights.layer)
    num_rows, num_segments = len(mixed), len(states.segments)
    at = states.at[weights.layer]
    mixed, gates = mixed.contiguous(), gates.contiguous()
    is_delta = isinstance(weights, DeltaWeights)
    heads, key_heads = shape.num_value_heads, shape.num_key_heads
    keys = _power_of_two(shape.key_dim)
    of_heads = {
        "CHANNELS": shape.conv_channels, "RING": pool.ring,
        "LOG_FLOATS": pool.bytes_per_log // _BYTES, "KEY_HEADS": key_heads, "HEADS": heads,
        "KEY_DIM": shape.key_dim,
    }  # fmt: skip
    of_inputs = {
        "STRIDE": mixed.shape[1], "TAPS": shape.conv_len,
        "SLOT": pool.bytes_per_slot // pool.dtype.itemsize,
        "LOG": pool.bytes_per_log // pool.dtype.itemsize,
    }  # fmt: skip
    bias = weights.conv_bias if isinstance(weights, Mamba2Weights) else None
    x = mixed.new_empty((num_rows, shape.conv_channels), dtype=torch.float32)
    c, beta = (x.new_empty((num_rows, heads)) for _ in range(2))
    inputs_kernel[(num_rows, 2 * key_heads + heads + 1)](
        mixed, gates, weights.conv, x if bias is None else bias, weights.decay, weights.dt_bias,
        memory.tail, memory.inputs, memory.c, x, c, beta, states.rows, states.segments, at,
        **of_inputs, **of_heads, PAGE=pool.page_size, VALUE_DIM=shape.value_dim,
        TILE=max(keys, _power_of_two(shape.value_dim)), HEADS_TILE=_power_of_two(heads),
        HAS_BIAS=bias is not None, IS_DELTA=is_delta,
    )  # fmt: skip
    products = x.new_empty((num_rows, key_heads, 2, pool.page_size))
    products_kernel[(num_rows, key_heads)](
        x, memory.k, products, states.rows, states.segments,
        **of_heads, PAGE=pool.page_size, KEYS=keys, IS_TILED=shape.is_tiled,
    )  # fmt: skip
    u, read = (x.new_empty((num_rows, heads * shape.value_dim)) for _ in range(2))
    values = min(VALUES, _power_of_two(shape.value_dim))
    recur_kernel[(-(-shape.value_dim // values), heads, num_segments)](
        x, products, c, beta, weights.skip if isinstance(weights, Mamba2Weights) else x, u, read,
        memory.state, memory.k, memory.u, memory.c, states.segments, states.keeps, at,
        **of_heads, PAGE=pool.page_size, SLOT_FLOATS=pool.bytes_per_slot // _BYTES,
        VALUE_DIM=shape.value_dim, KEYS=keys, VALUES=values, IS_TILED=shape.is_tiled,
        IS_DELTA=is_delta,
    )  # fmt: skip
    log_kernel[(num_rows, heads)](
        x, u, c, memory.k, memory.u, memory.c, states.rows, states.segments,
        **of_heads, VALUE_DIM=shape.value_dim, KEYS=keys, VALUES=_power_of_two(shape.value_dim),
        IS_TILED=shape.is_tiled,
    )  # fmt: skip
    keep_inputs_kernel[(-(-shape.conv_channels // CHANNELS_TILE), num_segments)](
        mixed, memory.tail, memory.inputs, states.segments, states.keeps, at,
        **of_inputs, CHANNELS=shape.conv_channels, RING=pool.ring, TILE=CHANNELS_TILE,
    )  # fmt: skip
    return _gated_norm(read, mixed, weights, states)


def _gated_norm(
    read: Tensor, mixed: Tensor, weights: RecurrentWeights, states: PassStates
) -> Tensor:
    """What was read [T, num_heads * value_dim] float32, normed and gated as the layer has it."""
    shape, is_delta = weights.shape, isinstance(weights, DeltaWeights)
    parts = weights.num_norms if isinstance(weights, Mamba2Weights) else shape.num_value_heads
    norm = weights.norm
    if norm is None:
        parts = shape.num_value_heads
    width = shape.value_width // parts
    out = torch.empty_like(read, dtype=mixed.dtype)
    gated_norm_kernel[(len(read), parts)](
        read, mixed, read if norm is None else norm, out, weights.norm_eps, states.rows,
        CHANNELS=shape.conv_channels, PARTS=parts, WIDTH=width, TILE=_power_of_two(width),
        HAS_NORM=norm is not None, IS_DELTA=is_delta,
    )  # fmt: skip
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
