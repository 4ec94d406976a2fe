"""Ranks of a model in the threads of one process."""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import RankLost
from foretoken.core.execution.ranks.ranks import TpDecoder
from foretoken.core.execution.ranks.worker import LOADED, Ints, send_shared_pool, serve_rank
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
        self._parts, self.barrier = parts, barrier

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Comm.sum`."""
        self._parts[self.rank] = part.float()
        self.barrier.wait(SECONDS)
        parts = [each for each in self._parts if each is not None]
        self.barrier.wait(SECONDS)
        return in_rank_order(torch.stack(parts)).to(dtype)


def thread_comms(size: int) -> list[ThreadComm]:
    """One for each rank."""
    parts: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadComm(rank, parts, barrier) for rank in range(size)]


def gloo_comms(folder: Path, size: int) -> list[GlooComm]:
    """One for each rank; their threads meet as processes would."""
    return on_ranks(lambda rank: GlooComm(folder, rank, size), range(size))


def on_ranks(work: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
    """Run work for every rank at a time; returns what each returns."""
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


class ThreadRanks:
    """The other ranks of a model in threads, in place of `Ranks`; each has a real one's loop."""

    def __init__(
        self, path: Path, size: int, options: Mapping[str, Any], *, threads: int | None = None
    ) -> None:
        self.size, self.failures, self.pids = size, list[BaseException](), list[int]()
        self.comm, *others = thread_comms(size)
        self._lost: RankLost | None = None
        self._channels: list[Connection] = []
        self._threads: list[threading.Thread] = []
        for comm in others:
            ours, theirs = Pipe()
            thread = threading.Thread(
                target=self._serve, args=(theirs, Path(path), comm, dict(options)), daemon=True
            )
            thread.start()
            self._channels.append(ours)
            self._threads.append(thread)

    def _serve(self, channel: Connection, path: Path, comm: Comm, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        decoder = load_decoder(path, comm=comm, **options)
        assert isinstance(decoder, OwnDecoder)
        channel.send_bytes(LOADED)
        try:
            serve_rank(channel, decoder)
        except BaseException as failure:
            self.failures.append(failure)
            channel.close()

    def wait_until_loaded(self) -> None:
        for channel in self._channels:
            assert channel.recv_bytes() == LOADED

    def send(self, message: Ints) -> None:
        if self._lost is not None:
            raise self._lost
        for channel in self._channels:
            channel.send_bytes(message.tobytes())

    def share_pool(self, rank: int, message: Ints, num_bytes: int) -> Tensor:
        return send_shared_pool(self._channels[rank - 1], message, num_bytes)

    def lost_error(self, failure: BaseException) -> RankLost:
        self._lost = self._lost or RankLost(str(failure))
        return self._lost

    def watch(self, on_lost: Callable[[BaseException], None]) -> None: ...

    def unwatch(self) -> None: ...

    def end(self, *, at_once: bool = False) -> None:
        for channel in self._channels:
            channel.close()
        self.comm.barrier.abort()  # of those that wait in a pass that rank 0 left
        for thread in self._threads:
            thread.join(SECONDS)


@contextlib.contextmanager
def tp_decoder(
    path: Path, size: int, *, shares_pools: bool = False, **options: Any
) -> Iterator[TpDecoder]:
    """Rank 0's decoder of a model whose other ranks are threads, which end with the block."""
    ranks = ThreadRanks(path, size, options)
    try:
        part = load_decoder(path, comm=ranks.comm, **options)
        assert isinstance(part, OwnDecoder)
        ranks.wait_until_loaded()
        yield TpDecoder(part, ranks, shares_pools=shares_pools)
    finally:
        ranks.end()
