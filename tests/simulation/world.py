"""A whole engine in virtual time, its clients, operators and faults, all drawn by one seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import EngineDead
from foretoken.core.interface.extras import packing
from foretoken.core.interface.plan import StepPlan
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.radix_cache import PrefixCache, StateSlots
from support.toy_states import ToyStates

from . import loop as loops
from .asks import NUM_SALTS, Ask, Asks
from .checked import CheckedScheduler
from .clients import Client, Told
from .drafting import SPECULATORS, FaultySpeculator, make_proposer, make_speculator
from .faults import Faults
from .loop import SimulatedLoop
from .model import VOCAB_SIZE, HashDecoder, Pages, SimulatedRunner
from .thread import SimulatedThread
from .tiering import SimulatedTiers
from .verdict import check_end

MAX_STEPS = 20_000
PATIENCE = 4000.0  # virtual seconds in which everybody must be through


class Violation(AssertionError):
    """Something that must hold did not."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and habits of one engine."""

    num_pages: int
    page_size: int
    max_batch_tokens: int
    max_running: int
    max_queued: int
    max_model_len: int
    max_slowdown: float
    pin_quota: float = 0.25
    cache_quota: float = 1.0
    aging_seconds: float = 10.0
    speculator: str
    depth: int
    overlap: bool = True
    launches: bool = False  # as a GPU does

    @classmethod
    def draw(cls, rng: random.Random) -> Shape:
        """Tiny pools: eviction and preemption are the rule."""
        return cls(
            num_pages=rng.choice([rng.randint(12, 18), rng.randint(12, 40)]),
            page_size=rng.choice([1, 1, 2, 4]),
            max_batch_tokens=rng.choice([2, 5, 16, 40]),
            max_running=rng.choice([1, 2, 4, 8, 8]),
            max_queued=rng.choice([1, 4, 50]),
            max_model_len=rng.choice([20, 60, 1000]),
            max_slowdown=rng.choice([1.0, 2.0, float("inf")]),
            pin_quota=rng.choice([0.0, 0.25, 0.5]),
            cache_quota=rng.choice([0.1, 0.5, 1.0]),
            aging_seconds=rng.choice([0.05, 10.0]),
            speculator=rng.choice(SPECULATORS),
            depth=rng.choice([1, 3, 7]),
            overlap=rng.random() < 0.7,
            launches=rng.random() < 0.5,
        )


@dataclass
class Findings:
    """Counts and the trace of one seed's run, for the report."""

    num_requests: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0
    num_loaded: int = 0  # tokens that came from a tier
    num_resumed: int = 0  # tokens that were not computed, because the state behind them was kept
    num_packed_away: int = 0  # tokens of answers whose KV was packed away
    num_late: int = 0  # loads that nobody waited for any longer
    num_ahead: int = 0  # steps whose plan was made while the one before ran
    seconds: float = 0.0  # virtual
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    trace: int = 0  # equal for equal runs


class World:
    """One seed's engine and all who deal with it; `live` raises what it finds."""

    def __init__(
        self,
        loop: SimulatedLoop,
        seed: object,
        *,
        shape: Shape | None = None,
        faults: Faults | None = None,
        has_tiers: bool | None = None,
        num_slots: int | None = 0,
    ) -> None:
        """``num_slots``: of recurrent states; 0: the model has none, None: by lot."""
        self.loop = loop
        self.rng = random.Random(f"world {seed}")
        self.shape = shape or Shape.draw(self.rng)
        self.faults = faults or Faults.draw(self.rng)
        self.tier_rng = random.Random(f"tiers {seed}")
        self.has_tiers = self.tier_rng.random() < 0.4 if has_tiers is None else has_tiers
        self.state_rng = random.Random(f"states {seed}")
        self.num_slots = self._draw_slots() if num_slots is None else num_slots
        self.packing_rng = random.Random(f"eviction {seed}")
        self.kv_budget = self._draw_budget()
        self.violations: list[str] = []
        self.told: list[Told] = []
        self.closed_at: float | None = None
        self.num_steps = 0  # tried
        self.trace = 0  # equal for equal runs
        self._failed = asyncio.Event()
        self.tiers: SimulatedTiers | None = None
        self.states: ToyStates | None = None
        self.engine = self._make_engine()
        self.asks = Asks(self.rng)
        if self.tiers is not None:
            self.tiers.fill(self.asks)

    # -- the engine -----------------------------------------------------------------------------

    def _draw_slots(self) -> int:
        """Few slots: that kept states give way is the rule."""
        has_states = self.state_rng.random() < 0.5
        return self.state_rng.choice([3, 3, 4, 6, 10]) if has_states else 0

    def _draw_budget(self) -> int:
        """Tokens of an answer that keep their KV: few, packed often. States are not packed."""
        evicts = self.packing_rng.random() < 0.4 and not self.num_slots
        return self.packing_rng.choice([1, 2, 5]) if evicts else 0

    def _make_states(self) -> StateSlots | None:
        """Slots for states, and the states of the model; fewer requests run then."""
        if not self.num_slots:
            return None
        self.shape = replace(
            self.shape, max_running=min(self.shape.max_running, max(1, self.num_slots - 2))
        )
        self.faults.add_those_of_states(self.state_rng)
        self.states = ToyStates(
            self.num_slots,
            self.shape.max_running,
            page_size=self.shape.page_size,
            violation=self.violation,
            between_layers=self.faults.between_layers,
        )
        interval = self.state_rng.choice([0, 5, 8])
        return StateSlots(self.num_slots, self.shape.max_running, interval=interval)

    def _make_engine(self) -> Engine:
        states = self._make_states()
        shape, part = self.shape, lambda: random.Random(self.rng.getrandbits(64))
        cache = PrefixCache(
            shape.num_pages,
            shape.page_size,
            pin_quota=shape.pin_quota,
            cache_quota=shape.cache_quota,
            states=states,
        )
        speculator = make_speculator(
            shape.speculator,
            depth=shape.depth,
            overlaps=shape.overlap and shape.launches,
            clock=self.loop.time,
            rng=part(),
        )
        pages = Pages(shape.num_pages, shape.page_size, self.states)
        if self.has_tiers:
            self.faults.add_those_of_tiers(self.tier_rng)
            self.tiers = SimulatedTiers(cache, pages, self.faults, self.tier_rng, self.loop.time)
        self.scheduler = CheckedScheduler(
            cache,
            SchedulerLimits(
                max_batch_tokens=shape.max_batch_tokens,
                max_running=shape.max_running,
                max_queued=shape.max_queued,
                max_model_len=shape.max_model_len,
                max_slowdown=shape.max_slowdown,
                aging_seconds=shape.aging_seconds,
                vocab_size=VOCAB_SIZE,
                kv_budget=self.kv_budget,
            ),
            FaultySpeculator(speculator, self.faults, part()),
            self.tiers,
        )
        self.scheduler.openings = [array("q", each) for each in ((1, 2), (3,), (4,))]
        self.decoder = HashDecoder(self.violation)
        self.runner = SimulatedRunner(
            self.decoder,
            pages,
            make_proposer(
                shape.speculator,
                self.faults,
                part(),
                page_size=shape.page_size,
                violation=self.violation,
            ),
            before=self._before,
            after=self.faults.after,
            seconds=lambda: self.rng.expovariate(200.0),
            fails_late=part() if shape.launches else None,
        )
        threads = part()
        return Engine(
            self.scheduler,
            self.runner,
            clock=self.loop.time,
            make_thread=lambda name, on_start: SimulatedThread(
                threads if name == "foretoken-model" else self.tier_rng,
                self.faults.seconds if name == "foretoken-model" else self.faults.io_seconds,
                self.violation,
                on_start,
            ),
            overlap=shape.overlap,
        )

    def _before(self, plan: StepPlan) -> None:
        """In the model thread: whatever depends on the plan is part of the trace."""
        self.num_steps += 1
        self._note(
            self.loop.time(), *((row.request_id, row.start, row.stop) for row in plan.requests)
        )
        if self.num_steps > MAX_STEPS:
            self.violation("requests get on for ever and never end")
        self.faults.before(plan, self.decoder)

    def _note(self, *what: object) -> None:
        self.trace = zlib.crc32(repr(what).encode(), self.trace)

    def violation(self, text: str) -> None:
        """Note what must not be, and raise it: whoever catches that does not hide it."""
        self.violations.append(f"{text} (at {self.loop.time():.3f} s)")
        self._failed.set()
        raise Violation(text)

    # -- what clients do ------------------------------------------------------------------------

    def submit(self, ask: Ask, request_id: str) -> tuple[Told, TokenStream]:
        """A request and its stream, watched. Raises what `Engine.submit` raises."""
        request = ask.request(request_id)
        stream = self.engine.submit(request)
        if ask.is_poison:
            self.faults.poison.add(request_id)
        return self.watch(stream, ask), stream

    def watch(self, stream: TokenStream, ask: Ask) -> Told:
        """See all that a stream of the engine is told."""
        told = Told(ask, stream.request, self.loop.time())
        told.watch(stream, self.loop.time, self.violation)
        self.told.append(told)
        return told

    async def _multi_tenant(self) -> None:
        """All clients to their end."""
        pause = self.rng.choice([0.0, 0.0, 0.02, 0.5])
        clients = [
            Client(self, f"c{number}", random.Random(self.rng.getrandbits(64)))
            for number in range(self.rng.choice([2, 6, 12]))
        ]
        await asyncio.gather(*(client.run(self.rng.randint(1, 3), pause) for client in clients))

    # -- what operators do ----------------------------------------------------------------------

    async def _operate(self) -> None:
        """Now and then: a flush, a look, a leap of the clock; maybe an early end."""
        rng = self.rng
        closes_at = rng.expovariate(0.5) if rng.random() < 0.25 else None
        leaps = rng.random() < 0.2
        while True:
            await asyncio.sleep(rng.expovariate(5.0))
            if closes_at is not None and self.loop.time() >= closes_at:
                await self.close(rng.choice([0.0, 0.1, 200.0]))
                return
            await self._look()
            if leaps and rng.random() < 0.1:
                self.loop.jump(rng.choice([1.0, 60.0]))

    async def _look(self) -> None:
        rng, engine = self.rng, self.engine
        namespace = rng.choice([None, *(f"tenant-{salt}" for salt in range(1, NUM_SALTS))])
        match rng.randrange(5):
            case 0:
                await engine.flush_cache(*(() if rng.random() < 0.3 else (namespace,)))
            case 1:
                told = rng.choice(self.told) if self.told else None
                if told is not None and len(told.request.tokens) >= self.shape.page_size:
                    await engine.flush_prefix(told.request.tokens, told.ask.namespace)
            case 2:
                await engine.cache_info(namespace)
            case 3 if rng.random() < 0.1:
                engine.metrics.render()
            case 4 if engine.alive:
                with contextlib.suppress(EngineDead):  # it may end before it answers
                    verdict = await engine.audit()
                    if not verdict["ok"]:
                        self.violation(f"the audit says {verdict}")

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Close the engine as at the end of a process, and note the time."""
        if self.closed_at is None:
            self.closed_at = self.loop.time()
        await self.engine.close(drain_seconds=drain_seconds)

    # -- all of it ------------------------------------------------------------------------------

    async def live(self) -> Findings:
        """From the start of the engine to its end. Raises `Violation`."""
        await self.engine.start()
        crowd = asyncio.create_task(self._multi_tenant(), name="crowd")
        operators = asyncio.create_task(self._operate(), name="operators")
        failed = asyncio.create_task(self._failed.wait(), name="failed")
        done, _ = await asyncio.wait(
            {crowd, failed}, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            self.violations.append(f"clients wait for ever\n{self.loop.state()}")
        operators.cancel()
        failed.cancel()
        await asyncio.wait({operators, failed})
        if self.violations:
            crowd.cancel()
            raise Violation("\n".join(self.violations))
        await crowd
        if not operators.cancelled():
            operators.result()
        await check_end(self)
        return self.findings()

    def findings(self) -> Findings:
        return Findings(
            num_requests=len(self.told),
            num_steps=self.num_steps,
            num_ahead=self.runner.num_ahead,
            num_preemptions=self.scheduler.num_preemptions,
            num_loaded=sum(told.request.usage.loaded_tokens for told in self.told),
            num_resumed=self._num_resumed(),
            num_packed_away=self.scheduler.num_packed_away_tokens,
            num_late=0 if self.scheduler.page_loads is None else self.scheduler.page_loads.num_late,
            num_accepted=sum(told.request.usage.accepted_tokens for told in self.told),
            seconds=self.loop.time(),
            ends=Counter(told.end for told in self.told),
            faults=Counter({kind: count for kind, count in self.faults.happened.items() if count}),
            trace=self.trace,
        )

    def _num_resumed(self) -> int:
        return self.scheduler.cache.num_hits if self.states is not None else 0


def live(seed: int, **options: int | None) -> Findings:
    """Run one seed; slots for states by lot. Raises `Violation` or `Stuck`, with the seed."""
    options = {"num_slots": None} | options
    every = packing.EVERY
    try:
        packing.EVERY = 3  # answers are short here
        return loops.run(lambda loop: World(loop, seed, **options).live(), seed)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        packing.EVERY = every
