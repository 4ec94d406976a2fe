"""An event loop with a virtual clock and a seeded, shuffled ready queue.

What asyncio promises stays true: callbacks that one callback registers run in the order in which
it did, none of them before the callback itself has returned, and timers run in the order of their
times. What no program may rely on is drawn by lot:

- in which order callbacks run that different callbacks have registered within one turn of the
  loop: with real sockets and threads any one of these could have been first;
- in which order timers run that are due at the same time, and what runs between them;
- when a call in an executor ends;
- how long callbacks take: now and then a timer falls due before the next ones run.

Half of the seeds leave the ready queue as asyncio itself would have it.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from foretoken.bench.planning.virtual_time import Stuck, VirtualLoop, run_on

__all__ = ["SimulatedLoop", "Stuck", "run"]
T = TypeVar("T")
MAX_SECONDS = 24 * 3600.0  # virtual; whoever waits longer waits for ever
MAX_CALLBACK_SECONDS = 0.05


class _Handle(asyncio.Handle):
    """A callback that knows which callback has registered it."""

    __slots__ = ("source",)


class SimulatedLoop(VirtualLoop):
    """A virtual loop that draws by lot what no program may rely on.

    ``wrap`` may replace a task's coroutine.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(MAX_SECONDS)
        self.wrap: Callable[[Any, str | None], Any] = lambda coroutine, name: coroutine
        self._rng = rng
        self._shuffles = rng.random() < 0.5
        self._haste = rng.choice([0.0, 0.02, 0.3])  # share of turns that take time
        self._source = 0  # number of the callback that runs

    # -- what asyncio calls ---------------------------------------------------------------------

    def call_soon(self, callback, *args, context=None):
        """At the end of the ready queue, with its source."""
        self._check_closed()
        handle = _Handle(callback, args, self, context)
        handle.source = self._source
        self._ready.append(handle)
        return handle

    def create_task(self, coro, *, name=None, context=None):
        """A task over what `wrap` makes of the coroutine."""
        return super().create_task(self.wrap(coro, name), name=name, context=context)

    def run_in_executor(self, executor, func, *args):
        """Inline, after a random time. A call that is cancelled may run or not, as with threads."""
        future = self.create_future()
        self.call_later(self._rng.expovariate(500.0), self._execute, future, func, args)
        return future

    def _execute(self, future: asyncio.Future[Any], func: Callable[..., Any], args: Any) -> None:
        if future.cancelled() and self._rng.random() < 0.5:
            return
        try:
            result = func(*args)
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(result)

    def _in_order(self, ready: list[Any]) -> list[Any]:
        """Any merger of the sources that keeps the order within each; all timers are one."""
        if not self._shuffles:
            return ready
        sources = [getattr(handle, "source", -1) for handle in ready]
        queues: dict[int, deque[Any]] = defaultdict(deque)
        for source, handle in zip(sources, ready, strict=True):
            queues[source].append(handle)
        self._rng.shuffle(sources)
        return [queues[source].popleft() for source in sources]

    def _run_handle(self, handle: asyncio.Handle) -> None:
        self._source += 1
        super()._run_handle(handle)

    # -- time -----------------------------------------------------------------------------------

    def jump(self, seconds: float) -> None:
        """The machine slept: so much time is gone."""
        self._now += seconds

    def _pass_time(self) -> None:
        has_ready = bool(self._ready) or self._stopping
        super()._pass_time()
        when = self._next_timer() if has_ready else None
        is_near = when is not None and when - self._now < MAX_CALLBACK_SECONDS
        if is_near and self._rng.random() < self._haste:
            self._move_to(when)

    def _tie(self) -> float:
        return self._rng.random()

    def end(self) -> None:
        """Cancel what is left, without minding how it takes it, and close."""
        self.wrap = lambda coroutine, name: coroutine
        super().end()


def run(main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]], seed: object) -> T:
    """Run to the end in no time. Raises `Stuck`, what ``main`` raises, and for logged errors."""
    return run_on(SimulatedLoop(random.Random(f"loop {seed}")), main)
