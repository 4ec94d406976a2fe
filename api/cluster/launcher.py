"""PlannedReplicas: the replicas of a plan, started by a `Cluster`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from ...core.errors import ForetokenError, InvalidRequest
from ..serving.settings import FrontOptions

QUIET_SECONDS = 30.0  # duration of a low load before a replica is removed


class LauncherError(ForetokenError):
    """Raised if replicas cannot be started or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """The wanted replicas: their number, their model, and the resources of each.

    ``options`` are the engine options of the replicas.
    """

    model: str | None
    front: str  # address that replicas connect to
    least: int
    most: int
    cpus: float
    gpus: float
    quiet_seconds: float  # duration of a low load before a replica is removed
    options: Mapping[str, Any] = field(default_factory=dict)
    # Number of shares of a disk, one more than the most replicas: a new replica may start before
    # the one that it replaces has released its share. None without a disk.
    num_shares: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the number of replicas does not follow the load."""
        return self.least == self.most

    @property
    def version(self) -> str:
        """Digest of the replicas' model, front and options; replicas are kept while it is equal."""
        alike = (self.model, self.front, sorted(self.options.items()), self.num_shares)
        return blake2b(repr(alike).encode(), digest_size=8).hexdigest()


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def plan_of(model: str | None, front: FrontOptions, options: Mapping[str, Any]) -> ReplicaPlan:
    """Return the plan for the flags of a front; its address ``front`` is still empty.

    If neither ``replica_cpus`` nor ``threads`` is given, this machine's CPUs are divided among the
    replicas. A replica has as many threads as CPUs unless ``threads`` is given.
    """
    least, most = front.bounds
    threads, num_ranks = options.get("threads"), options.get("tp", 1)
    cpus = front.replica_cpus
    if cpus is None:
        cpus = threads * num_ranks if threads else max(1, num_cpus() // most)
    on_cuda = options.get("device") == "cuda"
    return ReplicaPlan(
        model=model,
        front="",
        least=least,
        most=most,
        cpus=cpus,
        gpus=(1.0 if on_cuda else 0.0) if front.replica_gpus is None else front.replica_gpus,
        quiet_seconds=(
            QUIET_SECONDS if front.scale_down_seconds is None else front.scale_down_seconds
        ),
        options={"threads": max(1, int(cpus) // num_ranks), **options},
        num_shares=None if options.get("kv_disk") is None else most + 1,
    )


class Cluster(Protocol):
    """Starts the replicas of a plan. Calls block; all raise `LauncherError`."""

    def open(self, plan: ReplicaPlan) -> None:
        """Prepare to start replicas; refuse a plan that needs more resources than there are."""

    def deploy(self, plan: ReplicaPlan) -> None:
        """Request the replicas of a plan, in place of an earlier plan's."""

    def failure(self) -> str | None:
        """Return in one line why replicas cannot be started, or None."""

    def close(self) -> None:
        """Stop the replicas."""


class PlannedReplicas:
    """The `Launcher` that starts a plan's replicas on a `Cluster`. Belongs to one event loop."""

    def __init__(self, plan: ReplicaPlan, cluster: Cluster) -> None:
        self.plan = plan
        self._cluster = cluster
        self._changing = asyncio.Lock()
        self._is_closed = False

    async def start(self, address: str) -> None:
        """Begin to start replicas, which connect to ``address``. Raises `LauncherError`."""
        await asyncio.to_thread(self._cluster.open, self.plan)
        _take_signals_back()
        self.plan = replace(self.plan, front=address)
        try:
            await asyncio.to_thread(self._cluster.deploy, self.plan)
        except BaseException:
            await self.close()
            raise

    async def change(self, least: int, most: int) -> None:
        """Request between ``least`` and ``most`` replicas from the cluster.

        Raises `InvalidRequest` if the disk has too few shares for ``most``, and `LauncherError`.
        """
        async with self._changing:
            if self._is_closed:
                raise LauncherError(
                    "the front is closing: the number of replicas can no longer be changed"
                )
            if (shares := self.plan.num_shares) is not None and most >= shares:
                raise InvalidRequest(
                    f"replicas must be at most {shares - 1}, for which --kv-disk is divided, "
                    f"not {most}: restart the front with a larger --max-replicas",
                    param="replicas",
                )
            plan = replace(self.plan, least=least, most=most)
            await asyncio.to_thread(self._cluster.deploy, plan)
            self.plan = plan

    async def failure(self) -> str | None:
        """Return why replicas cannot be started, or None."""
        return await asyncio.to_thread(self._cluster.failure)

    async def close(self) -> None:
        """Stop the replicas after a change in progress."""
        self._is_closed = True
        async with self._changing:  # waits for a change in progress
            await asyncio.to_thread(self._cluster.close)


def _take_signals_back() -> None:
    """Reinstall Python's handlers of SIGTERM and SIGINT.

    When Ray starts, it installs handlers in C, which Python does not know and which would abort the
    process.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:  # None: a handler in C
                signal.signal(number, handler)
