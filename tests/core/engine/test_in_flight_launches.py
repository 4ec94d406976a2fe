"""Steps that a device is given before the one ahead of them is over, and their outcomes."""

from __future__ import annotations

import gc
import weakref
from array import array
from threading import get_ident
from typing import Any

import pytest
from msgspec.structs import replace

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.engine.model_thread import ModelThread
from foretoken.core.engine.step_executor import InFlightStep, is_launched_at_once
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.extras.adapter import Adapter
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.extras.packing import KvPack
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import (
    MAX_SHORT_ROWS,
    ScheduledExtras,
    ScheduledRequest,
    StepPlan,
)
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from foretoken.core.interface.sampling import SamplingMetadata
from support.in_flight_fakes import (
    FAILED,
    Device,
    Hand,
    Launch,
    chain,
    plan_of,
    run,
    tokens_of,
    yields,
)


def test_the_next_step_is_launched_before_anybody_waits_for_the_first() -> None:
    async def scenario() -> None:
        thread = ModelThread("foretoken-test", lambda: None)
        device = Device(yields(a=1), yields(a=2))
        first, second = chain(device, thread, "a", "a")
        assert tokens_of(await first.outcome(thread).result()) == {"a": [1]}
        assert tokens_of(await second.outcome(thread).result()) == {"a": [2]}
        assert device.calls == ["launch 0", "launch 1", "finish 0", "finish 1"]
        assert device.befores == [None, device.launched[0]]
        thread.close()

    run(scenario)


class Watched(Device):
    """Device that keeps the threads in which it is called."""

    def __init__(self, *, is_async: bool) -> None:
        super().__init__(yields(a=1))
        self.is_async = is_async
        self.threads: list[int] = []

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Launch:
        self.threads.append(get_ident())
        launched = super().launch(plan, after, on_kernels_started)
        finish = launched.finish

        def finished() -> StepOutput:
            self.threads.append(get_ident())
            return finish()

        launched.finish = finished  # type: ignore[method-assign]
        return launched


PENALTY = SamplingMetadata(params=SamplingParams(presence_penalty=1.0), seed=0, prompt_len=3)


@pytest.mark.parametrize(
    ("is_async", "changes", "is_here"),
    [
        (True, {}, True),
        (True, {"draft_plan": DraftPlan(Draft.of(array("q", [1, 2]), "suffix"))}, True),
        (True, {"draft_plan": DraftPlan(max_draft=2)}, False),
        (True, {"start": 0}, False),
        (True, {"sampling": PENALTY}, False),
        (True, {"extras": ScheduledExtras(pack=KvPack(0, 4, 2))}, False),
        (True, {"extras": ScheduledExtras(adapter=Adapter())}, False),
        (True, {"extras": ScheduledExtras(images=(PromptImage(bytes(32), ((2, 1),), ()),))}, False),
        (True, {"extras": ScheduledExtras(images=(PromptImage(bytes(32), ((0, 2),), ()),))}, True),
        (False, {}, False),
    ],
    ids=[
        "plain",
        "looked up",
        "proposer",
        "prompt",
        "penalty",
        "packing",
        "adapter",
        "row of an image",
        "after an image",
        "no device",
    ],
)
def test_only_short_launches_of_a_device_are_made_on_the_event_loop(
    is_async: bool, changes: dict[str, Any], is_here: bool
) -> None:
    async def scenario() -> None:
        thread, device = ModelThread("foretoken-test", lambda: None), Watched(is_async=is_async)
        plan = plan_of("a")
        row: ScheduledRequest = replace(plan.requests[0], **changes)
        plan = replace(plan, requests=[row])
        at_once = is_launched_at_once(plan, device)
        flight = InFlightStep(plan, device, 0.0, ignore_kernels, launches_here=at_once)
        flight.start(thread)
        assert (flight.launched is not None) == is_here
        assert tokens_of(await flight.outcome(thread).result()) == {"a": [1]}
        launch, finish = device.threads
        assert (launch == get_ident()) == is_here
        assert finish != get_ident(), "whatever waits for the device blocks a thread of its own"
        thread.close()

    run(scenario)


@pytest.mark.parametrize("num_drafted", [MAX_SHORT_ROWS - 1, MAX_SHORT_ROWS])
def test_a_launch_of_many_drafted_rows_is_not_short(num_drafted: int) -> None:
    plan = plan_of("a")
    drafted = DraftPlan(Draft.of(array("q", [1] * num_drafted), "suffix"))
    rows = [replace(plan.requests[0], draft_plan=drafted)]
    is_short = replace(plan, requests=rows, is_plain=False).is_short
    assert is_short == (num_drafted < MAX_SHORT_ROWS)


def test_the_launch_of_a_plain_step_is_short_however_many_requests_it_has() -> None:
    assert replace(plan_of("a"), requests=plan_of("a").requests * (MAX_SHORT_ROWS + 1)).is_short


def test_a_short_launch_of_drafted_rows_fits_the_largest_graph() -> None:
    graphs = pytest.importorskip("foretoken.core.ops.triton.graph.step")
    assert graphs.BUCKETS[-1] == MAX_SHORT_ROWS


def test_a_step_is_waited_for_once_however_often_its_outcome_is_asked_for() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1))
        (flight,) = chain(device, thread, "a")
        assert flight.outcome(thread) is flight.outcome(thread)
        thread.turn()
        assert device.calls == ["launch 0", "finish 0"]

    run(scenario)


@pytest.mark.parametrize("failure", [FAILED, SystemExit()])
def test_a_launch_that_fails_is_told_where_its_outcome_is_waited_for(failure) -> None:
    async def scenario() -> None:
        thread = Hand()
        device = Device(yields(a=1), yields(a=2), refuses={1: failure})
        flights = chain(device, thread, "a", "a")
        assert flights[1].launched is None
        jobs = [flight.outcome(thread) for flight in flights]
        thread.turn(2)
        assert tokens_of(await jobs[0].result()) == {"a": [1]}
        with pytest.raises(type(failure)):
            await jobs[1].result()
        assert device.calls == ["launch 0", "launch 1", "finish 0"]

    run(scenario)


def test_a_failure_that_the_device_tells_late_is_that_of_its_own_step() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(FAILED, yields(a=2))
        flights = chain(device, thread, "a", "a")
        jobs = [flight.outcome(thread) for flight in flights]
        thread.turn(2)
        with pytest.raises(RuntimeError, match="forward pass"):
            await jobs[0].result()
        await jobs[1].result()  # void, but the device has done with its pages
        assert device.calls == ["launch 0", "launch 1", "finish 0", "finish 1"]

    run(scenario)


def test_no_launch_keeps_those_before_it() -> None:
    async def scenario() -> None:
        thread, device = Hand(), Device(yields(a=1), yields(a=2))
        first, second = chain(device, thread, "a", "a")
        known = weakref.ref(first)
        first.outcome(thread)
        thread.turn()
        del first
        gc.collect()
        assert known() is None
        job = second.outcome(thread)
        thread.turn()
        assert tokens_of(await job.result()) == {"a": [2]}

    run(scenario)
