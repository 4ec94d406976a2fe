"""Comm: sums over the processes that compute one model together.

The only file that uses torch.distributed.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import RankLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=120)  # for connecting the ranks, and for sums before the start
SHARED_ITEMS = 2**19  # items from which each rank adds up only its share of a sum (measured)
_NEVER = timedelta(days=365)


class Comm(Protocol):
    """The rank of this process among the ``size`` ranks of a model, and sums over the ranks."""

    rank: int
    size: int

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of the ranks' parts, all of one shape, in float32 and in rank order.

        The result is rounded to ``dtype`` once and has the same bits on every rank. An item depends
        only on the same item of the parts, so a row's bits do not depend on other rows. all_reduce
        does not promise this: with three or more ranks, its order of addition depends on an item's
        place in the tensor. Raises `RankLost`.
        """


class GlooComm:
    """`Comm` of processes on one CPU, by gloo over the loopback interface."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """Connect to the other ranks. Blocks until all of them have connected.

        Raises `RankLost` if a rank does not connect within two minutes, or if gloo cannot open its
        sockets. Rank 0's sums have the same timeout until `wait_in_sums`; the other ranks' sums
        wait without a limit, because these processes end with rank 0.

        ``folder``: an empty folder that all ranks see; with it no port listens. The process group
        belongs to this object and is not torch's default group.
        """
        # Imported here because a process without other ranks does not need it.
        from torch import distributed

        self.rank, self.size = rank, size
        gloo: Any = distributed.ProcessGroupGloo  # only the untyped members accept an address
        options = gloo._Options()
        options._timeout, options._threads = CONNECT_TIMEOUT, 1
        try:
            options._devices = [gloo.create_device(hostname=LOOPBACK)]
        except RuntimeError as failure:
            raise RankLost(
                f"gloo cannot list network interfaces, which needs an AF_NETLINK socket: {failure}"
            ) from None
        try:
            store = distributed.FileStore(str(folder / "ranks"), size)  # type: ignore[attr-defined]
            self._group: ProcessGroup = gloo(store, rank, size, options)
        except RuntimeError as failure:
            raise RankLost(f"the ranks could not connect to each other: {failure}") from None
        if rank > 0:
            self.wait_in_sums()

    def wait_in_sums(self) -> None:
        """Remove the timeout of sums; the watchdog handles a sum that does not end."""
        self._group._set_default_timeout(_NEVER)  # type: ignore[attr-defined]

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up small parts on every rank; of large parts, let each rank add up its share.

        Both ways add the same items in the same order. With shares the ranks send less but wait
        twice: on two cores this took 0.6 to 0.9 times as long at `SHARED_ITEMS` and 0.5 to 0.7 at
        twice as many.
        """
        own = part.float().contiguous()
        is_shared = own.numel() >= SHARED_ITEMS and own.numel() % self.size == 0
        try:
            return self._sum_shares(own, dtype) if is_shared else self._sum_all(own, dtype)
        except RuntimeError as failure:
            raise RankLost(f"a rank is gone: {failure}") from None

    def _sum_all(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        parts = own.new_empty((self.size, *own.shape))
        self._group._allgather_base(parts.view(-1, *own.shape[1:]), own).wait()
        return in_rank_order(parts).to(dtype)

    def _sum_shares(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Send each rank its share of the items, add up this rank's share, and gather the sums."""
        parts, total = torch.empty_like(own), own.new_empty(own.shape, dtype=dtype)
        self._group.alltoall_base(parts.view(-1), own.view(-1), [], []).wait()
        share = in_rank_order(parts.view(self.size, -1)).to(dtype)
        # Gloo does not support every dtype, so the sums are sent as bytes.
        all_bytes, own_bytes = total.view(-1).view(torch.uint8), share.view(torch.uint8)
        self._group._allgather_base(all_bytes, own_bytes).wait()
        return total

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return torch's own all_reduce of the parts. Only comparisons use it."""
        total = part.clone()
        self._group.allreduce([total]).wait()
        return total


def in_rank_order(parts: Tensor) -> Tensor:
    """Return the sum over ranks of float32 parts ``[size, ...]``, added in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def summed(part: Tensor, comm: Comm | None) -> Tensor:
    """Return the sum over ranks of their parts, or ``part`` itself without a ``comm``."""
    return part if comm is None else comm.sum(part, part.dtype)
