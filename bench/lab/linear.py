"""Time of linear layers alone, by kind and rows: `python -m foretoken.bench.lab.linear`.

All matrices of SmolLM2's layers (or of `--shape`) with random weights are multiplied one after
another, so that each is read from memory. The native kernels of each `--variant` and PyTorch's
packed matrices take turns. The rooflines are the read bandwidth and the rate of float32 products of
the same variant, measured in the same run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...core.ops.blocks import BLOCK_TYPES, BlockType, BlockWeight
from ...core.ops.native import NativeLibrary, Variant, native_library, variants
from ...core.ops.native.limits import best_seconds, matrix_rate, read_bandwidth
from ...core.ops.native.products import bfloat16_products
from ...core.ops.native.structs.linear import linear, pack_linear
from ...core.ops.quantize import QuantizedWeight, quantize_weight
from ...core.ops.torch.torch_ops import TorchOps
from ..common.report import RESULTS, heading, table, write_json

SHAPES = {  # Matrices of a layer, [out, in], and number of layers.
    "smollm2": (((960, 576), (576, 576), (3072, 576), (576, 1536)), 30),
    "0.6b": (((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 10),
}
_BLOCKS: dict[str, BlockType] = {each.kind: each for each in BLOCK_TYPES.values()}
KINDS = ("float32", "bfloat16", "int8", "int4", "int4_zero", *_BLOCKS)
ROWS = (1, 2, 4, 5, 8, 9, 16, 64, 256, 512)
_OUT = RESULTS / "linear.json"


class Figure(msgspec.Struct, frozen=True):
    """Time to multiply all matrices once, the best of several turns."""

    by: str  # A variant of the native kernels, or torch.
    kind: str
    rows: int
    ms: float
    over_one_row: float
    gbps: float  # Gigabytes of weights read per second.
    of_read: float  # Share of the read bandwidth.
    gflops: float
    of_float32: float  # Share of the rate of float32 products.


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    options = _parsed(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n")
    figures, limits = [], {}
    for variant in options.variant:
        library = native_library(variant)
        if library is None:
            raise SystemExit(f"the kernels {variant} are not available on this machine")
        library.set_threads(options.threads)
        limits[variant] = (read_bandwidth(library), matrix_rate(library))
        reads, rate = limits[variant]
        print(f"{variant}: reads {reads / 1e9:.1f} GB/s, products {rate / 1e9:.0f} GFLOP/s")
    torch.set_num_threads(options.threads)
    for kind in options.kinds:
        figures += list(measured(options, kind, limits))
    print(table([_shown(figure) for figure in figures]))
    report = {**heading(), "threads": options.threads}
    write_json(options.out, {**report, "limits": limits, "figures": figures})


def _shown(figure: Figure) -> dict[str, object]:
    return msgspec.structs.asdict(figure)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.linear", description=__doc__
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="CPU threads (%(default)s)")
    parser.add_argument(
        "--variant",
        action="append",
        choices=get_args(Variant),
        help="variant of the kernels to measure; may be repeated (the fastest of this CPU)",
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--turns", type=int, default=7, help="number of runs of each case (7)")
    parser.add_argument(
        "--torch", action="store_true", help="also measure PyTorch's packed matrices"
    )
    parser.add_argument("--out", type=Path, default=_OUT)
    options = parser.parse_args(argv)
    options.variant = options.variant or [variants()[0]]
    return options


def measured(
    options: argparse.Namespace, kind: str, limits: dict[str, tuple[float, float]]
) -> Iterator[Figure]:
    """Yield the figures of one kind of weights, by variant and rows."""
    shapes, num_layers = SHAPES[options.shape]
    parameters = num_layers * sum(out * width for out, width in shapes)
    for by in [*options.variant, *(["torch"] if options.torch else [])]:
        run, num_bytes = _prepared(by, kind, shapes, num_layers)
        reads, rate = limits.get(by, limits[options.variant[0]])
        first = 0.0
        for rows in options.rows:
            seconds = best_seconds(run(rows), repeats=options.turns)
            first = first or seconds
            yield Figure(
                by=by,
                kind=kind,
                rows=rows,
                ms=round(seconds * 1e3, 3),
                over_one_row=round(seconds / first, 2),
                gbps=round(num_bytes / seconds / 1e9, 1),
                of_read=round(num_bytes / seconds / reads, 2),
                gflops=round(2 * rows * parameters / seconds / 1e9),
                of_float32=round(2 * rows * parameters / seconds / rate, 2),
            )


def _prepared(
    by: str, kind: str, shapes: Sequence[tuple[int, int]], num_layers: int
) -> tuple[Callable[[int], Callable[[], None]], int]:
    """Return a function that makes a run for a number of rows, and the bytes of all matrices."""
    weights = [torch.randn(shape) for _ in range(num_layers) for shape in shapes]
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    if by == "torch":
        ops = TorchOps()
        reordered = [ops.pack_linear(weight.to(dtype)) for weight in weights]
        sizes = [weight.numel() * dtype.itemsize for weight in weights]
        calls = [(w.shape[1], _torch_call(ops, p)) for w, p in zip(weights, reordered, strict=True)]
        return _runs(calls, dtype, ops.min_rows), sum(sizes)
    library = native_library(by)  # type: ignore[arg-type]
    assert library is not None
    packed = [
        pack_linear(library, _of_kind(weight, kind), None, products=bfloat16_products(library))
        for weight in weights
    ]
    native = [(each.in_features, _native_call(library, each)) for each in packed]
    return _runs(native, dtype, 1), sum(each.num_bytes for each in packed)


def _of_kind(weight: Tensor, kind: str) -> Tensor | QuantizedWeight:
    if kind in ("float32", "bfloat16"):
        return weight.to(getattr(torch, kind))
    if kind in ("int8", "int4"):
        return quantize_weight(weight, kind)  # type: ignore[arg-type]
    return _random(kind, *weight.shape)


def _random(kind: str, out: int, width: int) -> QuantizedWeight:
    """Return random quantised blocks, with each row padded to whole blocks."""
    found = _BLOCKS["int4_min" if kind == "int4_zero" else kind]
    shape = (out, -(-width // found.size) * found.num_bytes)
    # These bytes contain no infinities and no tiny scales, which can take longer.
    weight = BlockWeight(found, (np.random.default_rng(0).integers(64, 120, shape, np.uint8),))
    return replace(weight.unpacked(), kind="int4_zero") if kind == "int4_zero" else weight


def _native_call(library: NativeLibrary, packed: object) -> Callable[[Tensor], object]:
    return lambda x: linear(library, x, packed)  # type: ignore[arg-type]


def _torch_call(ops: TorchOps, packed: object) -> Callable[[Tensor], object]:
    return lambda x: ops.linear(x, packed)  # type: ignore[arg-type]


def _runs(
    calls: Sequence[tuple[int, Callable[[Tensor], object]]], dtype: torch.dtype, least: int
) -> Callable[[int], Callable[[], None]]:
    def of_rows(rows: int) -> Callable[[], None]:
        inputs = {width: torch.randn(max(rows, least), width).to(dtype) for width, _ in calls}

        def run() -> None:
            for width, call in calls:
                call(inputs[width])

        return run

    return of_rows


if __name__ == "__main__":
    main()
