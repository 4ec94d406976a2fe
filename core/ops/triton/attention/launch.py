"""Launches of the attention kernels: the number of programs and their tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ...kv_pool import KVPool
from ...weights import HeadLayout
from ..chain import chained
from ..graph.input_fields import ITEM_WORDS
from ..graph.plan import DevicePlan, Work
from .attention import attend_kernel, merge_kernel
from .tile_schedule import SPLIT

MERGED_HEADS = 4  # most heads of a merging program: 16 bytes per thread at 128 dimensions


class Rule(NamedTuple):
    """Keys that a row sees, and changes of its scores: arguments of `Ops.attention`."""

    window: int | None
    cap: float | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Parameters of a launch. Only ``keys`` affects the bits of the output."""

    keys: int  # positions of a tile
    programs: int  # programs per multiprocessor, limited by its registers and shared memory
    num_warps: int
    num_stages: int  # with 2 n + 1 stages, n tiles of keys and values are being loaded


NARROW = AttentionLaunch(keys=32, programs=3, num_warps=4, num_stages=5)
WIDE = AttentionLaunch(keys=64, programs=4, num_warps=8, num_stages=5)
WIDE_BYTES = 256  # longest vector for `WIDE`; of longer ones fewer fit into shared memory


def attention_launch(pool: KVPool, *, is_narrow: bool, one_tile: bool) -> AttentionLaunch:
    """Return the launch for narrow or wide items; with ``one_tile`` both have the narrow launch."""
    if is_narrow or one_tile:
        return NARROW
    vector_bytes = pool.head_dim * pool.dtype.itemsize
    return WIDE if vector_bytes <= WIDE_BYTES else replace(WIDE, keys=32, num_stages=3)


def attend(
    q: Tensor,
    out: Tensor,
    layer: int,
    plan: DevicePlan,
    work: Work,
    rule: Rule,
    *,
    is_narrow: bool,
    launch: AttentionLaunch | None = None,
) -> None:
    """Compute the narrow or the wide items of a work list.

    ``launch``: None for the result of `attention_launch`.
    """
    geometry, partial = plan.geometry, plan.partial_sums
    heads, pool = geometry.heads, geometry.pool
    if launch is None:
        launch = attention_launch(pool, is_narrow=is_narrow, one_tile=geometry.one_tile)
    num_programs = max(1, launch.programs * _num_multiprocessors(q.device) // heads.num_kv_heads)
    attend_kernel[(num_programs, heads.num_kv_heads)](
        q, out, *memory_of(pool), partial.acc, partial.max_score, partial.exp_sum,
        plan.last_seen, work.partials, work.counts, q if rule.sinks is None else rule.sinks,
        plan.words,
        geometry.layer_block(layer), geometry.page_blocks,
        **shape(heads, pool), SPLIT=SPLIT, KV_SPLIT_GROUP=geometry.kv_split_group,
        TILE=launch.keys,
        TILE_ROWS=geometry.narrow_tile if is_narrow else geometry.wide_tile,
        WINDOW=rule.window or 0, CAP=rule.cap or 0.0, HAS_SINKS=rule.sinks is not None,
        IS_NARROW=is_narrow, IS_WHOLE=not is_narrow and not geometry.one_tile,
        ITEM_WORDS=ITEM_WORDS,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
        **chained(len(q), q.device),
    )  # fmt: skip


def merge(out: Tensor, plan: DevicePlan, work: Work, rule: Rule) -> None:
    """Merge the partial sums of a work list into the output."""
    geometry, partial = plan.geometry, plan.partial_sums
    heads = geometry.heads
    heads_each = gcd(heads.num_heads, MERGED_HEADS)
    merge_kernel[(len(out), heads.num_heads // heads_each)](
        out, partial.acc, partial.max_score, partial.exp_sum, plan.last_seen, work.partials,
        out if rule.sinks is None else rule.sinks, plan.rows_in_tile,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEADS=heads_each,
        HEAD_DIM=heads.head_dim, SPLIT=SPLIT, KV_SPLIT_GROUP=geometry.kv_split_group,
        WIDE_TILE=geometry.wide_tile, WINDOW=rule.window or 0, HAS_SINKS=rule.sinks is not None,
        **chained(len(out), out.device),
    )  # fmt: skip


def shape(heads: HeadLayout, pool: KVPool) -> dict[str, int | str]:
    """Return the constants of a kernel that reads or writes the pool."""
    return {
        "NUM_HEADS": heads.num_heads,
        "NUM_KV_HEADS": heads.num_kv_heads,
        "HEAD_DIM": heads.head_dim,
        "PAGE_SIZE": pool.page_size,
        "NUM_ITEMS": pool.block.num_items,
        "SCALES_AT": pool.block.scales_at,
        "CODEC": pool.block.codec.name,
    }


def memory_of(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Return the pool's memory in the dtype that kernels load, and as float32 for its scales.

    Without scales the second tensor is not used.
    """
    codec = pool.block.codec
    if not codec.is_scaled:
        return pool.data, pool.data
    return pool.data.view(getattr(torch, codec.number)), pool.data.view(torch.float32)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
