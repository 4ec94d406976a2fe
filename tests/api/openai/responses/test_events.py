"""Streams of /v1/responses, through the real client."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby

import httpx
import openai
import pydantic
import pytest

THOUGHT = "<think>\nHello there.\n</think>\n\n"
CALL = '<tool_call>{"name": "f", "arguments": {"x": "é 東"}}</tool_call>'
SAID = f"{THOUGHT}The answer.{CALL}\n{CALL}"
TOOLS = [
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        "strict": False,
    }
]
MESSAGE = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
FUNCTION = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
BEGIN = ["response.created", "response.in_progress"]


def stream(client, **options):
    options = {"model": "tiny/model", "input": "hi", **options}
    return list(client.responses.create(stream=True, **options))


def kinds(events):
    """Types in order, several deltas in a row told as one."""
    return [kind for kind, _ in groupby(event.type for event in events)]


def without_ids(response):
    """Return the parts of a response that two equal requests share; timing is left out."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    usage = response.usage.model_dump(exclude={"speculation", "output_tokens_details"})
    return items, usage, response.status


def test_events_come_in_order_and_are_numbered(client, say, engine):
    say("naïve café, 東京 and 😀.")
    engine.tokens_per_step = 3
    events = stream(client)
    assert kinds(events) == [*BEGIN, *MESSAGE, "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert len({e.response.id for e in events if hasattr(e, "response")}) == 1
    assert len({e.item_id for e in events if hasattr(e, "item_id")}) == 1
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == "naïve café, 東京 and 😀."
    assert not any("\ufffd" in delta for delta in deltas)
    last = events[-1].response
    assert last.output_text == "naïve café, 東京 and 😀."
    assert last.usage.output_tokens == engine.requests[0].usage.completion_tokens
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.usage is None


def test_each_step_is_one_delta_with_all_its_tokens(client, say, engine):
    say("hello world, hello there. " * 8)  # what came before it is read comes in one
    engine.tokens_per_step = 4
    events = stream(client)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    steps = engine.requests[0].usage.verify_steps
    assert 1 < len(deltas) <= steps


def test_every_event_has_its_name_on_the_wire(server, say):
    say("hello")
    body = {"model": "tiny/model", "input": "hi", "stream": True}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in answer.text


def test_thought_words_and_calls_are_items_in_order(client, say, engine):
    say(SAID)
    engine.tokens_per_step = 2
    events = stream(client, tools=TOOLS)
    wanted = [*BEGIN, *REASONING, *MESSAGE, *FUNCTION, *FUNCTION, "response.completed"]
    assert kinds(events) == wanted
    reasoning, message, first, second = events[-1].response.output
    assert reasoning.content[0].text.strip() == "Hello there."
    assert reasoning.summary == []
    assert message.content[0].text == "The answer."
    assert (first.type, first.name) == ("function_call", "f")
    assert json.loads(first.arguments) == json.loads(second.arguments) == {"x": "é 東"}
    assert first.call_id != second.call_id
    assert first.id != first.call_id
    dones = [e for e in events if e.type == "response.output_item.done"]
    assert [e.item for e in dones] == events[-1].response.output
    assert [e.output_index for e in dones] == [0, 1, 2, 3]
    adds = [e.item for e in events if e.type == "response.output_item.added"]
    assert [(item.status, getattr(item, "arguments", "")) for item in adds] == [
        ("in_progress", "")
    ] * 4


def test_calls_alone_have_no_message_beside_them(client, say):
    say(CALL)
    answer = client.responses.create(model="tiny/model", input="hi", tools=TOOLS)
    assert [item.type for item in answer.output] == ["function_call"]
    assert answer.status == "completed"


def test_no_more_than_one_call_without_parallel_calls(client, say):
    say(CALL + CALL)
    answer = client.responses.create(
        model="tiny/model", input="hi", tools=TOOLS, parallel_tool_calls=False
    )
    assert [item.type for item in answer.output] == ["function_call"]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 1000])
def test_the_answer_does_not_depend_on_how_it_is_cut(client, say, engine, tokens_per_step):
    say(SAID)
    whole = client.responses.create(model="tiny/model", input="hi", tools=TOOLS)
    engine.tokens_per_step = tokens_per_step
    events = stream(client, tools=TOOLS)
    assert without_ids(events[-1].response) == without_ids(whole)
    said = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            said[event.item_id] = said.get(event.item_id, "") + event.delta
    assert [json.loads(text) for text in said.values()] == [{"x": "é 東"}] * 2


def test_tokens_of_thought_are_counted(client, say, engine, tokenizer):
    say(f"{THOUGHT}hello")
    answer = client.responses.create(model="tiny/model", input="hi")
    counted = answer.usage.output_tokens_details.reasoning_tokens
    assert 0 < counted <= len(tokenizer.encode_word(THOUGHT))


def test_the_stream_helper_of_the_client_puts_it_together(client, say, engine):
    say(SAID)
    engine.tokens_per_step = 3
    with client.responses.stream(model="tiny/model", input="hi", tools=TOOLS) as events:
        snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert snapshots[-1] == final.output_text == "The answer."
    assert [item.type for item in final.output[2:]] == ["function_call"] * 2


class Point(pydantic.BaseModel):
    x: int


def test_the_stream_helper_parses_text_of_a_format(client, say):
    say('{"x": 5}')
    options = {"model": "tiny/model", "input": "hi", "text_format": Point}
    with client.responses.stream(**options) as events:
        assert events.get_final_response().output_parsed == Point(x=5)


def test_strict_arguments_are_parsed_by_the_client(client, say):
    say(CALL)
    strict = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    tool = {**TOOLS[0], "strict": True, "parameters": {**strict, "additionalProperties": False}}
    answer = client.responses.parse(model="tiny/model", input="hi", tools=[tool])
    assert answer.output[0].parsed_arguments == {"x": "é 東"}
    assert answer.tools[0].strict is True


def test_a_stream_cut_by_its_limit_ends_incomplete(client, engine):
    events = stream(client, max_output_tokens=3)
    assert kinds(events)[-2:] == ["response.output_item.done", "response.incomplete"]
    assert events[-2].item.status == "incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_a_call_cut_by_the_limit_is_incomplete(client, say, tokenizer):
    say(CALL)
    limit = len(tokenizer.encode_word(CALL.split("東")[0]))
    events = stream(client, tools=TOOLS, max_output_tokens=limit)
    assert kinds(events) == [*BEGIN, *FUNCTION, "response.incomplete"]
    assert events[-1].response.output[0].status == "incomplete"


def test_the_first_events_come_before_the_prompt_is_read(client, engine, server, say):
    say("hello")
    engine.by_hand = True
    with client.responses.create(model="tiny/model", input="hi", stream=True) as events:
        assert next(events).type == "response.created"
        assert next(events).type == "response.in_progress"
        engine.by_hand = False
        server.do(lambda: engine._work.set())
        assert [*events][-1].type == "response.completed"


def test_a_quiet_stream_is_kept_warm_with_comments(serve, engine):
    engine.by_hand = True
    body = {"model": "tiny/model", "input": "hi", "stream": True}
    server = serve(ping_seconds=0.01)
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert any(line == ": ping" for line in lines)


def test_an_error_in_a_stream_is_a_response_that_failed(client, say, engine):
    say("hello there")
    engine.row_error = "a row went bad"
    events = stream(client)
    assert kinds(events)[-1] == "response.failed"
    failed = events[-1].response
    assert failed.status == "failed"
    assert failed.error.code == "server_error"
    assert failed.error.message == "a row went bad"
    assert failed.output[0].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_what_failed_inside_is_not_told(client, engine, server):
    engine.by_hand = True
    with client.responses.create(model="tiny/model", input="hi", stream=True) as events:
        next(events)
        server.do(engine.die)
        last = [*events][-1]
    assert last.type == "response.failed"
    assert "secret" not in last.model_dump_json()


def test_a_client_that_leaves_a_stream_ends_its_answer(client, engine):
    engine.by_hand = True  # the answer would be complete before the client has left
    with client.responses.create(model="tiny/model", input="hi", stream=True) as events:
        next(events)
    assert engine.was_aborted.acquire(timeout=10)


def test_logprobs_are_told_in_the_stream(client, say, engine):
    say(f"{THOUGHT}é 東")
    engine.tokens_per_step = 1
    include = ["message.output_text.logprobs"]
    events = stream(client, include=include, top_logprobs=1)
    parts = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    [done] = [e for e in events if e.type == "response.output_text.done"]
    tokens = [entry.token for part in parts for entry in part]
    assert tokens == [entry.token for entry in done.logprobs]
    spelt = events[-1].response.output[1].content[0].logprobs
    said = b"".join(bytes(entry.bytes) for entry in spelt).decode()
    assert said.endswith("é 東<|im_end|>")
    assert "Hello" not in said


def test_many_streams_at_once(server, say):
    say("hello world")

    async def one(client):
        events = await client.responses.create(model="tiny/model", input="hi", stream=True)
        return [event async for event in events][-1].response.output_text

    async def body():
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(body()) == ["hello world"] * 8
