"""Accounting of committed steps, which the engine does while the next step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.core.errors import ForetokenError
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import Speculator
from foretoken.core.interface.request import Delta, FinishReason, Request
from foretoken.core.scheduling.scheduler import Scheduler
from support.fake_model import answer, make_request, make_scheduler


class LooksUp(Speculator):
    """Looks up the next three tokens of each request, all of them right."""

    def __init__(self) -> None:
        self.observed: list[int] = []  # served tokens, by call

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        return False

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        return [DraftPlan(Draft.of(answer(each.tokens, 3), "suffix")) for each in requests]

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        self.observed.append(num_served)


def compute(scheduled: ScheduledRequest) -> RequestOutput:
    """Accept the whole draft of a row."""
    draft = scheduled.draft_plan.draft
    num_accepted = len(draft.token_ids)
    return RequestOutput(
        request_id=scheduled.request_id,
        token_ids=answer(scheduled.tokens, num_accepted + 1),
        draft=draft,
        path=range(num_accepted),
    )


class Session:
    """One decoding request, committed step by step as the engine does it."""

    def __init__(self, **options: Any) -> None:
        self.speculator = LooksUp()
        self.scheduler: Scheduler = make_scheduler(speculator=self.speculator)
        self.request: Request = make_request("a", [1, 2, 3], max_tokens=100, **options)
        self.scheduler.add(self.request, 0.0)
        self.commit()  # the prompt and the first token
        self.scheduler.account()

    def compute(self) -> tuple[StepPlan, StepOutput]:
        plan = self.scheduler.schedule(1.0)
        return plan, StepOutput(requests=list(map(compute, plan.requests)))

    def commit(self) -> Delta:
        (event,) = self.scheduler.commit(*self.compute(), 1.0)
        return event[1]


def test_the_tokens_of_a_commit_are_counted_when_it_is_accounted_for() -> None:
    session = Session()
    delta, usage = session.commit(), session.request.usage
    assert (len(delta.token_ids), delta.num_proposed, usage.completion_tokens) == (4, 0, 1)
    assert session.speculator.observed == []
    session.scheduler.account()
    assert (delta.num_proposed, len(delta.token_sources)) == (3, 4)
    assert session.speculator.observed == [4]
    assert (usage.completion_tokens, usage.accepted_tokens, usage.draft_steps) == (5, 3, 1)


def test_a_second_account_counts_nothing() -> None:
    session = Session()
    session.commit()
    session.scheduler.account()
    session.scheduler.account()
    assert session.request.usage.completion_tokens == 5


def test_a_commit_accounts_for_the_one_before_it() -> None:
    session = Session()
    first, second = session.commit(), session.commit()
    assert (first.num_proposed, second.num_proposed) == (3, 0)
    assert session.request.usage.completion_tokens == 5


@pytest.mark.parametrize("error", [None, ForetokenError("the client has gone")])
def test_an_abort_before_the_account_loses_no_token(error: ForetokenError | None) -> None:
    session = Session()
    delta = session.commit()
    session.scheduler.abort("a", 1.0, error)
    session.scheduler.account()
    assert (delta.num_proposed, session.request.usage.completion_tokens) == (3, 5)
    assert session.request.num_output == 5


def test_a_step_that_fails_before_the_account_loses_no_token() -> None:
    session = Session()
    delta = session.commit()
    plan, _ = session.compute()
    session.scheduler.fail(plan, 1.0, ForetokenError("the step failed"))
    session.scheduler.account()
    assert (delta.num_proposed, session.request.usage.completion_tokens) == (3, 5)


def test_a_preemption_before_the_account_loses_no_token() -> None:
    session = Session()
    delta = session.commit()
    session.scheduler.take_back_chunks(
        session.compute()[0], 1.0, ForetokenError("the step failed"), is_explained=True
    )
    session.scheduler.account()
    assert (delta.num_proposed, session.request.usage.completion_tokens) == (3, 5)


def test_an_ended_request_is_accounted_for_at_once() -> None:
    session = Session(on_token=lambda _token_id: "stop")
    # The first token ended the request already.
    usage = session.request.usage
    assert (usage.completion_tokens, session.scheduler.num_requests) == (1, 0)


def test_a_request_that_ends_in_its_draft_is_accounted_for_at_once() -> None:
    session = Session()
    last = answer(session.request.tokens, 2)[-1]
    session.request.stop_ids = frozenset([last])
    delta = session.commit()
    assert delta.finish_reason is FinishReason.STOP
    assert (session.request.usage.completion_tokens, delta.accepted_sources[0]) == (3, "suffix")


def test_draft_tokens_are_charged_to_the_tenant() -> None:
    session = Session(tenant="t")
    counters = session.scheduler.waiting.counters
    session.commit()
    before = counters["t"]
    session.scheduler.account()
    assert counters["t"] == before + 3
