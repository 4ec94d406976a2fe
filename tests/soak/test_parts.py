"""The soak's own judgement on made-up data, and one short run against a real server."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest

import soak.__main__ as soak
from soak.answers import Stream, Told, read_whole
from soak.book import MAX_TOLD, Book, Latency
from soak.leaks import MEMORY_BOUND, MIB, drifts, growth, slope
from soak.plan import WAVES, num_cycles, schedule
from soak.requests import Texts
from soak.server import Footprint, footprint
from soak.verdicts import INVARIANTS, OTHERS, judge_trends, verdicts
from soak.wire import Link, Pace, Reply, ask, request_bytes
from soak.world import World

# -- leaks --------------------------------------------------------------------------------------


def idle(memory: list[float], *, threads: int = 5, descriptors: list[int] | None = None):
    """A footprint every ten seconds; memory in MiB."""
    counts = descriptors or [12] * len(memory)
    return [
        Footprint(10.0 * at, int(mib * MIB), threads, count, 3)
        for at, (mib, count) in enumerate(zip(memory, counts, strict=True))
    ]


def leaks(samples) -> list[str]:
    return [each.name for each in growth(samples) if each.is_leak]


def test_memory_that_rises_to_the_end_is_a_leak():
    assert leaks(idle([100 + at for at in range(40)])) == ["memory"]


def test_memory_that_fills_up_and_then_wanders_is_none():
    rng = random.Random(0)
    filled = [100 + min(60, 6 * at) + 4 * rng.random() for at in range(40)]
    assert leaks(idle(filled)) == []


def test_one_high_moment_is_no_leak():
    assert leaks(idle([100.0] * 39 + [400.0])) == []


def test_a_slow_leak_is_seen_where_the_run_is_long_enough():
    per_sample = 2 * MEMORY_BOUND / MIB / 100
    assert leaks(idle([100 + per_sample * at for at in range(200)])) == ["memory"]
    assert leaks(idle([100 + per_sample * at for at in range(20)])) == []


@pytest.mark.parametrize(("last", "found"), [(12, []), (11, []), (13, ["descriptors"])])
def test_the_second_half_may_hold_no_more_descriptors_than_the_first(last, found):
    assert leaks(idle([100.0] * 20, descriptors=[10] + [12] * 18 + [last])) == found


def test_a_few_moments_are_not_judged():
    assert growth(idle([1.0, 100.0, 1000.0])) == []


def test_a_pool_may_make_a_thread_late_but_not_one_after_the_other():
    def found(last: int) -> list[str]:
        samples = idle([100.0] * 20)
        return leaks([*samples[:-1], msgspec.structs.replace(samples[-1], threads=last)])

    assert (found(7), found(8)) == ([], ["threads"])


def test_the_slope_is_that_of_the_line():
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == 2
    assert slope([0, 1, 2, 3, 4], [5, 7, 1000, 11, 13]) == 2
    assert slope([1], [1]) == 0


# -- drift and verdicts -------------------------------------------------------------------------


def canaries(seconds: list[float], wave: str = "quiet") -> list[Latency]:
    return [Latency(wave, cycle, ttft, [ttft / 10]) for cycle, ttft in enumerate(seconds)]


def test_drift_compares_the_first_quarter_with_the_last():
    ttft, gap = drifts(canaries([1.0, 1.0, 9.0, 9.0, 9.0, 9.0, 3.0, 3.0]), ["quiet"], 8)
    assert (ttft.measure, gap.measure) == ("ttft", "itl")
    assert (ttft.first_ms, ttft.last_ms) == (1000, 3000)
    assert ttft.ratio == gap.ratio == 3


def test_waves_of_another_load_and_single_cycles_tell_nothing_of_drift():
    assert drifts(canaries([1.0, 5.0], "storm"), ["quiet"], 2) == []
    assert drifts(canaries([1.0]), ["quiet"], 1) == []


def test_a_verdict_says_what_was_never_checked():
    book = Book()
    book.check("I4", True, "")
    book.check("I5", False, "other words")
    words = {each.kind: each.word for each in verdicts(book)}
    assert set(words) == {*INVARIANTS, *OTHERS}
    assert (words["I4"], words["I5"], words["I1"]) == ("holds", "VIOLATED", "not checked")
    assert [each.what for each in book.violations] == ["other words"]


def test_violations_are_all_counted_and_the_first_are_kept():
    book = Book()
    for index in range(100):
        book.check("I4", False, str(index))
    assert book.wrongs["I4"] == 100
    assert [each.what for each in book.violations] == [str(at) for at in range(MAX_TOLD)]


def test_leaks_and_drift_are_violations():
    book = Book()
    judge_trends(
        book,
        [growth(idle([100 + at for at in range(40)]))],
        drifts(canaries([1.0, 1.0, 3.0, 3.0]), ["quiet"], 4),
        max_drift=2.0,
    )
    assert (book.wrongs["leak"], book.checks["leak"]) == (1, 4)
    assert book.wrongs["drift"] == 2


# -- the schedule -------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0.2, 5, 60])
def test_waves_fill_the_time_and_each_cycle_has_all_of_them(minutes):
    turns = list(schedule(60 * minutes, seed=3))
    assert sum(turn.seconds for turn in turns) == pytest.approx(60 * minutes, rel=0.1)
    for cycle in range(num_cycles(60 * minutes)):
        names = [turn.wave.name for turn in turns if turn.cycle == cycle]
        assert names[0] == "quiet"
        assert sorted(names) == sorted(wave.name for wave in WAVES)


def test_a_schedule_follows_from_its_seed():
    def names(seed: int) -> list[str]:
        return [turn.wave.name for turn in schedule(3600, seed)]

    assert names(1) == names(1) != names(2)


# -- answers ------------------------------------------------------------------------------------


def usage(tokens: int) -> dict:
    return {
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "speculation": {"proposed_tokens": 0},
    }


def chunk(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE, ERROR = b"data: [DONE]\n\n", b'data: {"error": {"message": "x"}}\n\n'


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([chunk("a"), chunk("", "stop"), DONE], None),
        ([chunk("a"), ERROR], None),
        ([chunk("a"), chunk("", "stop")], "0 terminal events"),
        ([chunk("a"), chunk("", "stop"), DONE, DONE], "2 terminal events"),
        ([chunk("a"), chunk("", "stop"), ERROR, DONE], "2 terminal events"),
        ([chunk("a"), chunk("", "stop"), DONE, chunk("b")], "2 events after the end"),
        ([chunk("a"), chunk("", "stop"), chunk("b"), DONE], "1 events after the end"),
        ([chunk("", "stop"), chunk("", "stop"), DONE], "a choice ended more than once"),
        ([chunk("a"), DONE], "no choice ended"),
        ([b"data: {\n\n", DONE], "unreadable"),
    ],
)
def test_a_stream_has_one_terminal_and_nothing_after_it(events, fault):
    stream = Stream("completions")
    for at, event in enumerate(events):
        stream.feed(float(at), event)
    assert stream.told.fault() == fault


def test_only_events_that_bring_words_have_a_time():
    stream = Stream("completions")
    for at, data in enumerate([chunk(""), chunk("a"), chunk("b"), chunk("", "stop"), DONE]):
        stream.feed(float(at), data)
    assert stream.told.times == [1.0, 2.0]
    assert stream.told.text == "ab"


def test_a_whole_answer_is_read_in_every_dialect():
    speculation = {"proposed_tokens": 3}
    choices = [{"index": 0, "text": "a", "finish_reason": "stop"}]
    text = read_whole("completions", json.dumps({"choices": choices, "usage": usage(1)}).encode())
    said = {"type": "message", "content": [{"text": "a"}]}
    counted = {
        "output_tokens": 1,
        "input_tokens_details": {"cached_tokens": 2},
        "speculation": speculation,
    }
    response = {"output": [said], "status": "completed", "usage": counted}
    message = {
        "content": [{"type": "text", "text": "a"}],
        "stop_reason": "end_turn",
        "usage": {"output_tokens": 1, "cache_read_input_tokens": 2, "speculation": speculation},
    }
    others = [
        read_whole("responses", json.dumps(response).encode()),
        read_whole("messages", json.dumps(message).encode()),
    ]
    assert [told.fault() for told in (text, *others)] == [None] * 3
    assert [told.text for told in (text, *others)] == ["a"] * 3
    assert [(told.cached_tokens, told.proposed_tokens) for told in others] == [(2, 3)] * 2
    assert read_whole("chat", b"{}").fault() == "unreadable"


# -- judging ------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World(("127.0.0.1", 1), "key", Book(), Texts(0))


def test_requests_follow_from_the_seed_and_what_is_varied_decides_no_word(world):
    again = World(("127.0.0.1", 1), "key", Book(), Texts(0))
    assert [known.body for known in world.plain] == [known.body for known in again.plain]
    names = [known.name for known in [*world.canaries, *world.plain, *world.featured]]
    assert len(set(names)) == len(names)
    free = {"speculation", "cache_salt", "priority", "cache", "stream", "stream_options"}
    for known in world.featured:
        body = known.varied(random.Random(1), stream=True)
        assert {key: body[key] for key in body.keys() - free} == dict(known.body)


@pytest.mark.parametrize(
    ("reply", "phase", "wrong"),
    [
        (Reply("whole", 200), "up", []),
        (Reply("hang"), "killed", ["hang"]),
        (Reply("refused"), "up", ["there"]),
        (Reply("refused"), "draining", []),
        (Reply("cut"), "up", ["there"]),
        (Reply("cut"), "killed", []),
        (Reply("whole", 429, {"retry-after": "3"}), "up", []),
        (Reply("whole", 429), "up", ["retry-after"]),
        (Reply("whole", 429, {"retry-after": "soon"}), "up", ["retry-after"]),
        (Reply("whole", 503, {"retry-after": "1"}), "up", ["5xx"]),
        (Reply("whole", 503, {"retry-after": "1"}), "draining", []),
        (Reply("whole", 500), "draining", ["5xx"]),
        (Reply("whole", 404), "up", ["status"]),
    ],
)
def test_the_status_of_an_answer_is_judged_by_what_the_server_was_doing(world, reply, phase, wrong):
    world.phase = phase
    world.judge("somebody", reply, phase)
    assert list(world.book.wrongs) == wrong


def told(text: str, **fields: int) -> Told:
    made = Told(num_terminals=1, **fields)
    made.say(0, text)
    made.end(0, "length")
    return made


def test_other_words_violate_what_they_were_made_with(world):
    known = world.canaries[0]
    world.solo[known.name] = told("abc")
    world.judge_words("x", known, told("abc", proposed_tokens=1, cached_tokens=1))
    assert not world.book.wrongs
    world.judge_words("x", known, told("abd"))
    assert list(world.book.wrongs) == ["I5"]
    world.judge_words("x", known, told("abd", proposed_tokens=1, cached_tokens=1))
    assert dict(world.book.wrongs) == {"I5": 2, "I6": 1, "I7": 1}
    world.judge_words("x", known, told("abc", completion_tokens=25))
    assert world.book.wrongs["I8"] == 1


def test_a_beginning_of_the_words_is_right_and_another_is_not(world):
    known = world.canaries[0]
    world.solo[known.name] = told("abc")
    world.judge_beginning("x", known, told("ab"))
    assert not world.book.wrongs
    world.judge_beginning("x", known, told("b"))
    assert world.book.wrongs["I5"] == 1


def test_a_cut_answer_is_right_only_where_the_server_was_killed(world):
    known, half = world.canaries[0], Told()
    world.phase = "killed"
    world.judge_end("x", known, Reply("cut", 200), half)
    assert not world.book.wrongs
    world.phase = "draining"
    world.judge_end("x", known, Reply("cut", 200), half)
    assert list(world.book.wrongs) == ["I4"]


# -- the wire -----------------------------------------------------------------------------------

ANSWER = b"HTTP/1.1 200 OK\r\nretry-after: 7\r\ncontent-length: 5\r\n\r\nhello"


def served(serve, work):
    """Run ``work(address)`` beside a server whose connections are ``serve(reader, writer)``."""

    async def inner():
        async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.current_task())
            try:
                await serve(reader, writer)
            except OSError:
                pass
            finally:
                writer.close()

        tasks: list[asyncio.Task] = []
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        try:
            return await work(server.sockets[0].getsockname()[:2])
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(inner())


REQUEST = request_bytes("GET", "/", key=None)


@pytest.mark.parametrize(
    ("answer", "ended", "status"),
    [(ANSWER, "whole", 200), (ANSWER[:-1], "cut", 200), (ANSWER[:9], "cut", 0), (b"", "cut", 0)],
)
def test_a_reply_tells_how_it_ended(answer, ended, status):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    reply = served(serve, lambda address: ask(address, REQUEST, limit=20))
    assert (reply.ended, reply.status) == (ended, status)
    if ended == "whole":
        assert (reply.body, reply.fields["retry-after"], reply.keeps) == (b"hello", "7", True)


def test_a_server_that_says_nothing_is_a_hang():
    async def serve(reader, _writer):
        await reader.read()

    assert served(serve, lambda address: ask(address, REQUEST, limit=0.05)).ended == "hang"


def test_a_port_where_nobody_listens_refuses():
    async def serve(_reader, _writer): ...

    address = served(serve, _itself)
    assert asyncio.run(ask(address, REQUEST, limit=20)).ended == "refused"


async def _itself(address):
    return address


def test_a_kept_connection_that_was_closed_is_replaced_once():
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()

    async def work(address):
        kept: list[Link] = []
        first = await ask(address, REQUEST, limit=20, keep=kept.append)
        second = await ask(address, REQUEST, limit=20, link=kept.pop())
        return first, second

    assert [reply.ended for reply in served(serve, work)] == ["whole", "whole"]


def test_a_slow_reader_reads_in_nibbles_until_its_time_is_over():
    pieces: list[bytes] = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()

    async def work(address):
        link = await Link.open(address, small=True)
        await link.send(REQUEST, piece=9)
        chunk_budget = Pace(1, 0.0, asyncio.get_running_loop().time() + 3600)
        reply = await link.reply(lambda _, piece: pieces.append(piece), chunk_budget)
        link.close()
        return reply

    assert served(serve, work).ended == "whole"
    assert pieces[-5:] == [b"h", b"e", b"l", b"l", b"o"]


# -- a real one ---------------------------------------------------------------------------------


def test_a_footprint_counts_what_this_process_opens(tmp_path):
    import os

    before = footprint(os.getpid())
    with (tmp_path / "x").open("w"):
        assert footprint(os.getpid()).descriptors == before.descriptors + 1
    assert before.memory > 0
    assert before.threads > 0


@pytest.mark.slow
def test_a_short_soak_finds_nothing_and_checks_what_it_claims(tmp_path, capsys):
    out = tmp_path / "soak.json"
    flags = ["--minutes", "0.08", "--no-restarts", "--max-drift", "inf", "--out", str(out)]
    for wave in ("quiet", "features", "flood", "storm", "hostile"):
        flags += ["--only", wave]
    code = soak.main([*flags, "--", "--threads", "1"])
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["violations"] == []
    assert code == 0
    checked = {each["kind"] for each in report["verdicts"] if each["checks"]}
    assert checked >= {"I1", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "hang", "5xx", "status"}
    assert "retry-after" in checked  # a flood was refused
    assert report["answers"]["leaver"]
    assert "| I5" in capsys.readouterr().out
