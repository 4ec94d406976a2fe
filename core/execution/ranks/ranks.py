"""Rank 0's side of tensor parallelism: the processes of the other ranks, and its decoder.

Rank 0 is the server. It sends each pass and each change of the pool to the other ranks before it
computes the same itself. Within a pass the ranks synchronise at every sum over the ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from ...errors import ModelLoadError, RankLost
from ...interface.kv_codec import KvDtype
from ...interface.protocols import Companions
from ...model.decoder import OwnDecoder
from ...ops.batch import NOTHING_MORE, ForwardOutput, RaggedBatch, Wanted
from ...ops.kv_pool import KVPool
from ...ops.native import native_library, products
from ...ops.native.products import bfloat16_products
from ...ops.parallel import GlooComm
from ...ops.state_pool import StatePool
from . import worker
from .worker import Ints, copy_message, pass_message, pool_message, send_shared_pool

logger = logging.getLogger(__name__)
START_SECONDS = 120.0  # time limit for the ranks to start
LOAD_SECONDS = 900.0  # time limit for the other ranks' shards, once rank 0 has loaded its own
END_SECONDS = 5.0  # time limit for the ranks to exit by themselves
_LOOK_SECONDS = 0.1  # interval at which the processes are checked while the ranks connect
_SOURCES = Path(__file__).parents[3]  # the folder of the package


class Followers(Protocol):
    """Protocol by which a `TpDecoder` commands the other ranks."""

    size: int

    def send(self, message: Ints) -> None:
        """Send the same message to each rank. Raises `RankLost`."""

    def share_pool(self, rank: int, message: Ints, num_bytes: int) -> Tensor:
        """Send one rank the message that describes a pool; return that pool's shared memory.

        The memory has ``num_bytes`` bytes. Raises `RankLost`.
        """

    def lost_error(self, failure: BaseException) -> RankLost:
        """Mark the model as lost for good; return the `RankLost` to raise."""


class Ranks(Followers, Companions):
    """The processes of ranks 1, 2, ... of a model.

    The loss of one rank is the loss of the model: every later `send` raises `RankLost`.
    """

    def __init__(
        self, path: Path, size: int, options: Mapping[str, Any], *, threads: int | None = None
    ) -> None:
        """Start the processes and connect to them.

        ``options``: keyword arguments of `load_decoder`, as JSON types. ``threads``: number of
        threads of each rank. Raises `ModelLoadError` if a rank does not start.
        """
        self.size = size
        self._lost = ""  # the reason if a rank was lost, else empty
        self._channels: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self._channels, self._processes)
        self._environment = _environment(options.get("backend", "torch"))
        # Ranks may still need the folder to connect after rank 0 has connected to all.
        self._folder = tempfile.TemporaryDirectory(prefix="foretoken-ranks-")
        try:
            for rank in range(1, size):
                job = {"path": str(path), "rank": rank, "size": size, "folder": self._folder.name}
                self._start(job | {"threads": threads, "options": dict(options)})
            self._expect(worker.HERE, "did not start", START_SECONDS)
            self.comm = self._meet()
        except BaseException:
            self.end(at_once=True)
            raise

    def _start(self, job: dict[str, Any]) -> None:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", worker.__name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        self._channels.append(ours)
        self._processes.append(process)
        ours.send_bytes(json.dumps(job).encode())

    def wait_until_loaded(self) -> None:
        """Wait until each rank has loaded its weights. Raises `ModelLoadError` if a rank cannot."""
        self._expect(worker.LOADED, "could not load its part of the model", LOAD_SECONDS)
        self._folder.cleanup()

    def _expect(self, word: bytes, problem: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        for rank, channel in enumerate(self._channels, start=1):
            try:
                if not channel.poll(max(0.0, until - time.monotonic())):
                    raise ModelLoadError(
                        f"rank {rank} {problem} within {seconds:.0f} s", may_pass=True
                    )
                found = channel.recv_bytes()
            except (EOFError, OSError):
                found = b""
            if found != word:
                raise ModelLoadError(
                    f"rank {rank} {problem}; the reason is in its log lines above", may_pass=True
                )

    def _meet(self) -> GlooComm:
        """Return the connection to the other ranks. Raises `ModelLoadError` if a rank exits first.

        Connecting blocks until all ranks have connected, so it runs in a thread while this thread
        checks that the processes still run.
        """
        met: Future[GlooComm] = Future()

        def meet() -> None:
            try:
                met.set_result(GlooComm(Path(self._folder.name), 0, self.size))
            except BaseException as failure:  # `met.result` raises it in the caller's thread.
                met.set_exception(failure)

        threading.Thread(target=meet, daemon=True).start()
        while not wait([met], _LOOK_SECONDS).done:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    raise ModelLoadError(
                        f"rank {rank} exited before all ranks were connected", may_pass=True
                    )
        try:
            return met.result()
        except RankLost as failure:
            raise ModelLoadError(str(failure), may_pass=True) from None

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    @override
    def send(self, message: Ints) -> None:
        self._check_here()
        data = message.tobytes()
        for rank, channel in enumerate(self._channels, start=1):
            with self._losing(rank):
                channel.send_bytes(data)

    @override
    def share_pool(self, rank: int, message: Ints, num_bytes: int) -> Tensor:
        self._check_here()
        with self._losing(rank):
            return send_shared_pool(self._channels[rank - 1], message, num_bytes)

    def _check_here(self) -> None:
        if self._lost:
            raise RankLost(self._lost)

    @contextlib.contextmanager
    def _losing(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as failure:
            raise self.lost_error(RankLost(f"rank {rank} is gone: {failure}")) from None

    @override
    def lost_error(self, failure: BaseException) -> RankLost:
        is_loss = isinstance(failure, RankLost)
        told = str(failure) if is_loss else f"rank 0 failed in a forward pass: {failure!r}"
        self._lost = self._lost or told
        # Each call returns a new error: raising an exception from itself would make a cycle.
        return RankLost(self._lost)

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call ``on_lost`` on the running event loop if a rank exits before `unwatch`.

        From now on, sums over the ranks have no time limit of their own, because the engine's
        watchdog limits each step.
        """
        self.comm.wait_in_sums()
        loop = asyncio.get_running_loop()
        for rank, channel in enumerate(self._channels, start=1):
            loop.add_reader(channel.fileno(), partial(self._ended, rank, loop, on_lost))

    def _ended(
        self, rank: int, loop: asyncio.AbstractEventLoop, on_lost: Callable[[BaseException], None]
    ) -> None:
        """Report the loss of a rank: ranks send no messages, so a readable socket is closed."""
        loop.remove_reader(self._channels[rank - 1].fileno())
        on_lost(self.lost_error(RankLost(f"rank {rank} exited")))

    def unwatch(self) -> None:
        """Undo `watch`; this must run on the same event loop."""
        loop = asyncio.get_running_loop()
        for channel in self._channels:
            if not channel.closed:
                loop.remove_reader(channel.fileno())

    def end(self, *, at_once: bool = False) -> None:
        """End the processes and wait until they have exited; idempotent.

        ``at_once``: kill them without waiting for them to exit by themselves.
        """
        self.lost_error(RankLost("the processes of the ranks were ended"))
        _end(self._channels, self._processes, 0.0 if at_once else END_SECONDS)
        self._finalizer.detach()
        self._folder.cleanup()


def _environment(backend: str) -> dict[str, str]:
    """Return the environment variables of a rank's process.

    By these, the process finds this package and multiplies bfloat16 by the same method as rank 0.
    """
    paths = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # Rank 0 compiles the library before the ranks start, so that it is compiled only once.
    library = native_library() if backend in ("auto", "native") else None
    return found if library is None else found | {products.SETTING: bfloat16_products(library)}


def _end(
    channels: list[Connection],
    processes: list[subprocess.Popen[bytes]],
    seconds: float = END_SECONDS,
) -> None:
    """Close the channels, so that waiting ranks exit; kill the others after ``seconds``."""
    for channel in channels:
        channel.close()
    until = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


class TpDecoder(OwnDecoder):
    """The decoder of rank 0: it computes its shard, and the other ranks compute their shards.

    ``config`` describes the whole model; weights and pool are rank 0's shard. Only one pool exists
    at a time. With ``shares_pools`` this process maps the pools of all ranks, so that KV tiers can
    read and write them between two passes.
    """

    def __init__(
        self, part: OwnDecoder, followers: Followers, *, shares_pools: bool = False
    ) -> None:
        """Wrap ``part``, the decoder of rank 0's shard."""
        super().__init__(part.config, part.weights, part.ops, part.layout, compiles=False)
        self._followers, self._shares_pools = followers, shares_pools
        self._pool: weakref.ref[KVPool] | None = None

    @property
    def identity(self) -> dict[str, str]:
        """Identity of the operations and the number of ranks, because both affect rounding."""
        return super().identity | {"ranks": str(self._followers.size)}

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Return the size of one page in bytes, summed over all layers and ranks."""
        part = super().bytes_per_page(page_size=page_size, kv_dtype=kv_dtype)
        return part * self._followers.size

    def make_pool(
        self,
        num_pages: int,
        *,
        page_size: int,
        kv_dtype: KvDtype = "auto",
        states: StatePool | None = None,
    ) -> KVPool:
        """Make a pool on every rank, in place of the previous one. Raises `RankLost`."""
        if states is not None:
            raise ValueError("a model with recurrent states cannot be split over ranks")
        pool = super().make_pool(num_pages, page_size=page_size, kv_dtype=kv_dtype)
        message = pool_message(num_pages, page_size, kv_dtype, is_shared=self._shares_pools)
        if self._shares_pools:
            # Rank 0 copies slots in all pools itself, because a tier may save a page right after.
            pool.others = [
                self.pool_over(
                    partial(self._followers.share_pool, rank, message),
                    num_pages,
                    page_size=page_size,
                    kv_dtype=kv_dtype,
                )
                for rank in range(1, self._followers.size)
            ]
        else:
            self._followers.send(message)
            pool.mirror = self._mirror
        self._pool = weakref.ref(pool)
        return pool

    def _mirror(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._followers.send(copy_message(sources, targets))

    def forward(
        self, batch: RaggedBatch, pool: KVPool, wanted: Wanted = NOTHING_MORE
    ) -> ForwardOutput:
        """Compute a pass on every rank, as `Decoder.forward` does.

        Raises `RankLost` for any failure on rank 0, because then the other ranks wait in a sum
        forever. Raises ValueError for input vectors, and for a pool other than the latest one.
        """
        if self._pool is None or self._pool() is not pool or wanted.inputs is not None:
            raise ValueError("ranks need token ids and the KV pool that was made last")
        with self._in_step():
            self._followers.send(pass_message(batch))
            return super().forward(batch, pool, wanted)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            raise self._followers.lost_error(failure) from failure
