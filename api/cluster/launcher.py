"""PlannedReplicas: as many replicas as a plan says, and updates that prove themselves.

A `Cluster` starts the replicas. It replaces those of an earlier plan one after the other, each new
one before an old one leaves. If one does not come, the earlier plan is deployed again: replicas
that are still there stay. Meanwhile the bounds of their number may change, for both plans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from ..runtime.preprocess import make_config
from ..serving.errors import UpdateUnderWay
from ..serving.settings import FrontOptions
from ..types.results import Body

logger = logging.getLogger(__name__)
QUIET_SECONDS = 30.0  # of a low load before a replica is taken away
UPDATE_SECONDS = 600.0  # within which a new replica must come, from one to the next
SETTLE_SECONDS = 30.0  # for replicas that start before an update
LOOK_SECONDS = 0.5  # between looks at an update


class LauncherError(ForetokenError):
    """Replicas cannot be started, or not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """Replicas that are wanted: how many, of what model, with what resources each."""

    model: str | None
    front: str  # address that they dial
    least: int
    most: int
    cpus: float
    gpus: float
    quiet_seconds: float  # of a low load before a replica is taken away
    options: Mapping[str, Any] = field(default_factory=dict)  # engine options
    most_ever: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether their number does not follow the load."""
        return self.least == self.most

    @property
    def num_shares(self) -> int | None:
        """Number of shares of a disk; None without one. It never becomes less.

        One more than there may be replicas: a new one comes before an old one leaves.
        """
        return None if self.options.get("kv_disk") is None else max(self.most, self.most_ever) + 1

    @property
    def version(self) -> str:
        """Equal for plans whose replicas are alike: those of another version are replaced."""
        alike = (self.model, self.front, sorted(self.options.items()), self.num_shares)
        return blake2b(repr(alike).encode(), digest_size=8).hexdigest()


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def plan_of(model: str | None, front: FrontOptions, options: Mapping[str, Any]) -> ReplicaPlan:
    """The plan that the flags of a front ask for; its address is known when it listens.

    The CPUs of this machine are shared out unless they are named, and are the replicas' threads.
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
    )


class Rollout(NamedTuple):
    """Progress of a cluster with the plan that was deployed last."""

    failure: str | None = None  # in one line: why its replicas cannot be started
    is_complete: bool = False  # all of them are there, and none of an earlier plan
    is_gone: bool = False  # nothing starts replicas any longer


class Cluster(Protocol):
    """Starts the replicas of a plan. Calls block; all raise `LauncherError`."""

    def open(self, plan: ReplicaPlan) -> None:
        """Get ready to start replicas, or refuse a plan that would wait for ever."""

    def deploy(self, plan: ReplicaPlan, *, is_update: bool = False) -> None:
        """Ask for the replicas of a plan, in place of an earlier one's.

        ``is_update``: some of them are replaced, so there must be room for one more.
        """

    def rollout(self) -> Rollout:
        """Progress with the plan that was deployed last."""

    def close(self) -> None:
        """End the replicas."""


class PlannedReplicas:
    """Keeps as many replicas as a plan says. A `Launcher`; belongs to one event loop."""

    def __init__(
        self,
        plan: ReplicaPlan,
        cluster: Cluster,
        *,
        clock: Callable[[], float] = time.monotonic,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self.plan = plan
        self.update: Body | None = None  # the last one: its state, and why it was undone
        self._earlier = plan  # deployed again if the update that runs fails
        self._cluster, self._clock, self._look_seconds = cluster, clock, look_seconds
        self._num_joined: Callable[[], int] = int
        self._changing = asyncio.Lock()
        self._closed = asyncio.Event()
        self._updating: asyncio.Task[None] | None = None

    async def start(self, address: str, num_joined: Callable[[], int]) -> None:
        """Ask for replicas that dial ``address``. Raises `LauncherError`.

        ``num_joined`` returns how many have ever joined there.
        """
        self._num_joined = num_joined
        await asyncio.to_thread(self._cluster.open, self.plan)
        _take_signals_back()
        self.plan = replace(self.plan, front=address)
        try:
            await asyncio.to_thread(self._cluster.deploy, self.plan)
        except BaseException:
            await self.close()
            raise

    async def change(
        self, bounds: tuple[int, int] | None, options: Mapping[str, Any] | None
    ) -> None:
        """Change the fewest and most; with options replace all, one after the other.

        Returns when the cluster has taken note; `update` has the outcome for replicas that are
        replaced. Waits for those that start, but no longer than `SETTLE_SECONDS`. While an update
        runs, bounds count for its replicas and for those that come back if it fails.
        Raises `InvalidRequest` for an option that is none, or that the front holds to,
        `UpdateUnderWay` for a change that would replace replicas during an update, and
        `LauncherError`.
        """
        async with self._changing:
            self._check_open()
            plan = _changed(self.plan, bounds, options)
            is_update = plan.version != self.plan.version
            if self._is_updating:
                await self._change_during_update(plan, bounds, is_update=is_update)
                return
            if is_update:
                await self._settle()
                self._check_open()
            await asyncio.to_thread(self._cluster.deploy, plan, is_update=is_update)
            self._earlier, self.plan = self.plan, plan
            if is_update:
                self._note("running")
                self._updating = asyncio.create_task(self._follow())

    async def _change_during_update(
        self, plan: ReplicaPlan, bounds: tuple[int, int] | None, *, is_update: bool
    ) -> None:
        """Go on with the update, and with these bounds whatever becomes of it."""
        earlier = _changed(self._earlier, bounds, None)
        if is_update or earlier.version != self._earlier.version:
            raise UpdateUnderWay(
                "replicas are being replaced, and this change would replace them once more: "
                "send it again when GET /replicas shows an update that is done or undone"
            )
        await asyncio.to_thread(self._cluster.deploy, plan, is_update=True)
        self._earlier, self.plan = earlier, plan

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise LauncherError("the front closes: its replicas change no more")

    async def _settle(self) -> None:
        """Wait for replicas that start: an update would end them at once, others go one by one."""
        since = self._clock()
        while not (await asyncio.to_thread(self._cluster.rollout)).is_complete:
            is_closed = await self._closes_within(self._look_seconds)
            if is_closed or self._clock() - since >= SETTLE_SECONDS:
                return

    @property
    def _is_updating(self) -> bool:
        return self._updating is not None and not self._updating.done()

    def _note(self, state: str, reason: str | None = None) -> None:
        self.update = {"state": state, "reason": reason}

    async def _follow(self) -> None:
        """Wait until all replicas are new; undo the update if one of them does not come."""
        reason = await self._hindrance(self._wait_until_complete())
        if reason is not None and not self._closed.is_set():
            logger.warning(
                "the replicas keep their options, because a new one did not come: %s", reason
            )
            if (further := await self._hindrance(self._undo())) is not None:
                reason = f"{reason}; {further}"
        if self._closed.is_set():
            return
        if reason is None:
            logger.info("all replicas are new")
        self._note("done" if reason is None else "undone", reason)

    async def _hindrance(self, progress: Awaitable[str | None]) -> str | None:
        """Why a replica is not there, or why that is unknown; None if all are or `close` came."""
        try:
            return await progress
        except LauncherError as error:
            return str(error)
        except Exception as error:
            logger.exception("how far the replicas are is unknown")
            return str(error) or type(error).__name__

    async def _undo(self) -> str | None:
        """Deploy the earlier plan; replicas of it that are there stay. As `_hindrance` else."""
        async with self._changing:
            self.plan = self._earlier
            if not self._closed.is_set():
                await asyncio.to_thread(self._cluster.deploy, self.plan)
        return await self._wait_until_complete()

    async def _wait_until_complete(self) -> str | None:
        num_joined, began = self._num_joined(), self._clock()
        since = began
        while not (rollout := await asyncio.to_thread(self._cluster.rollout)).is_complete:
            if rollout.failure is not None:
                return rollout.failure
            now = self._clock()
            most_seconds = UPDATE_SECONDS * self.plan.most  # old ones that join again are no news
            if self._num_joined() > num_joined:
                num_joined, since = self._num_joined(), now
            elif now - since >= UPDATE_SECONDS:
                return f"no new replica came in {UPDATE_SECONDS:g} s"
            if now - began >= most_seconds:
                return f"not all replicas were there in {most_seconds:g} s"
            if await self._closes_within(self._look_seconds):
                break
        return None

    async def _closes_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def failure(self) -> str | None:
        """Why replicas cannot be started, or that nothing starts them; None if all is well.

        An update that fails is undone instead.
        """
        rollout = await asyncio.to_thread(self._cluster.rollout)
        return rollout.failure if rollout.is_gone or not self._is_updating else None

    async def close(self) -> None:
        """End the replicas, once no change of them is under way."""
        self._closed.set()
        async with self._changing:  # the last change: later ones are refused
            updating = self._updating
        try:
            if updating is not None:
                await asyncio.wait((updating,))
        finally:
            await asyncio.to_thread(self._cluster.close)


def _take_signals_back() -> None:
    """Set the handlers of the signals that end a server once more.

    Ray sets its own in C when it starts, behind Python's back: they would abort the process.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:  # of Python
                signal.signal(number, handler)


def _changed(
    plan: ReplicaPlan, bounds: tuple[int, int] | None, options: Mapping[str, Any] | None
) -> ReplicaPlan:
    """Return a plan with other bounds and further options. Raises `InvalidRequest`."""
    wanted = plan
    if bounds is not None:
        ever = max(plan.most, plan.most_ever)
        wanted = replace(wanted, least=bounds[0], most=bounds[1], most_ever=ever)
    if options is not None:
        if "lora" in options:
            message = "lora: load adapters by /v1/load_lora_adapter"
            raise InvalidRequest(message, param="options.lora")
        wanted = replace(wanted, options={**plan.options, **options})
        _check_same_model(make_config(plan.options), make_config(wanted.options))
    return wanted


def _check_same_model(now: EngineConfig, wanted: EngineConfig) -> None:
    """Refuse replicas that the front would not take. Raises `InvalidRequest`."""
    for name in ("max_model_len", "page_size"):
        if getattr(now, name) != getattr(wanted, name):
            message = f"{name} cannot change while this front serves: start another one"
            raise InvalidRequest(message, param=f"options.{name}")
