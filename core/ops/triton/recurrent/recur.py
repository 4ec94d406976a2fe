"""A recurrent layer by kernels; the number of launches does not depend on rows and segments."""

from __future__ import annotations

import torch
from torch import Tensor

from ...mixers.recurrent import RecurrentShape, RecurrentWeights
from ...state_pool import StatePool
from .inputs_kernels import inputs_kernel
from .layer_memory import LayerMemory, keep_inputs
from .pass_states import PassStates
from .recur_kernels import gated_norm_kernel, log_kernel, products_kernel, recur_kernel

VALUES = 32  # columns of S of a program
_BYTES = 4  # bytes of a float32


def recur(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, states: PassStates, pool: StatePool
) -> Tensor:
    """Return the rows' outputs of their states, [T, num_heads * value_dim] float32.

    `gated_norm` completes them. Advances the states on the device; the caller must call
    `record_positions` before any other operation that may fail.
    """
    mixed, gates = mixed.contiguous(), gates.contiguous()
    shape, memory = weights.shape, LayerMemory.of(pool, weights.layer)
    at = states.at[weights.layer]
    x, c, beta = _inputs(mixed, gates, weights, memory, states)
    num_rows, heads, keys = len(mixed), shape.num_value_heads, power_of_two(shape.key_dim)
    common = _common(shape, pool)
    is_tiled = shape.is_tiled
    products = x.new_empty((num_rows, shape.num_key_heads, 2, pool.page_size))
    products_kernel[(num_rows, shape.num_key_heads)](
        x, memory.k, products, states.rows, states.segments,
        **common, PAGE=pool.page_size, KEYS=keys, IS_TILED=is_tiled,
    )  # fmt: skip
    u, read = (x.new_empty((num_rows, shape.value_width)) for _ in range(2))
    values = min(VALUES, power_of_two(shape.value_dim))
    recur_kernel[(-(-shape.value_dim // values), heads, len(states.segments))](
        x, products, c, beta, x if weights.skip is None else weights.skip, u, read,
        memory.state, memory.k, memory.u, memory.c, states.segments, states.keeps, at,
        **common, PAGE=pool.page_size, SLOT_FLOATS=pool.bytes_per_slot // _BYTES,
        VALUE_DIM=shape.value_dim, KEYS=keys, VALUES=values, IS_TILED=is_tiled,
        IS_DELTA=weights.rule == "delta", HAS_SKIP=weights.skip is not None,
    )  # fmt: skip
    log_kernel[(num_rows, heads)](
        x, u, c, memory.k, memory.u, memory.c, states.rows, states.segments,
        **common, VALUE_DIM=shape.value_dim, KEYS=keys, VALUES=power_of_two(shape.value_dim),
        IS_TILED=is_tiled,
    )  # fmt: skip
    keep_inputs(mixed, shape.conv_channels, shape.conv_len, memory, states, at)
    return read


def _common(shape: RecurrentShape, pool: StatePool) -> dict[str, int]:
    """Return the constants that several kernels share."""
    return {
        "CHANNELS": shape.conv_channels,
        "RING": pool.ring,
        "LOG_FLOATS": pool.bytes_per_log // _BYTES,
        "KEY_HEADS": shape.num_key_heads,
        "HEADS": shape.num_value_heads,
        "KEY_DIM": shape.key_dim,
    }


def _inputs(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, memory: LayerMemory, states: PassStates
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [T, conv_channels], c and beta [T, num_heads].

    All are float32.
    """
    shape, pool, num_rows = weights.shape, memory.pool, len(mixed)
    heads, key_heads = shape.num_value_heads, shape.num_key_heads
    bias = weights.conv_bias
    x = mixed.new_empty((num_rows, shape.conv_channels), dtype=torch.float32)
    c, beta = (x.new_empty((num_rows, heads)) for _ in range(2))
    inputs_kernel[(num_rows, 2 * key_heads + heads + 1)](
        mixed, gates, weights.conv.contiguous(), x if bias is None else bias,
        weights.decay, weights.dt_bias,
        memory.tail, memory.inputs, memory.c, x, c, beta,
        states.rows, states.segments, states.at[weights.layer],
        **{**_common(shape, pool), **memory.input_strides},
        STRIDE=mixed.shape[1], TAPS=shape.conv_len, PAGE=pool.page_size,
        VALUE_DIM=shape.value_dim, TILE=power_of_two(max(shape.key_dim, shape.value_dim)),
        HEADS_TILE=power_of_two(heads), HAS_BIAS=bias is not None,
        IS_DELTA=weights.rule == "delta", HAS_GATES=weights.gates is not None,
        MOST_BETA=weights.most_beta,
    )  # fmt: skip
    return x, c, beta


def gated_norm(
    read: Tensor, mixed: Tensor, weights: RecurrentWeights, states: PassStates
) -> Tensor:
    """Return the normed and gated outputs [T, num_heads * value_dim] in the activations' dtype.

    ``read`` [T, num_heads * value_dim] float32: outputs of the states. ``mixed``: the layer's
    input with the gates z (`Ops.recur`).
    """
    mixed = mixed.contiguous()
    norm, parts = weights.norm, weights.num_norms or weights.shape.num_value_heads
    width = read.shape[1] // parts
    out = torch.empty_like(read, dtype=mixed.dtype)
    gated_norm_kernel[(len(read), parts)](
        read, mixed, read if norm is None else norm, out, weights.norm_eps, states.rows,
        CHANNELS=weights.shape.conv_channels, PARTS=parts, WIDTH=width, TILE=power_of_two(width),
        HAS_NORM=norm is not None, IS_DELTA=weights.rule == "delta",
        IS_LIGHTNING=weights.rule == "lightning", GATES_LAST=weights.rule != "mamba2",
    )  # fmt: skip
    return out


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
