"""LoopGuard: an event loop that stands still is noticed by another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from foretoken.api.server.lifecycle import LoopGuard


class Ticks:
    """In place of the guard's clock: at each tick it does what it is told, and ends at the last."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self.actions = list(actions)

    def wait(self, seconds: float) -> bool:
        if not self.actions:
            return True
        self.actions.pop(0)()
        return False


def guarded(*beats: bool) -> int:
    """Number of calls for help by a guard of three seconds, by whether the loop beat in each."""
    calls: list[str] = []
    guard = LoopGuard(3, lambda: calls.append(threading.current_thread().name))
    guard._ended = Ticks(*(guard.beat if each else lambda: None for each in beats))
    guard._watch()
    return len(calls)


def test_a_loop_that_stands_still_is_reported_once() -> None:
    assert guarded(True, False, False, False, False, False) == 1


def test_a_loop_that_is_late_now_and_then_is_left_alone() -> None:
    assert guarded(False, False, True, False, False, True, False) == 0


def test_a_guard_works_in_a_thread_of_its_own_until_it_is_closed() -> None:
    stuck = threading.Event()
    guard = LoopGuard(0.01, stuck.set, tick=0.001)
    guard.start()
    assert stuck.wait(10)
    other = LoopGuard(1000, stuck.clear)
    other.start()
    other.close()
    other._thread.join(10)
    assert not other._thread.is_alive()
    assert stuck.is_set()
