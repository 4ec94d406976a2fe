"""Requests get places and pages as soon as there are some."""

from __future__ import annotations

from msgspec.structs import replace

from foretoken.core.interface.request import Request
from foretoken.core.scheduling.request_table import RequestTable, SchedulerLimits
from foretoken.radix_cache import PrefixCache
from support.fake_model import VOCAB_SIZE, Driver, FakeRunner, make_request, make_scheduler


def test_a_request_may_reuse_the_id_of_one_that_did_not_fit() -> None:
    scheduler = make_scheduler(num_pages=8)
    driver = Driver(scheduler, FakeRunner(scheduler.cache.page_size))
    driver.add(make_request("running", [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6], max_tokens=12))
    driver.step()
    driver.add(make_request("id", [2] * 20))
    driver.step()
    driver.abort("id")
    assert [*scheduler.running] == ["running"]
    del driver.ended["id"]
    driver.add(make_request("id", [2, 3, 4], max_tokens=2))
    driver.step()
    assert [*scheduler.running] == ["running", "id"]


def test_a_request_is_admitted_when_packing_makes_room() -> None:
    limits = SchedulerLimits(
        max_batch_tokens=64,
        max_running=8,
        max_queued=8,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        kv_budget=256,
    )
    table, cache = RequestTable(limits, 64), PrefixCache(16, 4)

    def run(request_id: str, num_tokens: int, num_with_pages: int) -> Request:
        request = make_request(request_id, [len(request_id)] * num_tokens)
        table.add(request, 0.0)
        table.admit(request)
        request.lease = cache.acquire(request.tokens)
        assert cache.extend(request.lease, num_with_pages)
        return request

    prompt, packed = run("prompt", 28, 8), run("old", 8, 24)
    table.add(head := make_request("head", [5] * 8), 1.0)

    def first() -> Request | None:
        table.begin_round(1.0)
        return next(table.candidates(cache, None), None)

    assert first() is None, "the prompt needs its pages first"
    assert prompt.lease is not None
    assert packed.lease is not None
    cache.extend(prompt.lease, 28)
    assert first() is None
    cache.shrink(packed.lease, 8)
    assert cache.num_available_pages < 8, "fewer than at first, but no prompt needs them"
    assert first() is head


def test_a_prompt_computed_ahead_takes_no_place_of_a_single_tenant() -> None:
    scheduler = make_scheduler(max_running=1, max_queued=6)
    driver = Driver(scheduler, FakeRunner(scheduler.cache.page_size))
    driver.add(make_request("first", [1, 2, 3], tenant="only"))
    driver.step()
    ahead = make_request("ahead", [1, 2, 3, 4, 5], prompt_only=True)
    ahead.extras = replace(ahead.extras, is_idle_prefill=True)
    driver.add(ahead)
    driver.abort("ahead")
    for index in range(6):
        driver.add(make_request(str(index), [1, 2, 3], tenant="only"))
    assert len(scheduler.waiting) == 6
