"""Plans made while a step is under way, and the cases in which none is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION, Speculator
from foretoken.core.interface.request import Request
from foretoken.core.scheduling.async_scheduling import plan_next, replan
from support.fake_model import Driver, FakeRunner, answer, make_request, make_scheduler
from support.fixed_depth import FixedDepth

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [2, 1], "c": [3, 3, 3]}
NOW = 100.0


class Scene(Driver):
    """Requests that decode; one of their steps is under way from `begin` on."""

    def __init__(self, names: str = "ab", *, max_tokens: int = 20, **options: Any) -> None:
        options.setdefault("speculator", NO_SPECULATION)
        super().__init__(make_scheduler(**options), FakeRunner(page_size=4))
        self.add(*(make_request(n, PROMPTS[n], max_tokens=max_tokens) for n in names))
        self.step()

    def begin(self) -> StepPlan:
        return self.scheduler.schedule(NOW)

    def ahead(self, plan: StepPlan) -> StepPlan | None:
        return plan_next(self.scheduler, plan, NOW)

    def end(self, plan: StepPlan) -> None:
        self._note(self.scheduler.commit(plan, self.runner.step(plan), NOW))
        self.scheduler.audit()

    def charged(self) -> float:
        return self.scheduler.waiting.counters[None]


def spans(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {row.request_id: (row.start, row.stop) for row in plan.requests}


# -- what is planned ------------------------------------------------------------------------------


def test_each_row_goes_on_by_one_token_where_the_step_under_way_will_stop() -> None:
    scene = Scene()
    plan = scene.begin()
    ahead = scene.ahead(plan)
    assert ahead is not None
    assert spans(plan) == {"a": (5, 6), "b": (2, 3)}
    assert spans(ahead) == {"a": (6, 7), "b": (3, 4)}
    assert all(row.is_ahead and row.samples for row in ahead.requests)
    assert ahead.is_plain
    assert ahead.is_decode_only


def test_the_tokens_are_those_of_the_request_while_one_more_is_chosen() -> None:
    scene = Scene("a")
    plan = scene.begin()
    (row,) = scene.ahead(plan).requests  # type: ignore[union-attr]
    assert list(row.tokens[: row.stop - 1]) == [*PROMPTS["a"], *answer(PROMPTS["a"], 1)]
    scene.end(plan)
    assert list(row.tokens[: row.stop]) == [*PROMPTS["a"], *answer(PROMPTS["a"], 2)]


def test_the_page_table_reaches_the_new_token_and_is_nobodys_but_the_plans() -> None:
    scene = Scene("a", max_tokens=9)
    scene.step()
    scene.step()
    lent = scene.begin()
    (before,) = lent.requests
    (row,) = scene.ahead(lent).requests  # type: ignore[union-attr]
    lease = scene.scheduler.running["a"].lease
    assert lease is not None
    assert (len(before.page_ids), row.start) == (2, 8)
    assert row.page_ids == lease.page_ids
    assert len(row.page_ids) == 3
    scene.scheduler.cache.shrink(lease, 0)  # as whoever has the lease may
    assert len(row.page_ids) == 3


def test_pages_that_are_taken_for_it_are_told_with_it() -> None:
    scene = Scene("a")
    scene.step()
    scene.step()
    plan = scene.begin()
    ahead = scene.ahead(plan)
    assert ahead is not None
    assert not plan.newly_allocated_pages
    assert list(ahead.newly_allocated_pages) == [ahead.requests[0].page_ids[-1]]


def test_a_commit_leaves_the_step_that_follows_its_pages() -> None:
    scene = Scene("a")
    scene.step()
    scene.step()
    plan = scene.begin()
    (row,) = scene.ahead(plan).requests  # type: ignore[union-attr]
    scene.end(plan)
    lease = scene.scheduler.running["a"].lease
    assert lease is not None
    assert lease.page_ids == row.page_ids
    assert len(row.page_ids) > len(plan.requests[0].page_ids)


def test_a_plan_made_ahead_may_be_followed_by_another() -> None:
    scene = Scene()
    plan: StepPlan | None = scene.begin()
    for _ in range(4):
        assert plan is not None
        ahead = scene.ahead(plan)
        scene.end(plan)
        assert ahead is not None
        plan = ahead
    assert scene.served == {name: answer(PROMPTS[name], 5) for name in "ab"}


def test_who_ends_by_length_gets_no_row() -> None:
    scene = Scene("a", max_tokens=20)
    scene.add(make_request("b", PROMPTS["b"], max_tokens=2))
    scene.step()
    plan = scene.begin()
    assert spans(plan).keys() == {"a", "b"}
    ahead = scene.ahead(plan)
    assert ahead is not None
    assert spans(ahead).keys() == {"a"}


def test_a_full_house_goes_on_while_others_wait() -> None:
    scene = Scene(max_running=2)
    scene.add(make_request("c", PROMPTS["c"]))
    assert scene.ahead(scene.begin()) is not None


# -- when nothing is ------------------------------------------------------------------------------


def test_everybody_ends_by_length_so_nothing_follows() -> None:
    scene = Scene(max_tokens=2)
    assert scene.ahead(scene.begin()) is None


def test_a_full_house_that_somebody_leaves_by_length_has_a_place_for_who_waits() -> None:
    scene = Scene("a", max_running=2)
    scene.add(make_request("b", PROMPTS["b"], max_tokens=2), make_request("c", PROMPTS["c"]))
    scene.step()
    assert scene.ahead(scene.begin()) is None


def test_who_waits_and_has_a_place_comes_first() -> None:
    scene = Scene()
    plan = scene.begin()
    scene.add(make_request("c", PROMPTS["c"]))
    assert scene.ahead(plan) is None


def test_behind_a_chunk_of_a_prompt_nothing_is_planned() -> None:
    scene = Scene("b")
    scene.add(make_request("long", [1] * 40))
    assert scene.ahead(scene.begin()) is None


def test_a_prompts_last_chunk_is_no_decode_though_it_yields_a_token() -> None:
    scene = Scene("b")
    scene.add(make_request("c", PROMPTS["c"]))
    plan = scene.begin()
    assert all(row.samples for row in plan.requests)
    assert scene.ahead(plan) is None


def test_behind_a_chunk_of_one_token_that_yields_none_nothing_is_planned() -> None:
    scene = Scene("", max_batch_tokens=1)
    scene.add(make_request("a", PROMPTS["a"]))
    plan = scene.begin()
    assert spans(plan) == {"a": (0, 1)}
    assert scene.ahead(plan) is None


def test_behind_a_draft_nothing_is_planned() -> None:
    scene = Scene(speculator=FixedDepth(2))
    plan = scene.begin()
    scene.scheduler.speculator.inner = NO_SPECULATION
    assert any(row.draft_plan.max_draft for row in plan.requests)
    assert scene.ahead(plan) is None


class Silences(Speculator):
    """Is silent about a request while it has fewer tokens than ``until`` says of it."""

    def __init__(self, **until: int) -> None:
        self.until = until
        self.asked: list[tuple[list[str], int]] = []

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        self.asked.append(([each.request_id for each in requests], num_new_tokens))
        return all(
            len(each.tokens) + num_new_tokens < self.until.get(each.request_id, 1000)
            for each in requests
        )


def test_a_step_is_planned_while_all_are_silent_about_the_tokens_that_follow() -> None:
    scene = Scene(speculator=(speculator := Silences()))
    plan = scene.begin()
    speculator.asked.clear()
    assert scene.ahead(plan) is not None
    assert speculator.asked == [(["a", "b"], 1)], "what they will be when the step is over"


@pytest.mark.parametrize("name", ["a", "b"])
def test_nothing_is_planned_where_one_request_may_draft_after_this_token(name: str) -> None:
    num_tokens = len(PROMPTS[name]) + 1
    scene = Scene(speculator=Silences(**{name: num_tokens + 1}))
    plan = scene.begin()
    assert plan.is_plain, "in the step under way it is silent"
    assert scene.ahead(plan) is None
    scene.end(plan)
    assert not scene.begin().is_plain


def test_who_ends_by_length_is_not_asked_about_the_next_step() -> None:
    scene = Scene("a", speculator=(speculator := Silences(b=len(PROMPTS["b"]) + 2)))
    scene.add(make_request("b", PROMPTS["b"], max_tokens=2))
    scene.step()
    plan = scene.begin()
    speculator.asked.clear()
    assert scene.ahead(plan) is not None
    assert speculator.asked == [(["a"], 1)]


def test_nothing_is_planned_while_somebody_runs_who_is_not_in_the_step() -> None:
    scene = Scene("abc", max_batch_tokens=16)
    plan = scene.begin()
    short = StepPlan(
        requests=plan.requests[:2], newly_allocated_pages=plan.newly_allocated_pages, is_plain=True
    )
    assert scene.ahead(short) is None
    assert scene.ahead(plan) is not None


READS_TEXT: dict[str, Callable[[Request], Any]] = {
    "repetition_penalty": lambda request: {"params": _params(request, repetition_penalty=1.1)},
    "frequency_penalty": lambda request: {"params": _params(request, frequency_penalty=0.1)},
    "presence_penalty": lambda request: {"params": _params(request, presence_penalty=0.1)},
    "logprobs": lambda request: {"params": _params(request, logprobs=0)},
    "prompt_logprobs": lambda request: {"params": _params(request, prompt_logprobs=0)},
    "bad_words": lambda request: {"bad_words_ids": ((1, 2),)},
    "constraint": lambda request: {"constraint": object()},
}


def _params(request: Request, **changes: Any) -> Any:
    return replace(request.sampling.params, **changes)


@pytest.mark.parametrize("name", READS_TEXT)
def test_nothing_is_planned_where_a_row_reads_the_text(name: str) -> None:
    scene = Scene()
    request = scene.scheduler.running["b"]
    request.sampling = replace(request.sampling, **READS_TEXT[name](request))
    assert scene.ahead(scene.begin()) is None


def test_what_only_needs_logits_and_the_position_is_planned() -> None:
    scene = Scene()
    request = scene.scheduler.running["b"]
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_tokens": 9, "logit_bias": {1: 2.0}}
    request.sampling = replace(request.sampling, params=_params(request, **more))
    assert scene.ahead(scene.begin()) is not None


def test_without_a_page_nothing_is_planned_and_nobody_is_preempted() -> None:
    scene = Scene(num_pages=4, page_size=4, max_tokens=8)
    scene.step()
    scene.step()
    plan = scene.begin()
    assert scene.scheduler.cache.num_available_pages == 0
    charged = scene.charged()
    assert scene.ahead(plan) is None
    assert scene.charged() == charged
    assert scene.scheduler.num_preemptions == 0
    scene.end(plan)
    scene.run()
    assert scene.served == {name: answer(PROMPTS[name], 8) for name in "ab"}


# -- a plan that is dropped -----------------------------------------------------------------------


def test_after_a_plan_was_dropped_the_next_one_tells_what_it_had_to_tell() -> None:
    scene = Scene("ab")
    scene.step()
    scene.abort("b")
    plan = scene.begin()
    assert plan.released_request_ids == ["b"]
    scene.end(plan)
    plan = scene.begin()
    scene.scheduler._released_request_ids.append("c")
    ahead = scene.ahead(plan)
    assert ahead is not None
    assert (ahead.released_request_ids, len(ahead.newly_allocated_pages)) == (["c"], 1)
    scene.scheduler.discard_plan(ahead)
    scene.scheduler._released_request_ids.append("d")
    scene.end(plan)
    again = scene.begin()
    assert again.released_request_ids == ["c", "d"]
    assert again.newly_allocated_pages == ahead.newly_allocated_pages
    assert again.requests[0].page_ids == ahead.requests[0].page_ids


def test_a_plan_that_is_dropped_charges_nobody_twice() -> None:
    scene = Scene()
    plan, charged = scene.begin(), scene.charged()
    for _ in range(3):
        ahead = scene.ahead(plan)
        assert ahead is not None
        scene.scheduler.discard_plan(ahead)
    scene.end(plan)
    assert scene.charged() == charged + 2, "of the step that is still to come"
    scene.end(scene.begin())
    assert scene.charged() == charged + 2
    scene.end(scene.begin())
    assert scene.charged() == charged + 4


def test_a_plan_may_be_dropped_when_its_requests_have_ended() -> None:
    scene = Scene()
    plan = scene.begin()
    ahead = scene.ahead(plan)
    assert ahead is not None
    scene.end(plan)
    scene.abort("a")
    scene.scheduler.discard_plan(ahead)
    scene.scheduler.audit()
    assert spans(scene.begin()) == {"b": (3, 4)}


def test_the_rows_of_those_who_ended_meanwhile_are_nobodys_outcome() -> None:
    scene = Scene()
    plan = scene.begin()
    ahead = scene.ahead(plan)
    assert ahead is not None
    scene.end(plan)
    scene.abort("a")
    scene.end(ahead)
    assert scene.served == {"a": answer(PROMPTS["a"], 2), "b": answer(PROMPTS["b"], 3)}


def test_a_plan_made_ahead_is_made_anew_of_those_who_still_run() -> None:
    scene = Scene()
    plan = scene.begin()
    ahead = scene.ahead(plan)
    assert ahead is not None
    scene.end(plan)
    scene.abort("a")
    again = replan(scene.scheduler, ahead)
    (row,) = again.requests
    request = scene.scheduler.running["b"]
    assert row.tokens is request.tokens
    assert request.lease is not None
    assert row.page_ids is request.lease.page_ids
    assert spans(again) == {"b": (3, 4)}
    assert (again.is_plain, again.newly_allocated_pages) == (True, ahead.newly_allocated_pages)
    scene.end(again)
    assert scene.served["b"] == answer(PROMPTS["b"], 3)


def test_pages_of_a_withdrawn_plan_serve_the_plan_made_instead() -> None:
    """The pages that were evicted for the withdrawn plan are put to use."""
    scene = Scene("a", max_tokens=40)
    cache = scene.scheduler.cache
    while True:
        plan, num_free = scene.begin(), cache.num_free_pages
        ahead = scene.ahead(plan)
        assert ahead is not None
        scene.scheduler.discard_plan(ahead)
        scene.end(plan)
        if cache.num_free_pages < num_free:
            break
    num_free = cache.num_free_pages
    instead = scene.begin()
    assert cache.num_free_pages == num_free
    assert len(instead.newly_allocated_pages) == 1
    assert instead.newly_allocated_pages == ahead.newly_allocated_pages
