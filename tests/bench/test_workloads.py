"""Workloads make the same requests each time, and share prefixes where they should."""

from __future__ import annotations

import argparse
import asyncio
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from foretoken.bench.load.agents import AGENTS
from foretoken.bench.load.corpus import TextCorpus, chat_corpus, id_corpus, pool_text
from foretoken.bench.load.figures import Record
from foretoken.bench.load.noisy_neighbour import NOISY_NEIGHBOUR, neighbour_figures
from foretoken.bench.load.openai import joined
from foretoken.bench.load.short_beside_long import (
    LONG_OUTPUT,
    PAUSE_SECONDS,
    SHORT_BESIDE_LONG,
    beside_figures,
)
from foretoken.bench.load.trace import BLOCK, TRACE, read_trace, synthetic, write_trace
from foretoken.bench.load.workloads import MIXED, SHARED_PREFIX, Lengths, Scene, lengths
from support.virtual_time import FakeDriver, make_load, run

POOL = [(index * 7919) % 5003 for index in range(20_000)]


def scene(workload, *flags: str, seed: int = 0, max_len: int | None = None) -> Scene:
    parser = argparse.ArgumentParser()
    workload.add_flags(parser)
    return Scene(parser.parse_args(flags), TextCorpus(POOL, POOL[:200], seed), max_len, seed)


def asked(workload, made: Scene, driver: FakeDriver | None = None, concurrency: int = 8):
    """The jobs of a whole run."""

    async def work():
        used = driver or FakeDriver()
        load = make_load(used)
        await load.closed(workload.sessions(made), concurrency)
        return used.jobs, load.records

    return run(work)


def ids(job) -> list[int]:
    found = joined(job.prompt)
    assert isinstance(found, list)
    return found


def shared(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


# -- text ---------------------------------------------------------------------------------------


def test_a_cut_is_the_same_each_time_and_a_shorter_one_is_its_beginning():
    corpus = TextCorpus(POOL, POOL[:200], seed=3)
    assert corpus.cut("a", 400) == corpus.cut("a", 400)
    assert corpus.cut("a", 400)[:150] == corpus.cut("a", 150)
    assert shared(corpus.cut("a", 100), corpus.cut("b", 100)) < 8
    assert corpus.cut("a", 100) != TextCorpus(POOL, POOL[:200], seed=4).cut("a", 100)


@pytest.mark.parametrize("length", [1, 5, 8, 100, 20_000, 50_000])
def test_a_cut_has_exactly_its_length_even_beyond_the_pool(length):
    corpus = TextCorpus(POOL, POOL[:200])
    assert len(corpus.cut("x", length)) == length
    assert len(corpus.tool_schemas(length)) == length


def test_text_is_cut_by_the_characters_that_its_tokens_take():
    async def words(text: str) -> list[int]:
        return [0] * (len(text) // 5)

    corpus = asyncio.run(chat_corpus(words, 0))
    assert len(corpus.cut("x", 30)) == 150
    assert len(asyncio.run(chat_corpus(None, 0)).cut("x", 30)) == 120


def test_ids_are_of_real_text_where_there_is_a_tokenizer_and_random_below_a_bound_elsewhere():
    async def letters(text: str) -> list[int]:
        return [ord(c) for c in text]

    real = asyncio.run(id_corpus(letters, 10, 0))
    assert "".join(map(chr, real.pool[:100])) == pool_text()[:100]
    drawn = asyncio.run(id_corpus(None, 10, 0))
    assert set(drawn.cut("x", 500)) == set(range(10))


# -- lengths ------------------------------------------------------------------------------------


def test_lengths_are_one_number_or_a_range():
    assert lengths("64") == Lengths(64, 64)
    assert lengths("16:64") == Lengths(16, 64)
    for bad in ("", "x", "0", "64:16", "1:2:3", "-5"):
        with pytest.raises(argparse.ArgumentTypeError):
            lengths(bad)


def test_a_prompt_that_does_not_fit_is_cut_and_told():
    made = scene(MIXED, "--input-len", "900", "--output-len", "50", "--requests", "3", max_len=500)
    jobs, _ = asked(MIXED, made)
    assert [len(ids(job)) for job in jobs] == [434] * 3  # room for the answer and 16 more
    assert made.remarks() == ["3 prompts were cut to fit 500 tokens"]


# -- single requests ----------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [SHARED_PREFIX, MIXED, AGENTS, TRACE])
def test_the_same_seed_gives_the_same_requests_and_another_one_others(workload):
    first, again, other = (
        [(ids(job), job.output_len) for job in asked(workload, scene(workload, seed=seed))[0]]
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_groups_share_their_prefix_and_nothing_else():
    flags = ("--groups", "2", "--prefix-len", "100", "--suffix-len", "20", "--requests", "12")
    jobs, _ = asked(SHARED_PREFIX, scene(SHARED_PREFIX, *flags))
    prompts = [ids(job) for job in jobs]
    assert len({tuple(prompt[:100]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert {len(prompt) for prompt in prompts} == {120}
    assert {job.output_len for job in jobs} <= set(range(16, 49))


# -- agents -------------------------------------------------------------------------------------


def test_a_turn_contains_the_answer_before_it_and_agents_share_system_and_tools():
    flags = ("--agents", "2", "--turns", "3", "--branch-every", "0")
    jobs, records = asked(AGENTS, scene(AGENTS, *flags))
    assert [record.name for record in records] == ["turn"] * 6
    one, other = ([job for job in jobs if ids(job)[:704] == task] for task in _own_beginnings(jobs))
    for agent in (one, other):
        for before, after in pairwise(agent):
            answer = [900_000 + jobs.index(before)] * before.output_len
            assert ids(after)[: len(ids(before)) + len(answer)] == ids(before) + answer
    assert shared(ids(one[0]), ids(other[0])) == 256 + 384


def _own_beginnings(jobs) -> list[list[int]]:
    return [list(each) for each in dict.fromkeys(tuple(ids(job)[:704]) for job in jobs)]


def test_every_kth_turn_branches_and_the_summaries_come_back():
    flags = ("--agents", "1", "--turns", "4", "--branch-every", "2", "--branches", "3")
    jobs, records = asked(AGENTS, scene(AGENTS, *flags))
    assert [r.name for r in records] == (["turn"] * 2 + ["sub-agent"] * 3) * 2
    third, subs = jobs[5], jobs[2:5]
    history = shared(ids(subs[0]), ids(subs[1]))
    assert history > len(ids(jobs[1])) + jobs[1].output_len - 1
    assert ids(third)[:history] == ids(subs[0])[:history]
    summaries = [[900_000 + jobs.index(sub)] * sub.output_len for sub in subs]
    assert ids(third)[history : history + sum(map(len, summaries))] == [
        token_id for summary in summaries for token_id in summary
    ]


def test_sub_agents_run_at_the_same_time():
    driver = FakeDriver()
    asked(AGENTS, scene(AGENTS, "--agents", "1", "--branches", "3"), driver, concurrency=1)
    assert driver.most_running == 3


def test_think_time_is_between_a_tokens_arrival_and_the_next_request():
    flags = ("--agents", "1", "--turns", "3", "--branch-every", "0", "--think-time", "7")
    _, records = asked(AGENTS, scene(AGENTS, *flags))
    gaps = [after.due - before.times[-1] for before, after in pairwise(records)]
    assert gaps == pytest.approx([7, 7])
    assert [r.sent for r in records] == pytest.approx([r.due for r in records])


def test_a_conversation_that_is_full_ends_and_is_told():
    made = scene(AGENTS, "--agents", "1", "--turns", "50", "--branch-every", "0", max_len=1200)
    jobs, records = asked(AGENTS, made)
    assert 1 < len(jobs) < 50
    assert all(len(ids(job)) + job.output_len <= 1200 for job in jobs)
    assert all(record.error is None for record in records)
    assert made.remarks() == ["1 agents ended early because the context of 1200 tokens was full"]


# -- noisy neighbour ----------------------------------------------------------------------------


def test_a_long_prompt_joins_when_all_streams_are_steady():
    flags = ("--rounds", "1", "--streams", "3", "--steady", "4", "--before", "6", "--long", "900")
    driver = FakeDriver(gap=0.5, later=1.2)
    jobs, records = asked(NOISY_NEIGHBOUR, scene(NOISY_NEIGHBOUR, *flags), driver)
    assert [record.name for record in records] == ["stream/0"] * 3 + ["long/0"]
    assert len(ids(jobs[3])) == 900
    streams, long = records[:3], records[3]
    assert max(stream.times[9] for stream in streams) == pytest.approx(long.sent)
    assert all(stream.num_tokens == 256 for stream in streams)  # none is cut off


def test_a_stream_that_fails_ends_the_round_with_its_error():
    flags = ("--rounds", "2", "--streams", "2")
    made = scene(NOISY_NEIGHBOUR, *flags)
    _, records = asked(NOISY_NEIGHBOUR, made, FakeDriver(fails={1}), concurrency=1)
    assert [r.error for r in records if r.error] == [
        "HTTP 429",
        "not sent: an earlier request of its session failed",
    ]
    assert records[0].was_cut
    assert records[-1].name == "long/1"


def _stream(times: list[float]) -> Record:
    return Record("stream/0", 0.0, times=times, counts=[1] * len(times), ended=times[-1])


def test_gaps_are_compared_before_the_long_prompt_and_until_its_first_token():
    steady = [0.1 * i for i in range(31)]  # until 3.0
    slow = [3.3, 3.6, 3.9]
    after = [4.0 + 0.1 * i for i in range(9)]
    long = Record("long/0", 3.0, sent=3.0, times=[3.95], counts=[1], ended=4.5, prompt_tokens=64)
    found = neighbour_figures([_stream(steady + slow + after), long], steady=4)
    assert found is not None
    assert found["itl_p99_before_ms"].median == pytest.approx(100)
    assert found["itl_p99_during_ms"].median == pytest.approx(300)
    assert found["itl_ratio"].median == pytest.approx(3)
    assert found["streams_left"].median == 1


def test_without_a_long_answer_there_is_no_comparison():
    assert neighbour_figures([_stream([1.0, 2.0, 3.0])], steady=0) is None


# -- short beside long --------------------------------------------------------------------------

BESIDE_FLAGS = ("--long-len", "900", "--short-len", "20", "--output-len", "3", "--shorts", "5")
AS_LONG = {"first": 0.0, "gap": 0.05, "per_token": 0.001}  # 0.9 s and 0.02 s


def names(records: list[Record]) -> list[str]:
    return [record.name for record in records]


def test_short_and_long_prompts_come_alone_and_then_beside_each_other():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS, "--num-long", "2")
    jobs, records = asked(SHORT_BESIDE_LONG, made, FakeDriver(**AS_LONG), concurrency=1)
    assert names(records) == (
        ["short-alone/0"] * 5
        + ["long-alone/0"] * 2
        + ["long-beside/0"] * 2
        + ["short-beside/0"] * 5
    )
    assert [(len(ids(job)), job.output_len) for job in jobs] == (
        [(20, 3)] * 5 + [(900, LONG_OUTPUT)] * 4 + [(20, 3)] * 5
    )
    for before, after in pairwise(records[:5]):
        assert after.sent == pytest.approx(before.ended + PAUSE_SECONDS)
    for before, after in pairwise(records[9:]):
        assert after.sent == pytest.approx(before.ended + PAUSE_SECONDS)
    alone, beside = records[5:7], records[7:9]
    assert alone[0].sent == alone[1].sent >= records[4].ended
    assert beside[0].sent == beside[1].sent >= max(record.ended for record in alone)
    assert records[9].sent == pytest.approx(beside[0].sent + PAUSE_SECONDS)


def test_no_prompt_finds_the_text_of_another_in_the_cache():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS, "--num-long", "2,2")
    jobs, _ = asked(SHORT_BESIDE_LONG, made, FakeDriver(**AS_LONG), concurrency=1)
    assert len({tuple(ids(job)[:8]) for job in jobs}) == len(jobs) == 2 * 14


def test_no_short_request_is_sent_after_the_last_first_token_of_the_long_ones():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS, "--shorts", "50", "--num-long", "3")
    driver = FakeDriver(**AS_LONG, slots=2)  # the third long one is computed after the others
    _, records = asked(SHORT_BESIDE_LONG, made, driver, concurrency=1)
    last = max(record.times[0] for record in records if record.name == "long-beside/0")
    shorts = [record for record in records if record.name == "short-beside/0"]
    assert 1 < len(shorts) < 50
    assert shorts[-1].sent < last < shorts[-1].ended + PAUSE_SECONDS


def test_there_is_a_row_for_each_number_of_long_prompts():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS, "--num-long", "1,4,16")
    _, records = asked(SHORT_BESIDE_LONG, made, FakeDriver(**AS_LONG), concurrency=1)
    rows = beside_figures(records)
    assert [(row["num_long"], row["num_short"]) for row in rows] == [(1, 5), (4, 5), (16, 5)]
    with pytest.raises(SystemExit):
        scene(SHORT_BESIDE_LONG, "--num-long", "1,,4")


def test_long_prompts_that_were_computed_too_soon_are_noted():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS)
    _, records = asked(SHORT_BESIDE_LONG, made, FakeDriver(first=0.001), concurrency=1)
    assert "short-beside/0" not in names(records)
    assert beside_figures(records) == []
    assert made.remarks() == [
        "4 long prompts had their first tokens before a short request was sent; raise --long-len"
    ]


def test_prompts_that_do_not_fit_are_cut_and_a_round_that_fails_has_no_row():
    made = scene(SHORT_BESIDE_LONG, *BESIDE_FLAGS, "--num-long", "2,1", max_len=517)
    driver = FakeDriver(**AS_LONG, fails={8})  # one of the long prompts beside short ones
    jobs, records = asked(SHORT_BESIDE_LONG, made, driver, concurrency=1)
    assert [len(ids(job)) for job in jobs if job.name.startswith("long")] == [500] * 6
    assert made.remarks() == ["6 prompts were cut to fit 517 tokens"]
    assert (records[8].name, records[8].error) == ("long-beside/0", "HTTP 429")
    assert [row["num_long"] for row in beside_figures(records)] == [1]


def test_short_requests_are_compared_by_ttft_and_gap_and_long_ones_from_send_to_first_token():
    def record(name: str, sent: float, *times: float) -> Record:
        return Record(name, sent, sent=sent, times=list(times), counts=[1] * len(times))

    [row] = beside_figures([
        record("short-alone/0", 0.0, 0.1, 0.2),
        record("short-alone/0", 1.0, 1.1, 1.3),
        record("long-alone/0", 2.0, 3.0),
        record("long-alone/0", 2.1, 4.0),
        record("long-beside/0", 5.0, 8.0),
        record("long-beside/0", 5.1, 7.0),
        record("short-beside/0", 5.2, 5.4, 5.5),
        record("short-beside/0", 6.0, 8.2, 8.8),  # waited for the long ones
    ])  # fmt: skip
    assert row == pytest.approx({
        "num_long": 2, "num_short": 2,
        "ttft_p50_alone_ms": 100, "ttft_p50_beside_ms": 1200, "ttft_p50_ratio": 12,
        "ttft_p99_alone_ms": 100, "ttft_p99_beside_ms": 2180, "ttft_p99_ratio": 21.8,
        "longest_gap_alone_ms": 200, "longest_gap_beside_ms": 600, "longest_gap_ratio": 3,
        "long_alone_ms": 2000, "long_beside_ms": 3000, "long_ratio": 1.5,
    })  # fmt: skip


# -- traces -------------------------------------------------------------------------------------


def test_equal_hash_ids_are_equal_tokens_and_the_last_block_may_be_short():
    entries = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1536, "output_length": 4, "hash_ids": [1, 2, 4]},
    ]
    made = scene(TRACE, "--trace", "TRACE", "--scale", "1", "--speedup", "2")
    prompts, sessions = _replayed(made, entries)
    assert [len(prompt) for prompt in prompts] == [1100, 1536]
    assert shared(*prompts) == 1024
    assert [session.at for session in sessions] == [0.0, 1.0]  # from the first, twice as fast


def _replayed(made: Scene, entries: list[dict]):
    path = Path(made.args.trace)
    lines = b"\n".join(msgspec.json.encode(entry) for entry in entries)

    async def work():
        driver = FakeDriver()
        load = make_load(driver)
        sessions = TRACE.sessions(made)
        await load.open(sessions, [session.at or 0.0 for session in sessions])
        return [ids(job) for job in driver.jobs], sessions

    try:
        path.write_bytes(lines)
        return run(work)
    finally:
        path.unlink()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_scale_makes_every_length_shorter_and_keeps_what_is_shared():
    made = scene(TRACE, "--trace", "TRACE", "--scale", "0.125")
    prompts, _ = _replayed(made, [
        {"timestamp": 0, "input_length": 1024, "output_length": 80, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 1536, "output_length": 80, "hash_ids": [1, 2, 3]},
    ])  # fmt: skip
    assert [len(prompt) for prompt in prompts] == [128, 192]
    assert shared(*prompts) == 128


def test_a_synthetic_trace_can_be_written_and_read_and_shares_prefixes(tmp_path):
    entries = synthetic(60, seed=1)
    write_trace(tmp_path / "t" / "trace.jsonl", entries)
    assert read_trace(tmp_path / "t" / "trace.jsonl", 60) == entries
    assert [e.timestamp for e in entries] == sorted(e.timestamp for e in entries)
    assert all(len(e.hash_ids) == -(-e.input_length // BLOCK) for e in entries)
    seen: set[int] = set()
    hits = 0
    for entry in entries:
        hits += len(seen & set(entry.hash_ids))
        seen |= set(entry.hash_ids)
    assert 0.3 < hits / sum(len(e.hash_ids) for e in entries) < 0.95


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"timestamp": 1}',
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_a_line_that_is_no_entry_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"\n{line}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="line 2"):
        read_trace(path, 5)
