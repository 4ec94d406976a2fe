"""Loads of pages from tiers, over a model of hashes: every page that a step reads is checked."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import pytest

from foretoken.core.interface.extras.tiers import PageLoad
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import CacheOptions, Request, RequestStatus
from foretoken.core.interface.sampling import BranchPooling, Pooling
from foretoken.core.scheduling.async_scheduling import plan_next
from foretoken.core.scheduling.chunk_budget import ChunkBudget
from foretoken.core.scheduling.page_loads import LATE_SECONDS, LOOKUP_SECONDS, TRIAL_SECONDS
from support.fake_model import VOCAB_SIZE, answer, make_request
from support.fake_tiers import DictStore, TieredDriver, failing

LEN = 82  # of a prompt: 20 whole pages and two tokens
MAX_TOKENS = 6


def prompt_of(length: int = LEN, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def ask(name: str, prompt: Sequence[int] | None = None, **options: object) -> Request:
    options.setdefault("max_tokens", MAX_TOKENS)
    cache = options.pop("cache", CacheOptions())
    request = make_request(name, prompt_of() if prompt is None else prompt, **options)  # type: ignore[arg-type]
    request.cache = cache  # type: ignore[assignment]
    return request


@pytest.fixture(scope="module")
def served() -> dict[bytes, tuple[bytes, bytes]]:
    """The pages that a process leaves which served a prompt or two."""
    store = DictStore()
    driver = TieredDriver(store)
    driver.add(ask("a"), ask("b", prompt_of(seed=1)), ask("salted", namespace="salt"))
    driver.run()
    return store.pages


@pytest.fixture
def store(served: dict[bytes, tuple[bytes, bytes]]) -> DictStore:
    store = DictStore()
    store.pages = dict(served)
    return store


def restarted(store: DictStore, **options: object) -> TieredDriver:
    """A new process over what another one has left."""
    return TieredDriver(store, **options)  # type: ignore[arg-type]


def loading(store: DictStore, **options: object) -> tuple[TieredDriver, Request, PageLoad]:
    """A request that was looked up and admitted, and whose pages are to be loaded."""
    driver = restarted(store, **options)
    driver.add(request := ask("a"))
    driver.run_calls()
    assert not driver.step().requests
    assert request.status is RequestStatus.RUNNING
    assert request.transfer.load is not None
    return driver, request, request.transfer.load


def finish(driver: TieredDriver, *requests: Request) -> None:
    """All end with the model's own answers, and no page is lost."""
    driver.run()
    for request in requests:
        prompt = list(request.tokens[: request.prompt_len])
        assert driver.served[request.request_id] == answer(prompt, MAX_TOKENS)
    come_to_rest(driver)


def come_to_rest(driver: TieredDriver) -> None:
    driver.scheduler.audit()
    assert driver.loads.leases == []
    assert driver.loads.num_loading == 0
    cache = driver.scheduler.cache
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_total_pages


def set_compute_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A prompt token takes so long to compute."""
    monkeypatch.setattr(ChunkBudget, "token_seconds", property(lambda self: seconds))


def slow(driver: TieredDriver, seconds: float) -> Callable[[str], None]:
    """A store that takes its time for each page."""

    def before(name: str) -> None:
        if name == "get":
            driver.now += seconds

    return before


# -- from the look-up to the answer ---------------------------------------------------------------


def test_what_a_tier_has_is_loaded_and_not_computed(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(request := ask("a"))
    finish(driver, request)
    usage = request.usage
    assert (usage.loaded_tokens, usage.cached_tokens, usage.cache_write_tokens) == (80, 80, 0)
    assert driver.runner.num_computed == LEN - 80 + MAX_TOKENS - 1
    assert (driver.scheduler.cache.num_queries, driver.scheduler.cache.num_hits) == (LEN, 80)
    assert driver.loads.num_late == 0


def test_what_the_pool_has_is_not_loaded(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(ask("first", prompt_of()[:10], max_tokens=1))
    driver.run()
    store.calls.clear()
    driver.add(request := ask("a"))
    finish(driver, request)
    assert (request.usage.loaded_tokens, request.usage.cached_tokens) == (72, 80)
    assert store.calls.count("get") == 72 // 4


def test_a_second_request_hits_what_the_first_one_loaded(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(first := ask("a"), second := ask("b"))
    finish(driver, first, second)
    assert [each.usage.loaded_tokens for each in (first, second)] == [80, 0]
    assert [each.usage.cached_tokens for each in (first, second)] == [80, 80]
    assert store.calls.count("get") == 20


def test_nothing_of_another_salt_is_loaded(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(
        foreign := ask("b", prompt_of(seed=1), namespace="salt"), own := ask("a", namespace="salt")
    )
    finish(driver, foreign, own)
    assert [each.usage.loaded_tokens for each in (foreign, own)] == [0, 80]


def test_others_go_first_while_a_request_is_looked_up(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(request := ask("a"), other := ask("other", prompt_of(9, 5)))
    plan = driver.step()
    assert [row.request_id for row in plan.requests] == ["other"]
    assert request.status is RequestStatus.WAITING
    driver.run_calls()
    driver.step()
    assert request.status is RequestStatus.RUNNING
    finish(driver, request, other)


def test_a_shorter_prompt_that_is_looked_up_is_not_admitted_early_either(store: DictStore) -> None:
    driver = restarted(store, max_batch_tokens=8)
    driver.add(ask("long", prompt_of(200, 7)))
    driver.run_calls()
    driver.step()
    driver.add(short := ask("a"))
    for _ in range(5):
        driver.step()
    assert short.status is RequestStatus.WAITING
    finish(driver, short)
    assert short.usage.loaded_tokens == 80


def test_a_look_up_that_takes_too_long_found_nothing(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(request := ask("a"))
    call = driver.begin_call()
    driver.now += LOOKUP_SECONDS - 2 * driver.step_seconds
    assert not driver.step().requests, "it still waits"
    driver.now += 2 * driver.step_seconds
    assert driver.step().requests
    driver.end_call(call)
    finish(driver, request)
    assert request.usage.loaded_tokens == 0
    assert driver.tiers.is_open, "it may have been a long save"


def test_a_look_up_that_nobody_waits_for_is_not_begun(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(ask("a"), ask("b", prompt_of(seed=1)))
    driver.now += LOOKUP_SECONDS
    driver.step()
    driver.run_calls()
    assert "find" not in store.calls
    driver.run()


@pytest.mark.parametrize(("length", "num_loaded"), [(64, 0), (65, 64), (67, 64)])
def test_less_than_64_tokens_are_computed(store: DictStore, length: int, num_loaded: int) -> None:
    driver = restarted(store)
    driver.add(request := ask("a", prompt_of()[:length]))
    finish(driver, request)
    assert request.usage.loaded_tokens == num_loaded
    assert ("find" in store.calls) == (num_loaded > 0)


def test_less_than_64_tokens_that_are_found_are_computed(store: DictStore) -> None:
    driver = restarted(store)
    longer = [*prompt_of()[:62], *prompt_of(40, 9)]
    driver.add(request := ask("a", longer))
    finish(driver, request)
    assert store.calls.count("get") == 0
    assert request.usage.cached_tokens == 0


def test_a_load_that_takes_longer_than_computing_is_not_begun(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = restarted(store)
    store.before = slow(driver, 0.004)  # 1 ms a token
    driver.add(first := ask("a"))
    driver.run()
    assert first.usage.loaded_tokens == 80, "not known yet"
    set_compute_seconds(monkeypatch, 0.0009)
    driver.add(second := ask("b", prompt_of(seed=1)))
    driver.run()
    assert second.usage.cached_tokens == 0
    driver.scheduler.flush()
    set_compute_seconds(monkeypatch, 0.0011)
    driver.add(third := ask("c", prompt_of(seed=1)))
    finish(driver, third)
    assert third.usage.loaded_tokens == 80


def test_what_others_load_counts_as_time(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = restarted(store)
    store.before = slow(driver, 0.004)
    driver.add(ask("a"))
    driver.run()
    driver.scheduler.flush()
    set_compute_seconds(monkeypatch, 0.0019)
    driver.add(ask("b"), second := ask("c", prompt_of(seed=1)))
    driver.run_calls()
    driver.step()
    assert driver.loads.num_loading == 1
    assert second.transfer.load is None, "it would wait for the first, and computes meanwhile"
    driver.run()


def test_a_store_that_was_slow_is_tried_again(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would show that the store is fast again."""
    set_compute_seconds(monkeypatch, 0.01)
    driver = restarted(store)
    store.before = slow(driver, 1.0)
    driver.add(ask("a"))
    driver.run()
    assert driver.tiers.load_seconds(20) > 0.01 * 80
    store.before = failing()

    def num_loaded(name: str) -> int:
        driver.scheduler.flush()
        driver.add(request := ask(name))
        finish(driver, request)
        return request.usage.loaded_tokens

    driver.now += TRIAL_SECONDS / 2 - 20.0
    assert num_loaded("at once") == 0
    for number in range(12):
        driver.now += TRIAL_SECONDS
        assert num_loaded(f"trial {number}") == 80
    assert [num_loaded("then"), num_loaded("again")] == [80, 80]


# -- what is missing or unsound -------------------------------------------------------------------


def test_what_comes_behind_a_page_that_is_unsound_is_computed(store: DictStore) -> None:
    driver = restarted(store)
    store.damaged = {list(store.pages)[17]}
    driver.add(request := ask("a"))
    finish(driver, request)
    assert (request.usage.loaded_tokens, request.usage.cached_tokens) == (68, 68)
    assert request.usage.cache_write_tokens == 12
    assert driver.runner.num_computed == LEN - 68 + MAX_TOKENS - 1


@pytest.mark.parametrize("name", ["find", "get"])
def test_a_store_that_fails_costs_no_answer(store: DictStore, name: str) -> None:
    driver = restarted(store)
    store.before = failing(name)
    driver.add(request := ask("a"), other := ask("b", prompt_of(seed=1)))
    finish(driver, request, other)
    assert request.usage.cached_tokens == other.usage.cached_tokens == 0
    assert not driver.tiers.is_open
    driver.scheduler.flush()
    store.calls.clear()
    driver.add(third := ask("c"))
    assert third.transfer.load is None, "and while it is closed, nobody waits for it"
    finish(driver, third)


def test_a_store_that_closes_between_look_up_and_admission_is_not_waited_for(
    store: DictStore,
) -> None:
    driver = restarted(store)
    driver.add(request := ask("a"))
    driver.run_calls()
    store.before = failing("find")
    driver.tiers.find(array("q", prompt_of()), None, 0)
    assert driver.step().requests
    finish(driver, request)


def test_a_store_that_says_it_has_what_it_has_not_costs_no_answer() -> None:
    store = DictStore()
    store.num_lied = 10**6
    driver = restarted(store)
    driver.add(request := ask("a"), short := ask("b", prompt_of(5, 3)))
    finish(driver, request, short)
    assert request.usage.loaded_tokens == 0


def test_what_the_pool_lost_meanwhile_is_not_loaded_from_the_middle(store: DictStore) -> None:
    """A request is looked up behind what the pool has; if that goes, the load begins before."""
    driver = restarted(store)
    driver.add(ask("first", prompt_of()[:10], max_tokens=1))
    driver.run()
    for key in list(store.pages)[:2]:
        del store.pages[key]
    driver.add(request := ask("a"))
    driver.run_calls()
    driver.scheduler.flush()
    finish(driver, request)
    assert request.usage.cached_tokens == 0


# -- late -----------------------------------------------------------------------------------------


def late(driver: TieredDriver, load: PageLoad) -> StepPlan:
    """The time of a load is over; returns the plan that is made then."""
    driver.now = load.due
    return driver.step()


def test_a_late_load_is_given_up_and_its_pages_are_nobodys_until_the_thread_returns(
    store: DictStore,
) -> None:
    driver, request, load = loading(store, num_pages=40)
    call = driver.begin_call()
    under_io = set(load.page_ids[: driver.tiers.pages_per_call])
    driver.now += LATE_SECONDS - 3 * driver.step_seconds
    assert not driver.step().requests, "it still waits"
    plan = late(driver, load)
    assert [row.start for row in plan.requests] == [0]
    assert driver.loads.num_late == 1
    (lease,) = driver.loads.leases
    assert under_io <= set(lease.page_ids), "no one else may write them"
    assert len(lease.page_ids) == driver.tiers.pages_per_call, "the others are free"
    while driver.scheduler.num_requests:
        plan = driver.step()
        for row in plan.requests:
            assert under_io.isdisjoint(row.page_ids)
    driver.end_call(call)
    assert driver.served["a"] == answer(prompt_of(), MAX_TOKENS)
    assert request.usage.loaded_tokens == 0
    come_to_rest(driver)


def test_whoever_is_late_twice_is_left_alone() -> None:
    store = DictStore()
    store.num_lied = 20
    driver, _, load = loading(store)
    driver.tiers._asked = driver.tiers._tiers[0]
    driver.tiers.note_late()
    assert driver.tiers.is_open, "once may happen"
    call = driver.begin_call()

    def in_thread(name: str) -> None:
        if name == "get":
            late(driver, load)

    store.before = in_thread
    driver.end_call(call)
    assert not driver.tiers.is_open
    driver.run()


def test_a_late_load_leaves_what_had_come_by_then(store: DictStore) -> None:
    driver, request, load = loading(store, num_pages=64)
    for _ in range(3):
        driver.end_call(driver.begin_call())
    assert load.num_loaded == 12
    call = driver.begin_call()
    plan = late(driver, load)
    assert [row.start for row in plan.requests] == [48]
    assert len(driver.loads.leases) == 1
    driver.end_call(call)
    finish(driver, request)
    assert request.usage.loaded_tokens == request.usage.cached_tokens == 48


def test_a_late_load_that_the_thread_is_not_in_keeps_what_had_come(store: DictStore) -> None:
    driver, request, load = loading(store, num_pages=64)
    driver.end_call(driver.begin_call())
    plan = late(driver, load)
    assert [row.start for row in plan.requests] == [16]
    assert driver.loads.leases == []
    finish(driver, request)
    assert request.usage.loaded_tokens == 16


def test_a_late_load_of_who_does_not_write_gives_its_pages_back(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(request := ask("a", cache=CacheOptions(write=False)))
    driver.run_calls()
    driver.step()
    driver.end_call(driver.begin_call())
    call, load = driver.begin_call(), request.transfer.load
    assert load is not None
    late(driver, load)
    driver.end_call(call)
    finish(driver, request)
    assert driver.scheduler.cache.tree.num_pages == 0
    assert request.usage.cached_tokens == request.usage.loaded_tokens == 0


def test_branches_are_computed_with_the_row_before_them_after_a_late_load(store: DictStore) -> None:
    prompt, branches = prompt_of(80), (BranchPooling(-1, (1,)), BranchPooling(-1, (2,)))
    driver = restarted(store)
    pooling = Pooling((1, 2), branches=branches)
    driver.add(request := ask("a", [*prompt, 2, 2], pooling=pooling, depth=0))
    driver.run_calls()
    driver.step()
    call, load = driver.begin_call(), request.transfer.load
    assert load is not None
    # Meanwhile another request caches the whole prompt, the last page included.
    driver.add(ask("b", prompt, cache=CacheOptions(read=False)))
    while "b" not in driver.ended:
        driver.step()
    assert driver.scheduler.cache.match_len(request.tokens) == 80
    plan = late(driver, load)
    assert [row.start for row in plan.requests] == [76]
    driver.end_call(call)
    driver.run()
    assert driver.ended["a"] == "stop"
    come_to_rest(driver)


def test_the_audit_misses_a_lease_that_no_one_has(store: DictStore) -> None:
    driver, _, load = loading(store)
    call = driver.begin_call()
    late(driver, load)
    lease = driver.loads._leases.pop(load)
    with pytest.raises(AssertionError):
        driver.scheduler.audit()
    driver.loads._leases[load] = lease
    driver.end_call(call)
    driver.run()


def test_the_end_releases_what_a_store_never_gave_back(store: DictStore) -> None:
    driver, request, load = loading(store)
    driver.begin_call()
    late(driver, load)
    driver.abort(request.request_id)
    assert len(driver.loads.leases) == 1
    driver.loads.close()
    come_to_rest(driver)


# -- requests that end, or are preempted ----------------------------------------------------------

ENDS: dict[str, Callable[[TieredDriver], object]] = {
    "abort": lambda driver: driver.abort("a"),
    "deadline": lambda driver: driver.step(),
    "abort all": lambda driver: driver.scheduler.abort_all(driver.now),
}


@pytest.mark.parametrize("is_begun", [False, True], ids=["queued", "in the thread"])
@pytest.mark.parametrize("end", ENDS)
def test_a_request_may_end_while_it_is_looked_up(
    store: DictStore, end: str, is_begun: bool
) -> None:
    driver = restarted(store)
    driver.add(request := ask("a", deadline=0.0005 if end == "deadline" else None))
    call = driver.begin_call() if is_begun else None
    ENDS[end](driver)
    assert request.status is RequestStatus.FINISHED
    if call is not None:
        driver.end_call(call)
    driver.run_calls()
    come_to_rest(driver)
    assert driver.scheduler.cache.num_free_pages == 64
    driver.add(again := ask("again"))
    finish(driver, again)
    assert again.usage.loaded_tokens == 80


@pytest.mark.parametrize("num_pieces", [0, 2])
@pytest.mark.parametrize("is_begun", [False, True], ids=["queued", "in the thread"])
@pytest.mark.parametrize("end", ENDS)
def test_a_request_may_end_while_its_pages_are_loaded(
    store: DictStore, end: str, is_begun: bool, num_pieces: int
) -> None:
    driver = restarted(store)
    driver.add(request := ask("a", deadline=0.0015 if end == "deadline" else None))
    driver.run_calls()
    driver.step()
    assert request.transfer.load is not None
    for _ in range(num_pieces):
        driver.end_call(driver.begin_call())
    call = driver.begin_call() if is_begun else None
    ENDS[end](driver)
    assert request.status is RequestStatus.FINISHED
    assert request.lease is None
    assert len(driver.loads.leases) == is_begun, "it left at once; pages under I/O stay"
    driver.add(other := ask("other", prompt_of(100, 8)))
    driver.step()
    if call is not None:
        driver.end_call(call)
    finish(driver, other)


def test_a_flush_while_pages_are_looked_up_finds_nothing(store: DictStore) -> None:
    driver = restarted(store)
    driver.add(request := ask("a"))
    driver.flush()
    finish(driver, request)
    assert request.usage.cached_tokens == 0
    assert store.calls[0] == "flush"


def test_a_flush_while_pages_are_loaded_ends_the_load_and_harms_nothing(store: DictStore) -> None:
    driver, request, _ = loading(store)
    driver.end_call(driver.begin_call())
    call = driver.begin_call()
    driver.flush()
    driver.end_call(call)
    finish(driver, request)
    assert request.usage.loaded_tokens == 32, "two pieces had come"


def test_a_request_whose_pages_are_loaded_is_no_victim(store: DictStore) -> None:
    driver = restarted(store, num_pages=32, max_batch_tokens=64)
    driver.add(older := ask("older", prompt_of(30, 4), max_tokens=60))
    driver.step()
    driver.add(request := ask("a"))
    driver.run_calls()
    driver.step()
    assert request.transfer.load is not None
    for _ in range(60):
        driver.step()
        assert request.status is RequestStatus.RUNNING
    assert older.num_output > 10
    assert driver.scheduler.num_preemptions > 0 or older.num_output == 60
    driver.run()
    assert driver.served["a"] == answer(prompt_of(), MAX_TOKENS)
    assert driver.served["older"] == answer(prompt_of(30, 4), 60)
    come_to_rest(driver)


def test_a_preempted_request_looks_again_and_loads_what_left_the_pool() -> None:
    store = DictStore()
    driver = restarted(store, num_pages=48, max_running=2, least_tokens=16)
    driver.add(
        first := ask("first", prompt_of(90, 1), max_tokens=60),
        second := ask("second", prompt_of(88, 2), max_tokens=60),
    )
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert second.num_preemptions > 0
    for request in (first, second):
        prompt = list(request.tokens[: request.prompt_len])
        assert driver.served[request.request_id] == answer(prompt, 60)
        assert request.usage.cached_tokens == request.usage.loaded_tokens == 0, "of the first time"
    assert store.calls.count("get") > 4
    come_to_rest(driver)


def test_a_request_looks_again_if_the_pool_lost_what_it_had_on_arrival(store: DictStore) -> None:
    driver = restarted(store, max_running=1)
    driver.add(ask("first"))
    driver.run()
    driver.add(ask("busy", prompt_of(5, 3), max_tokens=20))
    driver.step()
    store.calls.clear()
    driver.add(request := ask("a"))
    assert request.transfer.load is None, "the pool has it all"
    driver.scheduler.flush()
    driver.run()
    assert store.calls.count("find") == 1
    assert request.usage.loaded_tokens == 80
    come_to_rest(driver)


def test_a_request_that_waits_for_its_turn_is_looked_up_once(store: DictStore) -> None:
    driver = restarted(store, max_running=1)
    driver.add(ask("busy", prompt_of(5, 3), max_tokens=20), request := ask("a"))
    driver.run()
    assert store.calls.count("find") == 1
    assert request.usage.loaded_tokens == 80


# -- beside other things --------------------------------------------------------------------------


def test_requests_that_decode_go_on_while_another_one_loads(store: DictStore) -> None:
    driver = restarted(store, speculator=NO_SPECULATION)
    driver.add(stream := ask("stream", prompt_of(5, 3), max_tokens=40))
    driver.step()
    driver.add(request := ask("a"))
    driver.run_calls()
    plan = driver.step()
    assert request.transfer.load is not None
    assert [row.request_id for row in plan.requests] == ["stream"]
    plan = driver.scheduler.schedule(driver.now)
    ahead = plan_next(driver.scheduler, plan, driver.now)
    assert ahead is not None, "and their steps overlap"
    assert [row.request_id for row in ahead.requests] == ["stream"]
    driver.scheduler.discard_plan(ahead)
    driver._note(driver.scheduler.commit(plan, driver.runner.step(plan), driver.now))
    driver.run()
    assert driver.served["stream"] == answer(prompt_of(5, 3), 40)
    assert stream.usage.completion_tokens == 40
    assert request.usage.loaded_tokens == 80


def test_nothing_is_planned_ahead_of_a_request_that_was_loaded(store: DictStore) -> None:
    driver = restarted(store, speculator=NO_SPECULATION)
    driver.add(ask("stream", prompt_of(5, 3), max_tokens=40))
    driver.step()
    driver.add(ask("a"))
    driver.run_calls()
    driver.step()
    plan = driver.scheduler.schedule(driver.now)
    driver.run_calls()
    assert plan_next(driver.scheduler, plan, driver.now) is None
    driver._note(driver.scheduler.commit(plan, driver.runner.step(plan), driver.now))
    driver.run()


def test_loads_take_turns(store: DictStore) -> None:
    driver = restarted(store, num_pages=64)
    driver.add(first := ask("a"), second := ask("b", prompt_of(seed=1)))
    driver.run_calls()
    driver.step()
    for _ in range(2):
        driver.end_call(driver.begin_call())
    loads = [each.transfer.load for each in (first, second)]
    assert [load.num_loaded for load in loads if load] == [4, 4]
    finish(driver, first, second)


@pytest.mark.parametrize(
    "options",
    [{"cache": CacheOptions(read=False)}, {"prompt_logprobs": 2}],
    ids=["reads nothing", "log-probabilities of the prompt"],
)
def test_who_must_compute_the_prompt_loads_nothing(
    store: DictStore, options: dict[str, object]
) -> None:
    driver = restarted(store)
    driver.add(request := ask("a", **options))
    assert request.transfer.load is None
    finish(driver, request)
    assert request.usage.cached_tokens == 0
    assert driver.runner.num_computed == LEN + MAX_TOKENS - 1
    assert store.calls.count("find") == 0


def test_who_does_not_write_may_load_and_leaves_nothing(store: DictStore) -> None:
    driver = restarted(store)
    store.calls.clear()
    before = dict(store.pages)
    driver.add(request := ask("a", cache=CacheOptions(write=False)))
    finish(driver, request)
    assert request.usage.loaded_tokens == 80
    assert driver.scheduler.cache.tree.num_pages == 0
    assert (store.pages, store.calls.count("put")) == (before, 0)


def test_what_was_evicted_and_came_back_is_no_loss() -> None:
    store = DictStore()
    driver = restarted(store, num_pages=24)
    driver.add(ask("a"))
    driver.run()
    driver.add(ask("b", prompt_of(seed=1)))
    driver.run()
    driver.add(back := ask("c"))
    finish(driver, back)
    assert back.usage.loaded_tokens > 0
    assert back.usage.cached_tokens == 80
    assert back.usage.cache_loss is None
    for key in list(store.pages):
        del store.pages[key]
    driver.add(ask("d", prompt_of(seed=1)))
    driver.run()
    driver.add(lost := ask("e"))
    finish(driver, lost)
    assert lost.usage.cache_loss is not None


# -- what the runner is told ----------------------------------------------------------------------


def plan_after_load(store: DictStore) -> tuple[TieredDriver, StepPlan]:
    driver, _, _ = loading(store)
    driver.run_calls()
    return driver, driver.scheduler.schedule(driver.now)


def test_the_runner_is_told_once_which_pages_came_and_that_they_are_new(store: DictStore) -> None:
    driver, plan = plan_after_load(store)
    (row,) = plan.requests
    assert plan.loaded_pages == row.page_ids[:20]
    assert set(plan.loaded_pages) <= set(plan.newly_allocated_pages)
    driver._note(driver.scheduler.commit(plan, driver.runner.step(plan), driver.now))
    assert not driver.step().loaded_pages
    driver.run()


def test_a_plan_that_is_not_computed_gives_the_loaded_pages_back(store: DictStore) -> None:
    driver, plan = plan_after_load(store)
    driver.scheduler.discard_plan(plan)
    again = driver.scheduler.schedule(driver.now)
    assert again.loaded_pages == plan.loaded_pages
    driver._note(driver.scheduler.commit(again, driver.runner.step(again), driver.now))
    driver.run()


def test_a_page_that_was_loaded_and_lost_before_a_step_is_new_again(store: DictStore) -> None:
    driver, request, _ = loading(store, num_pages=24, max_batch_tokens=200)
    driver.run_calls()
    driver.abort(request.request_id)
    driver.add(other := ask("other", prompt_of(90, 5)))
    driver.run_calls()
    (row,) = (plan := driver.step()).requests
    assert set(row.page_ids) <= set(plan.newly_allocated_pages)
    finish(driver, other)
