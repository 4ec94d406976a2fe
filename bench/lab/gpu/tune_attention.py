"""Times alternative launches of the attention kernel (core/ops/triton/attention) on a GPU.

``python -m foretoken.bench.lab.gpu.tune_attention`` prints, for each case, the alternatives, the
launch in use, and the time that reading the keys and values takes. If an alternative is faster,
change launch.py. Processes compile the kernels in parallel beforehand, because otherwise each is
compiled at its first launch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ....core.ops.batch import Segment, build_batch
from ....core.ops.kv_pool import KVPool
from ....core.ops.machine.device import choose_device
from ....core.ops.triton.attention import launch as launches
from ....core.ops.triton.attention.launch import AttentionLaunch, Rule, attend, merge
from ....core.ops.triton.graph.plan import DevicePlan
from ....core.ops.triton.linear.tiled_linear import OutOfResources
from ....core.ops.triton.triton_ops import TritonOps
from ....core.ops.weights import HeadLayout
from ...common.report import command, table, write_json
from .bed import PAGE_SIZE, fill
from .gauge import Gauge

REPEATS = 10
READ_BYTES = 2**30
COLD_BYTES = 2**28  # Bytes of keys and values in the pool: several times a GPU's cache.
MAX_LAYERS = 24  # Maximum number of layers of the pool.
RULE = Rule(None, None, None)
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """Requests with ``rows`` rows each after ``context`` tokens."""

    requests: int
    context: int
    rows: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def is_narrow(self) -> bool:
        """Whether this case is a decode or verify step."""
        return self.rows < PAGE_SIZE

    @property
    def heads(self) -> HeadLayout:
        """Numbers of heads, and their 128 dimensions."""
        return HeadLayout(self.num_heads, self.num_kv_heads, 128, 128**-0.5)

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values of a layer."""
        return self.requests * (self.context + self.rows) * self.num_kv_heads * 128 * 2 * 2

    @property
    def operations(self) -> int:
        """Operations of the causal attention of a layer."""
        seen = self.rows * self.context + self.rows * (self.rows + 1) // 2
        return self.requests * seen * self.num_heads * 128 * 4


CASES: dict[str, Case] = {
    "decode 1 x 1k": Case(1, 1040),
    "decode 1 x 8k": Case(1, 8200),
    "decode 16 x 1k": Case(16, 1040),
    "decode 64 x 1k": Case(64, 1040),
    "decode 256 x 1k": Case(256, 1040),
    "decode 256 x 1k, 0.6B": Case(256, 1040, num_heads=16),
    "verify 5 of 8 x 8k": Case(8, 8200, rows=5),
    "prompt 2k": Case(1, 0, rows=2048),
    "prompt 2k behind 14k": Case(1, 14336, rows=2048),
}


def choices(is_narrow: bool, programs: Sequence[int]) -> list[AttentionLaunch]:
    """Return the launches to time, the one in use first."""
    used = launches.NARROW if is_narrow else launches.WIDE
    shapes = (  # (keys, warps, stages) of a launch.
        ((32, 4, 3), (32, 4, 5), (32, 8, 5), (32, 2, 5), (64, 4, 3), (64, 4, 5), (64, 8, 5),
         (64, 4, 7), (128, 4, 3), (128, 8, 3), (128, 8, 5))
        if is_narrow
        else ((32, 4, 3), (32, 4, 5), (32, 8, 5), (64, 4, 3), (64, 4, 5), (64, 8, 3), (64, 8, 5),
              (128, 8, 3))
    )  # fmt: skip
    found = [
        AttentionLaunch(keys, number, warps, stages)
        for (keys, warps, stages), number in itertools.product(shapes, programs)
    ]
    return list(dict.fromkeys([used, *found]))


class Scene:
    """A pool, a plan of a pass over it, and queries."""

    def __init__(self, case: Case, device: torch.device, num_layers: int) -> None:
        each = -(-(case.context + case.rows) // PAGE_SIZE)
        self.pool = KVPool(
            case.requests * each,
            num_layers=num_layers,
            num_kv_heads=case.num_kv_heads,
            head_dim=128,
            page_size=PAGE_SIZE,
            dtype=DTYPE,
            device=device,
        )
        fill(self.pool)
        pages = torch.randperm(case.requests * each).tolist()
        segments = [
            Segment(
                array("q", [0] * case.rows),
                case.context,
                array("q", pages[index * each : (index + 1) * each]),
                1,
            )
            for index in range(case.requests)
        ]
        batch = build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)
        plan = TritonOps().plan(batch, self.pool, case.heads)
        self.plan: DevicePlan = plan.on_device((None,))
        width = case.num_heads * 128
        self.q = torch.randn(batch.num_rows, width, device=device).to(DTYPE) * 128**-0.5
        self.is_narrow = case.is_narrow

    def run(self, launch: AttentionLaunch | None) -> Tensor:
        """Run all layers one after the other; return the output of the last."""
        out = torch.empty_like(self.q)
        for layer in range(self.pool.num_layers):
            for work in self.plan.works[None]:
                attend(
                    self.q, out, layer, self.plan, work, RULE,
                    is_narrow=self.is_narrow, launch=launch,
                )  # fmt: skip
                if work.kinds.partial_sums:
                    merge(out, self.plan, work, RULE)
        return out


def compile_part(part: int, parts: int, names: Sequence[str], programs: Sequence[int]) -> None:
    """Compile share number ``part`` of the cases' launches, divided into ``parts`` shares."""
    kinds = {
        (each.num_heads, each.num_kv_heads, each.is_narrow)
        for each in map(CASES.get, names)
        if each
    }
    wanted = [(kind, launch) for kind in sorted(kinds) for launch in choices(kind[2], programs[:1])]
    for (num_heads, num_kv_heads, is_narrow), launch in wanted[part::parts]:
        rows = 1 if is_narrow else 64
        case = Case(1, 300, rows, num_heads, num_kv_heads)
        with suppress(OutOfResources):
            Scene(case, choose_device("cuda"), 1).run(launch)


def lines(
    name: str, device: torch.device, programs: Sequence[int], rate: float, split: str
) -> Iterator[dict[str, object]]:
    """Yield a line for each launch, the fastest first."""
    case, gauge = CASES[name], Gauge(device)
    num_layers = max(1, min(MAX_LAYERS, COLD_BYTES // case.read_bytes + 1))
    scene = Scene(case, device, num_layers)
    expected = scene.run(None).float()
    found: list[dict[str, object]] = []
    for launch in choices(case.is_narrow, programs):
        try:
            out = scene.run(launch).float()
            call = gauge.graph(partial(scene.run, launch))
            spent = statistics.median(gauge.seconds(call, repeats=REPEATS)) / num_layers
        except OutOfResources:
            continue  # The launch needs more memory or registers than there are.
        off = float((out - expected).norm() / expected.norm())
        found.append(
            {
                "case": name + split,
                "keys": launch.keys,
                "warps": launch.num_warps,
                "stages": launch.num_stages,
                "programs": launch.programs,
                "us": 1e6 * spent,
                "of the read roofline": case.read_bytes / rate / spent,
                "TFLOP/s": case.operations / spent / 1e12,
                "off by": off,
                "in use": launch == (launches.NARROW if case.is_narrow else launches.WIDE),
            }
        )
    yield from sorted(found, key=lambda line: float(str(line["us"])))


def main(argv: Sequence[str] | None = None) -> int:
    """Time the named cases, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="tune_attention", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"cases to time (all): {', '.join(CASES)}")
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 2, 3, 4, 6])
    parser.add_argument(
        "--split", type=int, help="positions of a split, in place of the value in use"
    )
    parser.add_argument("--tile", type=int, help="queries of a tile, in place of the value in use")
    parser.add_argument(
        "--best", type=int, default=8, help="number of launches to print per case (8)"
    )
    parser.add_argument("--json", type=Path, help="JSON file to write")
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    names: list[str] = args.cases or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"cases: {', '.join(unknown)} is not one of {', '.join(CASES)}")
    if args.split:
        from ....core.ops.triton.attention import tile_schedule

        tile_schedule.SPLIT = args.split
        vars(launches)["SPLIT"] = args.split
    if args.tile:
        from ....core.ops.triton.graph import plan

        plan.NARROW_TILE = plan.WIDE_TILE = args.tile
    if args.part:
        compile_part(args.part[0], args.part[1], names, args.programs)
        return 0
    device = choose_device("cuda")
    parts = min(16, os.cpu_count() or 1)
    base = [sys.executable, "-m", __spec__.name, *names]
    changes = {"split": args.split, "tile": args.tile}
    for flag, value in changes.items():
        base += [f"--{flag}", str(value)] if value else []
    running = [
        subprocess.Popen([*base, "--part", str(part), str(parts)])
        for part in range(0 if args.compiled else parts)
    ]
    for each in running:
        each.wait()
    data = torch.ones(READ_BYTES // 4, device=device)
    rate = data.nbytes / min(Gauge(device).seconds(data.sum, repeats=REPEATS))
    del data
    every: list[dict[str, object]] = []
    for name in names:
        found = list(
            lines(name, device, args.programs, rate, f", split {args.split}" if args.split else "")
        )
        kept = [line for at, line in enumerate(found) if at < args.best or line["in use"]]
        print(table(kept), flush=True)
        every += found
        Gauge(device).release()
    if args.json is not None:
        report = {"command": command(), "card": Gauge(device).card(), "read": rate}
        write_json(args.json, report | {"lines": every})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
