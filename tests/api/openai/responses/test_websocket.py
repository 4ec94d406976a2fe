"""Responses over WebSockets: the events of HTTP, in lanes, cancelled, resumed, and guarded."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from foretoken import QueueFull
from foretoken.api.dialects.responses.answers import ResponseBody
from foretoken.api.server.sockets.connection import ResponsesSocket
from foretoken.api.server.sockets.events import read_event
from foretoken.api.serving.errors import ApiError
from foretoken.api.serving.limits import Limits
from support.fake_engine import FakeEngine

SECONDS = 20.0
Event = dict[str, Any]
HANDSHAKE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
SCOPE = {
    "type": "websocket", "path": "/v1/responses", "scheme": "ws", "headers": [], "asgi": {},
    "state": {},
}  # fmt: skip
DONE = b'data: {"type":"response.completed"}\n\n'
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


class Socket:
    """A client of a server's WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **event: Any) -> None:
        self.connection.send(json.dumps(event))

    def create(self, **body: Any) -> None:
        self.send(type="response.create", **{"input": "hi", "max_output_tokens": 4} | body)

    def next(self) -> Event:
        return json.loads(self.connection.recv(SECONDS))

    def events(self) -> list[Event]:
        """The events up to the last one of a response."""
        found = [self.next()]
        while found[-1]["type"] not in (*TERMINAL, "error"):
            found.append(self.next())
        return found

    def ask(self, **body: Any) -> Event:
        """The response to a request."""
        self.create(**body)
        return self.events()[-1]["response"]


@contextmanager
def socket(server: Any, path: str = "/v1/responses", **headers: str) -> Iterator[Socket]:
    url = server.url.replace("http", "ws") + path
    with connect(url, additional_headers=headers, open_timeout=SECONDS) as connection:
        yield Socket(connection)


def refusal(server: Any, path: str = "/v1/responses", **headers: str) -> tuple[int, str | None]:
    with pytest.raises(InvalidStatus) as caught, socket(server, path, **headers):
        pass
    answer = caught.value.response
    return answer.status_code, json.loads(answer.body)["error"]["code"]


def streamed(server: Any, **body: Any) -> list[Event]:
    """The events of the same request over HTTP."""
    body = {"input": "hi", "max_output_tokens": 4, "stream": True} | body
    lines = httpx.post(f"{server.url}/v1/responses", json=body, timeout=SECONDS).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def shape(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (each["type"], each["sequence_number"], each.get("delta"), each.get("text"))
        for each in events
    ]


def wait_for(server: Any, holds: Callable[[], bool]) -> None:
    """Wait until something holds on the server's loop."""
    while not server.do(holds):
        pass


def go_on(server: Any, engine: FakeEngine) -> None:
    """Let an engine that was stepped by hand run by itself."""

    def wake() -> None:
        engine.by_hand = False
        engine._work.set()

    server.do(wake)


# -- events -------------------------------------------------------------------------------------


def test_the_events_are_those_of_http(server: Any, say: Any) -> None:
    say("Hello there.")
    with socket(server) as client:
        client.create(max_output_tokens=20)
        found = client.events()
    wanted = streamed(server, max_output_tokens=20)
    assert [kind for kind, *_ in shape(found)][:2] == ["response.created", "response.in_progress"]
    assert "".join(each.get("delta", "") for each in found) == "Hello there."
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Hello there."
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert {kind for kind, *_ in shape(found)} == {kind for kind, *_ in shape(wanted)}


def test_turns_continue_each_other_also_those_that_are_not_stored(server: Any) -> None:
    with socket(server) as client:
        first = client.ask(store=False)
        second = client.ask(store=False, input="and?", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        url = f"{server.url}/v1/responses"
        for each in (first, second):
            assert httpx.get(f"{url}/{each['id']}").status_code == 404
            assert httpx.get(f"{url}/{each['id']}/input_items").status_code == 404
        kept = client.ask()
        assert httpx.get(f"{url}/{kept['id']}").status_code == 200
    with socket(server) as client:
        assert client.ask(previous_response_id=kept["id"])["status"] == "incomplete"
        client.create(previous_response_id=second["id"])
        [error] = client.events()
    assert (error["type"], error["status"]) == ("error", 400)
    assert error["error"]["code"] == "previous_response_not_found"
    assert error["error"]["param"] == "previous_response_id"


def test_a_connection_keeps_only_ids_of_responses_to_forget(server: Any) -> None:
    with socket(server) as client:
        for _ in range(20):
            client.ask(store=False)

        def num_responses() -> int:
            gc.collect()
            return sum(isinstance(each, ResponseBody) for each in gc.get_objects())

        assert server.do(num_responses) < 10


def test_a_warm_up_generates_nothing_and_can_be_continued(server: Any, engine: FakeEngine) -> None:
    with socket(server) as client:
        warm = client.ask(generate=False, input="a long beginning", store=False)
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert warm["usage"]["output_tokens"] == 0
        answer = client.ask(input="go on", previous_response_id=warm["id"])
    assert answer["usage"]["output_tokens"] == 4
    assert answer["usage"]["input_tokens"] > warm["usage"]["input_tokens"]


def test_lanes_run_side_by_side_and_each_in_its_order(server: Any, engine: FakeEngine) -> None:
    engine.by_hand = True
    with socket(server) as client:
        for text, lane in (("a", "x"), ("b", "x"), ("c", "y")):
            client.create(input=text, stream_id=lane)
        wait_for(server, lambda: len(engine.requests) == 2)  # the second of x waits for the first
        begun = [client.next() for _ in range(4)]
        assert {each["stream_id"] for each in begun} == {"x", "y"}
        go_on(server, engine)
        ended: list[str] = []
        created: list[tuple[str, str]] = []
        while len(ended) < 3:
            event = client.next()
            if event["type"] == "response.created":
                created.append((event["stream_id"], "x" if "x" in ended else "-"))
            if event["type"] in TERMINAL:
                ended.append(event["stream_id"])
    assert sorted(ended) == ["x", "x", "y"]
    assert created == [("x", "x")], "it begins once the first response of its lane has ended"


def test_requests_without_a_lane_run_one_after_another(server: Any) -> None:
    with socket(server) as client:
        for index in range(3):
            client.create(metadata={"n": str(index)})
        ends = [client.events()[-1]["response"]["metadata"]["n"] for _ in range(3)]
    assert ends == ["0", "1", "2"]


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "response.create", "temperature": "hot"}, "temperature"),
        ({"type": "response.create", "max_output_tokens": 0}, "max_output_tokens"),
        ({"type": "response.create", "input": []}, "input"),
        ({"type": "response.create", "background": True}, "background"),
        ({"type": "response.create", "generate": "no"}, "generate"),
        ({"type": "response.create", "stream_id": ""}, "stream_id"),
        ({"type": "response.create", "stream_id": 3}, "stream_id"),
        ({"type": "response.steer", "input": "x"}, "type"),
        ({"input": "x"}, "type"),
        ({"type": "response.cancel", "response_id": 4}, "response_id"),
        ({"type": "response.cancel", "response_id": "resp_0"}, "response_id"),
        ({"type": "response.resume", "response_id": "resp_0"}, "starting_after"),
        ({"type": "response.resume", "starting_after": 0}, "response_id"),
        ({"type": "response.resume", "starting_after": 0, "response_id": "a/b"}, "response_id"),
        ({"type": "response.resume", "starting_after": -2, "response_id": "a"}, "starting_after"),
        ({"type": "response.cancel"}, "response_id"),
    ],
)
def test_a_bad_event_gets_an_error_that_names_its_field(
    server: Any, event: Event, param: str
) -> None:
    with socket(server) as client:
        client.send(**{"input": "hi"} | event)
        error = client.next()
        is_known = event.get("type") != "response.cancel" or event.get("response_id") == 4
        assert (error["type"], error["status"]) == ("error", 400 if is_known else 404)
        assert error["error"]["param"] == param
        assert client.ask()["status"] == "incomplete", "the connection goes on"


def test_what_is_no_json_gets_an_error(server: Any) -> None:
    with socket(server) as client:
        for data in ("{", "[1]", '"a"', "[" * 100_000, b"\xff", b'{"type": "\xff"}'):
            client.connection.send(data)
            error = client.next()
            assert (error["type"], error["status"]) == ("error", 400)
    with pytest.raises(ApiError, match="JSON"):
        read_event(b"\xff")


def test_a_full_queue_is_an_error_with_its_time_to_wait(server: Any, engine: FakeEngine) -> None:
    engine.refusal = QueueFull("the queue is full", retry_after=2)
    with socket(server) as client:
        client.create(stream_id="x")
        [error] = client.events()
    assert (error["status"], error["error"]["code"]) == (429, "queue_full")
    assert error["error"]["headers"]["retry-after"] == "2"
    assert error["stream_id"] == "x"


def test_too_many_waiting_responses_are_refused(server: Any, engine: FakeEngine) -> None:
    engine.by_hand = True
    with socket(server) as client:
        for _ in range(66):
            client.create()
        event = client.next()
        while event["type"] != "error":
            event = client.next()
    assert (event["status"], event["error"]["code"]) == (429, "too_many_responses")


def test_a_message_beyond_the_limit_of_bodies_closes_the_connection(serve: Any) -> None:
    with socket(serve(max_body_bytes=5000)) as client:
        client.create(input="x" * 6000)
        with pytest.raises(ConnectionClosed) as caught:
            client.next()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


# -- guards -------------------------------------------------------------------------------------


def test_a_page_of_another_origin_cannot_connect(serve: Any) -> None:
    server = serve(loopback_only=True)
    for origin in ("https://example.com", "http://127.0.0.1:1", "null"):
        assert refusal(server, Origin=origin) == (403, "foreign_origin")
    answer = httpx.get(f"{server.url}/v1/responses", headers=HANDSHAKE | {"host": "example.com"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")
    with socket(server, Origin=server.url) as client:
        assert client.ask()["status"] == "incomplete"
    with socket(serve(cors_origins=("https://example.com",)), Origin="https://example.com"):
        pass


def test_a_key_is_needed_where_the_server_has_one(serve: Any) -> None:
    server = serve(api_keys=("secret",))
    assert refusal(server) == (401, "invalid_api_key")
    assert refusal(server, Authorization="Bearer wrong") == (401, "invalid_api_key")
    with socket(server, Authorization="Bearer secret") as client:
        kept = client.ask()
    answer = httpx.get(
        f"{server.url}/v1/responses/{kept['id']}", headers={"authorization": "Bearer secret"}
    )
    assert answer.status_code == 200


def test_no_fault_of_a_client_is_logged_as_an_error(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn logs an error for each refused handshake, and a traceback for text in a bad form."""
    caplog.set_level(logging.ERROR, "uvicorn.error")  # the server of tests has silenced it
    assert refusal(server, "/other")[0] == 404
    with socket(server) as client:
        for _ in range(2):  # in one piece: the second arrives when the connection is closed
            client.connection.protocol.send_text(b"\xff")
        client.connection.socket.sendall(b"".join(client.connection.protocol.data_to_send()))
        with pytest.raises(ConnectionClosed) as caught:
            client.next()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1007
    wait_for(server, lambda: not server.llm._answers)
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    names = ("asyncio", "uvicorn.error")
    assert [each.getMessage() for each in errors if each.name in names] == []


def test_other_paths_have_no_websocket(server: Any) -> None:
    assert refusal(server, "/v1/chat/completions") == (405, "method_not_allowed")
    assert refusal(server, "/other/v1/responses") == (404, "not_found")


def test_it_is_served_below_a_root_path(serve: Any) -> None:
    with socket(serve(root_path="/llm"), "/llm/v1/responses") as client:
        assert client.ask()["status"] == "incomplete"


def test_connections_beyond_the_limit_are_refused(serve: Any) -> None:
    server = serve(max_connections=1)
    with socket(server) as client:
        assert refusal(server) == (503, "too_many_connections")
        assert client.ask()["status"] == "incomplete"


def test_no_time_limit_of_requests_ends_an_idle_connection(serve: Any) -> None:
    with socket(serve(header_seconds=0.1, body_seconds=0.1, idle_seconds=0.1)) as client:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                client.connection.recv(0.3)
            assert client.ask()["status"] == "incomplete"


def test_a_client_that_answers_no_ping_is_dropped(serve: Any, engine: FakeEngine) -> None:
    server = serve(ping_seconds=0.01, write_seconds=0.01)
    engine.by_hand = True
    with socket(server) as client:
        client.create()
        wait_for(server, lambda: bool(server.llm._answers))
        with client.connection.protocol_mutex:  # its thread cannot handle what arrives
            wait_for(server, lambda: not server.llm._answers)


# -- the end of a connection ----------------------------------------------------------------------


def test_a_client_that_leaves_ends_its_responses(server: Any, engine: FakeEngine) -> None:
    engine.by_hand = True
    with socket(server) as client:
        client.create(stream_id="a")
        client.create(stream_id="b")
        client.create(stream_id="b")
        wait_for(server, lambda: len(server.llm._answers) == 2)
    wait_for(server, lambda: not server.llm._answers)
    assert len(engine.requests) == 2


def test_a_cancelled_response_ends_at_once(server: Any, engine: FakeEngine) -> None:
    engine.by_hand = True
    with socket(server) as client:
        client.create(stream_id="a")
        client.create(stream_id="b")
        events = [client.next() for _ in range(4)]
        ids = {each["stream_id"]: each["response"]["id"] for each in events}
        client.send(type="response.cancel", response_id=ids["b"])
        last = client.next()
        assert (last["type"], last["stream_id"]) == ("response.cancelled", "b")
        assert (last["response"]["id"], last["response"]["status"]) == (ids["b"], "cancelled")
        assert last["sequence_number"] == 2
        wait_for(server, lambda: [*server.llm._answers] == [ids["a"]])
        client.send(type="response.cancel", stream_id="a")
        assert client.next()["response"]["id"] == ids["a"]
        wait_for(server, lambda: not server.llm._answers)
        go_on(server, engine)
        assert client.ask()["status"] == "incomplete"


def test_a_cancel_of_a_lane_spares_the_responses_of_others_that_have_no_id_yet() -> None:
    async def body() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        began: asyncio.Queue[None] = asyncio.Queue()
        frames: asyncio.Queue[Event] = asyncio.Queue()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await began.put(None)
            await receive()  # its client leaves

        layer = ResponsesSocket(app, Limits(), lambda scope: None)
        await events.put({"type": "websocket.connect"})
        served = asyncio.create_task(layer(dict(SCOPE), events.get, frames.put))
        for event in ({"stream_id": "a"}, {"stream_id": "b"}):
            event |= {"type": "response.create", "input": "hi"}
            await events.put({"type": "websocket.receive", "text": json.dumps(event)})
            await began.get()
        cancel = {"type": "response.cancel", "stream_id": "b"}
        await events.put({"type": "websocket.receive", "text": json.dumps(cancel)})
        assert (await frames.get())["type"] == "websocket.accept"
        last = json.loads((await frames.get())["text"])
        assert (last["type"], last["stream_id"]) == ("response.cancelled", "b")
        await events.put({"type": "websocket.disconnect"})
        await served

    asyncio.run(asyncio.wait_for(body(), SECONDS))


def test_a_response_that_did_not_begin_yet_is_cancelled() -> None:
    """Both events have arrived before the lane of the response runs for the first time."""

    async def body() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        frames: asyncio.Queue[Event] = asyncio.Queue()
        served_bodies = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            served_bodies.append(json.loads((await receive())["body"])["input"])
            await receive()  # its client leaves

        layer = ResponsesSocket(app, Limits(), lambda scope: None)
        await events.put({"type": "websocket.connect"})
        create = {"type": "response.create", "stream_id": "a"}
        cancel = {"type": "response.cancel", "stream_id": "a"}
        for event in (create | {"input": "one"}, create | {"input": "two"}, cancel):
            await events.put({"type": "websocket.receive", "text": json.dumps(event)})
        served = asyncio.create_task(layer(dict(SCOPE), events.get, frames.put))
        assert (await frames.get())["type"] == "websocket.accept"
        last = json.loads((await frames.get())["text"])
        assert (last["type"], last["stream_id"]) == ("response.cancelled", "a")
        await events.put({"type": "websocket.disconnect"})
        await served
        assert served_bodies in ([], ["two"])  # the second one may begin before the client leaves

    asyncio.run(asyncio.wait_for(body(), SECONDS))


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_cancel_of_a_lane_passes_over_a_response_that_is_ending(has_ended: bool) -> None:
    async def body() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        began: asyncio.Queue[str] = asyncio.Queue()
        frames: asyncio.Queue[Event] = asyncio.Queue()
        may_leave = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await began.put(json.loads((await receive())["body"])["input"])
            if has_ended:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": DONE, "more_body": True})
            await may_leave.wait()

        layer = ResponsesSocket(app, Limits(), lambda scope: None)
        await events.put({"type": "websocket.connect"})
        served = asyncio.create_task(layer(dict(SCOPE), events.get, frames.put))
        assert (await frames.get())["type"] == "websocket.accept"
        create = {"type": "response.create", "stream_id": "a"}
        cancel = {"type": "response.cancel", "stream_id": "a"}
        for event in (create | {"input": "one"}, create | {"input": "two"}):
            await events.put({"type": "websocket.receive", "text": json.dumps(event)})
        assert await began.get() == "one"
        if has_ended:
            assert json.loads((await frames.get())["text"])["type"] == "response.completed"
        for _ in range(2 - has_ended):
            await events.put({"type": "websocket.receive", "text": json.dumps(cancel)})
        # the error of a cancel that comes too late shows that the earlier ones were processed
        await events.put({"type": "websocket.receive", "text": json.dumps(cancel)})
        assert json.loads((await frames.get())["text"])["status"] == 404
        may_leave.set()
        for _ in range(2 - has_ended):
            last = json.loads((await frames.get())["text"])
            assert (last["type"], last["stream_id"]) == ("response.cancelled", "a")
        await events.put({"type": "websocket.disconnect"})
        await served
        assert began.empty(), "the second response was cancelled before it began"

    asyncio.run(asyncio.wait_for(body(), SECONDS))


def test_an_answer_in_another_form_is_an_error_of_its_lane() -> None:
    async def body() -> None:
        events: asyncio.Queue[Event] = asyncio.Queue()
        frames: asyncio.Queue[Event] = asyncio.Queue()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"<p>no gateway</p>"})

        layer = ResponsesSocket(app, Limits(), lambda scope: None)
        await events.put({"type": "websocket.connect"})
        served = asyncio.create_task(layer(dict(SCOPE), events.get, frames.put))
        create = {"type": "response.create", "input": "hi", "stream_id": "a"}
        await events.put({"type": "websocket.receive", "text": json.dumps(create)})
        assert (await frames.get())["type"] == "websocket.accept"
        error = json.loads((await frames.get())["text"])
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 500, "a")
        await events.put({"type": "websocket.disconnect"})
        await served

    asyncio.run(asyncio.wait_for(body(), SECONDS))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_cancelled_response_ends_also_where_it_could_be_resumed(
    serve: Any, engine: FakeEngine, is_resumed: bool
) -> None:
    server = serve(resume_seconds=3600)
    engine.by_hand = True
    with socket(server) as client:
        client.create(cache_salt="a")
        response_id = client.next()["response"]["id"]
        client.next()
        wait_for(server, lambda: len(server.llm._answers) == 1)
        if not is_resumed:
            client.send(type="response.cancel")
            assert client.next()["type"] == "response.cancelled"
    if is_resumed:
        with socket(server) as client:
            client.send(
                type="response.resume", response_id=response_id, starting_after=-1, cache_salt="a"
            )
            assert [client.next()["sequence_number"] for _ in range(2)] == [0, 1]
            client.send(type="response.cancel", response_id=response_id)
            last = client.next()
            assert (last["type"], last["sequence_number"]) == ("response.cancelled", 2)
            assert last["response"]["id"] == response_id
    wait_for(server, lambda: not server.llm._answers)
    with socket(server) as client:
        client.send(
            type="response.resume", response_id=response_id, starting_after=-1, cache_salt="a"
        )
        assert client.next()["error"]["code"] == "stream_not_found"


@pytest.mark.parametrize("over", ["websocket", "http"])
def test_a_dropped_response_is_resumed_after_an_event(
    serve: Any, engine: FakeEngine, over: str
) -> None:
    server = serve(resume_seconds=60)
    engine.by_hand = True
    with socket(server, Authorization="Bearer x") as client:
        client.create()
        created, progress = client.next(), client.next()
    response_id, after = created["response"]["id"], progress["sequence_number"]
    wait_for(server, lambda: len(server.llm._answers) == 1)
    go_on(server, engine)
    if over == "websocket":
        with socket(server, Authorization="Bearer x") as client:
            client.send(type="response.resume", response_id=response_id, starting_after=after)
            events = client.events()
            client.send(type="response.resume", response_id=response_id, starting_after=999)
            assert client.next()["error"]["code"] == "stream_not_found"
        with socket(server) as client:  # another caller
            client.send(type="response.resume", response_id=response_id, starting_after=after)
            assert client.next()["error"]["code"] == "stream_not_found"
    else:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as sdk:
            stream = sdk.responses.retrieve(response_id, stream=True, starting_after=after)
            events = [each.model_dump() for each in stream]
            whole = [*sdk.responses.retrieve(response_id, stream=True)]
        assert [each.sequence_number for each in whole] == list(range(len(whole)))
        for wrong in ("x", 10**16):
            query = f"stream=true&starting_after={wrong}"
            answer = httpx.get(f"{server.url}/v1/responses/{response_id}?{query}").json()["error"]
            assert answer["param"] == "starting_after"
            assert "at most 15 digits" in answer["message"]
    assert [each["sequence_number"] for each in events] == [
        *range(after + 1, after + 1 + len(events))
    ]
    assert events[-1]["type"] == "response.incomplete"


def test_without_resume_seconds_there_is_nothing_to_resume(server: Any) -> None:
    with socket(server) as client:
        kept = client.ask()
    answer = httpx.get(f"{server.url}/v1/responses/{kept['id']}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    with socket(server) as client:
        client.send(type="response.resume", response_id=kept["id"], starting_after=0)
        error = client.next()
    assert error["status"] == 400
    assert "--resume-seconds" in error["error"]["message"]


# -- the SDK ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # of the client
def test_the_openai_client_connects(server: Any, say: Any) -> None:
    say("Over the wire.")
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    with sdk as client, client.responses.connect() as connection:
        connection.response.create(input="hi", stream_id="lane", max_output_tokens=20)
        text = ""
        for event in connection:
            assert event.stream_id == "lane"
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.completed":
                break
        assert text == event.response.output_text == "Over the wire."


def test_many_connections_at_once(server: Any) -> None:
    found: list[str] = []

    def ask() -> None:
        with socket(server) as client:
            found.append(client.ask()["status"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(SECONDS)
    assert found == ["incomplete"] * 8
