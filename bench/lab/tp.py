"""Cost of sums over ranks: `python -m foretoken.bench.lab.tp`.

Processes on this machine meet as those of ``--tp N`` do. Each sum is timed in the engine's order of
addition and as all_reduce adds, in turns, by number of rows and of ranks. Then the built-in model
decodes over two ranks: the share of a pass that its sums take. What it measures is the exchange on
one machine's CPUs; nothing follows for GPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import Tensor

from ...core.execution.ranks import Ranks, TpDecoder
from ...core.model.decoder import OwnDecoder
from ...core.model.loader import load_decoder
from ...core.ops.batch import Segment
from ...core.ops.parallel import Comm, GlooComm
from ..common.report import RESULTS, heading, table, write_json

BUILTIN = Path(__file__).resolve().parents[2] / "draft" / "training" / "builtin" / "target"
ROWS, RANKS = (1, 8, 64, 256), (2, 4)
LARGE = 1024  # rows of a sum of which each rank adds up a share
_OUT = RESULTS / "tp.json"
_TURNS, _WARM = 30, 5


class Sum(msgspec.Struct, frozen=True):
    """Median microseconds of a sum of rows of float32, on rank 0."""

    ranks: int
    rows: int
    ordered_us: float
    all_reduce_us: float


class Share(msgspec.Struct, frozen=True):
    """A pass of the built-in model over two ranks, median microseconds."""

    rows: int
    pass_us: float
    sums_us: float
    num_sums: int


class TimedComm:
    """A `Comm` that adds up the time of its sums."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm
        self.seconds, self.count = 0.0, 0

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Comm.sum`."""
        began = time.perf_counter()
        total = self._comm.sum(part, dtype)
        self.seconds += time.perf_counter() - began
        self.count += 1
        return total


def main(args: Sequence[str] | None = None) -> None:
    """Measure, print and write ``bench/results/tp.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="columns of a row (1024)")
    parser.add_argument("--out", type=Path, default=_OUT, help="JSON file of the results")
    parser.add_argument("--rank", nargs=3, help="FOLDER RANK SIZE, set by the first process")
    parsed = parser.parse_args(args)
    torch.set_num_threads(1)
    if parsed.rank is not None:
        folder, rank, size = parsed.rank
        measure_sums(GlooComm(Path(folder), int(rank), int(size)), parsed.width)
        return
    sums = [each for size in RANKS for each in sums_of(size, parsed.width)]
    shares = measure_shares()
    report = heading() | {"width": parsed.width}
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    print("\nmicroseconds of a sum of float32 rows on rank 0, median")
    print(table([msgspec.to_builtins(each) for each in sums]))
    print("\nthe built-in model over two ranks, microseconds of a pass")
    print(table([msgspec.to_builtins(each) for each in shares]))
    write_json(parsed.out, report | {"sums": sums, "shares": shares})


def sums_of(size: int, width: int) -> list[Sum]:
    """Measure with so many processes, of which this is the first."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", __spec__.name, "--width", str(width), "--rank", folder]
        others = [subprocess.Popen([*words, str(rank), str(size)]) for rank in range(1, size)]
        try:
            return measure_sums(GlooComm(Path(folder), 0, size), width)
        finally:
            for process in others:
                process.wait()


def measure_sums(comm: GlooComm, width: int) -> list[Sum]:
    """Time both kinds of sum in turns; every rank calls it."""
    found = []
    for rows in (*ROWS, LARGE):
        part = torch.randn(rows, width, generator=torch.Generator().manual_seed(comm.rank))
        kinds: list[Callable[[], Tensor]] = [
            lambda part=part: comm.sum(part, torch.float32),  # type: ignore[misc]
            lambda part=part: comm.all_reduce(part),  # type: ignore[misc]
        ]
        times = [[_seconds(kind) for kind in kinds] for _ in range(_WARM + _TURNS)][_WARM:]
        ordered, reduced = (1e6 * median(each) for each in zip(*times, strict=True))
        found.append(Sum(comm.size, rows, ordered, reduced))
    return found


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure_shares() -> list[Share]:
    """Passes of the built-in model, each of the first rows of as many sequences."""
    ranks = Ranks(BUILTIN, 2, {"backend": "auto", "dtype": "float32"}, threads=1)
    try:
        comm = TimedComm(ranks.comm)
        part = load_decoder(BUILTIN, backend="auto", dtype="float32", comm=comm)
        assert isinstance(part, OwnDecoder), "the built-in model is computed by this decoder"
        ranks.wait_until_loaded()
        decoder = TpDecoder(part, ranks)
        decoder.ops.set_threads(1)
        pool = decoder.make_pool(max(ROWS), page_size=16)
        return [_share(decoder, pool, comm, rows) for rows in ROWS]
    finally:
        ranks.end()


def _share(decoder: TpDecoder, pool: object, comm: TimedComm, rows: int) -> Share:
    segments = [Segment([5], 0, array("q", [page]), 1) for page in range(rows)]
    batch = decoder.batch(segments, page_size=16)
    passes, sums = [], []
    for _ in range(_WARM + _TURNS):
        comm.seconds, comm.count = 0.0, 0
        passes.append(1e6 * _seconds(lambda: decoder.forward(batch, pool)))  # type: ignore[arg-type]
        sums.append(1e6 * comm.seconds)
    return Share(rows, median(passes[_WARM:]), median(sums[_WARM:]), comm.count)


if __name__ == "__main__":
    main()
