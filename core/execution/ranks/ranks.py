"""The other ranks of a tensor parallel model, seen from rank 0: their processes, and its decoder.

Rank 0 is the server. It sends each pass, and what else changes the pool, before it does the same
itself; within a pass the ranks meet at every sum.
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
START_SECONDS = 120.0  # for ranks to start
LOAD_SECONDS = 900.0  # for ranks to load their parts once rank 0 has its own
END_SECONDS = 5.0  # for ranks to end by themselves
_LOOK_SECONDS = 0.1  # between two looks at the processes while the ranks meet
_SOURCES = Path(__file__).parents[3]  # the folder of the package


class Followers(Protocol):
    """The other ranks, as `TpDecoder` knows them."""

    size: int

    def send(self, message: Ints) -> None:
        """Send the same message to each. Raises `RankLost`."""

    def share_pool(self, rank: int, message: Ints, num_bytes: int) -> Tensor:
        """Send a rank the message of a pool with so many bytes of memory, and return that memory.

        Raises `RankLost`.
        """

    def lost_error(self, failure: BaseException) -> RankLost:
        """Mark the model as lost for good; return the `RankLost` to raise."""


class Ranks(Followers, Companions):
    """The processes of ranks 1, 2, ... of a model.

    A rank that is lost is lost for good, and all with it: `send` raises `RankLost` ever after.
    """

    def __init__(
        self, path: Path, size: int, options: Mapping[str, Any], *, threads: int | None = None
    ) -> None:
        """Start the processes and meet them. ``options``: of `load_decoder`, in JSON's types.

        ``threads``: of each. Raises `ModelLoadError` where one does not come.
        """
        self.size = size
        self._lost = ""  # why, once a rank is
        self._channels: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self._channels, self._processes)
        self._environment = _environment(options.get("backend", "torch"))
        # It lasts until all ranks have their weights: some may still meet when rank 0 has met them.
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
        """Wait until each rank has its weights. Raises `ModelLoadError` where one ended."""
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
        """Meet the ranks; in a thread, because none returns from that before all are there."""
        met: Future[GlooComm] = Future()

        def meet() -> None:
            try:
                met.set_result(GlooComm(Path(self._folder.name), 0, self.size))
            except BaseException as failure:  # raised by `result`
                met.set_exception(failure)

        threading.Thread(target=meet, daemon=True).start()
        while not wait([met], _LOOK_SECONDS).done:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    raise ModelLoadError(f"rank {rank} ended before the ranks met", may_pass=True)
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
        told = str(failure) if is_loss else f"rank 0 failed in a pass: {failure!r}"
        self._lost = self._lost or told
        return RankLost(self._lost)  # another one each time: it is raised from what it tells of

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call ``on_lost`` on the running event loop when a rank ends; `end` ends the watch.

        From here on passes may take as long as the engine's watchdog allows.
        """
        self.comm.wait_in_sums()
        loop = asyncio.get_running_loop()
        for rank, channel in enumerate(self._channels, start=1):
            loop.add_reader(channel.fileno(), partial(self._ended, rank, loop, on_lost))

    def _ended(
        self, rank: int, loop: asyncio.AbstractEventLoop, on_lost: Callable[[BaseException], None]
    ) -> None:
        """A rank's socket can be read: ranks send nothing, so it is closed."""
        loop.remove_reader(self._channels[rank - 1].fileno())
        on_lost(self.lost_error(RankLost(f"rank {rank} ended")))

    def unwatch(self) -> None:
        """End the watch, on the loop that watches."""
        loop = asyncio.get_running_loop()
        for channel in self._channels:
            if not channel.closed:
                loop.remove_reader(channel.fileno())

    def end(self, *, at_once: bool = False) -> None:
        """End the processes; idempotent. ``at_once``: kill them. Blocks until they are gone."""
        self.lost_error(RankLost("the ranks of the model were ended"))
        _end(self._channels, self._processes, 0.0 if at_once else END_SECONDS)
        self._finalizer.detach()
        self._folder.cleanup()


def _environment(backend: str) -> dict[str, str]:
    """Build the environment of a rank: it finds this package, and multiplies as rank 0 does."""
    paths = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    library = native_library() if backend in ("auto", "native") else None  # compiled here, once
    return found if library is None else found | {products.SETTING: bfloat16_products(library)}


def _end(
    channels: list[Connection],
    processes: list[subprocess.Popen[bytes]],
    seconds: float = END_SECONDS,
) -> None:
    """Close the channels, which ends ranks that wait for a message; kill those that go on."""
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
    """Rank 0's part of a model, whose passes and pool the other ranks follow.

    ``config`` is the whole model's, weights and pool are this rank's. It has one pool at a time.
    With ``shares_pools`` this process has the pools of all ranks in its memory, for what stores
    pages: between two passes it may read and write them all.
    """

    def __init__(
        self, part: OwnDecoder, followers: Followers, *, shares_pools: bool = False
    ) -> None:
        """``part``: of rank 0."""
        super().__init__(part.config, part.weights, part.ops, part.layout, compiles=False)
        self._followers, self._shares_pools = followers, shares_pools
        self._pool: weakref.ref[KVPool] | None = None

    @property
    def identity(self) -> dict[str, str]:
        """The operations, and the number of ranks: sums of other parts have other bits."""
        return super().identity | {"ranks": str(self._followers.size)}

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of one page over all layers and ranks."""
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
        """A pool on every rank, in place of the one before. Raises `RankLost`."""
        if states is not None:
            raise ValueError("the ranks of a model keep no recurrent states")
        pool = super().make_pool(num_pages, page_size=page_size, kv_dtype=kv_dtype)
        message = pool_message(num_pages, page_size, kv_dtype, is_shared=self._shares_pools)
        if self._shares_pools:
            # Copies of slots are made here, not sent: a page is saved as soon as this rank is done.
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
        """Compute a pass on every rank; see `Decoder.forward`.

        Raises `RankLost` for whatever ends a pass on this rank, too: the others wait in its sums.
        """
        if self._pool is None or self._pool() is not pool or wanted.inputs is not None:
            raise ValueError("ranks compute token ids over the pool that was made last")
        with self._in_step():
            self._followers.send(pass_message(batch))
            return super().forward(batch, pool, wanted)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as failure:
            raise self._followers.lost_error(failure) from failure
