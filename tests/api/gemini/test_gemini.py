"""Gemini's API: what its bodies become, its answers, streams and errors."""

from __future__ import annotations

import base64
import json

import httpx
import pytest

from foretoken.api.dialects.gemini.bodies import GenerateBody, gemini_decoder
from foretoken.api.dialects.gemini.reading import json_schema, read_chat
from foretoken.core.errors import InvalidRequest

NAME = "tiny/model"
URL = f"/v1beta/models/{NAME}"
HI = [{"role": "user", "parts": [{"text": "Hello"}]}]
CALL = {"functionCall": {"name": "weather", "args": {"city": "Rome"}}}
RESULT = {"functionResponse": {"name": "weather", "response": {"result": "sunny"}}}
WEATHER = {
    "name": "weather",
    "description": "Tells it",
    "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
}
TOOLS = [{"functionDeclarations": [WEATHER]}, {"googleSearch": {}}]
PNG = base64.b64encode(b"\x89PNG").decode()


def chat(**body):
    return read_chat(gemini_decoder(GenerateBody)(json.dumps({"contents": HI} | body).encode()))


def post(server, method="generateContent", *, query="", headers=None, **body):
    url = f"{server.url}{URL}:{method}{query}"
    return httpx.post(url, json={"contents": HI} | body, headers=headers, timeout=20)


# -- bodies ----------------------------------------------------------------------------------------


def test_a_conversation_becomes_messages():
    contents = [
        {"parts": [{"text": "What is"}, {"text": "the weather?"}]},
        {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "So:"}, CALL, CALL]},
        {"role": "user", "parts": [RESULT, {"text": "and?"}, RESULT]},
        {"role": "model", "parts": [{"executableCode": {"code": "1"}}, {"text": "Sunny."}]},
    ]
    made = chat(contents=contents, systemInstruction={"parts": [{"text": "Be brief."}]})
    calls = [
        {"id": f"call_0000000{at}", "type": "function",
         "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        for at in (0, 1)
    ]  # fmt: skip
    assert made.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\nthe weather?"},
        {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "call_00000000"},
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "call_00000001"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "Sunny."},
    ]
    assert made.path(1) == "contents[0]"
    assert made.path(5) == "contents[2]"


def test_results_find_their_calls_by_id_then_by_name():
    called = [{"functionCall": {"name": name, "id": name * 2}} for name in "ab"]
    answers = [
        {"functionResponse": {"name": "b", "response": {"x": 1}}},
        {"functionResponse": {"id": "aa", "response": None}},
        {"functionResponse": {"name": "c", "response": 3}},
    ]
    contents = [*HI, {"role": "model", "parts": called}, {"role": "function", "parts": answers}]
    tools = [each for each in chat(contents=contents).messages if each["role"] == "tool"]
    assert [(each["tool_call_id"], each["content"]) for each in tools] == [
        ("bb", '{"x": 1}'), ("aa", "{}"), ("", "3"),
    ]  # fmt: skip


def test_names_in_snake_case_and_single_entries_are_read():
    made = chat(
        contents={"role": "user", "parts": {"text": "Hi"}},
        system_instruction={"parts": {"text": "Be brief."}},
        tools=[{"function_declarations": [WEATHER]}],
        tool_config={"function_calling_config": {"mode": "any"}},
        generation_config={"max_output_tokens": 7, "stop_sequences": ["x"]},
    )
    assert [each["content"] for each in made.messages] == ["Be brief.", "Hi"]
    assert (made.params.max_tokens, list(made.params.stop)) == (7, ["x"])
    assert made.tool_choice.mode == "required"
    args = {"my_city": {"some_thing": 1}}
    called = {"role": "model", "parts": [{"function_call": {"name": "f", "args": args}}]}
    message = chat(contents=[*HI, called]).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == args, "no names of ours"


def test_tools_that_are_no_functions_are_left_out(caplog):
    [tool] = chat(tools=TOOLS).tools
    assert (tool.name, tool.description) == ("weather", "Tells it")
    assert tool.parameters == {"type": "object", "properties": {"city": {"type": "string"}}}
    own = {"name": "f", "parametersJsonSchema": {"type": "object", "required": ["A"]}}
    [other] = chat(tools=[{"functionDeclarations": [own]}]).tools
    assert other.parameters == own["parametersJsonSchema"]


@pytest.mark.parametrize(
    ("mode", "allowed", "expected"),
    [
        ("AUTO", None, ("auto", None)),
        ("NONE", None, ("none", None)),
        ("ANY", None, ("required", None)),
        ("ANY", ["weather"], ("required", frozenset({"weather"}))),
        ("VALIDATED", ["weather"], ("auto", frozenset({"weather"}))),
        (None, None, ("auto", None)),
    ],
)
def test_which_functions_may_be_called(mode, allowed, expected):
    config = {"mode": mode, "allowedFunctionNames": allowed}
    choice = chat(tools=TOOLS, toolConfig={"functionCallingConfig": config}).tool_choice
    assert (choice.mode, choice.allowed) == expected


def test_sampling():
    config = {
        "temperature": 0.5, "topP": 0.75, "topK": 7, "candidateCount": 2, "maxOutputTokens": 9,
        "stopSequences": ["a"], "seed": 3, "presencePenalty": 1, "frequencyPenalty": -1,
        "responseLogprobs": True, "logprobs": 2, "thinkingConfig": {"thinkingBudget": 0},
    }  # fmt: skip
    made = chat(generationConfig=config, cacheSalt="s", speculation="off", deadlineMs=2000)
    params = made.params
    assert (params.temperature, params.top_p, params.top_k, params.n) == (0.5, 0.75, 7, 2)
    assert (params.max_tokens, list(params.stop), params.seed) == (9, ["a"], 3)
    assert (params.presence_penalty, params.frequency_penalty, params.logprobs) == (1, -1, 2)
    assert (params.cache_salt, params.speculation, params.deadline) == ("s", "off", 2)
    assert made.template == {"enable_thinking": False}
    level = chat(generationConfig={"thinkingConfig": {"thinkingLevel": "LOW"}})
    assert level.template == {"reasoning_effort": "low"}


def test_forms_of_answers():
    def params(**config):
        return chat(generationConfig=config).params

    as_json = {"responseMimeType": "application/json"}
    assert params(**as_json).json_schema == {"type": "object"}
    schema = {"type": "STRING", "enum": ["a", "b"]}
    found = params(**as_json, responseSchema=schema).json_schema
    assert (found["type"], found["enum"]) == ("string", ["a", "b"])
    assert list(params(responseMimeType="text/x.enum", responseSchema=schema).choice) == ["a", "b"]
    assert params(responseMimeType="text/plain").json_schema is None


def test_a_schema_of_googles_is_a_json_schema():
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "properties": {
            "a": {"type": "ARRAY", "items": {"type": "NUMBER", "nullable": True}, "minItems": "2"},
            "b": {"anyOf": [{"type": "INTEGER"}, {"type": "TYPE_UNSPECIFIED"}]},
            "c": {"type": "STRING", "format": "enum", "enum": ["x"]},
            "d": {"anyOf": [{"type": "INTEGER"}, {"type": "STRING"}], "nullable": True},
            "e": {"type": "STRING", "enum": ["x"], "nullable": True},
        },
        "required": ["a"],
    }
    made, null = json_schema(schema), {"type": "null"}
    assert list(made["properties"]) == ["b", "a", "c", "d", "e"]
    assert made == {
        "type": "object",
        "properties": {
            "b": {"anyOf": [{"type": "integer"}, {}]},
            "a": {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2},
            "c": {"type": "string", "enum": ["x"]},
            "d": {"anyOf": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, null]},
            "e": {"anyOf": [{"type": "string", "enum": ["x"]}, null]},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": [{"role": "robot", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": [{"text": "a"}, {"fileData": {"fileUri": "gs://x"}}]}]},
         "contents[0].parts[1].fileData"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}}]}]},
         "contents[0].parts[0].inlineData"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
         "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
         "toolConfig.functionCallingConfig.mode"),
        ({"generationConfig": {"responseMimeType": "image/png"}},
         "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}},
         "generationConfig.responseSchema"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_named(body, param):
    with pytest.raises(InvalidRequest) as refused:
        chat(**body)
    assert refused.value.param == param


def test_files_of_the_model_and_texts_of_the_user_end_no_session():
    data = base64.b64encode(b"a,b").decode()
    contents = [
        {"role": "user", "parts": [{"inlineData": {"mimeType": "text/csv", "data": data}}]},
        {"role": "model", "parts": [{"fileData": {"fileUri": "x"}}, {"text": "done"}]},
    ]
    assert [each["content"] for each in chat(contents=contents).messages] == [
        "a,b", "[a file that this model cannot read]\ndone",
    ]  # fmt: skip
    image = {"inlineData": {"mimeType": "image/png", "data": PNG}}
    odd = {"inlineData": {"mimeType": "text/plain", "data": "w7_DvsO-"}}
    assert chat(contents=[{"parts": [odd]}]).messages[0]["content"] == "\u00ff\u00fe\u00fe"
    assert chat(contents=[{"parts": [image]}]).images[0].url == f"data:image/png;base64,{PNG}"


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_has_its_parts_and_its_cost(server, say):
    say("Hello there.")
    answer = post(server, generationConfig={"temperature": 0}).raise_for_status().json()
    [candidate] = answer["candidates"]
    assert candidate["content"] == {"role": "model", "parts": [{"text": "Hello there."}]}
    assert (candidate["index"], candidate["finishReason"]) == (0, "STOP")
    assert answer["modelVersion"] == NAME
    usage = answer["usageMetadata"]
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + usage["candidatesTokenCount"]
    assert usage["cachedContentTokenCount"] == 0
    assert usage["speculation"]["accepted_tokens"] == 0
    two = post(server, generationConfig={"candidateCount": 2}).json()["candidates"]
    assert [each["index"] for each in two] == [0, 1]


def test_a_stream_ends_with_a_reason_and_the_cost(server, say):
    say("Hello there, you.")
    answer = post(server, "streamGenerateContent", query="?alt=sse")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    parts = [part for each in events for part in each["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts) == "Hello there, you."
    assert [each["candidates"][0].get("finishReason") for each in events] == [
        *[None] * (len(events) - 1), "STOP",
    ]  # fmt: skip
    assert events[-1]["usageMetadata"]["candidatesTokenCount"] > 0


def test_a_stream_of_another_form_is_refused(server):
    answer = post(server, "streamGenerateContent")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"] == "alt"


def test_counts(server, say):
    say("Yes.")
    counted = post(server, "countTokens").raise_for_status().json()["totalTokens"]
    whole = {"generateContentRequest": {"contents": HI}}
    url = f"{server.url}{URL}:countTokens"
    assert httpx.post(url, json=whole).raise_for_status().json() == {"totalTokens": counted}
    assert post(server).json()["usageMetadata"]["promptTokenCount"] == counted
    empty = httpx.post(url, json={})
    assert (empty.status_code, empty.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_models(server):
    listed = httpx.get(f"{server.url}/v1beta/models").raise_for_status().json()
    assert [each["name"] for each in listed["models"]] == [f"models/{NAME}"]
    one = httpx.get(f"{server.url}/v1beta/models/{NAME}").raise_for_status().json()
    assert one == listed["models"][0]
    missing = httpx.get(f"{server.url}/v1beta/models/other")
    assert (missing.status_code, missing.json()["error"]["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"maxOutputTokens": 0}, "generationConfig.maxOutputTokens"),
        ({"temperature": 200}, "generationConfig.temperature"),
        ({"speechConfig": {"voice": 1}}, "generationConfig.speechConfig"),
        ({"candidateCount": 65}, "generationConfig.candidateCount"),
    ],
)
def test_errors_name_the_field(server, engine, config, field):
    answer = post(server, generationConfig=config)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert field in error["details"][0]["fieldViolations"][0]["field"]
    assert not engine.requests


def test_keys(serve, say):
    say("Yes.")
    server = serve(api_keys=("k",))
    assert post(server, headers={"x-goog-api-key": "k"}).status_code == 200
    assert post(server, query="?key=k").status_code == 200
    assert post(server, headers={"authorization": "Bearer k"}).status_code == 200
    other_header = post(server, headers={"x-api-key": "k"})
    for refused in (post(server), post(server, query="?key=x"), other_header):
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    other = httpx.post(f"{server.url}/v1/chat/completions?key=k", json={"messages": []})
    assert other.status_code == 401, "a key in the query is Google's way alone"


def test_requests_with_googles_header_may_name_the_version_v1(server, say):
    say("Yes.")
    google = {"x-goog-api-key": "any"}
    url = f"{server.url}/v1/models"
    answer = httpx.post(f"{url}/{NAME}:generateContent", json={"contents": HI}, headers=google)
    assert answer.raise_for_status().json()["candidates"][0]["finishReason"] == "STOP"
    listed = httpx.get(url, headers=google).raise_for_status().json()
    assert [each["name"] for each in listed["models"]] == [f"models/{NAME}"]
    assert httpx.get(url).raise_for_status().json()["object"] == "list", "OpenAI's without it"
    missing = httpx.post(f"{url}/x:generateContent", json={"contents": HI}, headers=google)
    assert (missing.status_code, missing.json()["error"]["status"]) == (404, "NOT_FOUND")


def test_an_unknown_model_is_not_found(server):
    answer = httpx.post(f"{server.url}/v1beta/models/other:generateContent", json={"contents": HI})
    assert (answer.status_code, answer.json()["error"]["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": HI * 3}, "contents"),
        ({"tools": [{"functionDeclarations": [WEATHER] * 2}]}, "tools"),
        ({"generationConfig": {"candidateCount": 3}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"logprobs": 2, "responseLogprobs": True}},
         "generationConfig.logprobs"),
        ({"generationConfig": {"stopSequences": ["abcd"]}}, "generationConfig.stopSequences"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_limit_of_the_server_is_refused_and_named(serve, engine, body, field):
    low = {"max_messages": 2, "max_tools": 1, "max_n": 2, "max_top_logprobs": 1,
           "max_stop_bytes": 3}  # fmt: skip
    answer = post(serve(**low), **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["details"][0]["fieldViolations"][0]["field"] == field
    assert not engine.requests


def test_a_temperature_beyond_the_apis_own_is_refused_if_strict(serve, say):
    say("Yes.")
    hot = {"temperature": 3.0}
    assert post(serve(), generationConfig=hot).status_code == 200
    assert post(serve(strict=True), generationConfig=hot).status_code == 400
