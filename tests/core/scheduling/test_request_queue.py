"""The waiting queue by itself: in which order requests are let in, and what it remembers."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from foretoken.core.errors import QueueFull
from foretoken.core.interface.request import Request
from foretoken.core.scheduling import request_queue as tenants
from foretoken.core.scheduling.request_queue import (
    MAX_PROMOTED,
    VirtualTokenCounter,
    WaitingQueue,
)
from foretoken.core.scheduling.request_table import (
    MAX_PASSED,
    MULTI_TENANT_SECONDS,
    PendingArrivals,
)
from support.fake_model import Driver, FakeRunner, answer, make_request, make_scheduler

AGING = 10.0


class Line:
    """A queue, and what comes of it."""

    def __init__(self) -> None:
        self.queue = WaitingQueue(AGING)
        self._serials = count()

    def come(
        self, name: str, now: float = 0.0, *, tenant: str | None = None, priority: int = 0
    ) -> Request:
        request = make_request(name, [1] * 5, tenant=tenant, priority=priority)
        request.arrival_time, request.serial = now, next(self._serials)
        request.urgency = now + priority * AGING
        self.queue.add(request)
        return request

    def let_in(self, now: float = 0.0, *, cost: int = 5) -> str | None:
        self.queue.begin_round(now)
        self.queue.check()
        request = self.queue.first()
        if request is None:
            return None
        self.queue.remove(request)
        self.queue.charge(request.tenant, cost)
        self.queue.check()
        return request.request_id

    def drain(self, now: float = 0.0, *, cost: int = 5) -> list[str]:
        return [self.let_in(now, cost=cost) or "" for _ in range(len(self.queue))]


@pytest.fixture
def line() -> Line:
    return Line()


def test_what_waits_with_a_low_priority_gives_newcomers_no_credit(line: Line) -> None:
    line.come("parked", tenant="parked", priority=1000)
    for index in range(30):
        line.come(f"a{index}", tenant="a")
        line.come(f"b{index}", tenant="b")
    for _ in range(30):
        line.let_in(cost=100)
    for index in range(30):
        line.come(f"c{index}", tenant="c")
    served = Counter((line.let_in(cost=100) or "")[0] for _ in range(12))
    assert served == {"a": 4, "b": 4, "c": 4}


def test_a_newcomer_is_compared_with_those_alone_who_are_urgent(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(50):
        line.come(str(index), tenant=str(index), priority=index)
    looked: list[object] = []
    least = line.queue._least
    monkeypatch.setattr(line.queue, "_least", lambda at: looked.append(at) or least(at))
    line.come("new", tenant="new", priority=3)
    assert len(looked) == 1


def test_a_lower_priority_value_goes_first_then_who_came_first(line: Line) -> None:
    line.come("a", priority=1)
    line.come("b", priority=0)
    line.come("c", priority=-1)
    line.come("d", priority=0)
    assert line.drain() == ["c", "b", "d", "a"]


def test_waiting_makes_more_urgent_by_one_priority_at_a_time(line: Line) -> None:
    line.come("low", 0.0, priority=2)
    line.come("soon", 19.9, priority=0)
    assert line.let_in(19.9) == "soon"
    line.come("later", 20.1, priority=0)
    assert line.let_in(20.1) == "low"


@pytest.mark.parametrize("waited", [9.9, 10.1])
def test_waiting_counts_between_tenants_as_well(line: Line, waited: float) -> None:
    line.come("low", 0.0, tenant="a", priority=1)
    line.queue.charge("b", 100)
    line.come("high", waited, tenant="b", priority=0)
    assert line.let_in(waited) == ("low" if waited > AGING else "high")


def test_a_low_priority_gets_through_a_stream_of_high_ones(line: Line) -> None:
    line.come("low", 0.0, tenant="a", priority=3)
    for second in range(100):
        line.come(f"high-{second}", float(second), tenant="b", priority=0)
        line.come(f"next-{second}", float(second), tenant="b", priority=0)
        if line.let_in(float(second)) == "low":
            break
    assert second == 3 * AGING


def test_the_tenant_that_was_served_least_goes_first(line: Line) -> None:
    for name in ("a1", "a2", "a3", "b1", "b2"):
        line.come(name, tenant=name[0])
    assert line.drain() == ["a1", "b1", "a2", "b2", "a3"]


def test_who_costs_more_goes_less_often(line: Line) -> None:
    for index in range(30):
        line.come(f"a{index}", tenant="a")
        line.come(f"b{index}", tenant="b")
    served: Counter[str | None] = Counter()
    for _ in range(20):
        line.queue.begin_round(0.0)
        request = line.queue.first()
        assert request is not None
        line.queue.remove(request)
        line.queue.charge(request.tenant, 40 if request.tenant == "a" else 10)
        served[request.tenant] += 1
    assert served == {"a": 4, "b": 16}


def test_an_old_queue_of_one_tenant_does_not_go_before_anothers_newcomer(line: Line) -> None:
    for index in range(50):
        line.come(f"flood-{index}", 0.0, tenant="flood")
    line.let_in(0.0)
    line.come("single", 100.0, tenant="other")
    assert "single" in {line.let_in(100.0), line.let_in(100.0)}


def test_idle_time_saves_up_no_credit(line: Line) -> None:
    for index in range(100):
        line.come(f"a{index}", tenant="a")
    for _ in range(50):
        line.let_in()
    for index in range(20):
        line.come(f"b{index}", tenant="b")
    names = [(line.let_in() or "")[0] for _ in range(20)]
    assert names.count("b") == 10, "it takes turns from now on, and makes up for nothing"


def test_a_tenant_that_was_served_before_gains_nothing_by_a_pause(line: Line) -> None:
    line.come("b", tenant="b")
    line.let_in()
    for index in range(100):
        line.come(f"a{index}", tenant="a")
    for _ in range(50):
        line.let_in()
    for index in range(20):
        line.come(f"b{index}", tenant="b")
    names = [(line.let_in() or "")[0] for _ in range(20)]
    assert names.count("b") == 10


def test_a_tenant_that_leaves_and_comes_back_keeps_its_debt(line: Line) -> None:
    for index in range(9):
        line.come(f"b{index}", tenant="b")
    line.come("a0", tenant="a")
    assert line.let_in(cost=0) == "b0"
    line.queue.charge("a", 25)
    line.let_in(cost=5)
    line.queue.remove(next(each for each in line.queue.requests if each.tenant == "a"))
    line.come("a1", tenant="a")
    assert [line.let_in() for _ in range(6)] == ["b2", "b3", "b4", "b5", "b6", "a1"]


def test_who_comes_to_an_empty_queue_has_no_credit_with_who_waited_last(line: Line) -> None:
    for index in range(9):
        line.come(f"a{index}", tenant="a")
        line.let_in(cost=100)
    for index in range(4):
        line.come(f"b{index}", tenant="b")
        line.come(f"c{index}", tenant="a")
    assert Counter((line.let_in(cost=100) or "")[0] for _ in range(4)) == {"b": 2, "c": 2}


def test_of_equal_tenants_the_one_who_came_first_goes_first(line: Line) -> None:
    for name in "zyx":
        line.come(name, tenant=name)
    assert line.drain() == ["z", "y", "x"]


def test_urgency_goes_before_fairness(line: Line) -> None:
    line.come("poor", tenant="poor")
    line.queue.charge("rich", 10_000)
    line.come("rich", tenant="rich", priority=-1)
    assert line.drain() == ["rich", "poor"]


def test_an_urgent_request_is_not_hidden_behind_its_tenants_others(line: Line) -> None:
    line.come("a-low", tenant="a", priority=5)
    line.come("b", tenant="b", priority=1)
    line.come("a-high", tenant="a", priority=0)
    assert line.drain() == ["a-high", "b", "a-low"]


def test_those_passed_over_are_back_in_the_next_round_where_they_were(line: Line) -> None:
    line.come("first", tenant="a")
    line.come("second", tenant="a")
    line.come("other", tenant="b")
    line.queue.begin_round(0.0)
    while (request := line.queue.first()) is not None:
        line.queue.pass_over(request)
        line.queue.check()
    assert len(line.queue) == 3
    assert line.queue.num_of("a") == 2
    assert line.drain() == ["first", "other", "second"]


def test_one_that_was_passed_over_can_be_removed(line: Line) -> None:
    request = line.come("a")
    line.come("b")
    line.queue.pass_over(request)
    line.queue.remove(request)
    assert line.drain() == ["b"]


def test_a_preempted_request_takes_its_old_place(line: Line) -> None:
    preempted = line.come("old", 0.0)
    assert line.let_in(0.0) == "old"
    line.come("new", 1.0)
    line.queue.add(preempted)
    assert line.drain(2.0) == ["old", "new"]


def test_iterating_tells_the_serving_order_and_changes_nothing(line: Line) -> None:
    rng = random.Random(3)
    for index in range(60):
        tenant = rng.choice(["a", "b", "c"])
        line.come(str(index), float(index), tenant=tenant, priority=rng.randrange(3))
    line.queue.begin_round(60.0)
    foretold = [request.request_id for request in line.queue]
    assert line.queue.num_tokens == 60 * 5
    assert foretold == [request.request_id for request in line.queue]
    assert foretold == line.drain(60.0)


def test_many_lines_that_become_urgent_at_once_do_so_in_several_rounds(line: Line) -> None:
    for index in range(3 * MAX_PROMOTED):
        line.come(str(index), tenant=str(index), priority=1)
    line.come("urgent", 0.0, tenant="u", priority=0)
    line.queue.charge("u", 1000)
    line.queue.begin_round(AGING)
    line.queue.check()
    assert [len(at) for at in line.queue._levels.values()] == [MAX_PROMOTED + 1, 2 * MAX_PROMOTED]
    assert line.drain(AGING)[-1] == "urgent"


@pytest.mark.parametrize("seed", range(5))
def test_random_actors_never_break_the_queue(seed: int) -> None:
    """Against the rules spelt out over all who wait, where lines ripen as they should."""
    rng, line, now = random.Random(seed), Line(), 0.0
    for step in range(300):
        now += rng.random()
        for _ in range(rng.randrange(3)):
            tenant = rng.choice([None, "a", "b", "c"])
            line.come(f"{step}-{_}", now, tenant=tenant, priority=rng.randrange(3))
        if rng.random() < 0.2:
            line.queue.charge(rng.choice([None, "a", "b"]), rng.randrange(50))
        line.queue.begin_round(now)
        while rng.random() < 0.3 and (request := line.queue.first()) is not None:
            line.queue.pass_over(request)
        line.queue.check()
        for _ in range(MAX_PROMOTED):
            line.queue.begin_round(now)
        request = line.queue.first()
        assert request is foremost(line.queue, now)
        if request is not None and rng.random() < 0.8:
            line.queue.remove(request)
            line.queue.charge(request.tenant, rng.randrange(20))


def foremost(queue: WaitingQueue, now: float) -> Request | None:
    """The three rules, over all who wait."""
    top = min((request.priority for request in queue.requests), default=0)
    by_tenant: dict[str | None, Request] = {}
    for request in sorted(queue.requests, key=lambda each: each.order):
        by_tenant.setdefault(request.tenant, request)

    def place(request: Request) -> tuple[int, int, float, int]:
        level = request.priority - int((now - request.arrival_time) / AGING)
        return max(top, level), queue.counters[request.tenant], *request.order

    return min(by_tenant.values(), key=place, default=None)


# -- what is remembered -----------------------------------------------------------------------


def test_tenants_that_come_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_KNOWN", 8)
    queue = Line()
    queue.queue.counters = VirtualTokenCounter()
    for index in range(1000):
        queue.come(str(index), tenant=str(index))
        queue.let_in()
    assert len(queue.queue.counters) <= 2 * 8 + 1


def test_the_greatest_debts_are_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MAX_KNOWN", 8)
    counters = VirtualTokenCounter()
    for index in range(50):
        counters.charge(f"t{index}", index)
    counters.forget(waiting={"t1"})
    assert {f"t{index}": counters[f"t{index}"] for index in range(50)} == {
        f"t{index}": index if index >= 42 or index == 1 else 0 for index in range(50)
    }


def test_whoever_is_forgotten_counts_as_served_as_much_as_the_least(line: Line) -> None:
    counters = line.queue.counters
    counters.lift("a", 70)
    assert counters["unknown"] == 70
    counters.charge("unknown", 5)
    assert counters["unknown"] == 75


# -- the bound ----------------------------------------------------------------------------------


def drive(**options: object) -> Driver:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size))


def fill(driver: Driver, tenant: str | None, most: int = 1000) -> int:
    """Number of requests of a tenant that are taken before it is refused."""
    for index in range(most):
        name = f"{tenant}-{driver.now}-{index}"
        try:
            driver.add(make_request(name, [1, 2, 3], tenant=tenant, max_tokens=4))
        except QueueFull:
            return index
    return most


def test_a_tenant_that_is_alone_may_have_the_whole_queue() -> None:
    driver = drive(max_running=2, max_queued=20)
    assert fill(driver, None) == 22


def test_several_tenants_are_present_for_a_while_after_the_last_change() -> None:
    driver = drive(max_running=2, max_queued=20)
    driver.add(make_request("first", [1, 2, 3], tenant="a", max_tokens=1))
    driver.add(make_request("second", [1, 2, 3], tenant="b", max_tokens=1))
    driver.run()
    driver.now = MULTI_TENANT_SECONDS / 2
    assert fill(driver, "b") == 12, "half of the queue, beside what runs at once"
    driver.run()
    driver.now = MULTI_TENANT_SECONDS - 1.0
    driver.step()  # a second later
    assert fill(driver, "b") == 22, "alone again"


def test_a_flood_leaves_room_for_other_tenants() -> None:
    driver = drive(max_running=2, max_queued=20)
    fill(driver, "early", 2)
    driver.step()
    assert len(driver.scheduler.running) == 2
    assert fill(driver, "flood") == 10
    assert fill(driver, "second") == 5
    assert fill(driver, "third") == 3
    for name in ("x", "y"):
        assert fill(driver, name, 1) == 1
    driver.run()


def test_what_need_not_wait_is_not_bounded() -> None:
    driver = drive(max_running=4, max_queued=0)
    fill(driver, "early", 1)
    driver.run()
    assert fill(driver, "choices") == 4
    driver.run()


def test_one_who_had_the_whole_queue_gives_way_as_soon_as_another_asks() -> None:
    driver = drive(max_running=2, max_queued=20, max_batch_tokens=64)
    fill(driver, "flood")
    assert fill(driver, "other", 1) == 0
    while driver.scheduler.num_requests == 22:
        driver.step()
    assert fill(driver, "flood") == 0
    assert fill(driver, "other", 1) == 1


def test_requests_on_their_way_to_the_queue_count() -> None:
    driver = drive(max_running=2, max_queued=20)
    fill(driver, "early", 2)
    driver.step()
    scheduler = driver.scheduler
    scheduler.check(make_request("tenth", [1], tenant="flood"), pending=PendingArrivals(9, 9))
    with pytest.raises(QueueFull, match="10 of its requests"):
        scheduler.check(make_request("more", [1], tenant="flood"), pending=PendingArrivals(10, 10))
    scheduler.check(make_request("other", [1], tenant="other"), pending=PendingArrivals(10, 0))
    with pytest.raises(QueueFull, match="20 requests are waiting"):
        scheduler.check(make_request("other", [1], tenant="other"), pending=PendingArrivals(20, 0))


# -- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_passed", [MAX_PASSED - 1, MAX_PASSED])
def test_those_whose_prefix_is_on_its_way_do_not_stop_the_others_unless_they_are_many(
    num_passed: int,
) -> None:
    driver = drive(max_batch_tokens=24, page_size=4, num_pages=200, max_running=40)
    shared = [1, 2, 3, 4] * 8
    for index in range(1 + num_passed):
        driver.add(make_request(f"same-{index}", [*shared, 5], tenant="a", max_tokens=2))
    other = [6, 5, 4, 3, 2] * 4  # too long to begin before its turn
    driver.add(make_request("other", other, tenant="a", max_tokens=2))
    driver.step()
    others = {"other"} if num_passed < MAX_PASSED else set()
    assert {row.request_id for row in driver.step().requests} == {"same-0"} | others
    driver.run()
    assert all(
        driver.served[f"same-{index}"] == answer([*shared, 5], 2) for index in range(1 + num_passed)
    )


def test_a_step_looks_at_a_few_of_those_alone_who_wait_for_a_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = drive(max_batch_tokens=24, page_size=4, num_pages=200, max_running=40)
    for index in range(5 * MAX_PASSED):
        driver.add(make_request(f"same-{index}", [1, 2, 3, 4] * 8 + [5], max_tokens=2))
    driver.step()
    asked: list[Request] = []
    cache = driver.scheduler.cache
    match_len = cache.match_len
    monkeypatch.setattr(
        cache, "match_len", lambda *args, **kw: asked.append(args) or match_len(*args, **kw)
    )
    driver.step()
    assert len(asked) <= MAX_PASSED
    driver.run()
