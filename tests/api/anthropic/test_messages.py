"""POST /v1/messages over plain HTTP: what goes in, what comes out, what is refused."""

from __future__ import annotations

import httpx
import pytest

from foretoken import EngineDead, QueueFull

WEATHER = {"name": "sun", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "sun", "arguments": {"at": "noon"}}\n</tool_call>'


def test_an_answer_has_anthropics_shape(post, say, engine):
    say("hello world")
    engine.tokens_per_step = 2
    answer = post()
    body = answer.json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny/model")
    assert body["content"] == [{"type": "text", "text": "hello world"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    request = engine.requests[0]
    assert usage["input_tokens"] == request.prompt_len
    assert usage["output_tokens"] == request.usage.completion_tokens
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
    assert usage["speculation"]["accepted_by_source"] == request.usage.accepted_by_source


def test_cached_tokens_are_no_input_tokens(post, say, engine):
    say("hello")
    submit = engine.submit

    def with_hit(request):
        stream = submit(request)
        request.usage.cached_tokens = 4
        return stream

    engine.submit = with_hit
    usage = post().json()["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] == engine.requests[0].prompt_len - 4


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["there"]}, "stop_sequence", "there"),
        ({"max_tokens": 4000}, "end_turn", None),
    ],
)
def test_a_stop_has_its_reason(post, say, fields, reason, sequence):
    say("hello there. Stop here")
    body = post(**fields).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_a_stop_sequence_inside_a_call_is_the_reason(post, say):
    say('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>')
    body = post(stop_sequences=["Paris"], tools=[WEATHER], max_tokens=200).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "Paris")


def test_an_answer_that_fills_the_context_says_so(post):
    assert post(max_tokens=4000).json()["stop_reason"] == "model_context_window_exceeded"


def test_sampling_fields_reach_the_engine(post, say, engine):
    say("hello")
    post(temperature=0.5, top_p=0.9, top_k=7, seed=3, speculation="off", cache_salt="me")
    params = engine.requests[0].sampling.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert (params.speculation, params.cache_salt, params.max_tokens) == ("off", "me", 100)


def test_blocks_become_the_template_s_messages(post, say, prompt):
    say("ok")
    post(
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "what"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "so "},
                    {"type": "text", "text": "then"},
                    {"type": "tool_use", "id": "toolu_1", "name": "sun", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "go on"},
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "warm"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                ],
            },
            {"role": "user", "content": "please"},
            {"role": "system", "content": "be brief"},
        ],
    )
    call = '{"name": "sun", "arguments": {"at": 1}}'
    said = [
        ("system", "A\nB"),
        ("user", "what"),
        ("assistant", f"<think>hm</think>so then<tool_call>{call}</tool_call>"),
        ("tool", "warm"),
        ("tool", "Error: no"),
        ("user", "go on\nplease"),
        ("system", "be brief"),
    ]
    rendered = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said)
    assert prompt() == f"{rendered}<|im_start|>assistant\n"


def test_an_answer_begun_by_the_caller_is_continued(post, say, prompt):
    say("B)")
    talk = [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "It is ("}]
    assert post(messages=talk).json()["content"][0]["text"] == "B)"
    assert prompt().endswith("<|im_start|>assistant\nIt is (")


@pytest.mark.parametrize(
    ("thinking", "end"),
    [("disabled", "<think></think>"), ("adaptive", "assistant\n"), ("enabled", "assistant\n")],
)
def test_thinking_is_an_option_of_the_template(post, say, prompt, thinking, end):
    say("ok")
    post(thinking={"type": thinking})
    assert prompt().endswith(end)


def test_a_thought_is_a_block_of_its_own(post, say):
    say("<think>hm</think>hello")
    thought, text = post().json()["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm")
    assert thought["signature"], "clients send back no thought without one"
    assert text == {"type": "text", "text": "hello"}
    hidden, _ = post(thinking={"type": "adaptive", "display": "omitted"}).json()["content"]
    assert (hidden["type"], hidden["thinking"]) == ("thinking", "")


def test_a_call_is_a_block_with_an_object(post, say):
    say(f"Let me look.{CALL}")
    body = post(tools=[WEATHER]).json()
    text, call = body["content"]
    assert text["text"].strip() == "Let me look."
    assert call["id"].startswith("toolu_")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "sun", {"at": "noon"})
    assert body["stop_reason"] == "tool_use"


def test_without_parallel_use_one_call_is_the_last_thing_said(post, say):
    say(CALL + CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    fields = {"tools": [WEATHER], "max_tokens": 200}
    assert len(post(**fields).json()["content"]) == 2
    assert len(post(**fields, tool_choice=choice).json()["content"]) == 1


def test_a_tool_of_anthropics_own_is_left_out(post, say, prompt):
    say("ok")
    post(tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}])
    assert "sun" in prompt()
    assert "web_search" not in prompt()


def test_a_form_of_the_answer_reaches_the_engine(post, say, engine):
    say("{}")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({}, {"output_config": {"format": form}}, {"output_format": form}):
        post(**fields).raise_for_status()
    forms = [each.sampling.constraint is not None for each in engine.requests]
    assert forms == [False, True, True]
    bad = post(output_config={"format": {**form, "schema": {"type": "nothing"}}})
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_message_is_told_why_it_missed(post, say, engine):
    say("ok")
    engine.page_size = 16
    first = post(system="Be good.").json()
    assert first["diagnostics"] is None
    again = post(system="Be bad.", diagnostics={"previous_message_id": first["id"]}).json()
    lost = post(diagnostics={"previous_message_id": "msg_0"}).json()
    assert again["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    assert lost["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"
    assert post(explain_cache=True).json()["usage"]["cache_explanation"]["cause"]


def test_no_tokens_are_a_prompt_that_is_only_warmed(post, say, engine):
    say("hello")
    body = post(max_tokens=0).json()
    assert body["content"] == []
    assert (body["stop_reason"], body["usage"]["output_tokens"]) == ("max_tokens", 0)
    assert engine.requests[0].usage.completion_tokens == 0


def test_tokens_are_counted_with_tools_and_without_max_tokens(post, say, engine):
    say("ok")
    fields = {"tools": [WEATHER], "system": "A"}
    counted = post("/v1/messages/count_tokens?beta=true", max_tokens=..., **fields).json()
    post(**fields)
    assert counted == {"input_tokens": engine.requests[0].prompt_len}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0]: the model does not support images",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": ""}]}]},
            "messages[0].content[0]: thinking",
        ),
        ({"stop_sequences": ["a" * 100] * 200}, "stop_sequences: 20000 exceeds"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"top_p": 7}, "top_p"),
        ({"n": 2}, "n must be 1"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_bad_field_is_named(post, engine, fields, named, is_streamed):
    answer = post(stream=is_streamed, **fields)
    body = answer.json()
    assert answer.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"]
    assert not engine.requests


def test_a_prompt_that_is_too_long_is_told_in_words_that_clients_know(post):
    answer = post(messages=[{"role": "user", "content": "hi there " * 200}])
    assert answer.status_code == 400
    assert "prompt is too long" in answer.json()["error"]["message"]
    assert "maximum context length" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("full", retry_after=3), 429, "rate_limit_error"),
        (EngineDead("dead"), 503, "overloaded_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ],
)
def test_what_the_engine_refuses_has_its_kind(post, engine, refusal, status, kind):
    engine.refusal = refusal
    answer = post()
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status != 500)


def test_routes_below_are_answered_in_anthropics_words(http, post):
    missing, wrong = http.post("/v1/messages/batches", json={}), http.get("/v1/messages")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    unknown = post(model="other")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert "error" not in http.get("/v1/nothing").json().get("type", "")


def test_a_missing_key_is_an_authentication_error(serve):
    server = serve(api_keys=("k",), max_body_bytes=100)
    url = f"{server.url}/v1/messages"
    refused = httpx.post(url, json={})
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"
    large = httpx.post(url, json={"x": "x" * 200}, headers={"x-api-key": "k"})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
