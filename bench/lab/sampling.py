"""What choosing a token costs: the native sampler beside torch's, in microseconds per row.

Rows of logits in two shapes: ``model``, a few likely tokens before a long tail as a language model
writes them (Zipf), and ``flat``, a normal distribution, in which top-p keeps most of a vocabulary.
Both samplers choose for the same rows in turn; the floor is one read of a row from memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ...api.types.sampling_params import SamplingParams
from ...core.interface.sampling import SamplingMetadata
from ...core.ops.native import NativeLibrary, native_library
from ...core.ops.native.limits import read_bandwidth
from ...core.ops.native.sampler import NativeSampler
from ...core.sampling.sampler import Sampler, TorchSampler
from ...core.sampling.verifier import VerifyRequest
from ..report import RESULTS, command, machine, table, write_json

VOCAB_SIZES = (4_096, 151_936)
NUM_ROWS = (1, 8, 64)
SHAPES = ("model", "flat")
PROMPT_LEN, HISTORY_LEN = 256, 512  # tokens
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5),
}
_SECONDS = 0.25  # for each figure, if that is enough for three rounds
_OUT = RESULTS / "sampling.json"


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians of one kind of request; microseconds per row, in calls of ``rows``."""

    vocab: int
    shape: str
    rows: int
    kind: str
    native_us: float
    torch_us: float
    times_faster: float
    floor_us: float


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes JSON to ``--out``."""
    options = _parsed(argv)
    library = native_library()
    if library is None:
        raise SystemExit("the native kernels cannot be had here")
    torch.set_num_threads(options.threads)
    library.set_threads(options.threads)
    host = machine()
    print(command(), *(f"{key}: {value}" for key, value in host.items()), sep="\n")
    figures = [asdict(figure) for figure in measured(library)]
    print(table(figures))
    write_json(
        options.out,
        {"command": command(), "machine": host, "threads": options.threads, "figures": figures},
    )


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.sampling", description=__doc__
    )
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--out", type=Path, default=_OUT)
    return parser.parse_args(argv)


def measured(library: NativeLibrary) -> Iterator[Figure]:
    """Every vocabulary, shape, number of rows and kind of request."""
    bandwidth, samplers = read_bandwidth(library), (NativeSampler(library), TorchSampler())
    for vocab_size, shape in product(VOCAB_SIZES, SHAPES):
        logits = make_logits(shape, max(NUM_ROWS), vocab_size)
        for num_rows, (kind, params) in product(NUM_ROWS, KINDS.items()):
            rows = make_rows(params, num_rows, vocab_size)
            native, oracle = _pair(samplers, logits[:num_rows], rows)
            yield Figure(
                vocab=vocab_size,
                shape=shape,
                rows=num_rows,
                kind=kind,
                native_us=native * 1e6,
                torch_us=oracle * 1e6,
                times_faster=oracle / native,
                floor_us=4e6 * vocab_size / bandwidth,
            )


def make_logits(shape: str, num_rows: int, vocab_size: int) -> Tensor:
    """``[num_rows, vocab_size]`` of a shape."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    if shape == "flat":
        return noise
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    return noise.mul_(0.5).sub_(1.5 * (ranks + 1).log())


def make_rows(params: SamplingParams, num_rows: int, vocab_size: int) -> list[VerifyRequest]:
    """Requests in the middle of their answers, without drafts."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for seed in range(num_rows):
        history = torch.randint(vocab_size, (HISTORY_LEN,), generator=generator)
        sampling = SamplingMetadata(params=params, seed=seed, prompt_len=PROMPT_LEN)
        rows.append(VerifyRequest(array("q", history.tolist()), (), sampling))
    return rows


def _pair(
    samplers: tuple[Sampler, Sampler], logits: Tensor, rows: Sequence[VerifyRequest]
) -> tuple[float, float]:
    """Median seconds per row of either, measured in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(times[0]) < 4 or time.perf_counter() - began < _SECONDS:
        for sampler, own in zip(samplers, times, strict=True):
            started = time.perf_counter()
            sampler.verify(logits, rows)
            own.append(time.perf_counter() - started)
    first, second = (statistics.median(own[1:]) / len(rows) for own in times)  # the first warms up
    return first, second


if __name__ == "__main__":
    main()
