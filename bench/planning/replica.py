"""A replica in virtual time: the real engine, scheduler, cache and tiers; steps only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.engine.engine import Engine
from ...core.engine.model_thread import Supervision
from ...core.interface.extras.tiers import Medium
from ...core.interface.extras.transfers import PageOffer
from ...core.interface.output import StepOutput
from ...core.interface.plan import StepPlan
from ...core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from ...core.interface.request import Request
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...core.tiers.keys import PageKeys
from ...core.tiers.stores.peer_store import PeerStore
from ...core.tiers.stores.slotted_store import Entry, SlottedStore
from ...core.tiers.tiers import CALL_BYTES, Tiers
from ...radix_cache import PrefixCache
from .costs import StepCosts
from .drafts import NO_DRAFTS, Answers, Drafts, DraftsOfDepth
from .transfers import PAGE_BYTES, Network, Spends, VirtualReader
from .virtual_time import VirtualThread

FINGERPRINT = b"planned"  # All replicas of a plan share this, so equal pages have equal keys.
SAMPLES = 512  # Maximum number of samples of the occupancy.
Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier of a plan. ``page_seconds``: time to read or write a page."""

    medium: Medium
    num_bytes: int
    page_seconds: float


class VirtualSlots:
    """`Slots` that keep nothing: reading or writing a page only takes time."""

    def __init__(self, capacity: int, page_seconds: float, thread: Spends) -> None:
        self.capacity = capacity
        self._page_seconds, self._thread = page_seconds, thread

    def allocate(self, slot: int) -> bool:
        """Return whether the slot is within the capacity."""
        return slot < self.capacity

    def write(self, slot: int, page: memoryview) -> int:
        """Spend the time of writing a page."""
        del slot, page
        self._thread.spend(self._page_seconds)
        return 0

    def read(self, slot: int, into: memoryview) -> int | None:
        """Spend the time of reading a page."""
        del slot, into
        self._thread.spend(self._page_seconds)
        return 0

    def write_entry(self, slot: int, entry: Entry) -> None:
        """Do nothing: the store keeps entries in memory."""

    def void(self, slot: int) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Records:
    """`Records` of pages without content."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def read(self, page_id: int) -> memoryview:
        del page_id
        return memoryview(b"")

    def target(self, page_id: int) -> memoryview:
        del page_id
        return memoryview(bytearray(PAGE_BYTES))

    def write(self, page_id: int) -> None:
        pass


class Occupancy:
    """Shares of a KV pool at its steps; means are weighted by the steps' seconds.

    *Held* pages belong to running requests; *cached* pages are the others that the tree keeps.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []  # Time, held, cached.
        self.most_held = 0.0
        self._held_s = self._cached_s = self._seconds = 0.0
        self._num_seen, self._stride = 0, 1

    def note(self, now: float, seconds: float, held: float, cached: float) -> None:
        """Record the shares in a step that begins at ``now``."""
        self._seconds += seconds
        self._held_s += seconds * held
        self._cached_s += seconds * cached
        self.most_held = max(self.most_held, held)
        if self._num_seen % self._stride == 0:
            self.samples.append((now, held, cached))
        self._num_seen += 1
        if len(self.samples) > SAMPLES:
            self.samples, self._stride = self.samples[::2], 2 * self._stride

    @property
    def held(self) -> float:
        """Mean share that requests hold."""
        return self._held_s / self._seconds if self._seconds else 0.0

    @property
    def cached(self) -> float:
        """Mean share of other pages in the tree."""
        return self._cached_s / self._seconds if self._seconds else 0.0


class TimedStep:
    """`Pending` of a step that ends at ``ends`` on the thread's clock."""

    def __init__(self, output: StepOutput, thread: VirtualThread, ends: float) -> None:
        self._output, self._thread, self._ends = output, thread, ends

    def finish(self) -> StepOutput:
        """Let the time pass until the step ends."""
        self._thread.spend(max(0.0, self._ends - self._thread.time()))
        return self._output


class TimedRunner:
    """A `StepRunner` whose steps take their estimated time and always choose the same token."""

    def __init__(self, costs: StepCosts, cache: PrefixCache, drafts: Drafts) -> None:
        self.occupancy = Occupancy()
        self.thread = VirtualThread()
        self.num_steps = 0
        self.busy_seconds = 0.0
        self._costs, self._curve, self._cache = costs, costs.curve(), cache
        self._answers = Answers(drafts)
        self._ends = 0.0  # End of the last launched step.

    @property
    def is_async(self) -> bool:
        """Whether steps overlap on the machine with these costs."""
        return self._costs.overlaps

    def prepare_thread(self) -> None:
        """Do nothing."""

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Begin the step when the one before it has ended."""
        del after  # Every request gets the same token, whatever the step before chose.
        on_kernels_started()
        seconds = self._costs.seconds(plan, self._curve) + self._answers.seconds_of(plan)
        began = max(self.thread.time(), self._ends)
        self._ends = began + seconds
        self._note(began, seconds)
        outputs = self._answers.of(plan)
        num_rows = sum(row.stop - row.start + row.draft_plan.num_rows for row in plan.requests)
        output = StepOutput(requests=outputs, times={"forward": seconds}, num_rows=num_rows)
        return TimedStep(output, self.thread, self._ends)

    def _note(self, began: float, seconds: float) -> None:
        cache = self._cache
        cached = cache.num_evictable_pages / cache.num_total_pages
        self.occupancy.note(began, seconds, cache.usage, cached)
        self.num_steps += 1
        self.busy_seconds += seconds


class PlannedReplica:
    """One engine of a plan. It belongs to the running virtual loop.

    ``kv_bytes``: size of its pool; ``max_running``: maximum number of running requests. With a
    ``role`` it computes prompts for other replicas of its ``network``, or reads the prompts that
    they computed.
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        kv_bytes: int,
        max_running: int,
        tiers: Sequence[Tier] = (),
        drafts: Drafts = NO_DRAFTS,
        role: Role | None = None,
        network: Network | None = None,
    ) -> None:
        """Set the engine up. Raises ValueError if the pool has no room for a page."""
        num_pages = kv_bytes // costs.page_bytes
        if num_pages < 1:
            raise ValueError(
                f"the KV pool must have {costs.page_bytes} bytes or more, the size of one KV page"
            )
        self.cache = PrefixCache(num_pages, costs.page_size)
        self.keys = PageKeys(FINGERPRINT, num_pages, costs.page_size)
        self.cache.tree.add_observer(self.keys)
        self._io = VirtualThread()
        self.runner = TimedRunner(costs, self.cache, drafts)
        self.server = None
        if network is not None and role == "prefill":
            self.server = network.add(self.cache.transfers)
        limits = SchedulerLimits(
            max_batch_tokens=costs.max_batch_tokens,
            max_running=max_running,
            max_queued=1 << 20,
            max_model_len=costs.max_model_len,
            vocab_size=costs.vocab_size,
            max_slowdown=float("inf") if costs.max_slowdown is None else costs.max_slowdown,
        )
        peers = network if role == "decode" else None
        has_tiers = tiers or peers is not None
        self.tiers = self._make_tiers(tiers, peers, costs.page_bytes) if has_tiers else None
        self.scheduler = Scheduler(
            self.cache, limits, speculator=DraftsOfDepth(drafts.depth), tiers=self.tiers
        )
        self.engine = Engine(
            self.scheduler,
            self.runner,
            clock=asyncio.get_running_loop().time,
            make_thread=self._make_thread,
            supervision=Supervision(step_timeout=0.0),
            overlap=costs.overlaps,
            page_server=self.server,
        )

    def offer(self, request: Request) -> PageOffer | None:
        """Return the held pages of a prompt that was computed here; None if none are held."""
        handed = request.transfer.handed
        if self.server is None or handed is None:
            return None
        return self.server.offer(handed, self.keys.key(handed.page_ids[-1]))

    def _make_tiers(self, tiers: Sequence[Tier], network: Network | None, page_bytes: int) -> Tiers:
        stores = [
            SlottedStore(
                VirtualSlots(tier.num_bytes // page_bytes, tier.page_seconds, self._io),
                tier.medium,
                0,  # Bytes of a page that are copied.
                1.0,
            )
            for tier in tiers
        ]
        peers = None
        if network is not None:
            reader = VirtualReader(network, max(1, CALL_BYTES // page_bytes), self._io)
            peers = PeerStore(reader, PAGE_BYTES, clock=self._io.time)
        return Tiers(
            self.cache.tree, self.keys, _Records(page_bytes), stores, peers, clock=self._io.time
        )

    def _make_thread(self, name: str, on_start: object) -> VirtualThread:
        del on_start
        if name == "foretoken-io":
            return self._io
        return self.runner.thread
