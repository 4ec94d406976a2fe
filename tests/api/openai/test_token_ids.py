"""Token ids of prompts and answers in bodies, and answers that come back as ids or as text."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}
WORDS = "hello world"
CALL = '<tool_call>{"name": "f", "arguments": {"a":1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def odd_ids(engine, tokenizer):
    """The engine answers this in other tokens than those of its text: one for each character."""
    ids = [each for character in WORDS for each in tokenizer.encode_word(character)]
    assert ids != tokenizer.encode_word(WORDS)
    engine.answers = lambda request: [*ids, tokenizer.vocab["<|im_end|>"]]
    return ids


class Caller:
    """Sends bodies to one server."""

    def __init__(self, server, engine) -> None:
        self._server, self._engine = server, engine

    def send(self, path="/v1/chat/completions", key="", **fields):
        body = {"max_tokens": 50, **fields}
        if "messages" not in fields and "prompt" not in fields and "input" not in fields:
            body["messages"] = [HI]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.post(f"{self._server.url}{path}", json=body, headers=headers, timeout=20)

    def ask(self, *args, **fields):
        answer = self.send(*args, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chunks(self, path="/v1/chat/completions", **fields):
        text = self.send(path, stream=True, **fields).text
        return [
            json.loads(each.removeprefix("data: "))
            for each in text.split("\n\n")
            if each.startswith("data: {")
        ]

    @property
    def prompt(self):
        """Token ids of the last prompt."""
        request = self._engine.requests[-1]
        return list(request.tokens[: request.prompt_len])


@pytest.fixture
def caller(server, engine):
    return Caller(server, engine)


# -- what is returned ---------------------------------------------------------------------------


def test_a_chat_returns_the_ids_of_prompt_answer_and_message(caller, odd_ids, tokenizer):
    body = caller.ask(return_token_ids=True)
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == caller.prompt
    assert choice["token_ids"] == [*odd_ids, tokenizer.vocab["<|im_end|>"]]
    assert choice["message"]["token_ids"] == odd_ids
    plain = caller.ask()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert "token_ids" not in plain["choices"][0]["message"]


def test_a_streamed_chat_returns_them_with_its_chunks(caller, odd_ids, engine):
    engine.tokens_per_step = 2
    chunks = caller.chunks(return_token_ids=True, n=2)
    assert chunks[0]["prompt_token_ids"] == caller.prompt
    assert not any("prompt_token_ids" in each for each in chunks[1:])
    whole = caller.ask(return_token_ids=True)["choices"][0]
    for index in range(2):
        mine = [c for each in chunks for c in each["choices"] if c["index"] == index]
        assert [i for each in mine for i in each.get("token_ids", ())] == whole["token_ids"]
        ends = [each["delta"]["token_ids"] for each in mine if "token_ids" in each["delta"]]
        assert ends == [odd_ids]
        assert "token_ids" in mine[-1]["delta"]


def test_openai_s_own_stream_helper_collects_the_message(server, odd_ids):
    options = {"model": "tiny/model", "extra_body": {"return_token_ids": True}}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        client.chat.completions.stream(messages=[HI], **options) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    assert (message.content, message.token_ids) == (WORDS, odd_ids)


@pytest.mark.parametrize("prompt", ["hi", ["hi", "go on"], [5, 6, 7]])
def test_completions_return_them_with_each_choice(caller, odd_ids, tokenizer, prompt):
    end = tokenizer.vocab["<|im_end|>"]
    fields = {"prompt": prompt, "return_token_ids": True}
    choices = caller.ask("/v1/completions", **fields)["choices"]
    for choice in choices:
        assert choice["token_ids"] == [*odd_ids, end]
    assert choices[-1]["prompt_token_ids"] == caller.prompt
    parts = [c for each in caller.chunks("/v1/completions", **fields) for c in each["choices"]]
    for index in range(len(choices)):
        mine = [each for each in parts if each["index"] == index]
        assert [i for each in mine for i in each.get("token_ids", ())] == [*odd_ids, end]
        told = [each["prompt_token_ids"] for each in mine if "prompt_token_ids" in each]
        assert told == [choices[index]["prompt_token_ids"]]


def test_a_message_that_a_stop_string_cut_has_no_ids(caller, odd_ids):
    body = caller.ask(return_token_ids=True, stop=["lo w"])
    assert body["choices"][0]["token_ids"]
    assert "token_ids" not in body["choices"][0]["message"]
    assert caller.ask(messages=[HI, body["choices"][0]["message"], ON])


def test_a_message_that_the_limit_cut_has_all_its_ids(caller, odd_ids):
    message = caller.ask(return_token_ids=True, max_tokens=4)["choices"][0]["message"]
    assert message["token_ids"] == odd_ids[:4]


def test_a_message_with_a_call_comes_back_by_its_ids(serve, engine, tokenizer):
    caller = Caller(serve(tool_parser="hermes"), engine)
    ids = [each for character in CALL for each in tokenizer.encode_word(character)]
    engine.answers = lambda request: [*ids, tokenizer.vocab["<|im_end|>"]]
    engine.tokens_per_step = 5
    options = {"tools": [TOOL]}
    message = caller.ask(return_token_ids=True, max_tokens=99, **options)["choices"][0]["message"]
    start = caller.prompt
    assert message["token_ids"] == ids
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    usage = caller.ask(messages=[HI, message, result], max_tokens=1, **options)["usage"]
    assert caller.prompt[: len(start) + len(ids)] == [*start, *ids]
    assert usage["prompt_tokens_details"]["spliced_tokens"] == len(ids)


@pytest.mark.parametrize(
    "only",
    [
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 7, 99])
def test_a_message_with_its_only_call_has_the_ids_of_all_of_it(
    serve, engine, tokenizer, only, tokens_per_step
):
    caller = Caller(serve(tool_parser="hermes"), engine)
    ids = tokenizer.encode_word(CALL)
    engine.answers = lambda request: [*ids, tokenizer.vocab["<|im_end|>"]]
    engine.tokens_per_step = tokens_per_step
    body = caller.ask(return_token_ids=True, max_tokens=99, tools=[TOOL], **only)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["token_ids"] == ids
    start, message = caller.prompt, choice["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}
    caller.ask(messages=[HI, message, result], max_tokens=1, tools=[TOOL])
    assert caller.prompt[: len(start) + len(ids)] == [*start, *ids]


@pytest.mark.parametrize("behind", [" And so on.", f"\n{CALL}"])
def test_a_message_that_goes_on_behind_its_only_call_is_cut_there_and_has_no_ids(
    serve, engine, tokenizer, behind
):
    caller = Caller(serve(tool_parser="hermes"), engine)
    ids = tokenizer.encode_word(CALL + behind)
    engine.answers = lambda request: [*ids, *ids, tokenizer.vocab["<|im_end|>"]]
    options = {"return_token_ids": True, "parallel_tool_calls": False, "tools": [TOOL]}
    (choice,) = caller.ask(max_tokens=999, **options)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert not choice["message"]["content"]
    assert "token_ids" not in choice["message"]
    assert len(choice["token_ids"]) <= len(ids)


@pytest.mark.parametrize("num_left", [0, 1])
def test_an_only_call_that_the_limit_cuts_behind_its_end_is_whole(
    serve, engine, tokenizer, num_left
):
    caller = Caller(serve(tool_parser="hermes"), engine)
    ids = tokenizer.encode_word(CALL + "\n\n\n\n")
    engine.answers = lambda request: ids
    fields = {"parallel_tool_calls": False, "tools": [TOOL]}
    limit = len(tokenizer.encode_word(CALL)) + num_left
    (choice,) = caller.ask(max_tokens=limit, **fields)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"]


def test_responses_refuse_to_return_them(caller):
    answer = caller.send("/v1/responses", input="hi", return_token_ids=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_token_ids")


# -- what comes back as ids ---------------------------------------------------------------------


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "a"}] * 3])
def test_a_message_is_rendered_by_its_ids(serve, engine, odd_ids, system):
    caller = Caller(serve(token_history=False), engine)
    first = caller.ask(messages=[*system, HI], return_token_ids=True)
    start, message = caller.prompt, first["choices"][0]["message"]
    second = caller.ask(messages=[*system, HI, message, ON])
    assert caller.prompt[: len(start) + len(odd_ids)] == [*start, *odd_ids]
    assert second["usage"]["prompt_tokens_details"]["spliced_tokens"] == len(odd_ids)
    del message["token_ids"]
    third = caller.ask(messages=[*system, HI, message, ON])
    assert third["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]
    assert third["usage"]["prompt_tokens_details"]["spliced_tokens"] == 0


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize", "/cache/flush"]
)
def test_wrong_ids_are_an_error_that_names_them(caller, odd_ids, path):
    def refused(role, content, token_ids):
        messages = [HI, {"role": role, "content": content, "token_ids": token_ids}, ON]
        name = "prefix" if path == "/cache/flush" else "messages"
        answer = httpx.post(f"{caller._server.url}{path}", json={name: messages}, timeout=20)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[1].token_ids"

    refused("assistant", WORDS, odd_ids[:-1])
    refused("assistant", f"{WORDS}!", odd_ids)
    refused("assistant", WORDS, [*odd_ids, 10**6])
    refused("assistant", WORDS, [*odd_ids, -1])
    refused("assistant", WORDS, [])
    refused("user", WORDS, odd_ids)


def test_tokenize_counts_the_ids(caller, odd_ids):
    message = {"role": "assistant", "content": WORDS, "token_ids": odd_ids}
    found = caller.ask("/tokenize", messages=[HI, message])["tokens"]
    assert any(found[at : at + len(odd_ids)] == odd_ids for at in range(len(found)))


def test_tokenize_renders_as_a_request_with_the_same_fields(caller):
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]
    said = {"role": "assistant", "content": WORDS}
    plain = caller.ask("/tokenize", messages=[HI, said])["tokens"]
    assert len(caller.ask("/tokenize", messages=[HI, said], tools=tools)["tokens"]) > len(plain)
    fields = {"messages": [HI, said], "continue_final_message": True}
    continued = caller.ask("/tokenize", **fields)["tokens"]
    assert continued == caller.ask("/v1/chat/completions/render", **fields)["token_ids"]
    assert len(continued) < len(plain)


# -- what comes back as text --------------------------------------------------------------------


def spliced(body):
    return body["usage"]["prompt_tokens_details"]["spliced_tokens"]


def again(caller, **fields):
    """The second turn of a client that sends text."""
    said = {"role": "assistant", "content": WORDS}
    return spliced(caller.ask(messages=[HI, said, ON], **fields))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_comes_back_as_text_is_rendered_by_its_ids(caller, odd_ids, is_streamed):
    if is_streamed:
        caller.chunks()
    else:
        caller.ask()
    start = caller.prompt
    assert again(caller) == len(odd_ids)
    assert caller.prompt[: len(start) + len(odd_ids)] == [*start, *odd_ids]


def test_it_is_found_under_its_own_salt_and_key_alone(serve, engine, odd_ids):
    caller = Caller(serve(api_keys=("one", "two")), engine)
    caller.ask(key="one", cache_salt="a")
    assert again(caller, key="one", cache_salt="b") == 0
    assert again(caller, key="two", cache_salt="a") == 0
    assert again(caller, key="one") == 0
    assert again(caller, key="one", cache_salt="a") == len(odd_ids)


def test_a_flush_of_its_salt_forgets_it(caller, odd_ids):
    for flush, expected in (({"cache_salt": "b"}, len(odd_ids)), ({"cache_salt": "a"}, 0)):
        caller.ask(cache_salt="a")
        url = f"{caller._server.url}/cache/flush"
        httpx.post(url, json=flush, timeout=20).raise_for_status()
        assert again(caller, cache_salt="a") == expected


def test_nothing_is_remembered_without_the_memory_or_where_nothing_is_to_be_written(
    serve, engine, odd_ids
):
    caller = Caller(serve(token_history=False), engine)
    caller.ask()
    assert again(caller) == 0
    caller = Caller(serve(), engine)
    caller.ask(cache={"write": False})
    assert again(caller) == 0
    caller = Caller(serve(token_history_bytes=10), engine)
    caller.ask()
    assert again(caller) == 0


def test_the_memory_not_the_cache_decides(caller, odd_ids):
    caller.ask()
    prompts = []
    for options in ({}, {"cache": {"read": False}}, {"speculation": "off"}):
        assert again(caller, **options) == len(odd_ids)
        prompts.append(caller.prompt)
    assert prompts == [prompts[0]] * 3
