"""What waits for a worker: bounded by what it holds in memory, and served caller by caller."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from ..core.errors import QueueFull
from .owners import FAIR_SHARE, NOBODY

T = TypeVar("T")
MAX_BYTES = 64 * 2**20  # of the bodies whose jobs wait; in memory a body takes up to 25 times that


class Origin(NamedTuple):
    """Whose a job is, and how long the body that it is about."""

    caller: bytes = NOBODY
    num_bytes: int = 0


NO_ORIGIN = Origin()


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """Work and what becomes of it."""

    future: Future[T]
    work: Callable[[], T]
    origin: Origin


class Waiting:
    """Jobs by caller; each caller has one turn after the other. Every operation is O(1).

    A caller may fill its share of what all may wait with, and one job may always wait.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_caller: OrderedDict[bytes, OrderedDict[Future[Any], Job[Any]]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._sum = 0
        self._caller_of: dict[Future[Any], bytes] = {}

    def __len__(self) -> int:
        return len(self._caller_of)

    def put(self, job: Job[Any]) -> None:
        """The last of its caller's; raises `QueueFull`."""
        caller, num_bytes = job.origin
        own = self._bytes.get(caller, 0)
        share = FAIR_SHARE * self._max_bytes
        if _is_over(own, num_bytes, share) or _is_over(self._sum, num_bytes, self._max_bytes):
            raise QueueFull("too much text is waiting to be read")
        self._by_caller.setdefault(caller, OrderedDict())[job.future] = job
        self._bytes[caller] = own + num_bytes
        self._sum += num_bytes
        self._caller_of[job.future] = caller

    def take(self) -> Job[Any]:
        """The first of the caller whose turn it is; there must be one."""
        caller, jobs = next(iter(self._by_caller.items()))
        job = next(iter(jobs.values()))
        self._by_caller.move_to_end(caller)
        self.drop(job.future)
        return job

    def drop(self, future: Future[Any]) -> None:
        """Forget a job, if it is here."""
        caller = self._caller_of.pop(future, None)
        if caller is None:
            return
        job = self._by_caller[caller].pop(future)
        self._bytes[caller] -= job.origin.num_bytes
        self._sum -= job.origin.num_bytes
        if not self._by_caller[caller]:
            del self._by_caller[caller], self._bytes[caller]

    def clear(self) -> list[Job[Any]]:
        """Forget all of them; returns them."""
        jobs = list(chain.from_iterable(each.values() for each in self._by_caller.values()))
        for job in jobs:
            self.drop(job.future)
        return jobs


def _is_over(num_waiting: int, num_bytes: int, limit: float) -> bool:
    return num_waiting > 0 and num_waiting + num_bytes > limit
