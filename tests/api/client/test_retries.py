"""What both clients do when the server is busy, away, or fails; the server is a function."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest

from foretoken import (
    AsyncClient,
    Client,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from foretoken.api.client import KeyRefused, ServerFailed, Unreachable

MODELS = {"object": "list", "data": [{"id": "m"}]}
HI = [{"role": "user", "content": "hi"}]


class Scripted:
    """Answers with what it was given, one after the other, and counts."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def refused(status: int, message: str = "no", headers=None, **parts) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"error": {"message": message, **parts}})


def busy(seconds: str | None = "3", status: int = 429) -> httpx.Response:
    return refused(status, "busy", None if seconds is None else {"retry-after": seconds})


def fine() -> httpx.Response:
    return httpx.Response(200, json=MODELS)


def blocking(server, **options):
    with Client(transport=httpx.MockTransport(server), **options) as client:
        return client.models()


def nonblocking(server, **options):
    async def inner():
        async with AsyncClient(transport=httpx.MockTransport(server), **options) as client:
            return await client.models()

    return asyncio.run(inner())


@pytest.fixture(params=[blocking, nonblocking])
def models(request):
    return request.param


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses that the clients make, which take no time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("foretoken.api.client.blocking.sleep", made.append)
    monkeypatch.setattr("foretoken.api.client.nonblocking.sleep", pause)
    return made


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_that_it_names(models, pauses, status):
    server = Scripted(busy("3", status), busy("0", status), fine())
    assert [model.id for model in models(server)] == ["m"]
    assert pauses == [3.0, 0.0]


def test_a_date_is_a_time_to_wait_for_too(models, pauses):
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    models(Scripted(busy(soon), fine()))
    assert 20 < pauses[0] <= 30


def test_without_a_named_time_the_pauses_grow(models, pauses):
    models(Scripted(busy(None), httpx.ConnectError("nobody"), fine()))
    first, second = pauses
    assert 0.25 <= first <= 0.5 <= second <= 1.0


def test_after_the_last_try_the_error_is_raised_with_its_time_to_wait(models, pauses):
    server = Scripted(*[busy("2") for _ in range(3)])
    with pytest.raises(QueueFull, match="busy") as failed:
        models(server)
    assert failed.value.retry_after == 2.0
    assert len(server.requests) == 3


def test_no_try_is_made_again_when_none_is_wanted(models, pauses):
    with pytest.raises(EngineDead):
        models(Scripted(busy(status=503)), max_retries=0)
    assert not pauses


def test_a_server_that_wants_too_long_a_wait_is_not_waited_for(models, pauses):
    with pytest.raises(QueueFull) as failed:
        models(Scripted(busy("3600")))
    assert failed.value.retry_after == 3600
    assert not pauses


@pytest.mark.parametrize("odd", ["soon", "-1", "nan", "inf", ""])
def test_a_time_that_is_none_is_passed_over(models, pauses, odd):
    models(Scripted(busy(odd), fine()))
    assert 0 < pauses[0] <= 0.5


def test_a_server_that_cannot_be_reached_is_an_error_of_ours(models, pauses):
    with pytest.raises(Unreachable, match="nobody") as failed:
        models(Scripted(*[httpx.ConnectError("nobody") for _ in range(3)]))
    assert isinstance(failed.value, ForetokenError)


def test_an_answer_that_takes_too_long_is_not_asked_for_again(models, pauses):
    server = Scripted(httpx.ReadTimeout("slow"))
    with pytest.raises(Unreachable, match="in time"):
        models(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda: refused(400, param="top_p"), InvalidRequest),
        (lambda: refused(404, code="model_not_found"), InvalidRequest),
        (lambda: refused(413), InvalidRequest),
        (lambda: refused(401), KeyRefused),
        (lambda: refused(403), KeyRefused),
        (lambda: refused(408), ServerFailed),
        (lambda: refused(500), ServerFailed),
        (lambda: httpx.Response(502, text="<html>bad gateway</html>"), ServerFailed),
        (lambda: httpx.Response(200, text="<html>a portal</html>"), ServerFailed),
    ],
)
def test_other_refusals_are_final_and_have_their_types(models, pauses, answer, kind):
    with pytest.raises(kind) as failed:
        models(Scripted(answer()))
    assert type(failed.value) is kind
    assert not pauses


def test_a_bad_field_is_named(models):
    with pytest.raises(InvalidRequest, match="too big") as failed:
        models(Scripted(refused(400, "too big", param="top_p")))
    assert failed.value.param == "top_p"


def test_an_overlong_prompt_is_the_engines_own_error(models):
    message = str(PromptTooLong(300, 255))
    answer = refused(400, message, param="messages", code="context_length_exceeded")
    with pytest.raises(PromptTooLong) as failed:
        models(Scripted(answer))
    assert str(failed.value) == message
    assert failed.value.param == "messages"


def test_absurd_lengths_of_a_prompt_are_just_words(models):
    message = f"{'9' * 5000} tokens > 1 maximum"
    with pytest.raises(InvalidRequest, match="maximum") as failed:
        models(Scripted(refused(400, message, code="context_length_exceeded")))
    assert type(failed.value) is InvalidRequest


def test_a_server_that_sends_elsewhere_is_told_of(models):
    with pytest.raises(ServerFailed, match="to http://other/: base_url is wrong") as failed:
        models(Scripted(httpx.Response(302, headers={"location": "http://other/"})))
    assert failed.value.status == 302


def test_the_status_of_a_failure_is_told(models):
    with pytest.raises(ServerFailed, match="bad gateway") as failed:
        models(Scripted(httpx.Response(502, text="<html>bad gateway</html>")))
    assert failed.value.status == 502


# -- streams ------------------------------------------------------------------------------------


class CutOff(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __iter__(self):
        yield b'data: {"choices":[{"delta":{"content":"he"}}]}\n\n'
        raise httpx.ReadError("reset")

    async def __aiter__(self):
        for chunk in self:
            yield chunk


def read_blocking(server) -> list[str]:
    with Client(transport=httpx.MockTransport(server)) as client:
        return [delta.text for delta in client.stream_chat(HI)]


def read_nonblocking(server) -> list[str]:
    async def inner():
        async with AsyncClient(transport=httpx.MockTransport(server)) as client:
            return [delta.text async for delta in client.stream_chat(HI)]

    return asyncio.run(inner())


@pytest.fixture(params=[read_blocking, read_nonblocking])
def read(request):
    return request.param


def events(*payloads: str) -> httpx.Response:
    return httpx.Response(200, text="".join(f"data: {each}\n\n" for each in payloads))


WORD = '{"choices":[{"delta":{"content":"hi"}}]}'


def test_a_stream_that_was_refused_is_asked_for_again(read, pauses):
    assert read(Scripted(busy("1"), events(WORD, "[DONE]"))) == ["hi"]
    assert pauses == [1.0]


def test_a_stream_that_has_begun_is_never_asked_for_again(read, pauses):
    server = Scripted(httpx.Response(200, stream=CutOff()), fine())
    with pytest.raises(Unreachable, match="reset"):
        read(server)
    assert len(server.requests) == 1


def test_a_stream_that_ends_without_its_end_mark_is_an_error(read):
    with pytest.raises(Unreachable, match="before the answer did"):
        read(Scripted(events(WORD)))


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ('{"message":"x","type":"server_error","code":"unavailable"}', EngineDead),
        ('{"message":"x","type":"rate_limit_error","code":"queue_full"}', QueueFull),
        ('{"message":"x","type":"invalid_request_error","param":"n"}', InvalidRequest),
        ('{"message":"x","type":"server_error","code":null}', ServerFailed),
    ],
)
def test_an_error_in_the_middle_of_a_stream_has_its_type(read, parts, kind):
    with pytest.raises(kind) as failed:
        read(Scripted(events(WORD, f'{{"error":{parts}}}')))
    assert type(failed.value) is kind


# -- settings -----------------------------------------------------------------------------------


def test_the_key_is_the_given_one_or_that_of_the_environment(models, monkeypatch):
    monkeypatch.setenv("FORETOKEN_API_KEY", "from-env")
    server = Scripted(fine(), fine(), fine())
    models(server)
    models(server, api_key="given")
    models(server, api_key="")
    sent = [request.headers.get("authorization") for request in server.requests]
    assert sent == ["Bearer from-env", "Bearer given", None]


@pytest.mark.parametrize("url", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"])
def test_the_base_url_is_the_root_or_what_other_clients_take(models, url):
    server = Scripted(fine())
    models(server, base_url=url)
    assert str(server.requests[0].url) == "http://x:1/v1/models"


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "x:1"},
        {"max_retries": -1},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"api_key": "é中"},
        {"api_key": "a\nb"},
    ],
)
def test_settings_that_make_no_sense_are_named(options):
    with pytest.raises(InvalidRequest) as failed:
        Client(**options)
    assert failed.value.param in options
