"""Ranks of a model in the threads of one process."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.parallel import Comm, GlooComm, in_rank_order

T = TypeVar("T")
SECONDS = 30.0


class ThreadComm:
    """`Comm` of threads that meet at a barrier; the sum is the real one's."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Comm.sum`."""
        self._parts[self.rank] = part.float()
        self._barrier.wait(SECONDS)
        parts = [each for each in self._parts if each is not None]
        self._barrier.wait(SECONDS)
        return in_rank_order(torch.stack(parts)).to(dtype)


def thread_comms(size: int) -> list[Comm]:
    """One for each rank."""
    parts: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadComm(rank, parts, barrier) for rank in range(size)]


def gloo_comms(folder: Path, size: int) -> list[GlooComm]:
    """One for each rank; their threads meet as processes would."""
    return on_ranks(lambda rank: GlooComm(folder, rank, size), range(size))


def on_ranks(work: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
    """What each rank returns; all run at a time."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


def rank_decoders(path: Path, size: int, **options: str) -> list[OwnDecoder]:
    """The decoder of each rank of a model."""
    found = [load_decoder(path, comm=comm, **options) for comm in thread_comms(size)]  # type: ignore[arg-type]
    return [each for each in found if isinstance(each, OwnDecoder)]


def logits_of(decoders: Sequence[Decoder], chunks: Sequence[Sequence[int]]) -> Tensor:
    """Rank 0's logits of a sequence that is computed in chunks, [num_tokens, vocab] float32."""

    def of_rank(rank: int) -> Tensor:
        decoder, start, found = decoders[rank], 0, []
        pool = decoder.make_pool(8, page_size=16)
        for chunk in chunks:
            wanted = len(chunk) if rank == 0 else 0
            batch = decoder.batch(
                [Segment(chunk, start, array("q", [5, 2, 7, 0, 1, 3, 4, 6]), wanted)], page_size=16
            )
            found.append(decoder.forward(batch, pool).logits.clone())
            start += len(chunk)
        return torch.cat(found)

    return on_ranks(of_rank, range(len(decoders)))[0]
