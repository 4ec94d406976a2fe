"""Whole answers of /v1/responses, through the real client."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pydantic
import pytest

from foretoken.core.errors import EngineDead, PromptTooLong, QueueFull

SPECULATION = {
    "proposed_tokens", "accepted_tokens", "verify_steps", "tree_steps", "accepted_by_source",
    "proposed_by_source", "steps_by_accepted",
}  # fmt: skip
NAMED = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def ask(client, input="hi", **options):
    return client.responses.create(model="tiny/model", input=input, **options)


def test_an_answer_has_the_clients_shape(client, say, engine):
    say("hello world")
    engine.tokens_per_step = 2
    answer = ask(client, metadata={"a": "b"}, instructions="be brief", user="me")
    openai.types.responses.Response.model_validate(answer.model_dump())
    assert answer.id.startswith("resp_")
    assert answer.object == "response"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.model == "tiny/model"
    assert answer.completed_at >= answer.created_at > 1e9
    assert answer.output_text == "hello world"
    [message] = answer.output
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    [part] = message.content
    assert (part.type, part.annotations, part.logprobs) == ("output_text", [], [])
    assert answer.metadata == {"a": "b"}
    assert answer.instructions == "be brief"
    assert (answer.tool_choice, answer.tools, answer.parallel_tool_calls) == ("auto", [], True)
    assert (answer.temperature, answer.top_p, answer.truncation) == (1.0, 1.0, "disabled")
    assert answer.text.format.type == "text"
    assert answer.store is True
    assert answer.user == "me"


def test_usage_tells_what_the_cache_and_speculation_saved(client, say, engine):
    say("hello world")
    engine.tokens_per_step = 2
    usage = ask(client).usage
    [request] = engine.requests
    assert usage.input_tokens == request.prompt_len
    assert usage.output_tokens == request.usage.completion_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0
    assert "cache_write_tokens" in usage.input_tokens_details.model_fields_set
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert set(usage.speculation) == SPECULATION


def test_an_answer_cut_by_its_limit_is_incomplete(client, engine):
    answer = ask(client, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 3
    assert answer.max_output_tokens == 3
    assert answer.completed_at is None


def test_an_answer_of_no_words_is_one_empty_message(client, say):
    say("")
    answer = ask(client)
    assert answer.status == "completed"
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


def test_a_stop_string_is_told(client, say):
    say("hello there. Stop here. And more")
    answer = ask(client, extra_body={"stop": "Stop here"})
    assert answer.output_text == "hello there. "
    assert answer.status == "completed"
    assert answer.stop_reason == "Stop here"


def test_fields_reach_the_engine(client, engine):
    extra = {
        "top_k": 5, "min_p": 0.1, "stop_token_ids": [9], "ignore_eos": True, "speculation": 2,
        "cache_salt": "a", "priority": 4, "deadline_ms": 1500, "seed": 11, "frequency_penalty": -1,
        "prediction": "hello",
    }  # fmt: skip
    ask(
        client, max_output_tokens=3, temperature=0.5, top_p=0.9, top_logprobs=2, extra_body=extra,
        include=["reasoning.encrypted_content"], prompt_cache_key="k", safety_identifier="s",
        service_tier="auto", truncation="auto", reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"}, parallel_tool_calls=False,
        stream_options={"include_obfuscation": False}, max_tool_calls=3,
    )  # fmt: skip
    [request] = engine.requests
    params = request.sampling.params
    assert (params.max_tokens, params.temperature, params.top_p) == (3, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.frequency_penalty) == (5, 0.1, -1)
    assert (params.seed, params.logprobs, params.cache_salt) == (11, 2, "a")
    assert (params.priority, params.deadline, params.speculation) == (4, 1.5, 2)
    assert request.stop_ids == {9}
    assert params.prediction == "hello"


def test_settings_are_told_as_they_are_in_force(client, engine):
    answer = ask(
        client, max_output_tokens=1, temperature=0.5, truncation="auto", top_logprobs=2,
        reasoning={"effort": "low"}, parallel_tool_calls=False, prompt_cache_key="k",
    )  # fmt: skip
    assert answer.temperature == 0.5
    assert answer.truncation == "disabled", "nothing is dropped here"
    assert answer.top_logprobs == 2
    assert answer.reasoning.effort == "low"
    assert answer.parallel_tool_calls is False
    assert answer.prompt_cache_key == "k"


def test_logprobs_have_one_entry_per_token_with_its_bytes(client, say):
    say("é 東")
    include = ["message.output_text.logprobs"]
    answer = ask(client, top_logprobs=2, include=include)
    entries = answer.output[0].content[0].logprobs
    assert len(entries) == answer.usage.output_tokens
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == "é 東"
    assert all(math.isclose(e.logprob, -0.25) for e in entries)
    assert [len(e.top_logprobs) for e in entries] == [2] * len(entries)
    [none] = ask(client, include=include).output[0].content
    assert [len(e.top_logprobs) for e in none.logprobs] == [0] * len(entries)


def test_a_model_that_is_not_here_is_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="other", input="hi")
    assert caught.value.code == "model_not_found"


REFUSED = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": openai.omit}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"extra_body": {"guided_json": None, "suffix": "x"}}, "suffix"),
    ({"extra_body": {"guided_json": {"type": "x"}}}, "guided_json"),
    ({"extra_body": {"guided_regex": "a("}}, "guided_regex"),
    ({"extra_body": {"return_token_ids": True}}, "return_token_ids"),
    ({"extra_body": {"return_tokens_as_token_ids": 1}}, "return_tokens_as_token_ids"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [NAMED]}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"truncation": "yes"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata"),
]


def test_what_cannot_be_done_is_400_and_names_the_field(client):
    for options, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **options)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFull("full", retry_after=3.0), 429, "queue_full"),
        (EngineDead("gone"), 503, "unavailable"),
        (PromptTooLong(500, 255), 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_refuses_is_an_http_error_before_any_stream(
    client, engine, refusal, status, code, stream
):
    engine.refusal = refusal
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    if status == 400:
        assert caught.value.param == "input"


def test_an_error_in_the_middle_of_a_whole_answer_is_500(client, engine):
    engine.row_error = "a row went bad"
    with pytest.raises(openai.InternalServerError):
        ask(client)


def test_tokens_of_an_input_are_counted_without_an_answer(client, engine):
    counted = client.responses.input_tokens.count(
        model="tiny/model", input="hello there", instructions="be brief"
    )
    assert counted.object == "response.input_tokens"
    assert not engine.requests
    answer = ask(client, "hello there", instructions="be brief", max_output_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


def test_tools_of_a_provider_are_passed_over(client, say):
    say("hello")
    hosted = [{"type": "web_search"}, {"type": "custom", "name": "c"}, {"type": "local_shell"}]
    answer = ask(client, tools=hosted)
    assert answer.output_text == "hello"
    assert [(tool.type, tool.name) for tool in answer.tools] == [("custom", "c")]


def test_a_client_that_leaves_ends_its_answer(server, engine):
    engine.by_hand = True
    body = {"model": "tiny/model", "input": "hi"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/responses", json=body, timeout=0.5)
    assert engine.was_aborted.acquire(timeout=10)


def test_a_body_that_does_not_decode_is_400(server):
    for body in (b"{", b"[]", b'{"input": 5}', b'{"input": "\xff"}'):
        answer = httpx.post(f"{server.url}/v1/responses", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


class Point(pydantic.BaseModel):
    x: int
    y: int


def test_text_format_is_asked_of_the_engine_and_parsed_by_the_client(client, say, engine):
    said = json.dumps({"x": 1, "y": 2})
    say(said)
    answer = client.responses.parse(model="tiny/model", input="hi", text_format=Point)
    assert answer.output_parsed == Point(x=1, y=2)
    assert answer.text.format.type == "json_schema"
    assert answer.text.format.name == "Point"
    assert answer.text.format.schema_["required"] == ["x", "y"]
    params = engine.requests[0].sampling.params
    asked = params.grammar or json.dumps(params.json_schema)  # a grammar, where it may think first
    assert all(f'"{name}"' in asked for name in "xy")


def test_a_prompt_can_be_put_into_the_cache_without_an_answer(client, engine):
    answer = ask(client, prompt_cache_options={"prewarm": True})
    assert answer.status == "completed"
    assert answer.output == []
    assert answer.usage.output_tokens == 0
    assert answer.usage.input_tokens == engine.requests[0].prompt_len
    events = list(ask(client, stream=True, prompt_cache_options={"prewarm": True}))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


def test_why_a_prompt_missed_the_cache_is_told_where_it_is_asked(client, say, engine):
    say("hello")
    engine.page_size = 4
    first = ask(client, "hello world, hello there, the answer")
    assert first.prompt_cache_diagnostics is None
    assert "cache_explanation" not in first.usage.model_fields_set
    options = {"comparison_response_id": first.id}
    second = ask(client, "Stop here", prompt_cache_options=options)
    told = second.prompt_cache_diagnostics.explanation
    assert told["compared_with"] == first.id
    assert told["first_difference"]["now"] == "Stop here"
    unknown = ask(client, prompt_cache_options={"comparison_response_id": "resp_0"})
    assert unknown.prompt_cache_diagnostics.type == "comparison_response_not_found"
    explained = ask(client, extra_body={"explain_cache": True})
    assert explained.usage.cache_explanation["prompt_tokens"] == explained.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_deadline_cuts_is_incomplete_and_one_not_begun_is_an_error(
    server, client, engine, stream
):
    engine.by_hand = True

    def end(num_steps):
        request_id = engine.requests[-1].request_id
        for _ in range(num_steps):
            engine.step()
        engine._end(request_id)

    def answer(num_steps):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: settle(ask(client, stream=stream)))
            assert engine.submitted.acquire(timeout=10)
            server.do(lambda: end(num_steps))
            return asked.result(10)

    cut = answer(2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 2
    if stream:
        assert answer(0).error.code == "server_error"
    else:
        with pytest.raises(openai.InternalServerError) as caught:
            answer(0)
        assert caught.value.status_code == 503


def settle(answer):
    """The response at the end of a stream, or as it is."""
    return answer if hasattr(answer, "status") else [*answer][-1].response
