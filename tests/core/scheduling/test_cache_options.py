"""Cache options: whether a request may read, write and pin, with a model of hashes."""

from __future__ import annotations

import random
from array import array

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.request import MAX_PINS, CacheOptions, Pin, Request
from support.fake_model import VOCAB_SIZE, Driver, FakeRunner, answer, make_request, make_scheduler

PRIVATE = CacheOptions(read=False, write=False)


def drive(**options) -> Driver:
    scheduler = make_scheduler(**options)
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def ask(name: str, prompt: list[int], cache: CacheOptions | None = None, **options) -> Request:
    request = make_request(name, prompt, **{"max_tokens": 4, **options})
    request.cache = cache or CacheOptions()
    return request


def serve(driver: Driver, *requests: Request) -> None:
    for request in requests:
        driver.add(request)
    driver.run()
    driver.scheduler.audit()


def test_who_does_not_read_computes_everything_and_may_still_write() -> None:
    driver = drive()
    serve(driver, ask("a", prompt_of(20)))
    driver.runner.num_computed = 0
    blind = ask("b", prompt_of(20), CacheOptions(read=False), max_tokens=1)
    serve(driver, blind)
    assert driver.runner.num_computed == 20
    assert blind.usage.cached_tokens == blind.usage.cache_write_tokens == 0
    fresh = ask("c", prompt_of(20, 1), CacheOptions(read=False))
    serve(driver, fresh)
    assert fresh.usage.cache_write_tokens == 20
    serve(driver, again := ask("d", prompt_of(20, 1)))
    assert again.usage.cached_tokens == 16


def test_who_does_not_write_leaves_nothing_and_may_still_read() -> None:
    driver = drive()
    serve(driver, secret := ask("a", prompt_of(20), CacheOptions(write=False)))
    assert driver.scheduler.cache.tree.num_pages == 0
    assert secret.usage.cache_write_tokens == 0
    serve(driver, ask("b", prompt_of(20)))
    num_pages = driver.scheduler.cache.tree.num_pages
    reader = ask("c", prompt_of(20) + prompt_of(9, 3), CacheOptions(write=False))
    serve(driver, reader)
    assert reader.usage.cached_tokens == 20
    assert driver.scheduler.cache.tree.num_pages == num_pages


def test_what_is_not_to_be_written_is_not_lent_while_it_runs() -> None:
    driver = drive(max_batch_tokens=64)
    prompt = prompt_of(20)
    serve(
        driver,
        ask("secret", prompt, PRIVATE),
        *(open_ := [ask(f"{index}", prompt, max_tokens=1) for index in range(2)]),
    )
    assert [request.usage.cached_tokens for request in open_] == [0, 16]
    assert driver.served["secret"] == answer(prompt, 4)


def test_nobody_waits_for_what_will_not_be_written() -> None:
    driver = drive(max_batch_tokens=64)
    driver.add(ask("secret", prompt_of(20), CacheOptions(write=False)), ask("a", prompt_of(20)))
    assert [row.request_id for row in driver.step().requests] == ["secret", "a"]
    driver.run()


def test_who_does_not_read_is_let_in_when_there_is_room_for_all_of_its_pages() -> None:
    driver = drive(num_pages=12, page_size=4, max_batch_tokens=64)
    driver.add(ask("a", prompt_of(32), max_tokens=9))
    driver.step()
    driver.add(blind := ask("b", prompt_of(32), CacheOptions(read=False)))
    driver.step()
    assert list(driver.scheduler.running) == ["a"]
    driver.run()
    assert blind.usage.cached_tokens == 0


def test_private_requests_that_are_preempted_compute_anew_and_answer_the_same() -> None:
    driver = drive(num_pages=12, page_size=2, max_batch_tokens=32)
    requests = [ask(f"{i}", prompt_of(6, i), PRIVATE, max_tokens=12) for i in range(4)]
    serve(driver, *requests)
    assert driver.scheduler.num_preemptions > 0
    for index in range(4):
        assert driver.served[f"{index}"] == answer(prompt_of(6, index), 12)
    assert driver.scheduler.cache.tree.num_pages == 0


def test_written_tokens_are_the_whole_new_pages_of_the_prompt() -> None:
    driver = drive(page_size=4, max_batch_tokens=7)
    serve(driver, first := ask("a", prompt_of(18), max_tokens=9))
    assert (first.usage.cached_tokens, first.usage.cache_write_tokens) == (0, 16)
    serve(driver, second := ask("b", prompt_of(18) + prompt_of(12, 1), max_tokens=9))
    assert second.usage.cached_tokens == 16
    assert second.usage.cache_write_tokens == 28 - 16
    serve(driver, third := ask("c", prompt_of(18)))
    assert (third.usage.cached_tokens, third.usage.cache_write_tokens) == (16, 0)


def test_the_prompt_is_written_when_its_last_chunk_is_a_single_token() -> None:
    driver = drive(page_size=4, max_batch_tokens=7)
    driver.add(request := ask("a", prompt_of(8), max_tokens=9))
    driver.step()
    driver.step()
    assert request.num_output == 1
    assert request.usage.cache_write_tokens == 8


def test_preemption_counts_no_token_as_written_twice() -> None:
    driver = drive(num_pages=12, page_size=2, max_batch_tokens=32)
    requests = [ask(f"{index}", prompt_of(6, index), max_tokens=12) for index in range(4)]
    serve(driver, *requests)
    assert driver.scheduler.num_preemptions > 0
    assert [r.usage.cached_tokens + r.usage.cache_write_tokens for r in requests] == [6] * 4


def test_a_prompt_is_pinned_once_it_is_computed() -> None:
    driver = drive(page_size=4, max_batch_tokens=8, num_pages=64)
    cache = driver.scheduler.cache
    request = ask("a", prompt_of(18), CacheOptions(pins=(Pin(9, 5.0), Pin(1000, 60.0))))
    driver.add(request)
    driver.step()
    assert cache.num_pinned_pages == 0
    driver.run()
    assert sorted(p.lock.num_pages for p in cache.pins.of(None)) == [2, 4]
    driver.scheduler.audit()


def test_an_answer_that_was_cached_before_is_not_pinned_with_its_prompt() -> None:
    driver = drive(page_size=4)
    serve(driver, ask("a", prompt_of(15)))
    serve(driver, ask("b", prompt_of(15), CacheOptions(pins=(Pin(1000, 60.0),))))
    assert driver.scheduler.cache.num_pinned_pages == 3


def test_a_request_that_ends_with_its_first_token_is_pinned_too() -> None:
    driver = drive()
    serve(driver, ask("a", prompt_of(16), CacheOptions(pins=(Pin(16, 5.0),)), max_tokens=1))
    assert driver.scheduler.cache.num_pinned_pages == 4


def test_pins_of_a_request_that_does_not_write_keep_nothing() -> None:
    driver = drive()
    serve(driver, ask("a", prompt_of(16)))
    serve(driver, ask("b", prompt_of(16), CacheOptions(write=False, pins=(Pin(16, 5.0),))))
    assert driver.scheduler.cache.num_pinned_pages == 0


def test_a_failed_request_pins_nothing() -> None:
    driver = drive()
    driver.add(ask("a", prompt_of(8), CacheOptions(pins=(Pin(8, 5.0),))))
    plan = driver.scheduler.schedule(0.0)
    failed = StepOutput(requests=[RequestOutput(request_id="a", error="NaN")])
    driver.scheduler.commit(plan, failed, 0.0)
    assert driver.scheduler.cache.num_pinned_pages == 0
    driver.scheduler.audit()


def test_a_session_pins_its_last_turn_with_the_answer() -> None:
    driver = drive(page_size=4, num_pages=64)
    session, cache = CacheOptions(session="s"), driver.scheduler.cache
    serve(driver, ask("a", prompt_of(16), session, max_tokens=5))
    assert cache.num_pinned_pages == 5, "all but the last token, whose KV is not computed"
    turn = [*prompt_of(16), *driver.served["a"], *prompt_of(8, 1)]
    serve(driver, again := ask("b", turn, session))
    assert again.usage.cached_tokens == 20
    assert [p.lock.num_pages for p in cache.pins.of(None)] == [8]


def test_a_session_ends_with_a_request_that_says_so() -> None:
    driver = drive(page_size=4, num_pages=64)
    cache = driver.scheduler.cache
    serve(driver, ask("a", prompt_of(16), CacheOptions(session="s"), max_tokens=5))
    turn = [*prompt_of(16), *driver.served["a"], *prompt_of(8, 1)]
    last = CacheOptions(session="s", ends_session=True)
    serve(driver, again := ask("b", turn, last))
    assert again.usage.cached_tokens == 20
    assert (cache.num_pinned_pages, cache.pins.num_sessions) == (0, 0)
    serve(driver, ask("other", prompt_of(240, 2), CacheOptions(session="t")))
    assert cache.match_len(array("q", prompt_of(17))) < 16
    driver.scheduler.audit()


def test_a_turn_that_ends_its_session_takes_no_room_from_other_pins() -> None:
    driver = drive(page_size=4, num_pages=64)  # a quota of 16 pages
    pins = driver.scheduler.cache.pins
    serve(driver, ask("a", prompt_of(48), CacheOptions(session="a")))
    last = CacheOptions(session="b", ends_session=True)
    serve(driver, ask("b", prompt_of(48, 1), last))
    assert list(pins._sessions) == [(None, "a")]
    assert pins.num_session_yields == 0
    serve(driver, ask("other", prompt_of(160, 2)))
    found = [driver.scheduler.cache.match_len(array("q", prompt_of(49, n))) for n in range(2)]
    assert found[0] == 48
    assert found[1] < 48, "its own pages were evicted first"


def test_a_request_that_ends_its_session_does_so_also_when_it_fails_or_never_runs() -> None:
    driver = drive(page_size=4, num_pages=64)
    cache, last = driver.scheduler.cache, CacheOptions(session="s", ends_session=True)
    serve(driver, ask("a", prompt_of(16), CacheOptions(session="s")))
    driver.add(ask("waiting", prompt_of(8), last))
    assert cache.pins.num_sessions == 1
    driver.scheduler.abort("waiting", 1.0)
    assert cache.pins.num_sessions == 0
    serve(driver, ask("b", prompt_of(16), CacheOptions(session="s")))
    driver.add(ask("failing", prompt_of(8), last))
    plan = driver.scheduler.schedule(0.0)
    failed = StepOutput(requests=[RequestOutput(request_id="failing", error="NaN")])
    driver.scheduler.commit(plan, failed, 0.0)
    assert cache.pins.num_sessions == 0
    driver.scheduler.audit()


def test_a_prompt_that_is_only_computed_is_no_turn_of_its_session() -> None:
    driver = drive(page_size=4, num_pages=64)
    cache, session = driver.scheduler.cache, CacheOptions(session="s")
    serve(driver, ask("a", prompt_of(16), session))
    cache.expect("s", "tests")
    warm = ask("b", prompt_of(24), session, prompt_only=True, max_tokens=0)
    serve(driver, warm)
    assert not warm.sampling.generates
    assert cache.num_pinned_pages == 6
    assert not cache.pins.waits._times, "the wait goes on"


def test_a_running_turn_gives_its_pages_up_if_its_session_was_ended() -> None:
    driver = drive(page_size=4, num_pages=64)
    driver.add(running := ask("a", prompt_of(16), CacheOptions(session="s"), max_tokens=5))
    driver.scheduler.schedule(0.0)
    assert not driver.scheduler.end_session("s"), "it has no pages yet"
    assert running.cache.ends_session
    driver.scheduler.abort("a", 1.0)
    assert driver.scheduler.cache.pins.num_sessions == 0


def test_the_time_of_a_wait_ends_with_the_first_step_of_the_next_turn() -> None:
    driver = drive(page_size=4, num_pages=64)
    scheduler = driver.scheduler
    for number in range(4):
        driver.now = 100.0 * number
        request = ask(f"{number}", prompt_of(16, number), CacheOptions(session="s"), max_tokens=1)
        driver.add(request)
        driver.now += 7.0
        driver.run()
        scheduler.cache.expect("s", "tests")
    (waits,) = scheduler.cache.pins.waits._times.values()
    assert all(seconds == pytest.approx(100.0, abs=5.0) for seconds in waits)
    assert len(waits) == 3


def test_a_session_of_a_request_that_fails_or_does_not_write_pins_nothing() -> None:
    driver = drive()
    serve(driver, ask("a", prompt_of(16), CacheOptions(write=False, session="s")))
    driver.add(ask("b", prompt_of(8), CacheOptions(session="s")))
    plan = driver.scheduler.schedule(0.0)
    failed = StepOutput(requests=[RequestOutput(request_id="b", error="NaN")])
    driver.scheduler.commit(plan, failed, 0.0)
    assert driver.scheduler.cache.pins.num_sessions == 0


def test_a_pin_survives_a_crowd_and_the_scheduler_ends_it_in_time() -> None:
    driver = drive(num_pages=24, page_size=4, max_batch_tokens=64)
    serve(driver, ask("a", prompt_of(16), CacheOptions(pins=(Pin(16, 1e6),))))
    for index in range(12):
        serve(driver, ask(f"{index}", prompt_of(30, 1 + index)))
    serve(driver, hit := ask("again", prompt_of(17)))
    assert hit.usage.cached_tokens == 16
    driver.scheduler.schedule(3e6)
    assert driver.scheduler.cache.num_pinned_pages == 0


def test_a_prompt_of_the_whole_pool_is_served_when_all_that_may_be_is_pinned() -> None:
    driver = drive(num_pages=16, page_size=4, max_batch_tokens=64)
    for name in ("x", "y", "z"):
        pins = CacheOptions(pins=(Pin(1000, 1e6),))
        serve(driver, ask(name, prompt_of(16), pins, namespace=name))
    assert driver.scheduler.cache.num_pinned_pages == 8
    serve(driver, ask("big", prompt_of(60, 5), max_tokens=4))
    assert driver.served["big"] == answer(prompt_of(60, 5), 4)


def test_why_a_page_was_missing_is_noted_at_the_first_admission() -> None:
    driver = drive(num_pages=8, page_size=4, max_batch_tokens=64)
    serve(driver, ask("a", prompt_of(16)))
    serve(driver, ask("b", prompt_of(28, 1), max_tokens=1))
    serve(driver, late := ask("c", prompt_of(16)))
    assert late.usage.cache_loss is not None
    assert late.usage.cache_loss.cause == "evicted"
    driver.scheduler.cache.flush()
    serve(driver, later := ask("d", prompt_of(16)))
    assert later.usage.cache_loss is not None
    assert later.usage.cache_loss.cause == "flushed"


def test_a_shared_beginning_with_different_ends_is_computed_once() -> None:
    driver = drive(max_batch_tokens=256, page_size=4, num_pages=200)
    shared = prompt_of(40)
    branches = [ask(f"{i}", [*shared, *prompt_of(7, 50 + i)], max_tokens=1) for i in range(6)]
    serve(driver, *branches)
    assert driver.runner.num_computed == 40 + 6 * 7
    assert sum(b.prompt_len - b.usage.cached_tokens for b in branches) == 40 + 6 * 7


def test_too_many_pins_are_refused() -> None:
    pins = tuple(Pin(length + 1, 1.0) for length in range(MAX_PINS + 1))
    assert len(CacheOptions(pins=pins[1:]).pins) == MAX_PINS
    with pytest.raises(InvalidRequest):
        CacheOptions(pins=pins)


@pytest.mark.parametrize(("num_tokens", "ttl"), [(0, 1.0), (1, 0.0), (1, float("nan")), (1, 1e9)])
def test_a_pin_of_nothing_or_for_no_time_is_refused(num_tokens: int, ttl: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Pin(num_tokens, ttl)
    assert caught.value.param == "cache"
