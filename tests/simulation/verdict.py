"""Verdict on a world at its end: conditions that must hold whatever has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import DeadlineExceeded, EngineDead
from foretoken.core.interface.request import RequestStatus

from .clients import Told
from .faults import Fault, OutOfMemory

if TYPE_CHECKING:
    from .world import World

FORWARD_FAULTS = {"forward raises", "forward raises late", "layer raises", "out of memory"}
FATAL_FAULTS = FORWARD_FAULTS | {"forward fails for good", "model hangs"}


async def check_end(world: World) -> None:
    """All clients are through: look at the engine, close it, look at every request."""
    engine = world.engine
    _check_failure(world)
    if world.closed_at is None and engine.failure is None:
        await _check_idle(world)
    await world.close()
    world.scheduler.audit()
    _check_nothing_is_left(world)
    for told in world.told:
        _check_told(world, told)


def _check_failure(world: World) -> None:
    """An engine ends by faults that nobody could survive, and by no other."""
    failure, happened = world.engine.failure, world.faults.happened
    if failure is None:
        return
    if not any(happened.get(kind) for kind in FATAL_FAULTS):
        world.violation(f"the engine failed without a reason: {failure!r}")
    if not isinstance(failure, Fault | OutOfMemory) and not happened.get("model hangs"):
        world.violation(f"the engine failed by itself: {failure!r}")


async def _check_idle(world: World) -> None:
    """A living engine comes to rest by itself, and then keeps nothing but its cache."""
    await world.engine.close(drain_seconds=1000.0)
    aborted = [told for told in world.told if told.last is None]
    if aborted:
        world.violation(f"{aborted[0].request.request_id} was never ended")


def _check_nothing_is_left(world: World) -> None:
    """I1 and I3 at the end: every page is free once the cache is flushed."""
    scheduler, cache = world.scheduler, world.scheduler.cache
    if scheduler.num_requests or scheduler.running or scheduler.waiting:
        world.violation("requests are left in the scheduler")
    if world.engine._inbox.streams:
        world.violation("streams are left in the engine")
    if world.engine.num_audit_failures:
        world.violation("an audit of the engine's own has failed")
    cache.flush()
    cache.check([])
    if cache.num_free_pages != cache.num_total_pages:
        world.violation(f"{cache.num_total_pages - cache.num_free_pages} pages are lost")
    if cache.states is not None and cache.states.num_free != cache.states.num_total:
        world.violation(f"{cache.states.num_total - cache.states.num_free} state slots are lost")


def _check_told(world: World, told: Told) -> None:
    """I3, I4, I5 and I6 of one request."""
    name, request = told.request.request_id, told.request
    right, reason = told.ask.right(world.scheduler.capacity)
    if tuple(told.tokens) != right[: len(told.tokens)]:
        world.violation(f"{name} is told {told.tokens}, right is {right}")
    if told.end == "nothing":
        world.violation(f"{name} is never told its end")
    if told.end in ("stop", "length"):
        if told.end != reason or len(told.tokens) != len(right):
            world.violation(f"{name} ends by {told.end} after {told.tokens}: {reason}, {right}")
    elif not (_may_abort if told.end == "abort" else _may_fail)(world, told, reason):
        error = told.last.error if told.last is not None else None
        world.violation(f"{name} is untouched and ends by {told.end} {error!r}")
    _check_echo(world, told)
    if request.lease is not None or request.status is not RequestStatus.FINISHED:
        _check_never_added(world, told)


def _check_echo(world: World, told: Told) -> None:
    """Log-probabilities of the prompt come in order and once, however often it is computed."""
    wanted = list(told.ask.prompt[1:]) if told.ask.echoes else []
    is_whole = len(told.echoed) == len(wanted) or not told.tokens
    if told.echoed != wanted[: len(told.echoed)] or not is_whole:
        world.violation(f"{told.request.request_id} is told of {told.echoed}, right is {wanted}")


def _check_never_added(world: World, told: Told) -> None:
    """The request may have ended in the inbox, of an engine that went."""
    if told.request.lease is not None or (world.closed_at is None and world.engine.failure is None):
        world.violation(f"{told.request.request_id} has ended and is {told.request.status}")


def _may_abort(world: World, told: Told, reason: str) -> bool:
    if told.is_aborted or _is_late(told):
        return True
    return world.closed_at is not None and told.ended >= world.closed_at


def _may_fail(world: World, told: Told, reason: str) -> bool:
    error, name = told.last.error, told.request.request_id
    if isinstance(error, EngineDead):
        return world.engine.failure is not None or world.closed_at is not None
    if isinstance(error, DeadlineExceeded):
        return _is_late(told) and not told.tokens
    is_own = reason == "error" or name in world.faults.broken
    return is_own or name in world.faults.blamed


def _is_late(told: Told) -> bool:
    deadline = told.ask.deadline
    return deadline is not None and told.ended >= told.arrived + deadline
