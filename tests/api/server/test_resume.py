"""Streams that broke are picked up again with Last-Event-ID, by clients that know nothing of it."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from foretoken.api.serving import resume
from foretoken.api.serving.errors import ApiError
from foretoken.api.serving.resume import ResumableStreams
from foretoken.api.serving.sse import Reply, error_event
from foretoken.bench.load.event_stream import Event, EventParser

TALK = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 40},
    "/v1/completions": {"prompt": "hi", "max_tokens": 40},
    "/v1/responses": {"input": "hi", "max_output_tokens": 40},
    "/v1/messages": {"messages": TALK, "max_tokens": 40},
}
SECONDS = 20
FAR_FUTURE = 3600.0


@pytest.fixture(autouse=True)
def answers(engine):
    engine.answers = lambda request: range(30, 70)


def stream(server, path, headers=None, until=None) -> list[Event]:
    """The events of an answer; breaks off behind so many."""
    events, parser = [], EventParser()
    body = {**BODIES[path], "stream": True}
    with httpx.stream("POST", server.url + path, json=body, headers=headers) as answer:
        if answer.status_code != 200:
            answer.read()
            return [Event(answer.text, str(answer.status_code))]
        for chunk in answer.iter_bytes():
            events += parser.feed(chunk)
            if until is not None and len(events) >= until:
                return events[:until]
    return events


def text_of(events: list[Event]) -> list[str]:
    """Return the text of each event, without ids and times, which differ between answers."""
    found = []
    for event in events:
        data = {} if event.data == "[DONE]" else json.loads(event.data)
        choice = (data.get("choices") or [{}])[0]
        found.append(
            choice.get("text")
            or choice.get("delta", {}).get("content")
            or (isinstance(data.get("delta"), str) and data["delta"])
            or (isinstance(data.get("delta"), dict) and data["delta"].get("text"))
            or data.get("type")
            or event.data[:6]
        )
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_goes_on_where_it_broke_and_says_what_it_would_have_said(serve, engine, path):
    server = serve(resume_seconds=FAR_FUTURE)
    whole = stream(server, path)
    ids = [event.id for event in whole]
    assert [each.rpartition(":")[2] for each in ids] == [str(i) for i in range(len(ids))]
    begun = stream(server, path, until=7)
    rest = stream(server, path, {"Last-Event-ID": begun[-1].id})
    assert text_of(begun + rest) == text_of(whole)
    again = stream(server, path, {"Last-Event-ID": begun[2].id})  # it is kept at its end
    assert text_of(again) == text_of(whole[3:])
    assert len(engine.requests) == 2
    assert not engine.aborted


def test_openais_client_picks_a_stream_up(serve):
    server = serve(resume_seconds=FAR_FUTURE)
    begun = stream(server, "/v1/chat/completions", {"authorization": "Bearer x"}, until=5)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="tiny/model",
            messages=TALK,
            stream=True,
            extra_headers={"Last-Event-ID": begun[-1].id},
        )
        rest = [chunk.choices[0].delta.content or "" for chunk in chunks]
        with pytest.raises(openai.NotFoundError, match="Last-Event-ID"):
            client.chat.completions.create(
                model="tiny/model",
                messages=TALK,
                stream=True,
                extra_headers={"Last-Event-ID": "nobody:3"},
            )
    whole = stream(server, "/v1/chat/completions")
    said = "".join(each for each in text_of(whole) if each not in ("chat.c", "[DONE]", '{"id":'))
    had = "".join(each for each in text_of(begun) if each != '{"id":')
    assert had + "".join(rest) == said


def test_another_key_resumes_nothing(serve, engine):
    server = serve(resume_seconds=FAR_FUTURE, api_keys=("a", "b"))
    mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
    begun = stream(server, "/v1/chat/completions", mine, until=3)
    mark = {"Last-Event-ID": begun[-1].id}
    [refused] = stream(server, "/v1/chat/completions", other | mark)
    assert refused.kind == "404"
    assert "stream_not_found" in refused.data
    assert stream(server, "/v1/chat/completions", mine | mark)[-1].data == "[DONE]"


def test_another_salt_resumes_nothing(serve, engine):
    server = serve(resume_seconds=FAR_FUTURE)
    url = f"{server.url}/v1/responses"

    def post(mark=None, **salt) -> str:
        body = {**BODIES["/v1/responses"], "stream": True, **salt}
        return httpx.post(url, json=body, headers=mark, timeout=SECONDS).text

    begun = EventParser().feed(post(nvext={"cache_salt": "a"}).encode())
    mark = {"Last-Event-ID": begun[2].id}
    name = json.loads(begun[0].data)["response"]["id"]
    assert "stream_not_found" in post(mark)
    assert "stream_not_found" in post(mark, cache_salt="b")
    assert begun[-1].data in post(mark, cache_salt="a")
    asked = {"stream": "true", "starting_after": "2"}
    answers = [
        httpx.get(f"{url}/{name}", params=asked | salt, timeout=SECONDS)
        for salt in ({}, {"cache_salt": "b"}, {"cache_salt": "a"})
    ]
    assert [each.status_code for each in answers] == [404, 404, 200]
    assert begun[-1].data in answers[-1].text


def test_without_the_flag_there_are_no_ids_and_who_leaves_ends_his_request(server, engine):
    engine.by_hand = True
    body = {**BODIES["/v1/chat/completions"], "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body):
        engine.submitted.acquire(timeout=SECONDS)
    assert engine.was_aborted.acquire(timeout=SECONDS)
    engine.by_hand = False
    ids = {event.id for event in stream(server, "/v1/chat/completions", {"Last-Event-ID": "a:1"})}
    assert ids == {""}


def test_a_stream_that_nobody_picks_up_is_aborted_in_time(serve, engine):
    engine.by_hand = True
    server = serve(resume_seconds=0.05)
    body = {**BODIES["/v1/chat/completions"], "stream": True}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body):
        engine.submitted.acquire(timeout=SECONDS)
    assert engine.was_aborted.acquire(timeout=SECONDS)


# -- by itself ----------------------------------------------------------------------------------


class Said(Reply):
    """An answer of so many events, then for ever."""

    def __init__(self, count: int, data: bytes = b"x", error: Exception | None = None) -> None:
        self.closed = 0
        self._count, self._data, self._error = count, data, error

    async def events(self):
        for _ in range(self._count):
            yield b"data: " + self._data + b"\n\n"
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    def close(self) -> None:
        self.closed += 1


async def first(reader, count: int) -> list[bytes]:
    events = reader.events()
    found = [await anext(events) for _ in range(count)]
    await events.aclose()
    return found


async def test_a_new_reader_ends_the_one_before_it_whose_end_changes_nothing():
    streams, reply = ResumableStreams(FAR_FUTURE), Said(3)
    old = streams.begin(reply, error_event)
    [event, *_] = await first(old, 3)
    name = event.split(b"\n")[0].removeprefix(b"id: ").decode()
    waiting = asyncio.create_task(anext(old.events(), None))
    new = streams.resume(name)
    assert await waiting is None
    old.close()
    assert len(await first(new, 2)) == 2
    assert reply.closed == 0
    new.close()


async def test_memory_is_bounded_and_a_stream_that_was_forgotten_ends_with_its_client(monkeypatch):
    monkeypatch.setattr(resume, "STREAM_BYTES", 1000)
    monkeypatch.setattr(resume, "MAX_STREAMS", 3)
    streams = ResumableStreams(FAR_FUTURE)
    replies = [Said(100, b"y" * 100) for _ in range(5)]
    readers = [streams.begin(each, error_event) for each in replies]
    assert len(streams) == 3
    found = await first(readers[-1], 100)  # none is lost while a reader is there
    assert [each.split(b"\n")[0].rpartition(b":")[2] for each in found] == [
        str(i).encode() for i in range(100)
    ]
    name, _, _ = found[0].split(b"\n")[0].removeprefix(b"id: ").decode().partition(":")
    with pytest.raises(ApiError):
        streams.resume(f"{name}:3")  # long dropped
    assert len(await first(streams.resume(f"{name}:97"), 2)) == 2
    readers[0].close()
    while not replies[0].closed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [each.closed for each in replies] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("error", [ApiError(503, "late"), ZeroDivisionError()])
async def test_an_error_is_an_event_that_is_kept_too(error):
    streams, reply = ResumableStreams(FAR_FUTURE), Said(1, error=error)
    events = [event async for event in streams.begin(reply, error_event).events()]
    assert len(events) == 2
    assert b'"error"' in events[1]
    assert reply.closed == 1


@pytest.mark.parametrize("mark", ["", "x", ":", "a:-1", "a:\u0663", "a:" + "9" * 40])
def test_a_mark_that_makes_no_sense_is_not_found(mark):
    with pytest.raises(ApiError, match="Last-Event-ID"):
        ResumableStreams(FAR_FUTURE).resume(mark)
