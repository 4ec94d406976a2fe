"""Closed and open loops in virtual time."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from foretoken.bench.load.corpus import TextCorpus
from foretoken.bench.load.figures import summary
from foretoken.bench.load.generator import NOT_SENT, Job, Piece, Session, arrivals, warm_up
from foretoken.bench.load.workloads import single
from support.virtual_time import FakeDriver, make_load, run

PROMPT = (Piece("user", [1, 2, 3]),)
CORPUS = TextCorpus(list(range(100)), [5] * 50)


def sessions(count: int, output_len: int = 2) -> list[Session]:
    return [single(f"r{index}", PROMPT, output_len) for index in range(count)]


def test_a_closed_loop_keeps_its_concurrency_and_asks_everything():
    async def work():
        driver = FakeDriver()
        load = make_load(driver)
        await load.closed(sessions(7), 3)
        return driver, load

    driver, load = run(work)
    assert driver.most_running == 3
    assert [record.name for record in load.records] == [f"r{i}" for i in range(7)]
    assert all(record.due == record.sent for record in load.records)


def test_an_open_loop_sends_on_schedule_whatever_the_server_does():
    async def work():
        load = make_load(FakeDriver(first=1.0, slots=1))
        await load.open(sessions(4, 1), [0.0, 0.1, 0.2, 0.3])
        return load

    load = run(work)
    assert [r.sent for r in load.records] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [r.ttft for r in load.records] == pytest.approx([1.0, 1.9, 2.8, 3.7])


def test_waiting_for_room_in_the_client_counts_as_waiting():
    """A client that sends later and measures from there hides what it waited: omission."""

    async def work():
        load = make_load(FakeDriver(first=1.0))
        await load.open(sessions(4, 1), [0.0, 0.1, 0.2, 0.3], cap=1)
        return load

    load = run(work)
    assert [r.sent for r in load.records] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert [r.ttft for r in load.records] == pytest.approx([1.0, 1.9, 2.8, 3.7])
    found = summary(load.records, {"ttft": 1500})
    assert found["goodput"]["share"] == 0.25


def test_only_the_first_request_of_a_session_is_due_at_its_arrival():
    async def two(ask):
        reply = await ask(Job(name="one", prompt=PROMPT, output_len=1))
        await ask(Job(name="two", prompt=[*PROMPT, Piece("assistant", reply.content)],
                      output_len=1))  # fmt: skip

    async def work():
        driver = FakeDriver(first=1.0)
        load = make_load(driver)
        await load.open([Session(two, planned=2)], [5.0])
        return driver, load

    driver, load = run(work)
    assert [record.due for record in load.records] == pytest.approx([5.0, 6.0])
    assert driver.jobs[1].prompt[-1].content == [900_000]  # the answer to the first


def test_a_failure_is_recorded_and_so_is_what_it_kept_from_being_sent():
    async def three(ask):
        for index in range(3):
            await ask(Job(name=f"t{index}", prompt=PROMPT, output_len=1))

    async def work():
        load = make_load(FakeDriver(fails={1}))
        await load.closed([Session(three, planned=3), *sessions(1)], 1)
        return load

    load = run(work)
    assert [record.error for record in load.records] == [None, "HTTP 429", NOT_SENT, None]
    assert summary(load.records, {})["errors"] == {"HTTP 429": 1, NOT_SENT: 1}


def test_an_answer_without_a_token_is_an_error():
    async def work():
        load = make_load(FakeDriver())
        await load.closed(sessions(1, output_len=0), 1)
        return load

    assert [record.error for record in run(work).records] == ["no token"]


def test_warm_up_requests_are_in_no_record_and_on_other_text():
    async def work():
        driver = FakeDriver(fails={1})
        load = make_load(driver)
        warmed = await warm_up(load, CORPUS, 3)
        await load.closed(sessions(2), 2)
        return driver, load, warmed

    driver, load, warmed = run(work)
    assert [record.error for record in warmed] == [None, "HTTP 429", None]
    assert len(load.records) == 2
    assert len({str(job.prompt[0].content) for job in driver.jobs[:3]}) == 3


# -- arrivals -----------------------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_as_much_spread_as_mean():
    found = arrivals(4000, 5.0, random.Random(1))
    gaps = [after - before for before, after in pairwise(found)]
    assert found[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_the_spread_and_not_the_rate(burstiness, spread):
    found = arrivals(8000, 5.0, random.Random(2), burstiness)
    gaps = [after - before for before, after in pairwise(found)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(spread, rel=0.06)


def test_an_infinite_rate_has_all_arrive_at_once():
    assert arrivals(3, float("inf"), random.Random(0)) == [0.0, 0.0, 0.0]
