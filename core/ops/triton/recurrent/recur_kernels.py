"""Recurrent layers on the device; core/ops/torch/state.py is the reference.

A program of `recur_kernel` has some columns of a head's state, which do not depend on other
columns. It processes a segment's rows in order; everything that does not depend on the state is
computed before, by one program per row. Logs are written after every program has read them.

Every sum is over a tile of one shape, with 0 for entries that a row does not see, so its bits
depend only on the row's position in the page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .inputs_kernels import SEGMENT_WORDS, silu


@triton.jit
def products_kernel(
    x_ptr,  # [T, CHANNELS] float32
    log_k_ptr,  # keys in log 0, float32
    products_ptr,  # [T, KEY_HEADS, 2, PAGE] float32, written: the key's and the query's products
    rows_ptr,
    segments_ptr,
    CHANNELS: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, LOG_FLOATS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr,
    IS_TILED: tl.constexpr,
):  # fmt: skip
    """Multiply a row's key and query by the keys of its page, up to its own."""
    row, key_head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(rows_ptr + row)
    if segment < 0:
        return
    words = segments_ptr + segment * SEGMENT_WORDS
    start = tl.load(words)
    position = start + row - tl.load(words + 2)
    item, place = tl.arange(0, KEYS), tl.arange(0, PAGE)
    mask = item < KEY_DIM
    own = x_ptr + row.to(tl.int64) * CHANNELS + key_head * KEY_DIM + item
    q = tl.load(own, mask=mask, other=0.0)
    k = tl.load(own + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
    positions = position // PAGE * PAGE + place
    here = ((positions >= start) & (positions <= position))[:, None] & mask[None, :]
    logged = (positions < start)[:, None] & mask[None, :]
    others = (row + positions - position).to(tl.int64) * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM
    new = tl.load(x_ptr + others[:, None] + item[None, :], mask=here, other=0.0)
    head = key_head if IS_TILED else key_head * (HEADS // KEY_HEADS)
    log = log_k_ptr + tl.load(words + 4).to(tl.int64) * LOG_FLOATS + head * RING * KEY_DIM
    entries = (positions % RING) * KEY_DIM
    old = tl.load(log + entries[:, None] + item[None, :], mask=logged, other=0.0)
    keys = tl.where(here, new, old)
    to = products_ptr + (row.to(tl.int64) * KEY_HEADS + key_head) * 2 * PAGE + place
    tl.store(to, tl.sum(keys * k[None, :], 1))
    tl.store(to + PAGE, tl.sum(keys * q[None, :], 1))


@triton.jit
def folded(
    state, x_ptr, k_at, u_ptr, c_ptr, log_k_ptr, log_u_ptr, log_c_ptr,
    base, start, first_row, last, key, key_mask, value, value_mask,
    CHANNELS: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return some columns of a head's S at the start of the next page.

    ``last``: c of this page's last row. All pointers but ``x_ptr`` are the head's.
    """
    state = tl.exp(last) * state
    for place in range(PAGE):
        position = base + place
        if position >= start:
            row = (first_row + position - start).to(tl.int64)
            c = tl.load(c_ptr + row * HEADS)
            k = tl.load(x_ptr + row * CHANNELS + k_at + key, mask=key_mask, other=0.0)
            u = tl.load(u_ptr + row * (HEADS * VALUE_DIM) + value, mask=value_mask, other=0.0)
        else:
            entry = position % RING
            c = tl.load(log_c_ptr + entry)
            k = tl.load(log_k_ptr + entry * KEY_DIM + key, mask=key_mask, other=0.0)
            u = tl.load(log_u_ptr + entry * VALUE_DIM + value, mask=value_mask, other=0.0)
        state += (tl.exp(last - c) * k)[:, None] * u[None, :]
    return state


@triton.jit
def recur_kernel(
    x_ptr,  # [T, CHANNELS] float32
    products_ptr,  # [T, KEY_HEADS, 2, PAGE] float32
    c_ptr,  # [T, HEADS] float32
    beta_ptr,  # [T, HEADS] float32
    skip_ptr,  # [HEADS] float32, read where HAS_SKIP
    u_ptr,  # [T, HEADS, VALUE_DIM] float32, written: the rows' additions at their keys
    read_ptr,  # [T, HEADS, VALUE_DIM] float32, written: the state's outputs for the rows
    states_ptr,  # the layer's S in slot 0, float32; written
    log_k_ptr,  # k, u and c in log 0, float32
    log_u_ptr,
    log_c_ptr,
    segments_ptr,
    keeps_ptr,  # [num_keeps, 2] position, slot
    at_ptr,
    CHANNELS: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr,
    SLOT_FLOATS: tl.constexpr, LOG_FLOATS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,  # sizes of a tile of S
    IS_TILED: tl.constexpr, IS_DELTA: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a head's state through all pages of a segment."""
    head, segment = tl.program_id(1), tl.program_id(2)
    words = segments_ptr + segment * SEGMENT_WORDS
    start, stop, first_row = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    if start == stop:
        return
    slot, log = tl.load(words + 3), tl.load(words + 4).to(tl.int64) * LOG_FLOATS
    moved, keep, num_keeps = tl.load(words + 5), tl.load(words + 6), tl.load(words + 7)
    at = tl.load(at_ptr + segment)
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    k_at = (KEY_HEADS + key_head) * KEY_DIM
    key, place = tl.arange(0, KEYS), tl.arange(0, PAGE)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    key_mask, value_mask = key < KEY_DIM, value < VALUE_DIM
    x_mask = key_mask[:, None] & value_mask[None, :]
    tile = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    skip = tl.load(skip_ptr + head) if HAS_SKIP else 0.0
    # From here on all pointers but ``x_ptr`` are the head's.
    c_ptr += head
    u_ptr += head * VALUE_DIM
    log_k_ptr += log + head * (RING * KEY_DIM)
    log_u_ptr += log + head * (RING * VALUE_DIM)
    log_c_ptr += log + head * RING
    own = states_ptr + slot.to(tl.int64) * SLOT_FLOATS + tile
    state = tl.load(own, mask=x_mask, other=0.0)
    for each in range(keep, keep + num_keeps):
        if tl.load(keeps_ptr + 2 * each) == at:
            kept = tl.load(keeps_ptr + 2 * each + 1).to(tl.int64)
            tl.store(states_ptr + kept * SLOT_FLOATS + tile, state, mask=x_mask)
    for base in range(at, stop, PAGE):
        end = tl.minimum(base + PAGE, stop)
        positions = base + place
        is_new, is_old = (positions >= start) & (positions < stop), positions < start
        rows = (first_row + positions - start).to(tl.int64)
        new = tl.load(c_ptr + rows * HEADS, mask=is_new, other=0.0)
        cs = tl.where(is_old, tl.load(log_c_ptr + positions % RING, mask=is_old, other=0.0), new)
        entries = (positions % RING)[:, None] * VALUE_DIM + value[None, :]
        logged = is_old[:, None] & value_mask[None, :]
        us = tl.load(log_u_ptr + entries, mask=logged, other=0.0)
        for position in range(tl.maximum(base, start), end):
            row = (first_row + position - start).to(tl.int64)
            x = x_ptr + row * CHANNELS
            q = tl.load(x + key_head * KEY_DIM + key, mask=key_mask, other=0.0)
            v = tl.load(
                x + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value, mask=value_mask, other=0.0
            )
            products = products_ptr + (row * KEY_HEADS + key_head) * (2 * PAGE) + place
            c, beta = tl.load(c_ptr + row * HEADS), tl.load(beta_ptr + row * HEADS + head)
            left, weights = tl.exp(c), tl.exp(tl.minimum(c - cs, 0.0))
            u = beta * v
            if IS_DELTA:
                k = tl.load(x + k_at + key, mask=key_mask, other=0.0)
                for_key = tl.where(positions < position, weights * tl.load(products), 0.0)
                known = left * tl.sum(state * k[:, None], 0)
                known += tl.sum(for_key[:, None] * us, 0)
                u = beta * (v - known)
            us = tl.where((positions == position)[:, None], u[None, :], us)
            for_query = tl.where(positions <= position, weights * tl.load(products + PAGE), 0.0)
            read = left * tl.sum(state * q[:, None], 0) + tl.sum(for_query[:, None] * us, 0)
            if HAS_SKIP:
                read += skip * v
            to = row * (HEADS * VALUE_DIM) + value
            tl.store(u_ptr + to, u, mask=value_mask)
            tl.store(read_ptr + head * VALUE_DIM + to, read, mask=value_mask)
        if end == base + PAGE:
            tl.debug_barrier()  # other threads also read u
            last = tl.sum(tl.where(place == PAGE - 1, cs, 0.0), 0)
            state = folded(
                state, x_ptr, k_at, u_ptr, c_ptr, log_k_ptr, log_u_ptr, log_c_ptr,
                base, start, first_row, last, key, key_mask, value, value_mask,
                CHANNELS, RING, PAGE, HEADS, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
            for each in range(keep, keep + num_keeps):
                if tl.load(keeps_ptr + 2 * each) == end:
                    kept = tl.load(keeps_ptr + 2 * each + 1).to(tl.int64)
                    tl.store(states_ptr + kept * SLOT_FLOATS + tile, state, mask=x_mask)
            if end == moved:
                tl.store(own, state, mask=x_mask)


@triton.jit
def gated_norm_kernel(
    read_ptr,  # [T, PARTS * WIDTH] float32
    mixed_ptr,  # [T, CHANNELS + PARTS * WIDTH]; only z is read
    norm_ptr,  # [PARTS * WIDTH]; delta rule: [WIDTH]; read where HAS_NORM
    out_ptr,  # [T, PARTS * WIDTH], written
    eps,
    rows_ptr,
    CHANNELS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_DELTA: tl.constexpr,
    IS_LIGHTNING: tl.constexpr,  # whether the gate is a sigmoid
    GATES_LAST: tl.constexpr,  # whether the norm is before the gate
):  # fmt: skip
    """Compute the RMS norm of a part of a row and gate it; zeros for an empty row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    item = tl.arange(0, TILE)
    mask = item < WIDTH
    at = row * (PARTS * WIDTH) + part * WIDTH + item
    if tl.load(rows_ptr + row) < 0:
        tl.store(out_ptr + at, tl.zeros([TILE], out_ptr.dtype.element_ty), mask=mask)
        return
    x = tl.load(read_ptr + at, mask=mask, other=0.0)
    z = mixed_ptr + row * (CHANNELS + PARTS * WIDTH) + CHANNELS + part * WIDTH + item
    gate = tl.load(z, mask=mask, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-gate)) if IS_LIGHTNING else silu(gate)
    if not GATES_LAST:
        x = x * gate
    if HAS_NORM:
        shared = item if IS_DELTA else part * WIDTH + item
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x = x * factor * tl.load(norm_ptr + shared, mask=mask, other=0.0)
    if GATES_LAST:
        x = x * gate
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def log_kernel(
    x_ptr,  # [T, CHANNELS] float32
    u_ptr,  # [T, HEADS, VALUE_DIM] float32
    c_ptr,  # [T, HEADS] float32
    log_k_ptr,  # k, u and c in log 0, float32; written
    log_u_ptr,
    log_c_ptr,
    rows_ptr,
    segments_ptr,
    CHANNELS: tl.constexpr, RING: tl.constexpr, LOG_FLOATS: tl.constexpr,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
    IS_TILED: tl.constexpr,
):  # fmt: skip
    """Write a head's entry of a row to the log, if the row is among the last ``RING`` ones."""
    row, head = tl.program_id(0), tl.program_id(1)
    segment = tl.load(rows_ptr + row)
    if segment < 0:
        return
    words = segments_ptr + segment * SEGMENT_WORDS
    position = tl.load(words) + row - tl.load(words + 2)
    if position + RING < tl.load(words + 1):
        return
    log = tl.load(words + 4).to(tl.int64) * LOG_FLOATS
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    row = row.to(tl.int64)
    k = tl.load(x_ptr + row * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM + key, mask=key < KEY_DIM)
    u = tl.load(u_ptr + (row * HEADS + head) * VALUE_DIM + value, mask=value < VALUE_DIM)
    place = log + head * RING + position % RING
    entry = head * RING + position % RING
    tl.store(log_k_ptr + log + entry * KEY_DIM + key, k, mask=key < KEY_DIM)
    tl.store(log_u_ptr + log + entry * VALUE_DIM + value, u, mask=value < VALUE_DIM)
    tl.store(log_c_ptr + place, tl.load(c_ptr + row * HEADS + head))
