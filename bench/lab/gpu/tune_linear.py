"""Times alternative tiles of the linear layers (core/ops/triton/linear/tiles.py) on a GPU.

``python -m foretoken.bench.lab.gpu.tune_linear`` prints, for each shape and number of rows, the
tiles in use, the alternatives, the library, and the time that reading the weight takes. ``--plan``
only prints the alternatives to time and needs no GPU. If one is faster, change tiles.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ....core.ops.machine.device import choose_device
from ....core.ops.triton.linear.tiles import (
    FEW_ROWS,
    MANY_ROWS,
    Bits,
    LinearLaunch,
    LinearTiles,
    linear_launch,
    linear_tiles,
)
from ...common.report import command, table, write_json
from .gauge import Gauge

if TYPE_CHECKING:
    from ....core.ops.triton.linear.tiled_linear import TiledLinear

ROWS: dict[Bits, tuple[int, ...]] = {0: (1, 64, 256, 2048), 8: (1, 64, 256, 2048), 4: (1, 16)}
REPEATS = 20
READ_BYTES = 2**30  # Bytes that are read to measure the read roofline.
# Bytes of weights read in turn: several times a GPU's cache, like the reads between two steps.
COLD_BYTES = 2**28
SHAPES: dict[str, tuple[int, int]] = {  # Shapes of weights, [out, in].
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
    "8b lm_head": (151936, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b lm_head": (151936, 1024),
}
LIBRARY = "F.linear"


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles for a weight matrix, and the kernel's launch for a number of rows."""

    tiles: LinearTiles
    launch: LinearLaunch
    is_used: bool  # Whether tiles.py uses this choice.

    @property
    def name(self) -> str:
        """Name that lists the size of a tile and the numbers of pieces, stages and warps."""
        pieces = f" in {self.tiles.pieces}" if self.tiles.pieces > 1 else ""
        apart = " apart" if self.launch.is_apart else ""
        tile = f"{self.launch.rows} x {self.launch.columns}"
        return (
            f"{tile}{pieces}{apart}, {self.launch.num_stages} stages, {self.launch.num_warps} warps"
        )


def choices(out_features: int, in_features: int, num_rows: int, *, bits: Bits) -> list[Choice]:
    """Return the choices to time: the one in use, then variants of it, then other tiles."""
    used = linear_tiles(out_features, in_features, torch.bfloat16, bits=bits)
    launch = linear_launch(used, out_features, num_rows)
    if bits == 4:
        others = list(_rough_choices(used, launch.rows, out_features, num_rows))
        return [Choice(used, launch, True), *(Choice(*each, False) for each in others)]
    others = [(used, replace(launch, num_stages=stages)) for stages in (3, 4, 5, 6)]
    heights = (FEW_ROWS,) if bits or num_rows <= FEW_ROWS else (FEW_ROWS, MANY_ROWS)
    for rows, columns, pieces in itertools.product(heights, (64, 128, 256), (1, 2, 4, 8)):
        if columns == 256 and (pieces > 1 or rows == FEW_ROWS):
            continue  # The sums of such tiles do not fit into the registers.
        tiles = replace(used, pieces=pieces)
        others.append((tiles, linear_launch(tiles, out_features, num_rows, shape=(rows, columns))))
    if num_rows <= FEW_ROWS and not bits:
        wider = replace(used, inner=2 * used.inner)
        for stages in (3, 4):
            made = linear_launch(wider, out_features, num_rows)
            others.append((wider, replace(made, num_stages=stages)))
    unique = [each for each in dict.fromkeys(others) if each != (used, launch)]
    return [Choice(used, launch, True), *(Choice(*each, False) for each in unique)]


def _rough_choices(
    used: LinearTiles, rows: int, out_features: int, num_rows: int
) -> Iterator[tuple[LinearTiles, LinearLaunch]]:
    """Yield tiles of a 4-bit weight: combinations of columns, warps, stages and pieces."""
    kinds = ((64, 4, 4), (64, 2, 4), (64, 2, 6), (128, 4, 4))
    for (columns, warps, stages), pieces in itertools.product(kinds, (1, 2, 4, 8)):
        tiles = replace(used, pieces=pieces)
        launch = linear_launch(tiles, out_features, num_rows, shape=(rows, columns))
        launch = replace(launch, num_warps=warps, num_stages=stages)
        if (tiles, launch) != (used, linear_launch(used, out_features, num_rows)):
            yield tiles, launch


def plan(names: Sequence[str], *, bits: Bits) -> list[dict[str, object]]:
    """Return a line for each shape and number of rows."""
    return [
        {
            "shape": name,
            "out": out_features,
            "in": in_features,
            "rows": num_rows,
            "in use": found[0].name,
            "others": len(found) - 1,
        }
        for name in names
        for out_features, in_features in [SHAPES[name]]
        for num_rows in ROWS[bits]
        for found in [choices(out_features, in_features, num_rows, bits=bits)]
    ]


class Tuner:
    """Times one shape after another on one device."""

    def __init__(self, device: torch.device, *, bits: Bits) -> None:
        self.gauge = Gauge(device)
        self.bits = bits
        data = torch.ones(READ_BYTES // 4, device=device)
        self.read_rate = data.nbytes / min(self.gauge.seconds(data.sum, repeats=REPEATS))

    def shape(self, name: str) -> Iterator[dict[str, object]]:
        """Yield a line for each number of rows and each choice."""
        from ....core.ops.triton.linear.tiled_linear import OutOfResources

        plain = [self._weight(name) for _ in range(self._num_copies(name))]
        packed = [_packed(weight, self.bits) for weight in plain]
        x = torch.randn(ROWS[self.bits][-1], SHAPES[name][1], device=self.gauge.device).bfloat16()
        whole = _tiled(x, packed[:1], None)[0]
        floor = packed[0].num_bytes / self.read_rate
        for num_rows in ROWS[self.bits]:
            few = x[:num_rows].clone()
            spent = self._seconds(partial(_by_library, few, plain))
            yield _line(name, num_rows, LIBRARY, spent / len(plain), floor)
            for choice in choices(*SHAPES[name], num_rows, bits=self.bits):
                tiled = [replace(each, tiles=choice.tiles) for each in packed]
                try:
                    here = _tiled(few, tiled[:1], choice.launch)[0]
                except OutOfResources:
                    continue  # The launch needs more memory or registers than there are.
                spent = self._seconds(partial(_tiled, few, tiled, choice.launch))
                is_same = torch.equal(here, whole[:num_rows])
                line = _line(name, num_rows, choice.name, spent / len(tiled), floor)
                yield line | {"in use": choice.is_used, "bits of those in use": is_same}

    def _weight(self, name: str) -> Tensor:
        return torch.randn(SHAPES[name], device=self.gauge.device).bfloat16()

    def _num_copies(self, name: str) -> int:
        out_features, in_features = SHAPES[name]
        return max(1, COLD_BYTES // (out_features * in_features * 2))

    def _seconds(self, call: Callable[[], object]) -> float:
        return statistics.median(self.gauge.seconds(self.gauge.graph(call), repeats=REPEATS))


def compile_part(part: int, parts: int, names: Sequence[str], *, bits: Bits) -> None:
    """Compile share number ``part`` of ``parts`` of the kernels, on a slice of a weight."""
    from ....core.ops.triton.linear.tiled_linear import OutOfResources

    found: dict[object, tuple[str, int, Choice]] = {}
    for name, num_rows in itertools.product(names, ROWS[bits]):
        for choice in choices(*SHAPES[name], num_rows, bits=bits):
            kind = (choice.tiles.inner, choice.tiles.pieces > 1)
            options = replace(choice.launch, grid=(1, 1, 1))
            found.setdefault((kind, options), (name, num_rows, choice))
    device = choose_device("cuda")
    for name, num_rows, choice in list(found.values())[part::parts]:
        weight = torch.randn(1024, SHAPES[name][1], device=device).bfloat16()
        packed = replace(_packed(weight, bits), tiles=choice.tiles)
        x = torch.randn(num_rows, SHAPES[name][1], device=device).bfloat16()
        shape = choice.launch.rows, choice.launch.columns
        grid = linear_launch(choice.tiles, 1024, num_rows, shape=shape).grid
        launch = replace(choice.launch, grid=grid)
        try:
            _tiled(x, [packed], launch)
        except OutOfResources:
            continue


def _packed(weight: Tensor, bits: Bits) -> TiledLinear:
    from ....core.ops.triton.linear.tiled_linear import pack_tiled, rough_copy

    packed = pack_tiled(weight, None, is_int8=bits == 8)
    return rough_copy(packed, weight.dtype) if bits == 4 else packed


def _by_library(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [F.linear(x, each) for each in weights]


def _tiled(x: Tensor, weights: Sequence[TiledLinear], launch: LinearLaunch | None) -> list[Tensor]:
    from ....core.ops.triton.linear.tiled_linear import tiled_linear

    return [tiled_linear(x, each, launch=launch) for each in weights]


def _line(name: str, num_rows: int, how: str, seconds: float, floor: float) -> dict[str, object]:
    out_features, in_features = SHAPES[name]
    return {
        "shape": name,
        "rows": num_rows,
        "tiles": how,
        "microseconds": 1e6 * seconds,
        "of the read roofline": floor / seconds,
        "TFLOP/s": 2 * num_rows * out_features * in_features / seconds / 1e12,
        "in use": False,
        "bits of those in use": False,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Time the named shapes, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="tune_linear", description=__doc__)
    parser.add_argument("shapes", nargs="*", help=f"shapes to time (all): {', '.join(SHAPES)}")
    parser.add_argument(
        "--plan", action="store_true", help="print the choices to time, without timing them"
    )
    parser.add_argument(
        "--bits",
        type=int,
        choices=list(ROWS),
        default=0,
        help="bits of a weight; 0: not quantised (%(default)s)",
    )
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    names: list[str] = args.shapes or list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"shapes: {', '.join(unknown)} is not one of {', '.join(SHAPES)}")
    if args.plan:
        print(table(plan(names, bits=args.bits)))
        return 0
    if args.part:
        compile_part(args.part[0], args.part[1], names, bits=args.bits)
        return 0
    tuner = Tuner(choose_device("cuda"), bits=args.bits)
    lines: list[dict[str, object]] = []
    for name in names:
        found = list(tuner.shape(name))
        print(table(found), flush=True)
        lines += found
    if args.json is not None:
        report = {"command": command(), "card": tuner.gauge.card(), "read": tuner.read_rate}
        write_json(args.json, report | {"lines": lines})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
