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
import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
MAX_TURNS_AT_ONCE = 5_000  # turns of the loop in which no time passes: a hot loop
MAX_SECONDS = 24 * 3600.0  # virtual; whoever waits longer waits for ever
MAX_CALLBACK_SECONDS = 0.05


class Stuck(AssertionError):
    """Something waits for what will never come."""


class _Handle(asyncio.Handle):
    """A callback that knows which callback has registered it."""

    __slots__ = ("source",)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Time passes when nothing else is to be done, at once.

    ``errors`` collects what asyncio would only log. ``wrap`` may replace a task's coroutine.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.num_turns = 0
        self.wrap: Callable[[Any, str | None], Any] = lambda coroutine, name: coroutine
        self._rng = rng
        self._shuffles = rng.random() < 0.5
        self._haste = rng.choice([0.0, 0.02, 0.3])  # share of turns that take time
        self._now = 0.0
        self._turns_at_once = 0
        self._source = 0  # number of the callback that runs
        self.set_exception_handler(self._note_error)

    # -- what asyncio calls ---------------------------------------------------------------------

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

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

    def _write_to_self(self) -> None:
        """There is nobody to wake."""

    def _run_once(self) -> None:
        """One turn: let time pass, take the timers that are due, run what is ready."""
        self.num_turns += 1
        self._pass_time()
        ready = [*self._ready, *self._due()]
        self._ready.clear()
        for handle in self._shuffled(ready) if self._shuffles else ready:
            if not handle.cancelled():
                self._source += 1
                handle._run()

    # -- time -----------------------------------------------------------------------------------

    def jump(self, seconds: float) -> None:
        """The machine slept: so much time is gone."""
        self._now += seconds

    def _pass_time(self) -> None:
        when = self._next_timer()
        if not self._ready and not self._stopping:
            if when is None:
                raise Stuck(f"nothing is ready and nothing is scheduled\n{self.state()}")
            self._move_to(when)
            return
        self._turns_at_once += 1
        if self._turns_at_once > MAX_TURNS_AT_ONCE:
            raise Stuck(f"the loop runs hot: no time passes\n{self.state()}")
        is_near = when is not None and when - self._now < MAX_CALLBACK_SECONDS
        if is_near and self._rng.random() < self._haste:
            self._move_to(when)

    def _move_to(self, when: float) -> None:
        if when > self._now:
            self._now, self._turns_at_once = when, 0
        if self._now > MAX_SECONDS:
            raise Stuck(f"somebody still waits after {self._now:.0f} s\n{self.state()}")

    def _next_timer(self) -> float | None:
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        return self._scheduled[0].when() if self._scheduled else None

    def _due(self) -> list[asyncio.TimerHandle]:
        """Timers whose time has come, in the order of their times and else in any."""
        due = []
        while (when := self._next_timer()) is not None and when <= self._now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            due.append((when, self._rng.random(), len(due), handle))
        return [handle for *_, handle in sorted(due)]

    def _shuffled(self, ready: list[Any]) -> list[Any]:
        """Any merger of the sources that keeps the order within each; all timers are one."""
        sources = [getattr(handle, "source", -1) for handle in ready]
        queues: dict[int, deque[Any]] = defaultdict(deque)
        for source, handle in zip(sources, ready, strict=True):
            queues[source].append(handle)
        self._rng.shuffle(sources)
        return [queues[source].popleft() for source in sources]

    # -- what went wrong ------------------------------------------------------------------------

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def state(self) -> str:
        """Describe where every task stands."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        lines = [f"at {self._now:.3f} s, turn {self.num_turns}"]
        return "\n".join(lines + [f"  {task.get_name()}: {_place(task)}" for task in tasks])

    def end(self) -> None:
        """Cancel what is left, without minding how it takes it, and close."""
        self.wrap = lambda coroutine, name: coroutine
        try:
            for _ in range(3):
                if left := asyncio.all_tasks(self):
                    self._turns_at_once = 0
                    for task in left:
                        task.cancel()
                    self.call_later(60.0, self.stop)
                    self.run_forever()
        except Stuck:
            pass  # known already, or of no interest any more
        finally:
            self.close()


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost frames in which a task is suspended."""
    frames, awaited = [], task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " < ".join(reversed(frames))


def run(main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]], seed: object) -> T:
    """Run to the end in no time. Raises `Stuck`, what ``main`` raises, and for logged errors."""
    loop = SimulatedLoop(random.Random(f"loop {seed}"))
    try:
        result = loop.run_until_complete(main(loop))
        loop.run_until_complete(loop.shutdown_asyncgens())
        assert not (left := asyncio.all_tasks(loop)), f"tasks are left over: {left}"
        assert not loop.errors, f"the loop has heard of {loop.errors}"
        return result
    finally:
        loop.end()
