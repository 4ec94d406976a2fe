"""Client and AsyncClient on a real server; what the model says is told to a fake engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import aclosing, closing
from typing import get_type_hints

import httpx
import pytest

from foretoken import AsyncClient, Client, EngineDead, InvalidRequest, PromptTooLong
from foretoken.api.client import (
    CallDelta,
    ChatDelta,
    ChatOptions,
    CompleteOptions,
    KeyRefused,
    message_from,
)
from foretoken.api.client.reading import read_chat, read_chunk
from foretoken.api.openai.schema import ChatRequest, CompletionRequest

SECONDS = 10
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server):
    with Client(server.url, max_retries=0, timeout=SECONDS) as client:
        yield client


def in_async(server, body):
    """Run this with an AsyncClient."""

    async def inner():
        async with AsyncClient(server.url, max_retries=0, timeout=SECONDS) as client:
            return await body(client)

    return asyncio.run(asyncio.wait_for(inner(), SECONDS))


def test_chat_answers_with_text_and_what_it_cost(client, say, engine):
    say("hello world")
    engine.tokens_per_step = 3
    answer = client.chat(HI, max_tokens=40, seed=1)
    assert (answer.text, answer.finish_reason) == ("hello world", "stop")
    assert answer.message == {"role": "assistant", "content": "hello world"}
    assert (answer.reasoning, answer.tool_calls) == ("", [])
    usage = answer.usage
    assert usage.completion_tokens == answer.raw["usage"]["completion_tokens"]
    assert usage.accepted_tokens == engine.requests[0].usage.accepted_tokens > 0
    assert usage.steps_by_accepted == engine.requests[0].usage.steps_by_accepted
    assert answer.id == answer.raw["id"]


def test_streamed_deltas_add_up_to_the_answer_and_end_with_the_usage(client, say):
    say("zażółć, 東京.")
    *deltas, last = client.stream_chat(HI)
    assert message_from(deltas) == client.chat(HI).message
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert last.usage is not None
    assert last.usage.completion_tokens > 0


def test_completions_take_texts_ids_and_lists(client):
    answer = client.complete([[5, 6], [7]], max_tokens=2, seed=0)
    assert len(answer.choices) == 2
    assert client.complete([5, 6], max_tokens=2, seed=0).text == answer.choices[0].text
    deltas = list(client.stream_complete([5, 6], max_tokens=2, seed=0))
    assert "".join(delta.text for delta in deltas) == answer.choices[0].text
    assert deltas[-1].usage.completion_tokens == 2


def test_the_async_client_says_the_same(server, client, say):
    say("hello world")

    async def body(other):
        whole = await other.chat(HI, seed=1)
        async with aclosing(other.stream_chat(HI, seed=1)) as deltas:
            message = message_from([delta async for delta in deltas])
        text = await other.complete("hello", max_tokens=2)
        streamed = [delta.text async for delta in other.stream_complete("hello", max_tokens=2)]
        return whole.message, message, text.text, "".join(streamed), await other.health()

    assert in_async(server, body) == (
        client.chat(HI).message,
        client.chat(HI).message,
        client.complete("hello", max_tokens=2).text,
        client.complete("hello", max_tokens=2).text,
        True,
    )


def test_the_deadline_is_in_seconds_and_a_prediction_may_be_a_text(client, engine):
    client.chat(HI, deadline=2.5, prediction="hello", max_tokens=1)
    assert 0.0 < engine.requests[0].deadline <= 2.5, "what is left of it"
    assert engine.requests[0].prediction


def test_options_reach_the_engine(client, engine):
    client.chat(HI, max_tokens=1, top_k=7, cache_salt="me", priority=-3, speculation="off")
    request = engine.requests[0]
    assert request.sampling.params.top_k == 7
    assert (request.namespace, request.priority, request.depth) == ("me", -3, 0)


def test_a_misspelt_option_is_refused_and_nothing_is_sent(client, engine):
    with pytest.raises(InvalidRequest, match="max_token is not an option") as failed:
        client.chat(HI, max_token=5)
    assert failed.value.param == "max_token"
    assert not engine.requests


@pytest.mark.parametrize(
    ("send", "param"),
    [
        (lambda client: client.chat(None), "messages"),
        (lambda client: client.chat("hi"), "messages"),
        (lambda client: client.chat(HI, temperature=float("nan")), "temperature"),
        (lambda client: client.chat(HI, deadline=float("inf")), "deadline"),
        (lambda client: client.chat(HI, deadline="1 s"), "deadline"),
        (lambda client: client.chat(HI, extra_body=[1]), "extra_body"),
        (lambda client: client.chat(HI, extra_body={"top_p": float("inf")}), "top_p"),
        (lambda client: client.prewarm(HI, prompt_cache_options=1), "prompt_cache_options"),
        (lambda client: client.branches(None, messages=HI), "branches"),
        (lambda client: client.tokenize(messages=5), "messages"),
        (lambda client: client.detokenize(None), "token_ids"),
        (lambda client: client.model("\ud800"), "name"),
        (lambda client: client.model(None), "name"),
        (lambda client: client.explain_cache("\ud800"), "response_id"),
        (lambda client: client.explain_cache("a", salt="\ud800"), "cache_salt"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_name(client, engine, send, param):
    with pytest.raises(InvalidRequest) as failed:
        send(client)
    assert failed.value.param == param
    assert not engine.requests


def test_extra_body_goes_along(client):
    with pytest.raises(InvalidRequest) as failed:
        client.chat(HI, extra_body={"audio": {"voice": "x"}})
    assert failed.value.param == "audio"


@pytest.mark.parametrize(
    ("options", "body"), [(ChatOptions, ChatRequest), (CompleteOptions, CompletionRequest)]
)
def test_every_option_is_a_field_of_the_body(options, body):
    fields = {*body.__struct_fields__, "extra_body", "deadline"}
    assert set(get_type_hints(options)) <= fields


def test_a_bad_value_is_the_engines_own_error(client):
    with pytest.raises(InvalidRequest, match="top_p") as failed:
        client.chat(HI, top_p=3.0)
    assert failed.value.param == "top_p"
    with pytest.raises(PromptTooLong):
        client.chat([{"role": "user", "content": "hello " * 500}])
    with pytest.raises(InvalidRequest, match="JSON"):
        client.chat(HI, stop=object())


def test_a_dead_engine_is_told(client, server, engine):
    assert client.health() is True
    server.do(engine.die)
    assert client.health() is False
    with pytest.raises(EngineDead):
        client.chat(HI)


def test_a_wrong_key_is_refused(serve):
    server = serve(api_keys=("right",))
    with Client(server.url, api_key="wrong") as client, pytest.raises(KeyRefused):
        client.models()
    with Client(server.url, api_key="right") as client:
        assert client.models()[0].id == "tiny/model"
        assert client.model("tiny/model").max_model_len == 256


def test_texts_go_to_tokens_and_back(client, tokenizer):
    ids = client.tokenize("hello world")
    assert ids == tokenizer.encode_word("hello world")
    assert client.detokenize(ids) == "hello world"
    assert len(client.tokenize(messages=HI)) > len(client.tokenize("hi"))


def test_the_cache_is_looked_at_and_flushed(client, engine):
    assert client.cache()["total_pages"] == 10
    assert client.flush_cache(salt="me") == 3
    assert client.flush_cache() == 3
    assert engine.flushed == [("me",), ()]


def test_prewarming_says_nothing_and_leaves_the_prompt_in_the_cache(client, engine):
    usage = client.prewarm(HI, cache_salt="me")
    (request,) = engine.requests
    assert request.namespace == "me"
    assert usage.prompt_tokens == request.prompt_len
    assert usage.completion_tokens == 0


def test_branches_share_their_beginning_and_have_their_own_ends(server, client, engine):
    adds = [{"messages": [{"role": "user", "content": word}]} for word in ("one", "two")]
    answer = client.branches(adds, messages=HI, max_tokens=3, seed=0)
    assert [branch.index for branch in answer.branches] == [0, 1]
    assert [branch.usage.completion_tokens for branch in answer.branches] == [3, 3]
    assert answer.usage.completion_tokens == 6
    texts = client.branches([{"prompt": [7]}, {"prompt": [8]}], prompt=[5, 6], max_tokens=3, seed=0)
    assert [request.tokens[2] for request in engine.requests[2:]] == [7, 8]
    assert len(texts.branches) == 2

    async def body(other):
        return await other.branches(adds, messages=HI, max_tokens=3, seed=0)

    assert in_async(server, body).branches == answer.branches


@pytest.mark.parametrize("beginning", [{}, {"messages": HI, "prompt": "hi"}])
def test_branches_begin_with_messages_or_a_prompt(client, beginning):
    with pytest.raises(InvalidRequest, match="not both"):
        client.branches([{}], **beginning)


def test_why_a_prompt_missed_is_told(serve, engine):
    asked = []

    def answer(request):
        asked.append(request.url)
        return httpx.Response(200, json={"matched_tokens": 3})

    with Client(transport=httpx.MockTransport(answer)) as client:
        assert client.explain_cache("r1", previous_id="r0", salt="me") == {"matched_tokens": 3}
        client.explain_cache("r1")
    assert dict(asked[0].params) == {"response_id": "r1", "previous_id": "r0", "cache_salt": "me"}
    assert dict(asked[1].params) == {"response_id": "r1"}


def leave(server, is_aborted) -> None:
    with Client(server.url) as client:
        with closing(client.stream_chat(HI)) as deltas:
            next(deltas)
        assert is_aborted(), "although the client stays open"


def leave_by_break(server, is_aborted) -> None:
    with Client(server.url) as client:
        for _ in client.stream_chat(HI):
            break
        assert is_aborted()


def leave_async(server, is_aborted) -> None:
    async def body(client):
        async with aclosing(client.stream_chat(HI)) as deltas:
            await anext(deltas)
        assert await asyncio.to_thread(is_aborted)

    in_async(server, body)


@pytest.mark.parametrize("leaving", [leave, leave_by_break, leave_async])
def test_leaving_a_stream_ends_the_request_on_the_server(server, engine, leaving):
    engine.by_hand = True

    def step_once() -> None:
        engine.submitted.acquire(timeout=SECONDS)
        server.do(engine.step)

    stepping = threading.Thread(target=step_once)
    stepping.start()
    leaving(server, lambda: engine.was_aborted.acquire(timeout=SECONDS))
    stepping.join(SECONDS)


def test_connections_are_used_again_after_a_stream(client):
    pool = client._http._transport._pool
    list(client.stream_chat(HI, max_tokens=2))
    (connection,) = pool.connections
    client.models()
    assert pool.connections == [connection]


# -- what the wire says -------------------------------------------------------------------------


def test_thinking_and_calls_are_read_from_a_whole_answer():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [call]}
    body = {"id": "x", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    answer = read_chat(json.dumps(body).encode())
    (found,) = answer.tool_calls
    assert (answer.text, answer.reasoning, found.parsed()) == ("", "hm", {"a": 1})
    assert answer.message["tool_calls"] == [call]
    assert found.reply("3") == {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_pieces_of_a_call_are_put_together_by_their_index():
    pieces = [
        CallDelta(index=0, id="c0", name="add", arguments='{"a"'),
        CallDelta(index=1, id="c1", name="mul"),
        CallDelta(index=0, arguments=":1}"),
    ]
    message = message_from(ChatDelta(tool_calls=[piece]) for piece in pieces)
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions[0] == {"name": "add", "arguments": '{"a":1}'}
    assert functions[1]["name"] == "mul"


def test_a_chunk_with_a_piece_of_a_call_is_one_delta():
    call = {"index": 1, "function": {"arguments": "{"}}
    chunk = {"choices": [{"index": 2, "delta": {"tool_calls": [call]}}]}
    (delta,) = read_chunk(json.dumps(chunk).encode())
    assert (delta.index, delta.tool_calls) == (2, [CallDelta(index=1, arguments="{")])


def test_importing_foretoken_brings_no_httpx():
    code = (
        "import sys, foretoken\n"
        "assert not {'httpx', 'torch'} & set(sys.modules)\n"
        "assert foretoken.Client.__name__ == 'Client'\n"
        "assert 'httpx' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
