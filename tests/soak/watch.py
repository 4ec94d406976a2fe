"""Watch of the server during a soak: canaries, health checks, scrapes, and the ledger.

Nothing here puts load on it worth mentioning. When a wave is over the server must become idle,
and then every page must be accounted for.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator

import msgspec

from .book import Latency
from .server import Footprint, Server
from .wire import OK
from .world import World

CANARY_SECONDS, PROBE_SECONDS, AUDIT_SECONDS = 0.3, 0.25, 5.0
IDLE_SECONDS = 60.0  # a server without clients must be idle by then
CLOSE_SECONDS = 3.0  # until it has noticed that connections are gone
MAX_PROBE_SECONDS = 5.0  # of /health; a burst of connections is accepted before it
MAX_LAG_SECONDS = 2.0  # of a timer of the server's event loop
OWN_LATE_SECONDS = 0.3  # we were late ourselves: the machine stood still, not the server
TICK_SECONDS = 0.05
NOT_FOUND = 404
_SAMPLE = re.compile(r"^(foretoken:\w+)(?:\{[^}]*\})? ([0-9.eE+-]+|\+Inf|NaN)$", re.MULTILINE)
LAG = "foretoken:event_loop_lag_max_seconds"
STREAMS = "foretoken:http_streams"
MISHAPS = ("foretoken:failed_steps_total", "foretoken:audit_failures_total",
           "foretoken:crash_dumps_total")  # fmt: skip
RUNNING, WAITING = "foretoken:num_requests_running", "foretoken:num_requests_waiting"


class Watch:
    """Runs beside the waves; paused while the server is to be idle, or is not there."""

    def __init__(self, world: World, server: Server, seed: int) -> None:
        self.idle: list[list[Footprint]] = [[]]  # by process
        self.timeline: list[Footprint] = []  # under load, too
        self.metrics: dict[str, float] = {}  # the last scrape of each process, added up
        self.worst_lag = 0.0  # seconds
        self.has_audit = True
        self._world, self._server = world, server
        self._rng = random.Random(f"{seed}/canary")
        self._go = asyncio.Event()
        self._busy = 0
        self._last_late = self._last_scrape = 0.0  # on time.monotonic
        self._now: dict[str, float] = {}  # the last scrape of the process that runs
        self._tasks: list[asyncio.Task[None]] = []

    # -- all the while --------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look."""
        self._go.set()
        works = self._canaries(), self._probes(), self._samples(), self._audits(), self._own_lag()
        for work in works:
            self._tasks.append(asyncio.create_task(work))

    async def end(self) -> None:
        """Stop looking; what went wrong in here is written down."""
        for task in self._tasks:
            task.cancel()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in found:
            if isinstance(error, Exception):
                self._world.book.check("status", False, f"the watch: {error!r}")

    async def pause(self) -> None:
        """Returns when nothing of ours is on its way."""
        self._go.clear()
        while self._busy:  # noqa: ASYNC110 - a poll is plain
            await asyncio.sleep(0.02)

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    @contextlib.asynccontextmanager
    async def _turn(self, seconds: float) -> AsyncIterator[None]:
        await asyncio.sleep(seconds)
        while not self._go.is_set():  # it may be cleared again before we run
            await self._go.wait()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _canaries(self) -> None:
        """The same few requests; a flood may refuse them, nothing may change them."""
        world = self._world
        while True:
            async with self._turn(CANARY_SECONDS):
                known = self._rng.choice(world.canaries)
                wave, cycle = world.book.wave, world.book.cycle
                reply, told = await world.ask_known("canary", known, self._rng, stream=True)
                if told is not None and told.times and reply.ended == "whole":
                    gaps = [b - a for a, b in zip(told.times, told.times[1:], strict=False)]
                    ttft = told.times[0] - reply.sent
                    world.book.latencies.append(Latency(wave, cycle, ttft, gaps))

    async def _probes(self) -> None:
        """I9 from outside: health and readiness are answered, whatever the load."""
        world = self._world
        while True:
            async with self._turn(PROBE_SECONDS):
                began, begin = world.phase, time.monotonic()
                reply = await world.get(self._rng.choice(["/health", "/health", "/ready"]))
                if began == world.phase == "up":
                    world.judge("probe", reply, began)
                    world.book.probes.append(reply.seconds)
                    if self._last_late < begin:
                        told = f"/health took {reply.seconds:.1f} s"
                        world.book.check("I9", reply.seconds < MAX_PROBE_SECONDS, told)

    async def _own_lag(self) -> None:
        """Note when timers of our own are late: I9 cannot be told from a busy machine then."""
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            if time.monotonic() - due > OWN_LATE_SECONDS:
                self._last_late = time.monotonic()
                self._world.book.facts["own timers late"] += 1

    async def _samples(self) -> None:
        """Sample the server's footprint and its metrics while it is up."""
        while True:
            async with self._turn(2.0):
                if self._world.phase == "up":
                    with contextlib.suppress(OSError):
                        self.timeline.append(self._server.footprint())
                    await self.scrape()

    def _note_lag(self, seconds: float) -> None:
        """I9 from inside: how late its timers were at worst since the scrape before."""
        begin, self._last_scrape = self._last_scrape, time.monotonic()
        self.worst_lag = max(seconds, self.worst_lag)
        if self._last_late >= begin:
            return
        told = f"a timer of the server's loop was {seconds:.2f} s late"
        self._world.book.check("I9", seconds < MAX_LAG_SECONDS, told)

    async def _audits(self) -> None:
        """Between two steps of a server under load every page must have its place, too."""
        while self.has_audit:
            async with self._turn(AUDIT_SECONDS):
                if self._world.phase == "up":
                    await self._audit()

    # -- at rest --------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the server to be idle; check its ledger; note what it holds."""
        await self.pause()
        self._world.drop_links()
        await self._wait_idle()
        await self._check_ledger()
        await self._audit()
        self.idle[-1].append(await self._empty_footprint())
        self.resume()

    async def flush(self) -> None:
        """Empty the cache of an idle server: each cycle begins alike, and every page is free."""
        await self.pause()
        await self._wait_idle()
        await self._world.send(self._world.request("POST", "/cache/flush"))
        reply = await self._world.get("/cache")
        if reply.status == OK:
            cache = msgspec.json.decode(reply.body)
            told = f"after a flush of everything: {cache}"
            is_empty = cache["free_pages"] == cache["total_pages"]
            self._world.book.check("I1", is_empty, told)
        self.resume()

    async def _wait_idle(self) -> None:
        """I3: every request is gone once its client is."""
        end, found = time.monotonic() + IDLE_SECONDS, {RUNNING: 1.0, WAITING: 1.0}
        while found.get(RUNNING) or found.get(WAITING) or found.get(STREAMS):
            found = await self.scrape()
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.05)
        left = found.get(RUNNING, -1.0), found.get(WAITING, -1.0), found.get(STREAMS, 0.0)
        told = f"running, waiting, streams without clients: {left}"
        self._world.book.check("I3", left == (0, 0, 0), told)

    async def _check_ledger(self) -> None:
        """I1: free and evictable pages are all there are."""
        reply = await self._world.get("/cache")
        told = f"{reply.ended} {reply.status} {reply.body!r}"
        if not self._world.book.check("there", reply.status == OK, told):
            return
        cache = msgspec.json.decode(reply.body)
        held = cache["total_pages"] - cache["free_pages"] - cache["evictable_pages"]
        self._world.book.check("I1", held == 0, f"{held} pages are held by nobody: {cache}")

    async def _audit(self) -> None:
        """I1 to I3 by the server's own look at its books."""
        world = self._world
        reply = await world.send(world.request("POST", "/debug/audit"))
        self.has_audit = reply.status != NOT_FOUND
        if world.phase == "up" and self.has_audit:
            is_fine = reply.status == OK and msgspec.json.decode(reply.body)["ok"] is True
            for kind in ("I1", "I2", "I3"):
                world.book.check(kind, is_fine, f"audit: {reply.status} {reply.body[:500]!r}")

    async def _empty_footprint(self) -> Footprint:
        """Return the server's footprint once it has noticed that all connections are gone."""
        least = min((each.descriptors for each in self.idle[-1]), default=0)
        end, found = time.monotonic() + CLOSE_SECONDS, self._server.footprint()
        while found.descriptors > least and time.monotonic() < end:
            await asyncio.sleep(0.1)
            found = self._server.footprint()
        return found

    async def scrape(self) -> dict[str, float]:
        """Scrape metrics, summed over labels; those of a server that died stay as they were."""
        reply = await self._world.get("/metrics")
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(reply.body.decode("utf-8", "replace")):
            found[name] = found.get(name, 0.0) + float(value)
        self._now = found or self._now
        if LAG in found:
            self._note_lag(found[LAG])
        mishaps = {name: found[name] for name in MISHAPS if found.get(name)}
        self._world.book.check("engine", not mishaps, str(mishaps))
        return found

    def new_process(self) -> None:
        """The counters of the old one are added up; what it holds is another story now."""
        for name, value in self._now.items():
            if name.endswith(("_total", "_sum", "_count")):
                self.metrics[name] = self.metrics.get(name, 0.0) + value
        self._now = {}
        self.idle.append([])
