"""Cancellation at the k-th suspension of a coroutine, for every k there is."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal

from . import loop as loops
from .loop import SimulatedLoop

How = Literal["waiting", "woken"]


class Strike:
    """Cancels a task once, where it is suspended for the ``at``-th time; 0 is never.

    "waiting": while what it waits for is still to come. "woken": when that has just come, before
    the task has run again; so its result is lost.
    """

    def __init__(self, at: int, how: How) -> None:
        self.at, self.how = at, how
        self.num_seen = 0  # suspensions
        self.spare: asyncio.Task[Any] | None = None  # if set, all others but this are cancelled

    @property
    def has_struck(self) -> bool:
        """Whether it came to that."""
        return 0 < self.at <= self.num_seen

    @types.coroutine
    def over(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The same coroutine, its suspensions counted."""
        inner, error = coroutine.__await__(), None
        while True:
            try:
                awaited = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            self.num_seen += 1
            if self.num_seen == self.at:
                self._hit(asyncio.current_task(), awaited)
            error = None
            try:
                yield awaited
            except BaseException as caught:
                error = caught

    def _hit(self, task: asyncio.Task[Any] | None, awaited: object) -> None:
        assert task is not None
        if self.how == "woken" and isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: self._cancel(task))
        else:
            task.get_loop().call_soon(self._cancel, task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        all_tasks = asyncio.all_tasks(task.get_loop()) if self.spare is not None else {task}
        for each in sorted(all_tasks - {self.spare}, key=lambda each: each.get_name()):
            each.cancel()


async def _run(coroutine: Any) -> Any:
    return await coroutine


def struck(coroutine: Coroutine[Any, Any, Any], strike: Strike) -> Coroutine[Any, Any, Any]:
    """Strike a coroutine; returns one that a task can be made of."""
    return _run(strike.over(coroutine))


Scenario = Callable[[SimulatedLoop, Strike], Coroutine[Any, Any, None]]


def every_suspension(scenario: Scenario, seed: int = 0, most: int = 500) -> Iterator[Strike]:
    """Run a scenario once for each suspension and each way to strike at it; yields the strikes."""
    for how in ("waiting", "woken"):
        for at in range(1, most):
            strike = Strike(at, how)
            loops.run(lambda loop, strike=strike: scenario(loop, strike), seed)
            if not strike.has_struck:
                break
            yield strike
        else:
            raise AssertionError(f"the scenario has more than {most} suspensions")


def by_name(qualname: str, strike: Strike) -> Callable[[Any, str | None], Any]:
    """For `SimulatedLoop.wrap`: the first task over a coroutine of that name is the one."""
    is_taken = False

    def wrap(coroutine: Any, name: str | None) -> Any:
        nonlocal is_taken
        if is_taken or getattr(coroutine, "__qualname__", "") != qualname:
            return coroutine
        is_taken = True
        return struck(coroutine, strike)

    return wrap
