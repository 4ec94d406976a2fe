"""Choice of the load's loop, open or closed, by flags and workload; in virtual time."""

from __future__ import annotations

import random

import pytest

from foretoken.bench.load.cli import ALL, WORKLOADS, parsed
from foretoken.bench.load.cli import run as run_workload
from foretoken.bench.load.corpus import TextCorpus
from foretoken.bench.load.generator import arrivals
from foretoken.bench.load.workloads import Scene
from support.virtual_time import FakeDriver, make_load, run

CORPUS = TextCorpus(list(range(500)), list(range(50)))


def measured(*argv: str, driver: FakeDriver | None = None):
    """Figures, notes and records of one run."""
    (args,) = parsed("bench", "", argv, lambda parser: None)

    async def work():
        load = make_load(driver or FakeDriver(first=1.0, gap=0.5))
        figures, notes = await run_workload(load, Scene(args, CORPUS, None, args.seed))
        return figures, notes, load.records

    return run(work)


def test_a_request_rate_opens_the_loop_at_arrivals_that_the_seed_draws():
    figures, _, records = measured("mixed", "--requests", "9", "--request-rate", "3", "--seed", "4")
    begin = records[0].due
    expected = arrivals(9, 3.0, random.Random("4/arrivals"))
    assert [record.due - begin for record in records] == pytest.approx(expected)
    assert figures["loop"].startswith("open loop, 3 sessions/s, Poisson;")
    assert figures["served"] == 9


def test_a_concurrency_closes_the_loop_of_a_workload_that_is_open_by_default():
    driver = FakeDriver()
    figures, _, _ = measured("mixed", "--requests", "9", "--concurrency", "2", "--warmup", "0",
                             driver=driver)  # fmt: skip
    assert figures["loop"].startswith("closed loop, 2 sessions at a time")
    assert driver.most_running == 2


def test_both_are_an_open_loop_with_a_cap():
    driver = FakeDriver(first=5.0)
    argv = ("mixed", "--requests", "6", "--concurrency", "2", "--request-rate", "inf")
    figures, _, records = measured(*argv, "--warmup", "0", driver=driver)
    assert driver.most_running == 2
    assert "at most 2 at a time" in figures["loop"]
    assert {record.due for record in records} == {0.0}
    assert figures["sent_late_ms"]["p99"] > 5000


def test_a_trace_keeps_its_own_time_unless_told_a_rate():
    argv = ("trace", "--requests", "5", "--speedup", "10", "--warmup", "0")
    figures, notes, records = measured(*argv)
    assert figures["loop"].startswith("open loop by the trace's timestamps")
    assert "synthetic trace: invented conversations, not recorded traffic" in notes
    _, _, slower = measured("trace", "--requests", "5", "--speedup", "1", "--warmup", "0")
    assert [r.due for r in slower] == pytest.approx([10 * r.due for r in records])
    figures, _, _ = measured(*argv, "--request-rate", "5")
    assert figures["loop"].startswith("open loop, 5 sessions/s")


def test_the_noisy_neighbour_has_its_own_loop():
    figures, _, _ = measured("noisy-neighbour", "--rounds", "1", "--streams", "2")
    assert figures["neighbour"]["rounds"] == 1
    for flags in (("--request-rate", "1"), ("--concurrency", "2")):
        with pytest.raises(SystemExit, match="2"):
            measured("noisy-neighbour", *flags)


def test_short_beside_long_has_its_own_loop_and_figures():
    driver = FakeDriver(first=0.0, gap=0.5, per_token=0.001)
    figures, notes, _ = measured("short-beside-long", "--shorts", "3", driver=driver)
    [row] = figures["short_beside_long"]
    assert (row["num_long"], row["num_short"]) == (4, 2)
    assert "neighbour" not in figures
    assert notes[0].startswith("closed loop, one round after another")


def test_a_failed_warm_up_is_told_with_its_message():
    driver = FakeDriver(fails={0, 1})
    figures, notes, _ = measured("mixed", "--requests", "2", "--warmup", "2", driver=driver)
    assert "2 of the warm-up requests failed" in notes
    assert "HTTP 429: busy" in notes
    assert figures["errors"] == {}


def test_all_runs_every_workload_with_its_own_defaults():
    argv = [ALL, "--seed", "3", "--concurrency", "5"]
    runs = parsed("bench", "", argv, lambda parser: None)
    assert [args.workload for args in runs] == list(WORKLOADS)
    assert {args.seed for args in runs} == {3}
    assert {args.workload: args.temperature for args in runs}["noisy-neighbour"] == 1.0
    assert runs[0].temperature == 0.0
    assert [args.concurrency for args in runs] == [5, 5, 5, None, None, 5]
