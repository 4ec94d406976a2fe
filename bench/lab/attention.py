"""What a shared prefix saves: `python -m foretoken.bench.lab.attention`.

One attention call of the native backend, the shape of Qwen3-0.6B, bfloat16: sequences decode one
token each behind a prefix of 2,048 tokens and a tail of their own. The baseline, in the same run
and in turn, is the same batch with the prefix copied to pages of each sequence's own. KV comes
from memory: the calls go through the layers, so that what the caches hold is no longer wanted.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ...core.config import EngineConfig
from ...core.ops.base import HeadLayout
from ...core.ops.batch import Segment, build_batch
from ...core.ops.kv_pool import KVPool
from ...core.ops.native import NativeLibrary, native_library
from ...core.ops.native.limits import read_bandwidth
from ...core.ops.native.native_ops import NativeOps
from ...core.ops.native.plan import NativePlan
from ..report import RESULTS, Spread, command, machine, table, write_json

NUM_LAYERS = 28
HEADS = HeadLayout(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
DTYPE = torch.bfloat16
PREFIX_LEN = 2_048  # tokens
TAIL_LEN = 32  # tokens of each sequence's own, the decoded one included
NUM_SHARERS = (1, 4, 16)
KEY_BYTES = 2 * HEADS.num_kv_heads * HEADS.head_dim * DTYPE.itemsize  # and its value's, a layer
PAGE_SIZE = EngineConfig().sizes("cpu").page_size  # tokens
COLD_BYTES = 200 << 20  # read between two reads of the same KV
_OUT = RESULTS / "attention.json"


class Figure(msgspec.Struct, frozen=True):
    """A call with shared pages (`shared`), and with pages of each sequence's own (`own`)."""

    num_sharers: int
    own_us: Spread
    shared_us: Spread
    ratio: float  # own over shared, the median of the pairs
    cpu_ratio: float  # of processor time
    own_gbps: float  # KV that a call must read, each page once, over its time
    own_of_read: float  # share of the measured bandwidth
    shared_gbps: float
    shared_of_read: float


class Timing(NamedTuple):
    """Seconds of one call, and of the processor in it on all threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Batch:
    """Sequences that decode, and how many layers hold their KV."""

    plan: NativePlan
    num_layers: int
    num_bytes: int  # of KV a layer, each page once


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON to ``--out``. Exits where there are no native kernels."""
    options = _parsed(argv)
    library = native_library()
    if library is None:
        raise SystemExit("there are no native kernels on this machine")
    ops = NativeOps(library)
    ops.set_threads(options.threads)
    host = machine()
    print(command(), *(f"{key}: {value}" for key, value in host.items()), sep="\n")
    bandwidth = read_bandwidth(library)
    print(f"threads: {options.threads}, read bandwidth: {bandwidth / 1e9:.1f} GB/s\n")
    figures = [measured(ops, count, bandwidth, options.repeats) for count in NUM_SHARERS]
    print(table([msgspec.structs.asdict(figure) for figure in figures]))
    write_json(options.out, _report(host, library, options.threads, bandwidth, figures))


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.attention", description=__doc__
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, default=cores, help="number of CPU threads (all: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=100, help="number of pairs of calls")
    parser.add_argument("--out", type=Path, default=_OUT)
    return parser.parse_args(argv)


def _report(
    host: dict[str, object],
    library: NativeLibrary,
    threads: int,
    bandwidth: float,
    figures: Sequence[Figure],
) -> dict[str, object]:
    return {
        "command": command(),
        "machine": host,
        "variant": library.variant,
        "threads": threads,
        "read_gbps": bandwidth / 1e9,
        "prefix_len": PREFIX_LEN,
        "tail_len": TAIL_LEN,
        "page_size": PAGE_SIZE,
        "figures": figures,
    }


def measured(ops: NativeOps, num_sharers: int, bandwidth: float, repeats: int) -> Figure:
    """Both batches in turn."""
    own, shared = batches(num_sharers)
    q = torch.randn(num_sharers, HEADS.num_heads * HEADS.head_dim).to(DTYPE)
    calls = [(_timed(ops, q, own, i), _timed(ops, q, shared, i)) for i in range(repeats)]
    own_us, shared_us = (Spread.of([pair[i].wall * 1e6 for pair in calls]) for i in (0, 1))
    own_rate = own.num_bytes / (own_us.median / 1e6)
    shared_rate = shared.num_bytes / (shared_us.median / 1e6)
    return Figure(
        num_sharers=num_sharers,
        own_us=own_us,
        shared_us=shared_us,
        ratio=statistics.median(a.wall / b.wall for a, b in calls),
        cpu_ratio=statistics.median(a.cpu / b.cpu for a, b in calls),
        own_gbps=own_rate / 1e9,
        own_of_read=own_rate / bandwidth,
        shared_gbps=shared_rate / 1e9,
        shared_of_read=shared_rate / bandwidth,
    )


def _timed(ops: NativeOps, q: Tensor, batch: Batch, turn: int) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    ops.attention(q, turn % batch.num_layers, batch.plan, None)
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def batches(num_sharers: int) -> tuple[Batch, Batch]:
    """The batch with pages of each sequence's own, and with a shared prefix."""
    prefix_pages, tail_pages = PREFIX_LEN // PAGE_SIZE, -(-TAIL_LEN // PAGE_SIZE)
    pool = _pool(num_sharers * (prefix_pages + tail_pages) + prefix_pages)
    ids = iter(random.Random(0).sample(range(pool.num_pages), pool.num_pages))
    prefix = list(_taken(ids, prefix_pages))
    tails = [list(_taken(ids, tail_pages)) for _ in range(num_sharers)]
    shared = [prefix + tail for tail in tails]
    own = [list(_taken(ids, prefix_pages)) + tail for tail in tails]
    return _batch(pool, own), _batch(pool, shared)


def _pool(num_pages: int) -> KVPool:
    """Of all layers, which spreads a layer's pages as in the engine; unused ones cost nothing."""
    return KVPool(
        num_pages,
        num_layers=NUM_LAYERS,
        num_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        page_size=PAGE_SIZE,
        dtype=DTYPE,
        device="cpu",
    )


def _taken(ids: Iterator[int], count: int) -> Iterator[int]:
    return (next(ids) for _ in range(count))


def _batch(pool: KVPool, tables: Sequence[Sequence[int]]) -> Batch:
    """One decoding row per page table, with KV in as many layers as no cache holds."""
    distinct = {page for pages in tables for page in pages}
    num_bytes = len(distinct) * pool.page_size * KEY_BYTES
    num_layers = min(NUM_LAYERS, -(-COLD_BYTES // num_bytes))
    noise = torch.randn(pool.data.shape[2:]).to(DTYPE)
    for page in distinct:
        pool.data[page, :num_layers] = noise
    start = PREFIX_LEN + TAIL_LEN - 1
    segments = [Segment([0], start, array("q", pages), 0) for pages in tables]
    batch = build_batch(segments, page_size=pool.page_size, device="cpu", min_rows=1)
    unused = torch.empty(batch.num_rows, HEADS.head_dim // 2)  # attention turns nothing
    return Batch(NativePlan(batch, pool, HEADS, [(unused, unused)]), num_layers, num_bytes)


if __name__ == "__main__":
    main()
