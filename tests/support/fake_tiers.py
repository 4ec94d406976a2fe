"""Stores in memory that misbehave when they are told to, records of the model of hashes, and a
driver whose I/O thread is called by hand."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretoken.core.engine.extras.tier_io import Call, TierIO
from foretoken.core.interface.extras.tiers import IsValid, Medium
from foretoken.core.scheduling.page_loads import PageLoads
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.tiers.keys import PageKeys
from foretoken.core.tiers.stores.peer_store import PeerStore
from foretoken.core.tiers.tiers import LEAST_TOKENS, Tiers
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver, FakeRunner, make_scheduler

_STATE = struct.Struct("<q")  # a hash


class DictStore:
    """A `PageStore` in a dict. ``calls`` has the names of its methods, in turn.

    ``before`` is called with each name before anything is done: what it raises, the store raises.
    """

    def __init__(self, medium: Medium = "disk", *, capacity: int = 10_000) -> None:
        self.medium: Medium = medium
        self.capacity = capacity
        self.pages: dict[bytes, tuple[bytes, bytes]] = {}  # tag and bytes by key, oldest first
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self.num_lied: int | None = None  # what `find` returns, if anything
        self.damaged: set[bytes] = set()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self.pages)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    def find(self, keys: Sequence[bytes]) -> int:
        self._called("find")
        if self.num_lied is not None:
            return self.num_lied
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys))

    def get(self, key: bytes, into: memoryview) -> bool:
        self._called("get")
        if key not in self.pages:
            return False
        if key in self.damaged:
            into[:] = b"\xff" * len(into)
            return False
        into[:] = self.pages[key][1]
        return True

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        self._called("put")
        data = bytes(page)
        if not is_valid():
            return False
        while len(self.pages) >= self.capacity:
            del self.pages[next(iter(self.pages))]
        self.pages[key] = (tag, data)
        return True

    def flush(self, tag: bytes | None = None) -> None:
        self._called("flush")
        self.pages = {key: page for key, page in self.pages.items() if tag not in (None, page[0])}

    def stats(self) -> Mapping[str, int]:
        return {"evicted": 7}

    def close(self) -> None:
        self._called("close")
        self.is_closed = True


def failing(*names: str) -> Callable[[str], None]:
    """Return a `DictStore.before` that raises in the methods of these names."""

    def before(name: str) -> None:
        if name in names:
            raise OSError(f"{name} failed")

    return before


class HashRecords:
    """`Records` of a `FakeRunner`, whose pages hold a hash for each position."""

    def __init__(self, runner: FakeRunner) -> None:
        self.num_bytes = runner.page_size * _STATE.size
        self._runner = runner
        self._staged = bytearray(self.num_bytes)

    def read(self, page_id: int) -> memoryview:
        for at in range(self._runner.page_size):
            _STATE.pack_into(self._staged, at * _STATE.size, self._runner.kv[page_id, at])
        return memoryview(self._staged)

    def target(self, page_id: int) -> memoryview:
        del page_id
        return memoryview(self._staged)

    def write(self, page_id: int) -> None:
        for at, (state,) in enumerate(_STATE.iter_unpack(self._staged)):
            self._runner.kv[page_id, at] = state


def make_fake_tiers(
    runner: FakeRunner,
    stores: Sequence[DictStore],
    clock: Callable[[], float],
    cache: PrefixCache,
    *,
    peers: PeerStore | None = None,
    least_tokens: int = LEAST_TOKENS,
) -> Tiers:
    """Real tiers of a cache, over the pages of a runner."""
    keys = PageKeys(b"fake", cache.num_total_pages, cache.page_size)
    cache.tree.add_observer(keys)
    records = HashRecords(runner)
    return Tiers(cache.tree, keys, records, stores, peers, clock=clock, least_tokens=least_tokens)


class CallingDriver(Driver):
    """A `Driver` whose tiers have no thread: what it would do is done where a test says so.

    ``begin_call`` takes the next call, `run_calls` makes all there are.
    """

    step_seconds = 0.001  # a look-up may take 50 of them

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        super().__init__(scheduler, runner)
        loads = scheduler.page_loads
        assert loads is not None
        self.loads: PageLoads = loads
        self.num_changes = 0  # told to the engine
        self._io = TierIO(
            loads,
            None,  # type: ignore[arg-type] # calls are made here
            clock=lambda: self.now,
            on_change=self._changed,
        )

    def _changed(self) -> None:
        self.num_changes += 1

    def flush(self, *namespaces: str | None) -> None:
        """Empty the pool and the tiers, as an engine does."""
        self.scheduler.flush(*namespaces)
        self._io.flush(*namespaces)

    def next_call(self) -> Call | None:
        """Return what the thread would begin now, if anything."""
        return self._io._next_call()

    def begin_call(self) -> Call:
        """Return what the thread would begin now."""
        call = self.next_call()
        assert call is not None, "the thread has nothing to do"
        return call

    def end_call(self, call: Call) -> None:
        """Make a call, and hand its result on."""
        call.use(call.work())
        self.loads.begin_fetches(self.now)  # as the next plan does first
        self.scheduler.audit()

    def run_calls(self) -> None:
        """Make all calls that there are."""
        while (call := self.next_call()) is not None:
            self.end_call(call)

    def run(self, max_steps: int = 10_000) -> None:
        """Run all requests to their end; the thread is never late."""
        for _ in range(max_steps):
            self.run_calls()
            if not self.scheduler.num_requests:
                return
            self.step()
        raise AssertionError("the requests never ended")


class LateDriver(CallingDriver):
    """One whose calls take any time, by lot, and are made at their beginning or their end."""

    step_seconds = 0.02

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, rng: random.Random) -> None:
        super().__init__(scheduler, runner)
        self._rng = rng

    def run(self, max_steps: int = 10_000) -> None:
        call: Call | None = None
        for _ in range(max_steps):
            if call is None and (call := self.next_call()) is not None:
                results = [call.work()] if self._rng.random() < 0.5 else []
                left = self._rng.choices([0, 1, 20], [0.95, 0.03, 0.02])[0]  # steps
            if call is not None and left == 0:
                call.use(results[0] if results else call.work())
                self.scheduler.audit()
                call = None
                continue
            if not self.scheduler.num_requests and call is None:
                return
            left -= 1
            self.step()
        raise AssertionError("the requests never ended")


class TieredDriver(CallingDriver):
    """One of a model of hashes with tiers over ``stores``."""

    def __init__(
        self,
        *stores: DictStore,
        page_size: int = 4,
        least_tokens: int = LEAST_TOKENS,
        runner: FakeRunner | None = None,
        peers: PeerStore | None = None,
        **options: Any,
    ) -> None:
        runner = runner or FakeRunner(page_size)

        def make_tiers(cache: PrefixCache) -> Tiers:
            self.tiers = make_fake_tiers(
                runner,
                stores,
                lambda: self.now,
                cache,
                peers=peers,
                least_tokens=least_tokens,
            )
            return self.tiers

        self.now = 0.0
        super().__init__(
            make_scheduler(page_size=page_size, make_tiers=make_tiers, **options), runner
        )
