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
MEETING = timedelta(seconds=120)  # for the ranks to meet; for a sum until the engine starts
SHARED_ITEMS = 2**19  # of a sum, from which on each rank adds up a share of them (measured)
_NEVER = timedelta(days=365)


class Comm(Protocol):
    """The place of this process among the ``size`` ranks of a model, and their sums."""

    rank: int
    size: int

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up the ranks' parts, all of one shape, in float32 and in rank order.

        The result is rounded to ``dtype`` once, and has the same bits on every rank. An item of it
        depends on the same item of the parts alone: a row has the same bits beside any other rows,
        which all_reduce does not promise (from three ranks up its order of addition depends on
        where an item lies in the tensor). Raises `RankLost`.
        """


class GlooComm:
    """`Comm` of processes on one CPU, by gloo over the loopback interface."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """Meet the other ranks. Blocks until all of them are here.

        Raises `RankLost` where one does not come within two minutes, or where gloo may not open its
        sockets. Rank 0's sums have as long, until `wait_in_sums`; those of the others wait for
        rank 0, with which they end.

        ``folder``: an empty one that all ranks see, in place of a port that would listen. The group
        is this object's: torch's default group is left to the program.
        """
        # Not at the top: a process without other ranks needs none of it.
        from torch import distributed

        self.rank, self.size = rank, size
        gloo: Any = distributed.ProcessGroupGloo  # names an address only by what is not typed
        options = gloo._Options()
        options._timeout, options._threads = MEETING, 1
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
            raise RankLost(f"the ranks did not meet: {failure}") from None
        if rank > 0:
            self.wait_in_sums()

    def wait_in_sums(self) -> None:
        """Let sums take as long as they do: one that does not end is the watchdog's business."""
        self._group._set_default_timeout(_NEVER)  # type: ignore[attr-defined]

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up all parts on every rank, or of large ones each rank's share; see `Comm.sum`.

        Both add the same items in the same order. The latter sends less and waits twice: on two
        cores it took 0.6 to 0.9 times as long at `SHARED_ITEMS`, 0.5 to 0.7 at twice as many.
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
        """Send each rank its share of the items, add up this one's, and gather the sums."""
        parts, total = torch.empty_like(own), own.new_empty(own.shape, dtype=dtype)
        self._group.alltoall_base(parts.view(-1), own.view(-1), [], []).wait()
        share = in_rank_order(parts.view(self.size, -1)).to(dtype)
        # As bytes: gloo does not know every type.
        all_bytes, own_bytes = total.view(-1).view(torch.uint8), share.view(torch.uint8)
        self._group._allgather_base(all_bytes, own_bytes).wait()
        return total

    def all_reduce(self, part: Tensor) -> Tensor:
        """Add up the parts as torch does, for comparison alone: see `Comm.sum`."""
        total = part.clone()
        self._group.allreduce([total]).wait()
        return total


def in_rank_order(parts: Tensor) -> Tensor:
    """``[size, ...]`` in float32 to the sum over ranks: the first, plus the second, and so on."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def summed(part: Tensor, comm: Comm | None) -> Tensor:
    """The sum over ranks of what each of them computed a part of; without ranks the part itself."""
    return part if comm is None else comm.sum(part, part.dtype)
