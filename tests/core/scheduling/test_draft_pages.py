"""Drafts take free pages only, give them back, and cost no prefix hit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from foretoken.core.interface.draft import NO_DRAFT_PLAN, Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import Request
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES, GuardedSpeculator
from foretoken.core.scheduling.shares import allocate_draft_pages, draft_limits
from foretoken.radix_cache import KVLease, PrefixCache
from support.draft_trees import tree_of
from support.fake_model import Driver, FakeRunner, make_request, make_scheduler, perfect, wrong
from support.fixed_depth import FixedDepth


def lease_of(cache: PrefixCache, num_tokens: int) -> KVLease:
    lease = cache.acquire(array("q", range(num_tokens)))
    assert cache.extend(lease, num_tokens)
    return lease


def draft(length: int) -> Draft:
    return Draft.of(list(range(length)), "test")


def test_a_draft_takes_pages_behind_the_tokens() -> None:
    cache = PrefixCache(8, 4)
    lease = lease_of(cache, 6)
    plan, spare = allocate_draft_pages(cache, lease, 6, DraftPlan(draft(5)))
    assert (plan.depth, len(spare)) == (5, 0)
    assert len(lease.page_ids) * 4 >= 11


@pytest.mark.parametrize("plan", [DraftPlan(draft(30)), DraftPlan(max_draft=30)])
def test_a_draft_is_cut_to_the_free_pages(plan: DraftPlan) -> None:
    cache = PrefixCache(4, 4)
    lease = lease_of(cache, 6)
    fitted, _ = allocate_draft_pages(cache, lease, 6, plan)
    assert fitted.depth == 10
    assert len(fitted.draft.sources) == len(fitted.draft.token_ids)


@pytest.mark.parametrize(
    "plan",
    [
        DraftPlan(tree_of([[1, 2, 3], [1, 4, 5, 6], [7]])),
        DraftPlan(max_draft=5, may_branch=True),
    ],
)
def test_nodes_beside_the_trunk_have_pages_of_their_own(plan: DraftPlan) -> None:
    cache = PrefixCache(12, 2)
    lease = lease_of(cache, 9)
    fitted, spare = allocate_draft_pages(cache, lease, 9, plan)
    assert fitted == plan
    assert len(spare) == 2, "for four nodes"
    in_place = lease.page_ids[: -(-(9 + plan.depth) // 2)]
    assert not set(spare) & set(in_place)
    assert set(spare) < set(lease.page_ids), "shrinking the lease takes them back"


def test_a_chain_takes_no_spare_page() -> None:
    for plan in (DraftPlan(draft(4)), DraftPlan(max_draft=4), DraftPlan(tree_of([[1, 2]]))):
        cache = PrefixCache(12, 2)
        assert not allocate_draft_pages(cache, lease_of(cache, 9), 9, plan)[1]


def test_spare_pages_are_fewer_where_few_are_free() -> None:
    cache = PrefixCache(8, 2)
    lease = lease_of(cache, 9)
    plan = DraftPlan(tree_of([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    fitted, spare = allocate_draft_pages(cache, lease, 9, plan)
    assert (fitted, len(spare)) == (plan, 2)
    assert cache.num_free_pages == 0


def test_what_is_cached_is_never_evicted_for_a_draft() -> None:
    cache = PrefixCache(6, 4)
    old = lease_of(cache, 16)
    cache.release(old, array("q", range(16)), 16)
    lease = cache.acquire(array("q", [99] * 4))
    assert cache.extend(lease, 4)
    plan = DraftPlan(tree_of([list(range(9)), [50, 51]]))
    fitted, spare = allocate_draft_pages(cache, lease, 4, plan)
    assert (fitted.draft.token_ids.tolist(), fitted.draft.parents) == ([0, 1, 2, 3], ())  # type: ignore[attr-defined]
    assert not spare
    assert cache.num_evictable_pages == 4


def served_prefixes(depth: int, drafter, seed: int) -> tuple[int, dict[str, list[int]]]:  # type: ignore[no-untyped-def]
    """Prefix hits of a pool under pressure: conversations that grow, come back and compete."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_pages=24, page_size=2, max_batch_tokens=200, max_running=3, depth=depth
    )
    driver = Driver(scheduler, FakeRunner(2, drafter))
    system = [rng.randrange(1, 7) for _ in range(6)]
    threads = [
        [*system, *(rng.randrange(1, 7) for _ in range(rng.randrange(1, 6)))] for _ in "abcd"
    ]
    for turn in range(12):
        names = [f"{turn}-{index}" for index in range(rng.randrange(1, 4))]
        picked = [rng.randrange(len(threads)) for _ in names]
        for name, index in zip(names, picked, strict=True):
            driver.add(make_request(name, threads[index][-20:], max_tokens=4))
        driver.run()
        for name, index in zip(names, picked, strict=True):
            threads[index] += driver.served[name]
    return scheduler.cache.num_hits, driver.served


@pytest.mark.parametrize("seed", range(8))
def test_speculation_never_lowers_the_prefix_hit_rate(seed: int) -> None:
    plain, served = served_prefixes(0, wrong, seed)
    assert plain > 0
    assert served_prefixes(5, wrong, seed) == (plain, served)


class Failing(FixedDepth):
    """Breaks in every way that it can."""

    def plan(self, requests, limits, *, budget, num_prefill):  # type: ignore[no-untyped-def]
        raise RuntimeError("plan")

    def observe(
        self, request: Request, row: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        raise RuntimeError("observe")

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        raise RuntimeError("observe_step")

    def join(self, request: Request) -> None:
        raise RuntimeError("join")

    def leave(self, request: Request) -> None:
        raise RuntimeError("leave")


def test_a_speculator_that_fails_costs_its_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(speculator=Failing(3))
    driver = Driver(scheduler, FakeRunner(4, perfect))
    driver.add(request := make_request("a", [1, 2, 3]))
    driver.run()
    assert driver.ended == {"a": "length"}
    assert request.usage.proposed_tokens == 0
    assert "drafting failed to join" in caplog.text


def test_a_speculator_that_always_fails_is_not_asked_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = make_scheduler(speculator=Failing(3))
    driver = Driver(scheduler, FakeRunner(4))
    driver.add(make_request("a", [1, 2, 3], max_tokens=60))
    driver.run()
    assert driver.ended == {"a": "length"}
    assert "drafting failed repeatedly" in caplog.text
    assert len(caplog.records) <= MAX_FAILURES + 1


class Greedy(FixedDepth):
    """Wants more than it may have, and says how much it was offered."""

    def __init__(self) -> None:
        super().__init__(9)
        self.offers: list[tuple[Sequence[int], int, int]] = []

    def plan(self, requests, limits, *, budget, num_prefill):  # type: ignore[no-untyped-def]
        self.offers.append((limits, budget, num_prefill))
        return [NO_DRAFT_PLAN] * len(requests)


def test_the_last_token_of_an_answer_is_never_a_draft() -> None:
    request = make_request("a", [1, 2])
    request.max_len = 8
    limits = []
    for token_id in (3, 4, 5, 6, 7):
        limits += draft_limits([request], 3)
        request.tokens.append(token_id)
    assert limits == [0, 3, 3, 2, 1], "nor is any before the first token"
    assert draft_limits([request], 3) == [0]


def test_half_of_the_budget_is_kept_for_prompts_that_wait() -> None:
    greedy = Greedy()
    driver = Driver(make_scheduler(speculator=greedy, max_batch_tokens=20), FakeRunner(4))
    driver.add(make_request("a", [1, 2], max_tokens=9))
    driver.step()
    driver.step()
    driver.add(make_request("b", [3] * 40, max_tokens=9))
    driver.step()
    assert greedy.offers == [([7], 19, 0), ([6], 9, 19)]


class Says(FixedDepth):
    """Plans what it was given."""

    def __init__(self, *plans: DraftPlan) -> None:
        super().__init__(0)
        self.plans = list(plans)

    def plan(self, requests, limits, *, budget, num_prefill):  # type: ignore[no-untyped-def]
        return self.plans


@pytest.mark.parametrize(
    "plans",
    [
        [],
        [DraftPlan(draft(3))] * 2,
        [DraftPlan(draft(9))],
        [DraftPlan(max_draft=9)],
        [DraftPlan(tree_of([[1], list(range(2, 11))]))],
        [DraftPlan(tree_of([[n] for n in range(11)]))],
    ],
)
def test_a_plan_that_exceeds_what_was_offered_is_not_followed(plans: list[DraftPlan]) -> None:
    guarded = GuardedSpeculator(Says(*plans))
    request = make_request("a", [1, 2, 3])
    assert guarded.plan([request], [8], budget=10, num_prefill=0) == [NO_DRAFT_PLAN]
    fitting = [DraftPlan(tree_of([[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]))]
    guarded = GuardedSpeculator(Says(*fitting))
    assert guarded.plan([request], [8], budget=10, num_prefill=0) == fitting


def test_a_failure_now_and_then_is_forgiven() -> None:
    said = Says(DraftPlan(draft(2)))
    guarded = GuardedSpeculator(said)
    request = make_request("a", [1, 2, 3])
    for turn in range(4000):
        said.plans = [] if turn % 50 == 0 else [DraftPlan(draft(2))]
        guarded.plan([request], [8], budget=10, num_prefill=0)
    assert guarded.inner is said


# -- silence --------------------------------------------------------------------------------------


class Silences(FixedDepth):
    """Is silent about some requests, and writes down what it is asked and told of others."""

    def __init__(self, *silent: str) -> None:
        super().__init__(2)
        self._silent = set(silent)
        self.told: list[tuple[str, list[str]]] = []
        self.num_steps = 0

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        return self._silent.issuperset(each.request_id for each in requests)

    def plan(self, requests, limits, *, budget, num_prefill):  # type: ignore[no-untyped-def]
        self.told.append(("plan", [each.request_id for each in requests]))
        return super().plan(requests, limits, budget=budget, num_prefill=num_prefill)

    def observe(
        self, request: Request, row: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        self.told.append(("observe", [request.request_id]))

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        self.num_steps += 1


def decode(speculator: FixedDepth, *names: str) -> tuple[Driver, list[StepPlan]]:
    """Requests of four tokens each, and the plans of the steps in which they decode."""
    runner = FakeRunner(4, perfect)
    driver = Driver(make_scheduler(speculator=speculator), runner)
    driver.add(*(make_request(name, [1, 2, 3], max_tokens=4) for name in names))
    driver.run()
    return driver, [
        plan for plan in runner.plans if plan.requests[0].stop - plan.requests[0].start == 1
    ]


def test_without_speculation_every_request_is_silent() -> None:
    assert NO_SPECULATION.drafts_nothing([make_request("a", [1])], num_new_tokens=1)


def test_a_step_in_which_all_are_silent_is_neither_planned_nor_observed_by_row() -> None:
    driver, plans = decode(speculator := Silences("a", "b"), "a", "b")
    assert len(plans) == 3
    assert all(plan.is_plain for plan in plans)
    assert speculator.told == []
    assert speculator.num_steps == 4, "what each step took is told all the same"
    assert driver.ended == {"a": "length", "b": "length"}


def test_one_request_that_is_not_silent_has_the_whole_step_planned() -> None:
    _, plans = decode(speculator := Silences("a"), "a", "b")
    assert not any(plan.is_plain for plan in plans)
    assert speculator.told[0] == ("plan", ["a", "b"])
    assert {name for kind, (name, *_) in speculator.told if kind == "observe"} == {"a", "b"}


def test_who_cannot_say_whether_it_is_silent_drafts_nothing_and_is_soon_not_asked() -> None:
    class Mute(Silences):
        def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
            raise RuntimeError("drafts_nothing")

    driver, plans = decode(speculator := Mute(), "a")
    assert all(plan.is_plain for plan in plans)
    assert speculator.told == []
    guarded = driver.scheduler.speculator
    for _ in range(MAX_FAILURES):
        assert guarded.drafts_nothing([make_request("b", [1])])
    assert guarded.inner is NO_SPECULATION
