"""Recurrent states of requests: where they go on, what is kept for others, what failed steps do.

The fake model checks at every row that its state is that of the request's own tokens, so each test
also shows that no token came from another state.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.core.engine.audit import inspect
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import CacheOptions, Pin, Request
from foretoken.core.scheduling.async_scheduling import plan_next, replan
from foretoken.core.scheduling.shares import allocate_draft_pages
from foretoken.core.scheduling.states import MAX_STATE_DRAFT, shared_len
from foretoken.core.telemetry.families import PREFIX
from foretoken.core.telemetry.metrics import EngineMetrics
from support.draft_trees import tree_of
from support.fake_model import (
    Driver,
    FakeRunner,
    answer,
    make_request,
    make_scheduler,
    no_draft,
    perfect,
    sometimes,
    toy_states,
    wrong,
)
from support.fake_tiers import DictStore, TieredDriver

PAGE = 4


class Scene(Driver):
    """A scheduler over a model with recurrent states."""

    def __init__(self, *, drafter: Any = no_draft, num_slots: int = 8, **options: Any) -> None:
        options.setdefault("num_pages", 200)
        scheduler = make_scheduler(page_size=PAGE, num_slots=num_slots, **options)
        super().__init__(scheduler, FakeRunner(PAGE, drafter, states=toy_states(scheduler)))

    def ask(self, name: str, prompt: Sequence[int], **options: Any) -> Request:
        """Serve one request to its end; its answer is right."""
        cache = options.pop("cache", None)
        request = make_request(name, prompt, **options)
        if cache is not None:
            request.cache = cache
        self.add(request)
        self.run()
        self.check(request)
        return request

    def check(self, *requests: Request) -> None:
        for each in requests:
            prompt = each.tokens[: each.prompt_len]
            said = self.served[each.request_id]
            assert said == answer(prompt, len(said))
            assert self.ended[each.request_id] == "length"

    @property
    def slots(self):
        assert self.scheduler.cache.states is not None
        return self.scheduler.cache.states


def text(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens that say nothing."""
    return [1 + hash((seed, at)) % 6 for at in range(num_tokens)]


# -- what a later request goes on from ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_a_conversation_goes_on_behind_its_last_answer(chunk: int) -> None:
    scene = Scene(max_batch_tokens=chunk + 1)
    first = scene.ask("a", text(37))
    second = scene.ask("b", [*first.tokens, *text(9, 1)])
    num_computed = len(first.tokens) - 1  # the last token was never computed
    assert 0 < num_computed - second.usage.cached_tokens <= PAGE, "at most a page is lost"


@pytest.mark.parametrize("num_tokens", range(37, 41))
def test_a_session_goes_on_behind_its_last_answer_however_many_requests_come_between(
    num_tokens: int,
) -> None:
    scene, session = Scene(num_slots=4), CacheOptions(session="s")
    first = scene.ask("a", text(num_tokens), cache=session)
    for seed in range(2, 8):
        scene.ask(str(seed), text(30, seed))
    second = scene.ask("b", [*first.tokens, *text(9, 1)], cache=session)
    assert scene.slots.num_evicted > 4
    assert 0 < len(first.tokens) - 1 - second.usage.cached_tokens <= PAGE


def test_a_turn_that_is_rendered_anew_is_computed_from_where_its_answer_opened() -> None:
    scene = Scene()
    scene.scheduler.set_openings([array("q", [6, 6, 6]), array("q", [6])])
    talk = text(38)
    scene.ask("a", [*talk, 6, 6, 6], max_tokens=20)
    second = scene.ask("b", [*talk, 1, 5, 5, 1, *text(9, 1)])
    assert second.usage.cached_tokens == 36


def test_the_longest_opening_that_a_prompt_ends_with_is_left_out() -> None:
    scene = Scene()
    scene.scheduler.set_openings([array("q", [5, 5, 5, 5]), array("q", [6, 6]), array("q", [6])])
    scene.ask("a", [*text(35), 1, 6, 6])
    assert scene.ask("b", [*text(35), 1, 2, 3, 4]).usage.cached_tokens == 36
    assert scene.ask("c", [*text(35), 1, 2, 5]).usage.cached_tokens == 36


def test_the_same_prompt_again_is_computed_from_its_last_page_on() -> None:
    scene = Scene()
    for num_tokens in (40, 41, 43):
        scene.ask(f"a{num_tokens}", text(num_tokens, num_tokens))
        again = scene.ask(f"b{num_tokens}", text(num_tokens, num_tokens))
        assert again.usage.cached_tokens == (num_tokens - 1) // PAGE * PAGE


def test_the_third_request_that_begins_alike_goes_on_from_what_the_second_kept() -> None:
    scene = Scene()
    system = text(60)
    found = [
        scene.ask(name, [*system, *text(13, seed)]) for seed, name in enumerate("abc", start=1)
    ]
    assert [each.usage.cached_tokens for each in found] == [0, 0, 60]
    assert [each.usage.matched_tokens for each in found] == [0, 60, 60]
    assert found[1].usage.cache_loss is not None
    assert found[1].usage.cache_loss.cause == "state_not_kept"
    assert found[2].usage.cache_loss is None
    assert scene.slots.num_recomputed_tokens == 60


def test_a_short_beginning_that_requests_share_takes_no_slot() -> None:
    scene = Scene()
    for name in "abc":
        scene.ask(name, [*text(12), *text(13, ord(name))])
    assert len(scene.slots.attached) == 6, "each request left two states: prompt and end"


@pytest.mark.parametrize("num_branches", [2, 8])
def test_branches_of_one_prompt_compute_it_once(num_branches: int) -> None:
    scene = Scene(num_slots=12, max_running=8)
    requests = [make_request(str(index), text(101)) for index in range(num_branches)]
    scene.add(*requests)
    scene.run()
    scene.check(*requests)
    assert [each.usage.cached_tokens for each in requests] == [0, *[100] * (num_branches - 1)]


def test_prompts_wait_for_the_state_where_they_part_from_one_that_runs() -> None:
    scene = Scene(num_slots=12, max_batch_tokens=32)
    requests = [make_request(name, [*text(61), *text(20, ord(name))]) for name in "abc"]
    scene.add(*requests)
    scene.run()
    scene.check(*requests)
    assert [each.usage.cached_tokens for each in requests] == [0, 60, 60]


def test_a_prompt_does_not_wait_for_one_that_is_beyond_where_they_part() -> None:
    scene = Scene(num_slots=12, max_batch_tokens=48, max_running=2)
    one, other = (make_request(name, [*text(33), *text(60, ord(name))]) for name in "ab")
    scene.add(one)
    scene.step()
    assert one.num_computed == 48
    scene.add(other)
    scene.step()
    assert other.num_computed > 0
    scene.run()
    scene.check(one, other)


def test_a_prompt_does_not_wait_for_one_that_leaves_nothing_in_the_cache() -> None:
    scene = Scene(num_slots=12, max_batch_tokens=200)
    one, other = (make_request(name, text(50)) for name in "ab")
    one.cache = CacheOptions(write=False)
    scene.add(one, other)
    scene.step()
    assert len(scene.scheduler.running) == 2


def test_the_end_of_a_pin_is_kept_and_outlives_all_others() -> None:
    scene = Scene(num_slots=4, max_running=1)
    scene.ask("a", text(60), cache=CacheOptions(pins=(Pin(21, 100.0),)))
    for seed in range(1, 6):
        scene.ask(f"n{seed}", text(30, seed))
    assert scene.ask("b", [*text(25), *text(9, 9)]).usage.cached_tokens == 20


def test_states_are_kept_every_so_many_tokens_of_a_prompt() -> None:
    scene = Scene(interval=30)
    scene.ask("a", text(75), max_tokens=40)
    for num_same, cached in ((35, 28), (65, 60), (70, 60), (20, 0)):
        scene.scheduler.flush(None) if num_same == 20 else None
        request = scene.ask(str(num_same), [*text(num_same), *text(9, num_same)])
        assert request.usage.cached_tokens == cached


def test_who_does_not_write_keeps_no_state() -> None:
    scene = Scene(interval=8)
    scene.ask("a", text(60), cache=CacheOptions(write=False))
    assert scene.slots.num_free == 8
    scene.ask("b", text(60), cache=CacheOptions(read=False))
    assert scene.ask("c", text(60)).usage.cached_tokens == 56


# -- slots that run out ---------------------------------------------------------------------------


def test_requests_wait_for_slots() -> None:
    scene = Scene(num_slots=3, max_running=3, max_batch_tokens=200)
    requests = [make_request(str(seed), text(20, seed)) for seed in range(5)]
    scene.add(*requests)
    scene.step()
    assert len(scene.scheduler.running) == 3
    scene.run()
    scene.check(*requests)


def test_kept_states_give_way_and_no_token_changes() -> None:
    scene = Scene(num_slots=3, max_running=1, interval=8)
    for turn in range(12):
        scene.ask(str(turn), [*text(40, turn % 3), *text(5, turn)])
    assert scene.slots.num_evicted > 0


def test_tiers_that_keep_no_states_are_refused() -> None:
    with pytest.raises(ValueError, match="recurrent states"):
        TieredDriver(DictStore(), num_slots=3)


# -- preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [no_draft, sometimes, perfect])
def test_a_preempted_request_computes_a_page_and_its_pending_tokens_again(drafter: Any) -> None:
    depth = 0 if drafter is no_draft else 5
    for num_steps in range(2 * PAGE + 8):
        scene = Scene(drafter=drafter, depth=depth, max_batch_tokens=8)
        request = make_request("a", text(21), max_tokens=30)
        scene.add(request)
        for _ in range(num_steps):
            scene.step()
        if request.request_id in scene.scheduler.running:
            num_computed = request.num_computed
            scene.scheduler._preempt(request)
            scene.scheduler.audit()
            scene.step()
            if request.request_id in scene.scheduler.running:
                assert request.num_computed > num_computed - PAGE - depth
        scene.run()
        scene.check(request)


def test_a_request_that_was_preempted_before_its_first_step_leaves_no_state() -> None:
    scene = Scene()
    scene.ask("a", text(37))
    request = make_request("b", [*text(37), *text(20, 1)])
    scene.add(request)
    scene.scheduler.schedule(scene.now)
    (source,) = {each.num_readers for each in scene.slots.attached.values()} - {0}
    assert source == 1
    num_attached = len(scene.slots.attached)
    scene.scheduler._preempt(request)
    scene.scheduler.audit()
    assert len(scene.slots.attached) == num_attached
    scene.run()
    scene.check(request)


def test_small_pools_preempt_and_every_answer_is_right() -> None:
    scene = Scene(num_pages=22, num_slots=4, max_running=3, max_batch_tokens=12, interval=8)
    requests = [make_request(str(seed), text(17, seed % 2), max_tokens=40) for seed in range(5)]
    scene.add(*requests)
    scene.run()
    scene.check(*requests)
    assert scene.scheduler.num_preemptions > 0


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [perfect, wrong, sometimes])
@pytest.mark.parametrize("depth", [1, 5, 40])
def test_drafts_over_page_ends_change_no_token(drafter: Any, depth: int) -> None:
    scene = Scene(drafter=drafter, depth=depth, max_batch_tokens=100)
    first = scene.ask("a", text(21), max_tokens=90)
    assert scene.ask("b", [*first.tokens, 1, 2]).usage.cached_tokens > 21
    longest = max(row.draft_plan.max_draft for plan in scene.runner.plans for row in plan.requests)
    assert longest == min(depth, MAX_STATE_DRAFT)


def test_a_draft_is_cut_to_a_chain_that_a_log_has_room_for() -> None:
    scene = Scene()
    lease = scene.scheduler.cache.acquire(array("q", text(9)))
    tree = tree_of([[1, 2, 3], [1, 4]], ["x", "x"])
    plan, spare = allocate_draft_pages(
        scene.scheduler.cache, lease, 9, DraftPlan(tree, max_draft=60, may_branch=True)
    )
    assert (list(plan.draft.token_ids), list(plan.draft.parents)) == ([1, 2, 3], [])
    assert (plan.max_draft, plan.may_branch, len(spare)) == (MAX_STATE_DRAFT, False, 0)


# -- steps ahead, and steps that fail -------------------------------------------------------------


class Pair(Scene):
    """Two requests that decode: lengths 6 and 7 are to be computed next."""

    def __init__(self) -> None:
        super().__init__(speculator=NO_SPECULATION)
        self.add(*(make_request(n, text(5 + i, i), max_tokens=20) for i, n in enumerate("ab")))
        self.step()

    def begin(self) -> StepPlan:
        return self.scheduler.schedule(self.now)

    def end(self, plan: StepPlan) -> None:
        self._note(self.scheduler.commit(plan, self.runner.step(plan), self.now))


def test_a_step_in_which_a_state_moves_on_is_not_planned_ahead() -> None:
    scene, was_planned = Pair(), []
    for _ in range(8):
        plan = scene.begin()
        moves = any(row.stop % PAGE == 0 for row in plan.requests)
        ahead = plan_next(scene.scheduler, plan, scene.now)
        assert (ahead is None) == moves
        was_planned.append(ahead is not None)
        scene.end(plan)
        if ahead is not None:
            assert all(row.extras.state is not None for row in ahead.requests)
            assert [row.extras.state for row in ahead.requests] == [
                row.extras.state for row in plan.requests
            ]
            again = replan(scene.scheduler, ahead)
            assert [row.extras.state for row in again.requests] == [
                row.extras.state for row in plan.requests
            ]
    assert {True, False} == {*was_planned}


def test_a_step_ahead_copies_no_state_again() -> None:
    scene = Scene(speculator=NO_SPECULATION)
    scene.ask("a", text(9))
    scene.add(make_request("b", text(9)))
    plan = scene.scheduler.schedule(scene.now)
    (row,) = plan.requests
    assert (row.start, row.stop) == (8, 9)
    assert row.extras.state is not None
    assert row.extras.state.source >= 0
    ahead = plan_next(scene.scheduler, plan, scene.now)
    assert ahead is not None
    assert ahead.requests[0].extras.state is not None
    assert ahead.requests[0].extras.state.source == -1
    assert ahead.requests[0].extras.state.slot == row.extras.state.slot


def test_a_chunk_that_failed_goes_on_from_a_kept_state_in_a_step_of_its_own() -> None:
    scene = Scene(max_batch_tokens=16, interval=8)
    a, b = make_request("a", text(40)), make_request("b", text(40, 1))
    scene.add(a, b)
    scene.step()
    plan = scene.scheduler.schedule(scene.now)
    scene.runner.step(plan)  # and fails then
    at = {row.request_id: row.stop for row in plan.requests}
    error = ForetokenError("failed")
    assert scene.scheduler.take_back_chunks(plan, scene.now, error, is_explained=False) == []
    scene.scheduler.audit()
    assert not scene.scheduler.running
    while suspects := {each.request_id for each in (a, b) if each.is_suspect}:
        assert all(each.num_computed < at[each.request_id] for each in (a, b) if each.is_suspect)
        chunks = {row.request_id for row in scene.step().requests if row.stop - row.start > 1}
        assert len(chunks) <= 1 or not chunks & suspects
    scene.run()
    scene.check(a, b)


def test_a_chunk_that_fails_alone_ends_its_request() -> None:
    scene = Scene(max_batch_tokens=16)
    request = make_request("a", text(40))
    scene.add(request)
    error = ForetokenError("failed")
    for explained, ends in ((True, 0), (False, 0), (True, 0), (False, 1)):
        plan = scene.scheduler.schedule(scene.now)
        events = scene.scheduler.take_back_chunks(plan, scene.now, error, is_explained=explained)
        assert len(events) == ends
        scene.scheduler.audit()
    assert scene.slots.num_free == 8
    assert not scene.scheduler.num_requests


def test_a_failed_chunk_leaves_no_state_that_moved_too_far() -> None:
    scene = Scene(max_batch_tokens=16)
    request = make_request("a", text(40))
    scene.add(request)
    scene.step()
    plan = scene.scheduler.schedule(scene.now)
    scene.runner.step(plan)
    scene.scheduler.take_back_chunks(plan, scene.now, ForetokenError("x"), is_explained=False)
    assert not scene.slots.attached
    scene.run()
    scene.check(request)


@pytest.mark.parametrize("num_same", range(3 * PAGE))
def test_shared_tokens_are_counted_in_whole_pages(num_same: int) -> None:
    one = array("q", range(3 * PAGE + 1))
    other = array("q", [*range(num_same), *range(50, 60)])
    expected = num_same // PAGE * PAGE
    assert shared_len(one, other, PAGE) == shared_len(other, one, PAGE) == expected


# -- what operators see ---------------------------------------------------------------------------


def test_an_audit_counts_the_owners_of_slots() -> None:
    scene = Scene()
    assert "states" not in inspect(make_scheduler())
    scene.ask("a", text(37))
    scene.add(make_request("b", text(20, 1)))
    scene.step()
    found = inspect(scene.scheduler)
    assert found["ok"]
    assert found["states"] == {"total": 8, "free": 4, "attached": 3, "private": 1}


def test_metrics_count_slots_evictions_and_what_was_computed_again() -> None:
    scene = Scene(num_slots=3, max_running=1)
    for name in "ab":
        scene.ask(name, [*text(40), *text(5, ord(name))])
    body = EngineMetrics(scene.scheduler).render()[0].decode()
    values = dict(line.split(" ") for line in body.splitlines() if line.startswith(PREFIX))
    assert float(values[f"{PREFIX}state_slots_total"]) == 3
    assert float(values[f"{PREFIX}state_slots_attached"]) == len(scene.slots.attached) == 3
    assert float(values[f"{PREFIX}state_evictions_total"]) == scene.slots.num_evicted == 2
    assert float(values[f"{PREFIX}state_recomputed_tokens_total"]) == 40
    assert "state_" not in EngineMetrics(make_scheduler()).render()[0].decode()


def test_page_ends_kept_in_an_answer_that_is_computed_again_token_by_token_are_published() -> None:
    """A kept page end that stayed with its request would be planned again behind its rows."""
    scene = Scene(max_batch_tokens=1, max_running=1, speculator=NO_SPECULATION)
    request = make_request("a", text(10), max_tokens=30)
    scene.add(request)
    while len(request.tokens) < 28:
        scene.step()
    scene.scheduler._preempt(request)
    taken = []
    while (slot := scene.slots.take(None)) is not None:  # all kept states give way
        taken.append(slot)
    scene.slots._free.extend(taken)
    scene.add(make_request("b", [*request.tokens[:28], 1, 2], max_tokens=2))
    while scene.scheduler.num_requests:
        plan = scene.step()
        for row in plan.requests:
            assert row.extras.state is not None
            assert all(row.start < position <= row.stop for position, _ in row.extras.state.keeps)
    scene.check(request)
