"""OpenAI's own client against a real server on this machine."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest

from foretoken import EngineDead, PromptTooLong, QueueFull, Unavailable
from foretoken.api.dialects.openai.text_writing import echo_ids, echo_offsets
from foretoken.api.dialects.openai.writing import LOWEST_LOGPROB, finite

TALK = [{"role": "user", "content": "hi"}]
SPECULATION = {
    "proposed_tokens", "accepted_tokens", "verify_steps", "tree_steps", "accepted_by_source",
    "proposed_by_source", "steps_by_accepted",
}  # fmt: skip


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def chat(client, **options):
    options = {"model": "tiny/model", "messages": TALK, **options}
    return client.chat.completions.create(**options)


def complete(client, prompt="hi", **options):
    return client.completions.create(model="tiny/model", prompt=prompt, **options)


# -- chat ---------------------------------------------------------------------------------------


def test_streamed_chunks_follow_the_rules_of_the_clients(client, say, engine):
    say("naïve café, 東京 and 😀.")
    engine.tokens_per_step = 3
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == engine.requests[0].usage.completion_tokens
    assert set(last.usage.speculation) == SPECULATION
    assert all("usage" in c.model_fields_set and c.usage is None for c in parts)
    deltas = [c.choices[0].delta for c in parts]
    assert deltas[0].role == "assistant"
    assert deltas[0].content == ""
    assert all("role" not in delta.model_fields_set for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == "naïve café, 東京 and 😀."
    reasons = [c.choices[0].finish_reason for c in parts]
    assert reasons == [None] * (len(parts) - 1) + ["stop"]
    assert not any("\ufffd" in (delta.content or "") for delta in deltas)
    assert all("tool_calls" not in delta.model_fields_set for delta in deltas)


def test_a_stop_string_over_chunks_is_never_shown(client, say, engine):
    say("hello there. Stop here. And more")
    engine.tokens_per_step = 1
    parts = [c.choices[0].delta.content or "" for c in chat(client, stream=True, stop="Stop here")]
    assert "".join(parts) == "hello there. "
    answer = chat(client, stop=["Stop here", "zzz"])
    assert answer.choices[0].message.content == "hello there. "
    assert answer.choices[0].stop_reason == "Stop here"


def test_the_stream_helper_accumulates_two_choices(client, engine, tokenizer):
    words = [tokenizer.encode_word(text) for text in ("hello", "world, dog")]
    eos = tokenizer.vocab["<|im_end|>"]

    def two(request):
        return [*words[int(request.request_id[-1])], eos]

    engine.answers = two
    with client.chat.completions.stream(model="tiny/model", messages=TALK, n=2) as stream:
        seen = [e.chunk.choices[0].index for e in stream if e.type == "chunk"]
        final = stream.get_final_completion()
    assert seen[:2] == [0, 1], "the first chunks come in order"
    assert [c.message.content for c in final.choices] == ["hello", "world, dog"]
    assert [c.finish_reason for c in final.choices] == ["stop", "stop"]
    whole = chat(client, n=2)
    assert [c.message.content for c in whole.choices] == ["hello", "world, dog"]
    assert whole.usage.prompt_tokens == engine.requests[0].prompt_len
    assert whole.usage.completion_tokens == sum(map(len, words)) + 2


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_one_entry_per_token_with_its_bytes(client, say, tokenizer, stream):
    say("é 東")
    if stream:
        chunks = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
        entries = [
            e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content
        ]
    else:
        answer = chat(client, logprobs=True, top_logprobs=2)
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
    assert entries[-1].token == "<|im_end|>"
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == "é 東"
    assert all(math.isclose(e.logprob, -0.25) for e in entries)
    assert [len(e.top_logprobs) for e in entries] == [2] * len(entries)
    assert entries[0].top_logprobs[0].token == entries[0].token


def test_the_async_client_streams_many_at_once(server, say):
    say("hello world")

    async def one(client):
        stream = await client.chat.completions.create(
            model="tiny/model", messages=TALK, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def body():
        base = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(body()) == ["hello world"] * 8


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, *TALK],
    ],
)
def test_developer_is_system_and_parts_are_text(client, engine, tokenizer, messages):
    chat(client, messages=messages, max_tokens=1)
    request = engine.requests[0]
    text = tokenizer.decode(request.tokens[: request.prompt_len], skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


def test_turns_with_tools_behind_them_are_rendered(client, engine):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    assert chat(client, messages=messages, max_tokens=1).choices


def test_fields_reach_the_engine(client, engine):
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [9],
        "ignore_eos": True, "speculation": 2, "cache_salt": "a", "priority": 4, "deadline_ms": 1500,
    }  # fmt: skip
    chat(
        client, max_completion_tokens=3, temperature=0.5, top_p=0.9, seed=11,
        logit_bias={"7": -100}, presence_penalty=0.5, frequency_penalty=-0.5, extra_body=extra,
        user="me", store=True,
        metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, reasoning_effort="low",
        response_format={"type": "text"}, tool_choice="none", tools=[], stop=None,
    )  # fmt: skip
    [request] = engine.requests
    params = request.sampling.params
    assert (params.max_tokens, params.temperature, params.top_p) == (3, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (5, 0.1, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.logit_bias == {7: -100}
    assert params.min_tokens == 1
    assert request.stop_ids == {9}
    assert (request.depth, request.namespace, request.priority) == (2, "a", 4)
    assert 0 < request.deadline <= 1.5, "what is left of it"
    assert request.sampling.seed == 11


@pytest.mark.parametrize("field", ["no_stop_trim", "return_tokens_as_token_ids", "stop_regex"])
def test_a_refused_field_that_asks_for_nothing_passes(client, engine, field):
    for value in (None, "" if field == "stop_regex" else False):
        chat(client, extra_body={field: value})
    assert len(engine.requests) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={field: "x"})
    assert caught.value.param == field


def test_nought_is_no_false(client, engine):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"prompt_logprobs": 0})
    assert caught.value.param == "prompt_logprobs"


def test_model_defaults_are_not_taken_from_anywhere_but_the_request(client, engine):
    chat(client, max_tokens=1)
    params = engine.requests[0].sampling.params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


def test_of_the_two_limits_of_a_chat_the_newer_one_counts(client, engine):
    chat(client, max_tokens=2, max_completion_tokens=3)
    assert engine.requests[0].sampling.params.max_tokens == 3


# -- completions --------------------------------------------------------------------------------


def test_sixteen_tokens_are_the_default_of_completions(client):
    assert complete(client).usage.completion_tokens == 16


def test_lists_of_prompts_times_n_are_numbered_in_order(client, tokenizer):
    prompts = [[5, 6, 7], [8, 9]]
    answer = complete(client, prompts, n=2, seed=0, max_tokens=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == tokenizer.decode([8])
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 4
    chunks = list(complete(client, prompts, n=2, seed=0, max_tokens=1, stream=True))
    assert all(c.choices[0].text for c in chunks), "no chunk is empty"
    texts = ["", "", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in answer.choices]
    assert complete(client, [5, 6, 7], seed=0, max_tokens=1).choices[0].text == tokenizer.decode(
        [5]
    )
    assert len(complete(client, ["a", "b"], max_tokens=1).choices) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_first(client, say, stream):
    say(" world")
    answer = complete(client, "hello", echo=True, stream=stream)
    if stream:
        assert "".join(c.choices[0].text for c in answer) == "hello world"
    else:
        assert answer.choices[0].text == "hello world"


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_cover_prompt_and_answer(client, say, tokenizer, stream):
    say(" world")
    answer = complete(client, "hello", echo=True, logprobs=2, stream=stream)
    chunks = list(answer) if stream else [answer]
    text = "".join(c.choices[0].text for c in chunks)
    lists = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    tokens = [token for each in lists for token in each.tokens]
    offsets = [offset for each in lists for offset in each.text_offset]
    values = [value for each in lists for value in each.token_logprobs]
    assert text == "hello world"
    assert "".join(tokens) == "hello world<|im_end|>"
    assert values[0] is None
    assert all(value == -0.25 for value in values[1:])
    assert [text[o : o + len(t)] for o, t in zip(offsets[:-1], tokens[:-1], strict=True)] == tokens[
        :-1
    ]
    tops = [top for each in lists for top in each.top_logprobs]
    assert tops[0] is None
    assert all(token in top for token, top in zip(tokens[1:], tops[1:], strict=True))


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a<|im_end|>b 東", "<|im_start|>a", "é<|im_start|>"])
def test_offsets_point_into_the_echoed_text_behind_special_tokens_too(
    client, say, tokenizer, prompt, as_ids, stream
):
    say("ok")
    given = tokenizer.encode_word(prompt) if as_ids else prompt
    answer = complete(client, given, echo=True, logprobs=0, stream=stream)
    chunks = list(answer) if stream else [answer]
    text = "".join(c.choices[0].text for c in chunks)
    lists = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    places = [pair for each in lists for pair in zip(each.tokens, each.text_offset, strict=True)]
    assert text == f"{prompt}ok"
    whole = [pair for pair in places[:-1] if not pair[0].startswith("bytes:")]
    assert all(text.startswith(token, offset) for token, offset in whole)
    assert places[-1] == ("<|im_end|>", len(text))


def test_a_token_that_encoding_adds_takes_no_room_in_the_echoed_text(tokenizer):
    bos = tokenizer.vocab["<|im_start|>"]
    ids = [bos, *tokenizer.encode_word("a<|im_start|>b")]
    text = echo_ids(tokenizer, ids, [bos])
    assert text == "a<|im_start|>b"
    assert list(echo_offsets(tokenizer, ids, text)) == [0, 0, 1, 13]
    assert echo_ids(tokenizer, ids[1:], [bos]) == text


def test_a_logprob_is_always_a_number_that_json_has():
    for odd in (math.nan, -math.inf, -1e30):
        assert finite(odd) == LOWEST_LOGPROB
    assert finite(-0.5) == -0.5


def test_legacy_logprobs_name_pieces_of_characters_by_their_bytes(client, say):
    say("東")
    logprobs = complete(client, logprobs=0).choices[0].logprobs
    assert logprobs.tokens[0].startswith("bytes:\\x")
    assert logprobs.text_offset[0] == 0


# -- models and errors --------------------------------------------------------------------------


def test_models_are_listed_and_retrieved_by_a_name_with_a_slash(client):
    [model] = client.models.list().data
    assert model.id == "tiny/model"
    assert model.max_model_len == 256
    assert client.models.retrieve("tiny/model").id == "tiny/model"
    with pytest.raises(openai.NotFoundError) as info:
        client.models.retrieve("other/model")
    assert info.value.code == "model_not_found"


def test_served_and_folder_names_are_accepted_and_others_are_404(serve, built):
    server = serve(served_names=("pretty",))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        for name in ("pretty", "tiny/model", built.path.name):
            answer = client.completions.create(model=name, prompt=[5], max_tokens=1)
            assert answer.model == "pretty"
        with pytest.raises(openai.NotFoundError) as info:
            client.completions.create(model="other", prompt=[5])
        assert (info.value.code, info.value.param) == ("model_not_found", "model")


def test_a_model_has_several_names_and_answers_by_the_first(serve):
    server = serve(served_names=("pretty", "plain"))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == ["pretty", "plain"]
        for name in ("pretty", "plain"):
            assert client.models.retrieve(name).id == name
            answer = client.completions.create(model=name, prompt=[5], max_tokens=1)
            assert answer.model == "pretty"
        assert client.models.retrieve("tiny/model").id == "pretty"


def test_one_bad_prompt_of_several_leaves_nothing_behind(client, engine):
    engine.by_hand = True
    with pytest.raises(openai.BadRequestError):
        complete(client, [[5], [-1]])
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("refusal", "kind", "status", "retry_after"),
    [
        (QueueFull("full", retry_after=6.2), openai.RateLimitError, 429, "7"),
        (QueueFull("full", retry_after=900), openai.RateLimitError, 429, "60"),
        (EngineDead("dead"), openai.InternalServerError, 503, "1"),
        (Unavailable("wait", retry_after=2.1), openai.InternalServerError, 503, "3"),
        (PromptTooLong(5, 4), openai.BadRequestError, 400, None),
        (ZeroDivisionError("secret"), openai.InternalServerError, 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_exception_has_its_status_before_any_stream(
    client, engine, refusal, kind, status, retry_after, stream
):
    engine.refusal = refusal
    with pytest.raises(kind) as info:
        chat(client, stream=stream)
    assert info.value.status_code == status
    assert info.value.response.headers.get("retry-after") == retry_after
    assert info.value.response.headers["x-request-id"]
    assert "secret" not in info.value.response.text
    assert set(info.value.body) == {"message", "type", "param", "code"}


def test_an_error_inside_a_stream_is_raised_by_the_client(client, engine):
    engine.row_error = "the row has no finite logit"
    with pytest.raises(openai.APIError, match="no finite logit"):
        list(chat(client, stream=True, seed=0))
    with pytest.raises(openai.InternalServerError, match="no finite logit"):
        chat(client, seed=0)
