"""Tenants that share a scheduler, over whole runs of the model of hashes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.request import Request
from foretoken.core.scheduling.leases import RETURN_GROWTH
from foretoken.core.scheduling.scheduler import Scheduler
from support.fake_model import (
    VOCAB_SIZE,
    Driver,
    FakeRunner,
    answer,
    make_request,
    make_scheduler,
    no_draft,
    sometimes,
    wrong,
)


def drive(drafter=no_draft, **options) -> Driver:
    scheduler = make_scheduler(**options)
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size, drafter))


def prompt_of(length: int, seed: object = 0) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def come(driver: Driver, name: str, tenant: str, length: int = 8, **options) -> Request:
    request = make_request(name, prompt_of(length, name), tenant=tenant, **options)
    driver.add(request)
    return request


def computed(driver: Driver) -> Counter[str]:
    """Rows computed for each tenant, the first part of a request's name."""
    rows: Counter[str] = Counter()
    for plan in driver.runner.plans:
        for row in plan.requests:
            rows[row.request_id.split("-")[0]] += row.stop - row.start
    return rows


def tenants_waiting(driver: Driver) -> set[str | None]:
    return {request.tenant for request in driver.scheduler.waiting.requests}


def test_two_tenants_with_more_than_enough_to_do_are_served_alike() -> None:
    """The bound of the paper: twice what the running requests may cost, whatever they bring."""
    driver = drive(max_running=4, max_batch_tokens=32, num_pages=200, max_queued=600)
    for index in range(40):
        come(driver, f"long-{index}", "long", 40, max_tokens=20)
    for index in range(200):
        come(driver, f"short-{index}", "short", 4, max_tokens=4)
    gap = 0
    while tenants_waiting(driver) == {"long", "short"}:
        driver.step()
        rows = computed(driver)
        gap = max(gap, abs(rows["long"] - rows["short"]))
    assert computed(driver).total() > 2500, "long enough to tell"
    assert gap <= 2 * 4 * 60
    driver.run()


def test_a_flood_of_one_tenant_delays_anothers_single_request_by_one_place_at_most() -> None:
    driver = drive(max_running=3, max_batch_tokens=32, num_pages=200, max_queued=600)
    for index in range(400):
        come(driver, f"flood-{index}", "flood", max_tokens=6)
    for turn in range(12):
        request = come(driver, f"single-{turn}", "single", max_tokens=3)
        steps = 0
        while request.num_output == 0:
            driver.step()
            steps += 1
        assert steps <= 6 + 1, "a place is free after the six steps of an answer"
        for _ in range(9):
            driver.step()


def test_a_flood_that_came_first_and_waited_long_is_no_reason_to_wait() -> None:
    driver = drive(max_running=2, max_batch_tokens=32, max_queued=600)
    for index in range(300):
        come(driver, f"flood-{index}", "flood", max_tokens=6)
    for _ in range(200):  # seconds: twenty times the time of ageing
        driver.step()
    request = come(driver, "single-0", "single", max_tokens=3)
    for _ in range(7):
        driver.step()
    assert request.num_output > 0


def test_rejected_drafts_are_charged_to_whoever_had_them() -> None:
    driver = drive(wrong, max_running=2, max_batch_tokens=64, num_pages=200)
    guesses = come(driver, "guesses-0", "guesses", max_tokens=30, depth=5)
    plain = come(driver, "plain-0", "plain", max_tokens=30, depth=0)
    driver.run()
    counters = driver.scheduler.waiting.counters
    assert counters["plain"] == plain.prompt_len + 29
    assert guesses.usage.accepted_tokens == 0
    proposed = guesses.usage.proposed_tokens
    assert proposed > 100
    assert counters["guesses"] == guesses.prompt_len + 29 + proposed


def test_whose_drafts_fail_is_let_in_less_often() -> None:
    driver = drive(wrong, max_running=2, max_batch_tokens=64, num_pages=200, max_queued=300)
    for index in range(60):
        come(driver, f"guesses-{index}", "guesses", max_tokens=20, depth=6)
        come(driver, f"plain-{index}", "plain", max_tokens=20, depth=0)
    while tenants_waiting(driver) == {"guesses", "plain"}:
        driver.step()
    ended = Counter(name.split("-")[0] for name in driver.ended)
    assert ended["plain"] > 2 * ended["guesses"]


def test_cached_tokens_are_not_charged() -> None:
    driver = drive(page_size=4, num_pages=100)
    shared = prompt_of(40)
    for name in ("first", "second"):
        driver.add(make_request(name, [*shared, 1], tenant=name, max_tokens=1))
        driver.run()
    counters = driver.scheduler.waiting.counters
    assert counters["first"] == 41
    assert counters["second"] == counters["first"] + 1, "lifted to the first, then one token"


def test_idle_time_saves_up_no_credit() -> None:
    driver = drive(max_running=2, max_batch_tokens=32, max_queued=600)
    for index in range(200):
        come(driver, f"busy-{index}", "busy", max_tokens=6)
    for _ in range(150):
        driver.step()
    before = computed(driver)["busy"]
    for index in range(60):
        come(driver, f"idle-{index}", "idle", max_tokens=6)
    for _ in range(60):
        driver.step()
    rows = computed(driver)
    assert abs(rows["idle"] - (rows["busy"] - before)) <= 2 * 2 * 14


def test_ageing_lets_a_low_priority_through_a_stream_of_high_ones() -> None:
    driver = drive(max_running=1, max_batch_tokens=32, max_queued=300, aging_seconds=5.0)
    low = come(driver, "low-0", "low", priority=4, max_tokens=2)
    came = 0
    while low.num_output == 0 and driver.now < 200:
        for _ in range(2):  # more than can be served
            come(driver, f"high-{came}", "high", priority=0, max_tokens=2)
            came += 1
        driver.step()
    assert 4 * 5.0 <= driver.now <= 4 * 5.0 + 6


def test_the_most_urgent_priority_delays_the_others_by_a_bounded_time() -> None:
    driver = drive(max_running=1, max_batch_tokens=32, aging_seconds=5.0, max_priority=10)
    usual = come(driver, "usual-0", "usual", max_tokens=2)
    came = 0
    while usual.num_output == 0 and driver.now < 200:
        while driver.scheduler.waiting.num_of("urgent") < 2:
            come(driver, f"urgent-{came}", "urgent", priority=-10, max_tokens=2)
            came += 1
        driver.step()
    assert driver.now <= 10 * 5.0 + 6


@pytest.mark.parametrize("priority", [-11, 11, -(2**31), 2**31 - 1])
def test_a_priority_beyond_the_bound_is_refused(priority: int) -> None:
    driver = drive(max_priority=10)
    for within in (-10, 10):
        come(driver, f"within-{within}", "a", priority=within)
    with pytest.raises(InvalidRequest, match="from -10 to 10") as refused:
        come(driver, "beyond", "a", priority=priority)
    assert refused.value.param == "priority"
    assert driver.scheduler.num_requests == 2


def test_what_has_aged_is_not_preempted_by_those_who_came_later() -> None:
    driver = drive(num_pages=12, page_size=2, max_batch_tokens=32, aging_seconds=2.0)
    low = come(driver, "low-0", "low", 4, priority=3, max_tokens=14)
    driver.now = 7.0  # more than three times the time of ageing, as if it had waited
    for index in range(6):
        come(driver, f"high-{index}", "high", 4, priority=0, max_tokens=12)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert low.num_preemptions == 0


def test_one_tenants_namespace_keeps_its_prefix_through_anothers_flood() -> None:
    driver = drive(num_pages=40, page_size=2, max_batch_tokens=32, max_running=2, cache_quota=0.5)
    prompt, cached = prompt_of(20, "quiet"), []
    for visit in range(4):
        name = f"quiet-{visit}"
        driver.add(again := make_request(name, prompt, namespace="quiet", max_tokens=1))
        driver.run()
        cached.append(again.usage.cached_tokens)
        for index in range(12):  # twice the pool
            come(driver, f"flood-{visit}-{index}", "flood", 10, namespace="flood", max_tokens=4)
        driver.run()
    assert cached == [0, 18, 18, 18]


# -- preemption ---------------------------------------------------------------------------------


class Watched(Scheduler):
    """Notes for whose sake each request was preempted, and what was free when it came back."""

    def watch(self) -> None:
        self.pairs: list[tuple[str, str]] = []  # (who needed pages, whom it cost its own)
        self.room: list[float] = []  # tokens for each other that runs
        self._for = ""

    def _admit(self, request: Request, now: float) -> None:
        num_others = len(self.running)
        super()._admit(request, now)
        if request.num_preemptions and num_others and request.lease is not None:
            size = self.cache.page_size
            needed = len(request.tokens) // size + 1 - len(request.lease.page_ids)
            spare = self.cache.num_available_pages - needed
            self.room.append(spare * size / num_others)

    def _reserve(self, request: Request, *args, **options) -> bool:
        self._for = request.request_id
        return super()._reserve(request, *args, **options)

    def _preempt(self, request: Request) -> None:
        self.pairs.append((self._for, request.request_id))
        super()._preempt(request)


def crowd(rng: random.Random, num_pages: int, page_size: int) -> Iterable[Request]:
    """Far more than the pool holds, of several tenants, with prefixes in common."""
    longest = num_pages * page_size
    prefixes = [prompt_of(rng.randrange(longest // 4), each) for each in "abc"]
    for index in range(16):
        prompt = rng.choice(prefixes) + prompt_of(rng.randrange(1, longest // 4), index)
        tenant = rng.choice(["a", "b", "c"])
        yield make_request(
            f"{tenant}-{index}", prompt, tenant=tenant, priority=rng.randrange(3),
            max_tokens=rng.randrange(longest // 4, longest // 2),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_in_a_pool_far_too_small_all_finish_and_nobody_is_preempted_for_ever(seed: int) -> None:
    """A request returns only when those who run may grow by `RETURN_GROWTH` tokens each.

    So there are no more preemptions than requests, and one more for each time that all together
    grew by as much: never one for every few tokens.
    """
    rng = random.Random(seed)
    num_pages, page_size = rng.choice([(12, 4), (24, 4), (40, 8)])
    driver = drive(
        rng.choice([no_draft, sometimes]), num_pages=num_pages, page_size=page_size, depth=3,
        max_batch_tokens=rng.choice([8, 24]), aging_seconds=rng.choice([1.0, 30.0]),
    )  # fmt: skip
    scheduler = driver.scheduler
    scheduler.__class__ = Watched
    scheduler.watch()
    requests = list(crowd(rng, num_pages, page_size))
    for request in requests:
        driver.add(request)
        if rng.random() < 0.5:
            driver.step()
    driver.run()
    for request in requests:
        prompt = list(request.tokens[: request.prompt_len])
        solo = answer(prompt, request.max_len - request.prompt_len)
        assert driver.served[request.request_id] == solo
    grown = sum(request.num_output for request in requests)
    assert scheduler.num_preemptions <= len(requests) + grown // RETURN_GROWTH
    assert all(tokens >= RETURN_GROWTH for tokens in scheduler.room)
    pairs = {pair for pair in scheduler.pairs if pair[0] != pair[1]}
    assert pairs.isdisjoint((victim, other) for other, victim in pairs), "in turn"


def test_a_victim_returns_to_others_when_there_is_room_to_grow() -> None:
    driver = drive(num_pages=64, page_size=8, max_batch_tokens=24)
    scheduler = driver.scheduler
    scheduler.__class__ = Watched
    scheduler.watch()
    for index in range(8):
        come(driver, f"t-{index}", "abc"[index % 3], 30, max_tokens=40 + 10 * index)
    driver.run()
    assert scheduler.num_preemptions > 0
    assert scheduler.room, "somebody came back while others ran"
    assert min(scheduler.room) >= RETURN_GROWTH


def test_the_pool_of_that_test_is_too_small_indeed() -> None:
    driver = drive(num_pages=24, page_size=4, max_batch_tokens=24)
    requests = list(crowd(random.Random(1), 24, 4))
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.num_preemptions > len(requests) // 2
