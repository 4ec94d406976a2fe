"""Inputs of layers with states: the convolution reads a pass, logs and slots.

Logs and slots are written after every program has read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of a segment: first position, position after the last, first row, slot, log, position of
# its own state after the pass, first kept state, number of kept states.
SEGMENT_WORDS = tl.constexpr(8)
LENGTH_EPS = tl.constexpr(1e-6)  # added to the squared length of queries and keys
SERIES = tl.constexpr(0.03125)  # below it a series of log(1 + x) is exact enough


@triton.jit
def silu(x):
    """Return ``x * sigmoid(x)``."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return ``log(1 + exp(x))``."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.33333334 - small * 0.25)))
    return tl.where(small < SERIES, series, tl.log(1.0 + small)) + tl.maximum(x, 0.0)


@triton.jit
def input_of(
    mixed_ptr, tail_ptr, log_ptr, row, position, start, at, channel, mask,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Return a position's inputs: from the pass, from the log, or from the state's tail.

    The pass has positions from ``start``, the log from ``at``. ``row``: the position's row, if it
    is in the pass. ``tail_ptr`` and ``log_ptr`` belong to the segment.
    """
    if position >= start:
        x = tl.load(mixed_ptr + row.to(tl.int64) * STRIDE + channel, mask=mask, other=0.0)
    elif position >= at:
        x = tl.load(log_ptr + position % RING * CHANNELS + channel, mask=mask, other=0.0)
    else:
        tail = (position - at + TAPS - 1) * CHANNELS
        x = tl.load(tail_ptr + tail + channel, mask=mask, other=0.0)
    return x


@triton.jit
def inputs_kernel(
    mixed_ptr,  # [T, CHANNELS + values] q, k, v and z
    gates_ptr,  # delta rule: [T, 2 * HEADS] b and a; Mamba-2: [T, HEADS]; read where HAS_GATES
    taps_ptr,  # [CHANNELS, TAPS] float32
    taps_bias_ptr,  # [CHANNELS] float32, read where HAS_BIAS
    decay_ptr,  # [HEADS] float32
    dt_bias_ptr,  # [HEADS] float32
    tails_ptr,  # the layer's inputs in slot 0
    log_inputs_ptr,  # the layer's inputs of rows not committed yet: log 0 of the pool
    log_c_ptr,  # c in log 0, float32
    x_ptr,  # [T, CHANNELS] float32, written: q, k and v
    c_ptr,  # [T, HEADS] float32, written: sum of the log decays since the page's start
    beta_ptr,  # [T, HEADS] float32, written: factor of a row's addition to the state
    rows_ptr,  # [T] segment; -1: no row
    segments_ptr,  # [num_segments, SEGMENT_WORDS]
    at_ptr,  # [num_segments] position of the state
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    PAGE: tl.constexpr, SLOT: tl.constexpr, LOG: tl.constexpr, LOG_FLOATS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,  # items of a head
    HEADS_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_GATES: tl.constexpr,
    MOST_BETA: tl.constexpr,
):  # fmt: skip
    """Compute one head of a row's queries, keys or values; the last program, the row's gates."""
    row, part = tl.program_id(0), tl.program_id(1)
    segment = tl.load(rows_ptr + row)
    if segment < 0:
        return
    words = segments_ptr + segment * SEGMENT_WORDS
    start = tl.load(words)
    position = start + row - tl.load(words + 2)
    log = tl.load(words + 4).to(tl.int64)
    if part == 2 * KEY_HEADS + HEADS:
        write_gates(
            gates_ptr, decay_ptr, dt_bias_ptr, log_c_ptr + log * LOG_FLOATS, c_ptr, beta_ptr,
            row, position, start, RING, PAGE, HEADS, HEADS_TILE, IS_DELTA, HAS_GATES, MOST_BETA,
        )  # fmt: skip
        return
    at = tl.load(at_ptr + segment)
    is_value = part >= 2 * KEY_HEADS
    first = part * KEY_DIM
    if is_value:
        first = 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM
    item = tl.arange(0, TILE)
    mask = item < tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel = first + item
    tail_ptr = tails_ptr + tl.load(words + 3).to(tl.int64) * SLOT
    log_ptr = log_inputs_ptr + log * LOG
    total = tl.zeros([TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        x = input_of(
            mixed_ptr, tail_ptr, log_ptr, row - back, position - back, start, at, channel, mask,
            STRIDE, CHANNELS, TAPS, RING,
        )  # fmt: skip
        total += x.to(tl.float32) * tl.load(taps_ptr + channel * TAPS + tap, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(taps_bias_ptr + channel, mask=mask, other=0.0)
    total = silu(total)
    if IS_DELTA:
        normed = total / tl.sqrt(tl.sum(total * total, 0) + LENGTH_EPS)
        normed = tl.where(part < KEY_HEADS, normed * KEY_DIM**-0.5, normed)
        total = tl.where(is_value, total, normed)
    tl.store(x_ptr + row.to(tl.int64) * CHANNELS + channel, total, mask=mask)


@triton.jit
def write_gates(
    gates_ptr, decay_ptr, dt_bias_ptr, log_c_ptr, c_ptr, beta_ptr, row, position, start,
    RING: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HEADS_TILE: tl.constexpr,
    IS_DELTA: tl.constexpr, HAS_GATES: tl.constexpr, MOST_BETA: tl.constexpr,
):  # fmt: skip
    """Write c and beta of all heads of a row; c continues the log or begins at the page's start."""
    WIDTH: tl.constexpr = 2 * HEADS if IS_DELTA else HEADS
    head = tl.arange(0, HEADS_TILE)
    mask = head < HEADS
    decay = tl.load(decay_ptr + head, mask=mask, other=0.0)
    bias = tl.zeros([HEADS_TILE], tl.float32)
    if HAS_GATES:
        bias = tl.load(dt_bias_ptr + head, mask=mask, other=0.0)
    base = position // PAGE * PAGE
    first = tl.maximum(base, start)
    c = tl.zeros([HEADS_TILE], tl.float32)
    if first > base:
        c = tl.load(log_c_ptr + head * RING + (first - 1) % RING, mask=mask, other=0.0)
    dt = tl.full([HEADS_TILE], 1.0, tl.float32)
    for each in range(first, position + 1):
        if HAS_GATES:
            gates = gates_ptr + (row + each - position).to(tl.int64) * WIDTH + WIDTH - HEADS
            dt = softplus(tl.load(gates + head, mask=mask, other=0.0).to(tl.float32) + bias)
        c += decay * dt
    beta = dt
    if IS_DELTA:
        b = tl.load(gates_ptr + row.to(tl.int64) * WIDTH + head, mask=mask, other=0.0)
        beta = MOST_BETA / (1.0 + tl.exp(-b.to(tl.float32)))
    tl.store(c_ptr + row.to(tl.int64) * HEADS + head, c, mask=mask)
    tl.store(beta_ptr + row.to(tl.int64) * HEADS + head, beta, mask=mask)


@triton.jit
def short_conv_kernel(
    inputs_ptr,  # [T, CHANNELS] b * x
    mixed_ptr,  # [T, 3 * CHANNELS] b, c and x; only c is read
    taps_ptr,  # [CHANNELS, TAPS] float32
    taps_bias_ptr,  # [CHANNELS] float32, read where HAS_BIAS
    tails_ptr,  # the layer's inputs in slot 0
    log_inputs_ptr,  # the layer's inputs of rows not committed yet: log 0 of the pool
    out_ptr,  # [T, CHANNELS], written
    rows_ptr,
    segments_ptr,
    at_ptr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    SLOT: tl.constexpr, LOG: tl.constexpr,
    TILE: tl.constexpr,  # channels of a program
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute some channels of a row of a gated short convolution; zeros for an empty row."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = channel < CHANNELS
    to = out_ptr + row.to(tl.int64) * CHANNELS + channel
    segment = tl.load(rows_ptr + row)
    if segment < 0:
        tl.store(to, tl.zeros([TILE], out_ptr.dtype.element_ty), mask=mask)
        return
    words = segments_ptr + segment * SEGMENT_WORDS
    start, at = tl.load(words), tl.load(at_ptr + segment)
    position = start + row - tl.load(words + 2)
    tail_ptr = tails_ptr + tl.load(words + 3).to(tl.int64) * SLOT
    log_ptr = log_inputs_ptr + tl.load(words + 4).to(tl.int64) * LOG
    total = tl.zeros([TILE], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        x = input_of(
            inputs_ptr, tail_ptr, log_ptr, row - back, position - back, start, at, channel, mask,
            CHANNELS, CHANNELS, TAPS, RING,
        )  # fmt: skip
        total += x.to(tl.float32) * tl.load(taps_ptr + channel * TAPS + tap, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(taps_bias_ptr + channel, mask=mask, other=0.0)
    c = tl.load(mixed_ptr + (3 * row.to(tl.int64) + 1) * CHANNELS + channel, mask=mask, other=0.0)
    tl.store(to, (c.to(tl.float32) * total).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_inputs_kernel(
    mixed_ptr,  # [T, STRIDE]
    tails_ptr,  # the layer's inputs in slot 0; written
    log_inputs_ptr,  # the layer's inputs of rows not committed yet: log 0 of the pool; written
    segments_ptr,
    keeps_ptr,
    at_ptr,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    SLOT: tl.constexpr, LOG: tl.constexpr,
    TILE: tl.constexpr,  # channels of a program
):  # fmt: skip
    """Write some channels of a segment's inputs: to kept states, to its own state, to its log."""
    segment = tl.program_id(1)
    words = segments_ptr + segment * SEGMENT_WORDS
    start, stop, first_row = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    if start == stop:
        return
    slot, log = tl.load(words + 3).to(tl.int64), tl.load(words + 4).to(tl.int64)
    moved, keep, num_keeps = tl.load(words + 5), tl.load(words + 6), tl.load(words + 7)
    at = tl.load(at_ptr + segment)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = channel < CHANNELS
    tail_ptr, log_ptr = tails_ptr + slot * SLOT, log_inputs_ptr + log * LOG
    # The own state is written last, because kept states may be read from it.
    for each in range(keep, keep + num_keeps + 1):
        position, target = moved, slot
        if each < keep + num_keeps:
            position = tl.load(keeps_ptr + 2 * each)
            target = tl.load(keeps_ptr + 2 * each + 1).to(tl.int64)
        to = tails_ptr + target * SLOT
        if (each < keep + num_keeps) | (moved > at):
            for tap in tl.static_range(TAPS - 1):
                one = position - (TAPS - 1) + tap
                x = input_of(
                    mixed_ptr, tail_ptr, log_ptr, first_row + one - start, one, start, at,
                    channel, mask, STRIDE, CHANNELS, TAPS, RING,
                )  # fmt: skip
                tl.store(to + tap * CHANNELS + channel, x, mask=mask)
    if TAPS == 1:  # a log without inputs
        return
    tl.debug_barrier()  # other threads must have read the log before it is written
    for position in range(tl.maximum(start, stop - RING), stop):
        row = (first_row + position - start).to(tl.int64)
        x = tl.load(mixed_ptr + row * STRIDE + channel, mask=mask)
        tl.store(log_ptr + position % RING * CHANNELS + channel, x, mask=mask)
