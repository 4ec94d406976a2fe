"""Norms, RoPE with the write to the KV pool, and activations: one program per row or head."""

from __future__ import annotations

import triton
import triton.language as tl

from .chain import begin
from .kv_codec import store_vector


@triton.jit
def norm_kernel(
    x_ptr,  # [T, WIDTH]
    residual_ptr,  # [T, WIDTH], read where HAS_RESIDUAL
    weight_ptr,  # [WIDTH], read where HAS_NORM
    bias_ptr,  # [WIDTH], read where HAS_BIAS
    out_ptr,  # written where HAS_NORM
    total_ptr,  # x + residual, written where HAS_RESIDUAL
    eps,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,  # WIDTH, rounded up to a power of two
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_LAYER: tl.constexpr,  # whether the mean is subtracted first
    HAS_BIAS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Compute the norm of a row, or of its sum with the residual."""
    begin(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + row * WIDTH + column, mask=mask, other=0.0)
        tl.store(total_ptr + row * WIDTH + column, x, mask=mask)
    if HAS_NORM:
        wide = x.to(tl.float32)
        if IS_LAYER:
            wide = tl.where(mask, wide - tl.sum(wide, 0) / WIDTH, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        normed = wide * factor * weight
        if HAS_BIAS:
            normed += tl.load(bias_ptr + column, mask=mask, other=0.0)
        tl.store(out_ptr + row * WIDTH + column, normed.to(x.dtype), mask=mask)


@triton.jit
def norm_factor(
    x, at, head, eps, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the RMS norm's factor of the head ``x`` at ``at``, or of all query or key heads."""
    squares, num_normed = x * x, 1
    if IS_WHOLE:
        squares = tl.zeros([HEAD_DIM], tl.float32)
        is_query = head < NUM_HEADS
        num_normed = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
        others = at + (tl.where(is_query, 0, NUM_HEADS) - head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
        for other in range(num_normed):
            each = tl.load(others + other * HEAD_DIM).to(tl.float32)
            squares += each * each
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / (HEAD_DIM * num_normed) + eps)


@triton.jit
def rope_write_kernel(
    qkv_ptr,  # [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    q_ptr,  # [T, NUM_HEADS * HEAD_DIM], written
    kv_ptr,  # the pool's blocks, written
    scales_ptr,  # the pool's memory as float32, written where SCALES_AT
    slots_ptr,  # [T] page * page size + offset in the page; -1: an empty row
    positions_ptr,  # [T]
    q_cos_ptr,  # [num_positions, HEAD_DIM / 2] float32
    q_sin_ptr,
    k_cos_ptr,
    k_sin_ptr,
    norm_ptr,  # [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM], read where HAS_NORM
    eps,
    scale,
    layer_block,
    page_blocks,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    CODEC: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # whether the norm is over all heads of a kind together
    IS_AFTER_ROPE: tl.constexpr,  # whether the norm, per head, is after RoPE
    IS_CHAINED: tl.constexpr,
):
    """Process one head of a row: norm and rotate queries and keys, store keys and values."""
    begin(IS_CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    dims, half = tl.arange(0, HEAD_DIM), tl.arange(0, HEAD_DIM) % HALF
    at = qkv_ptr + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    x = tl.load(at + dims).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        swapped = tl.load(at + (dims + HALF) % HEAD_DIM).to(tl.float32)
        if HAS_NORM and not IS_AFTER_ROPE:
            factor = norm_factor(x, at, head, eps, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, IS_WHOLE)
            x = x * factor * tl.load(norm_ptr + head * HEAD_DIM + dims).to(tl.float32)
            other = tl.load(norm_ptr + head * HEAD_DIM + (dims + HALF) % HEAD_DIM).to(tl.float32)
            swapped = swapped * factor * other
        turn = tl.load(positions_ptr + row).to(tl.int64) * HALF + half
        if head < NUM_HEADS:
            cos, sin = tl.load(q_cos_ptr + turn), tl.load(q_sin_ptr + turn)
        else:
            cos, sin = tl.load(k_cos_ptr + turn), tl.load(k_sin_ptr + turn)
        x = x * cos + tl.where(dims < HALF, -swapped, swapped) * sin
        if HAS_NORM and IS_AFTER_ROPE:
            factor = norm_factor(x, at, head, eps, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, False)
            x = x * factor * tl.load(norm_ptr + head * HEAD_DIM + dims).to(tl.float32)
    if head < NUM_HEADS:
        out = (x * scale).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + (row * NUM_HEADS + head) * HEAD_DIM + dims, out)
        return
    # A layer's blocks have the order of a row's heads: keys of each head, then values.
    block = slot // PAGE_SIZE * page_blocks + layer_block + head - NUM_HEADS
    store_vector(
        x, kv_ptr, scales_ptr, block, slot % PAGE_SIZE, HEAD_DIM, NUM_ITEMS, SCALES_AT, CODEC
    )


@triton.jit
def activate_kernel(
    x_ptr,  # [T, 2 * WIDTH] where IS_GATED, else [T, WIDTH]
    out_ptr,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,  # `Activation.kind`
    LIMIT: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """Compute the activation of a row; if gated, of its first half, times the second half."""
    begin(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    STRIDE: tl.constexpr = 2 * WIDTH if IS_GATED else WIDTH
    gate = tl.load(x_ptr + row * STRIDE + column, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    if KIND == "clamped_swiglu":
        factor = tl.load(x_ptr + row * STRIDE + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        factor = tl.minimum(tl.maximum(factor, -LIMIT), LIMIT) + 1.0
        wide = tl.minimum(wide, LIMIT)
        activated = (wide / (1.0 + tl.exp(wide * -1.702))).to(gate.dtype)
        tl.store(out_ptr + row * WIDTH + column, (activated * factor).to(gate.dtype), mask=mask)
        return
    if KIND == "silu":
        activated = wide / (1.0 + tl.exp(-wide))
    elif KIND == "relu2":  # arXiv 2109.08668; NaN is not below 0
        activated = tl.where(wide < 0.0, 0.0, wide * wide)
    else:  # x / (1 + exp(-2 u)): arXiv 1606.08415, section 2
        inner = (wide * wide * wide * 0.044715 + wide) * -1.5957691216057308
        activated = wide / (1.0 + tl.exp(inner))
    activated = activated.to(gate.dtype)
    if IS_GATED:
        activated *= tl.load(x_ptr + row * STRIDE + WIDTH + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, activated, mask=mask)
