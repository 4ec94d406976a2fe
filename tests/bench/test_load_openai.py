"""The driver against servers that are well, that know little, and that break."""

from __future__ import annotations

import asyncio
import contextlib
import string

import pytest

from foretoken.bench.load.corpus import TextCorpus
from foretoken.bench.load.figures import Record
from foretoken.bench.load.generator import Job, Load, Piece, Session
from foretoken.bench.load.http import Failure, Http
from foretoken.bench.load.openai import OpenAIDriver, messages
from foretoken.bench.load.server import KvUsage, first_model, server_encode

PROMPT = (Piece("system", [1, 2]), Piece("user", [3]))
CORPUS = TextCorpus(list(range(100)), [1, 2])


def job(output_len: int = 6, prompt=PROMPT, **more) -> Job:
    return Job(name="x", prompt=prompt, output_len=output_len, **more)


def drive(server, work, *, endpoint="completions", encode=None, timeout=20.0):
    """Run ``work(driver)`` on a connection that is closed in the end."""

    async def inner():
        http = Http(server.url)
        driver = OpenAIDriver(http, "fake", endpoint, corpus=CORPUS, encode=encode, timeout=timeout)
        try:
            return await work(driver)
        finally:
            http.close()

    return asyncio.run(inner())


def asked(server, **more) -> tuple[Record, object, OpenAIDriver]:
    """One request."""

    async def work(driver):
        record = Record("x", 0.0, times=[], counts=[])
        content = await driver.ask(job(), record)
        await driver.settle()
        return record, content, driver

    return drive(server, work, **more)


async def letters(text: str) -> list[int]:
    return [string.ascii_lowercase.index(letter) for letter in text]


# -- tokens of a chunk --------------------------------------------------------------------------


def test_several_tokens_of_a_chunk_are_known_from_the_usage_at_the_end(server):
    server.per_chunk = 4
    record, _, driver = asked(server)
    assert record.counts == [4, 2]
    assert record.times == sorted(record.times)
    assert list(driver.countings) == ["final usage, assigned to chunks by their characters"]


def test_usage_in_every_chunk_is_taken_as_it_is(server):
    server.per_chunk, server.continuous = 4, True
    record, _, driver = asked(server)
    assert record.counts == [4, 2]
    assert list(driver.countings) == ["reported by the server for each chunk"]


def test_without_usage_a_chunk_is_a_token_unless_its_text_can_be_tokenised(server):
    server.per_chunk, server.usage = 4, False
    record, _, driver = asked(server)
    assert (record.counts, record.prompt_tokens) == ([1, 1], None)
    assert list(driver.countings) == ["no usage, or cut by the client: one per chunk"]
    record, _, driver = asked(server, encode=letters)
    assert record.counts == [4, 2]


def test_cached_tokens_and_speculation_are_taken_where_they_are_told(server):
    server.extra_usage = {
        "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": None},
        "speculation": {"proposed_tokens": 5, "accepted_tokens": 3, "verify_steps": 3, "new": {}},
    }
    record, _, _ = asked(server)
    assert (record.prompt_tokens, record.cached_tokens) == (10, 8)
    assert (record.proposed_tokens, record.accepted_tokens, record.verify_steps) == (5, 3, 3)
    server.extra_usage = {"prompt_tokens_details": None}
    record, _, _ = asked(server)
    assert (record.cached_tokens, record.proposed_tokens) == (None, None)


# -- what is sent -------------------------------------------------------------------------------


def test_token_ids_go_to_completions_and_the_answer_comes_back_as_ids(server):
    _, content, driver = asked(server, encode=letters)
    assert content == [0, 1, 2, 3, 4, 5]
    assert driver.num_stand_ins == 0
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2, 3], 6, True)
    assert "speculation" not in body


def test_without_a_tokenizer_text_of_the_same_length_stands_in_for_an_answer(server):
    _, content, driver = asked(server)
    assert isinstance(content, list)
    assert len(content) == 6
    assert driver.num_stand_ins == 1


def test_a_chat_is_sent_as_messages_and_answered_in_text(server):
    prompt = [Piece("system", "a"), Piece("system", "b"), Piece("user", "c")]

    async def work(driver):
        record = Record("x", 0.0, times=[], counts=[])
        return await driver.ask(job(prompt=prompt, speculation="off"), record)

    assert drive(server, work, endpoint="chat") == "abcdef"
    body = server.bodies[0]
    assert body["messages"] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c"},
    ]
    assert body["speculation"] == "off"
    assert messages([]) == []


def test_thoughts_count_as_tokens(server):
    from foretoken.bench.load.openai import Answer

    record = Record("x", 0.0, times=[], counts=[])
    answer = Answer(record)
    answer.feed(1.0, b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n')
    answer.feed(2.0, b'data: {"choices":[{"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\n')
    answer.finish()
    assert record.times == [1.0, 2.0]
    assert answer.text == ["hm", "yes"]


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ({"continuous_usage_stats"}, ["continuous_usage_stats"]),
        ({"ignore_eos"}, ["continuous_usage_stats", "ignore_eos"]),
        ({"stream_options"}, ["continuous_usage_stats", "ignore_eos", "stream_options"]),
    ],
)
def test_what_a_server_refuses_is_left_out_and_told(server, refused, told):
    server.refused = refused

    async def work(driver):
        await driver.probe(job())
        await driver.ask(job(), Record("x", 0.0, times=[], counts=[]))
        return driver.notes

    notes = drive(server, work)
    assert [note.split()[0] for note in notes] == told
    last = server.bodies[-1]
    assert not refused & (set(last) | set(last.get("stream_options", {})))


def test_a_server_that_knows_only_the_new_name_of_the_length_is_served_it(server):
    server.refused = {"max_tokens"}

    async def work(driver):
        await driver.probe(job())

    drive(server, work)
    assert server.bodies[-1]["max_completion_tokens"] == 6


def test_a_server_that_refuses_everything_is_a_failure(server):
    server.refused = {"model"}
    with pytest.raises(Failure, match="HTTP 400"):
        drive(server, lambda driver: driver.probe(job()))


# -- errors -------------------------------------------------------------------------------------


def failure(server, **more) -> tuple[str, Record]:
    """The kind of the failure of one request, and its record."""

    async def work(driver):
        load = Load(driver)

        async def one(ask):
            await ask(job())

        await load.closed([Session(one)], 1)
        return load.records[0]

    record = drive(server, work, **more)
    assert record.error is not None
    return record.error, record


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_status_is_an_error_of_its_own_kind(server, status):
    server.statuses = {0: status}
    kind, record = failure(server)
    assert kind == f"HTTP {status}"
    assert "no" in record.message


def test_an_error_in_the_stream_and_a_cut_connection_are_told_apart(server):
    server.breaks = {0: "error", 1: "cut"}
    kind, record = failure(server)
    assert kind == "error in the stream"
    assert "out of memory" in record.message
    assert len(record.times) == 2  # what came before it
    kind, _ = failure(server)
    assert kind == "connection cut"


def test_a_server_that_does_not_answer_is_a_timeout(server):
    server.hang = True
    assert failure(server, timeout=0.05)[0] == "timeout"


def test_nobody_listening_is_no_connection(server):
    real, server.port = server.port, 1
    try:
        assert failure(server)[0] == "no connection"
    finally:
        server.port = real


def test_a_stream_without_an_end_is_a_cut_connection_and_junk_is_unreadable():
    from foretoken.bench.load.openai import Answer

    answer = Answer(Record("x", 0.0, times=[], counts=[]))
    answer.feed(1.0, b'data: {"choices":[{"text":"a"}]}\n\n')
    with pytest.raises(Failure, match="connection cut"):
        answer.finish()
    with pytest.raises(Failure, match="unreadable"):
        answer.feed(2.0, b"data: {not json\n\n")


def test_an_answer_given_up_by_the_client_is_counted_by_its_text(server):
    async def work(driver):
        load = Load(driver)
        heard = asyncio.Event()

        def watch(_record: Record) -> None:
            heard.set()

        task = asyncio.create_task(load.ask(job(100_000, watch=watch)))
        await heard.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await driver.settle()
        return load.records[0]

    server.per_chunk = 5
    record = drive(server, work, encode=letters)
    assert record.was_cut
    assert record.num_tokens == 5 * len(record.times)


def test_connections_are_kept_for_the_next_request(server):
    async def work(driver):
        for _ in range(3):
            await driver.ask(job(), Record("x", 0.0, times=[], counts=[]))
        return len(driver.http._idle)

    assert drive(server, work) == 1


# -- round the server ---------------------------------------------------------------------------


def test_the_model_is_the_first_one_or_the_one_that_was_named(server):
    server.max_model_len = 512

    async def work(driver):
        return [await first_model(driver.http, name) for name in (None, "fake", "other")]

    assert drive(server, work) == [("fake", 512), ("fake", 512), ("other", None)]


def test_a_server_tokenises_if_it_can(server):
    async def work(driver):
        return await server_encode(driver.http, "fake")

    encode = drive(server, work)
    assert encode is not None
    server.has_tokenize = False
    assert drive(server, work) is None


@pytest.mark.parametrize(
    "line",
    [
        "foretoken:kv_cache_usage_perc 0.25",
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 2.5e-01',
    ],
)
def test_kv_occupancy_is_read_under_either_name(line):
    usage = KvUsage()
    assert usage.read(f"# TYPE x gauge\n{line}\nother 1\n".encode())
    assert usage.figures() == {"mean": 0.25, "max": 0.25}
    assert not usage.read(b"nothing of it")
