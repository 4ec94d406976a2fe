"""Compaction through the real client: items, thresholds, triggers, what stays, broken seals."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from foretoken.api.runtime.compaction.summarizer import HEAD, INSTRUCTIONS

CONTEXT = 4096
HISTORY = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "My cat is Tom."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "My dog is Rex."},
    {"role": "assistant", "content": "Noted, too."},
]
QUESTION = {"role": "user", "content": "Who is my cat?"}
READ = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "file text"}


@pytest.fixture
def built(built, engine):
    engine.max_model_len = built.max_model_len = CONTEXT
    return built


@pytest.fixture
def says(engine, tokenizer):
    """The engine answers the request for a summary and other requests each in their own words."""
    ends = [tokenizer.vocab["<|im_end|>"]]

    def tell(summary: str, answer: str) -> None:
        def answers(request: Any) -> list[int]:
            ids = list(request.tokens[: request.prompt_len])
            asked = INSTRUCTIONS in tokenizer.decode(ids, skip_special_tokens=False)[-900:]
            return [*tokenizer.encode_word(summary if asked else answer), *ends]

        engine.answers = answers

    tell("Tom is a cat, Rex is a dog.", "It is Tom.")
    return tell


def ask(client, input, **options):
    return client.responses.create(model="tiny/model", input=input, **options)


def compact(client, input=HISTORY, **options):
    return client.responses.compact(model="tiny/model", input=input, **options)


def managed(threshold: int) -> list[dict[str, Any]]:
    return [{"type": "compaction", "compact_threshold": threshold}]


def kinds(response) -> list[str]:
    return [item.type for item in response.output]


def plain(item) -> dict[str, Any]:
    return item.model_dump(exclude_none=True, warnings=False)


def test_a_compacted_conversation_is_its_user_messages_and_a_sealed_item(client, says):
    done = compact(client)
    assert (done.object, done.id[:5]) == ("response.compaction", "resp_")
    assert [item.type for item in done.output] == ["message", "message", "compaction"]
    assert [item.role for item in done.output[:2]] == ["user", "user"]
    item = done.output[-1]
    assert item.id.startswith("cmp_")
    assert "Tom" not in item.encrypted_content
    report = done.usage.compaction
    assert report["original_input_tokens"] > 0
    assert report["input_tokens"] == done.usage.input_tokens > report["original_input_tokens"]
    assert report["output_tokens"] == done.usage.output_tokens > 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_triggered", [False, True])
def test_the_cost_includes_the_summary(connect, says, stream, is_triggered):
    client = connect(prices={"input": 2, "output": 8})
    if is_triggered:
        asked: dict[str, Any] = {"input": [*HISTORY, {"type": "compaction_trigger"}]}
    else:
        asked = {"input": [*HISTORY, QUESTION], "context_management": managed(1)}
    answer = ask(client, **asked, stream=stream)
    usage = ([*answer][-1].response if stream else answer).usage
    spent = [usage.compaction]
    if not is_triggered:
        spent.append({"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens})
    cost = sum(2 * each["input_tokens"] + 8 * each["output_tokens"] for each in spent)
    assert usage.cost == pytest.approx(cost / 1e6)
    done = compact(client).usage
    assert done.cost == pytest.approx((2 * done.input_tokens + 8 * done.output_tokens) / 1e6)


def test_the_request_for_a_summary_begins_like_the_conversation(client, says, engine, tokenizer):
    says("Sum.", "ok")
    ask(client, HISTORY, store=False)
    compact(client)
    answered, asked = engine.requests
    shared = answered.prompt_len - len(tokenizer.encode_word("<|im_start|>assistant\n"))
    assert list(asked.tokens[:shared]) == list(answered.tokens[:shared])
    text = tokenizer.decode(asked.tokens[shared : asked.prompt_len], skip_special_tokens=False)
    assert text == f"<|im_start|>user\n{INSTRUCTIONS}<|im_end|><|im_start|>assistant\n"


def test_an_item_stands_for_all_before_it_but_messages_of_users(client, says, prompt_of):
    done = compact(client)
    answer = ask(client, [*map(plain, done.output), QUESTION])
    assert answer.output_text == "It is Tom."
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>"
        "<|im_start|>user\nMy cat is Tom.<|im_end|>"
        "<|im_start|>user\nMy dog is Rex.<|im_end|>"
        f"<|im_start|>user\n{HEAD}\n\nTom is a cat, Rex is a dog.<|im_end|>"
        "<|im_start|>user\nWho is my cat?<|im_end|><|im_start|>assistant\n"
    )
    assert prompt_of() == expected
    ask(client, [*HISTORY, plain(done.output[-1]), QUESTION])
    assert prompt_of() == expected


def test_a_later_compaction_brings_nothing_back_that_an_earlier_one_removed(
    client, says, prompt_of
):
    first = ask(client, [*HISTORY, QUESTION], context_management=managed(60))
    trigger = {"type": "compaction_trigger"}
    second = ask(client, [trigger], previous_response_id=first.id)
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>"
        "<|im_start|>user\nWho is my cat?<|im_end|>"
        f"<|im_start|>user\n{HEAD}\n\nTom is a cat, Rex is a dog.<|im_end|>"
        "<|im_start|>user\nAnd my dog?<|im_end|><|im_start|>assistant\n"
    )
    ask(client, "And my dog?", previous_response_id=second.id)
    assert prompt_of() == expected
    items = [*HISTORY, QUESTION, *map(plain, first.output), trigger, *map(plain, second.output)]
    ask(client, [*items, {"role": "user", "content": "And my dog?"}])
    assert prompt_of() == expected


def test_a_conversation_above_the_threshold_is_compacted_before_its_answer(client, says, prompt_of):
    answer = ask(client, [*HISTORY, QUESTION], context_management=managed(60))
    assert kinds(answer) == ["compaction", "message"]
    assert answer.output_text == "It is Tom."
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>"
        f"<|im_start|>user\n{HEAD}\n\nTom is a cat, Rex is a dog.<|im_end|>"
        "<|im_start|>user\nWho is my cat?<|im_end|><|im_start|>assistant\n"
    )
    assert prompt_of() == expected
    report = answer.usage.compaction
    assert report["compacted_input_tokens"] == answer.usage.input_tokens
    later = [*map(plain, answer.output), {"role": "user", "content": "And my dog?"}]
    ask(client, later)
    pruned = prompt_of()
    assert pruned.startswith(expected)
    assert pruned.endswith("It is Tom.<|im_end|><|im_start|>user\nAnd my dog?<|im_end|>"
                           "<|im_start|>assistant\n")  # fmt: skip
    ask(client, [*HISTORY, QUESTION, *later])
    assert prompt_of() == pruned, "what stands before the item does not matter"
    ask(client, "And my dog?", previous_response_id=answer.id)
    assert prompt_of() == pruned, "nor who keeps the conversation"


@pytest.mark.parametrize(
    ("input", "threshold"),
    [
        ([*HISTORY, QUESTION], 1000),
        ([QUESTION], 1),
        ([HISTORY[0], QUESTION], 1),
        ([QUESTION, READ, RESULT][1:], 1),
    ],
)
def test_nothing_is_compacted_below_the_threshold_or_without_earlier_turns(
    client, says, engine, input, threshold
):
    answer = ask(client, input, context_management=managed(threshold))
    assert kinds(answer) == ["message"]
    assert len(engine.requests) == 1
    assert answer.usage.model_extra.get("compaction") is None


def test_the_calls_whose_results_are_awaited_stay(client, says, prompt_of):
    tools = [{"type": "function", "name": "read", "parameters": {}, "strict": False}]
    ask(
        client,
        [*HISTORY, QUESTION, READ, RESULT],
        context_management=managed(60),
        tools=tools,
    )
    assert prompt_of().endswith(
        f"<|im_start|>user\n{HEAD}\n\nTom is a cat, Rex is a dog.<|im_end|>"
        '<|im_start|>assistant\n<tool_call>{"name": "read", "arguments": {}}</tool_call><|im_end|>'
        "<|im_start|>tool\nfile text<|im_end|><|im_start|>assistant\n"
    )


def test_tools_that_the_cut_part_added_stay(client, says, engine, prompt_of):
    tool = {"type": "function", "name": "read", "parameters": {}, "strict": False}
    added = {"type": "additional_tools", "role": "developer", "tools": [tool]}
    answer = ask(client, [added, *HISTORY, QUESTION], context_management=managed(60))
    ask(client, [*map(plain, answer.output), QUESTION])
    assert prompt_of().startswith("1<tool_call></tool_call>")


def test_a_stored_answer_behind_an_item_is_rendered_by_its_token_ids(connect, engine, tokenizer):
    client = connect(token_history=False)
    ids = [each for character in "hello" for each in tokenizer.encode_word(character)]
    engine.answers = lambda _: [*ids, tokenizer.vocab["<|im_end|>"]]
    answer = ask(client, [*HISTORY, QUESTION], context_management=managed(60))
    later = ask(client, "And my dog?", previous_response_id=answer.id)
    assert later.usage.input_tokens_details.spliced_tokens == len(ids)


def test_a_summary_calls_no_tools(client, says):
    says('<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>', "ok")
    tool = {"type": "function", "name": "read", "parameters": {}, "strict": False}
    assert compact(client, extra_body={"tools": [tool]}).output[-1].type == "compaction"


@pytest.mark.parametrize("mode", ["implicit", "explicit"])
def test_breakpoints_let_the_summary_use_the_cache_and_are_pins_of_the_answer(
    client, says, engine, prompt_of, tokenizer, mode
):
    part = {"type": "input_text", "text": "Who is my cat?"}
    part["prompt_cache_breakpoint"] = {"mode": "explicit"}
    answer = ask(
        client,
        [*HISTORY, {"role": "user", "content": [part]}],
        context_management=managed(60),
        extra_body={"prompt_cache_options": {"mode": mode}},
    )
    asked, answered = engine.requests
    assert (asked.cache.read, asked.cache.write, asked.cache.pins) == (True, True, ())
    [pin] = answered.cache.pins
    head = tokenizer.decode([*answered.tokens[: pin.num_tokens]], skip_special_tokens=False)
    assert head == prompt_of().removesuffix("<|im_start|>assistant\n")
    assert "cache_write_tokens_details" in answer.usage.input_tokens_details.to_dict()


def test_a_prompt_that_is_only_cached_is_not_compacted(client, says, engine):
    warm = {"prompt_cache_options": {"prewarm": True}}
    ask(client, [*HISTORY, QUESTION], context_management=managed(60), extra_body=warm)
    assert len(engine.requests) == 1
    assert engine.requests[0].sampling.params.prompt_only


def test_a_trigger_compacts_and_answers_nothing(client, says, engine, prompt_of):
    answer = ask(client, [*HISTORY, {"type": "compaction_trigger"}])
    assert (kinds(answer), answer.status) == (["compaction"], "completed")
    assert len(engine.requests) == 1
    assert answer.usage.input_tokens == answer.usage.compaction["input_tokens"]
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>"
        "<|im_start|>user\nMy cat is Tom.<|im_end|><|im_start|>user\nMy dog is Rex.<|im_end|>"
        f"<|im_start|>user\n{HEAD}\n\nTom is a cat, Rex is a dog.<|im_end|>"
        "<|im_start|>user\nWho is my cat?<|im_end|><|im_start|>assistant\n"
    )
    ask(client, [QUESTION], previous_response_id=answer.id)
    assert prompt_of() == expected
    trigger = {"type": "compaction_trigger"}
    ask(client, [*HISTORY, trigger, *map(plain, answer.output), QUESTION])
    assert prompt_of() == expected


def test_a_stream_begins_with_the_compaction_item(client, says):
    events = list(ask(client, [*HISTORY, QUESTION], context_management=managed(60), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "output_item.done"]
    assert names[:5] == [*begin, "output_item.added"]
    added, done = events[2:4]
    assert added.item.encrypted_content == ""
    assert done.item.encrypted_content
    assert added.item.id == done.item.id
    assert {event.output_index for event in events[2:4]} == {0}
    assert {event.output_index for event in events[4:-1]} == {1}
    last = events[-1].response
    assert (events[-1].type, kinds(last)) == ("response.completed", ["compaction", "message"])
    assert last.output[0] == done.item


def test_a_stream_that_compacts_is_resumed_by_its_id(connect, says):
    client = connect(resume_seconds=3600)
    events = list(ask(client, [*HISTORY, QUESTION], context_management=managed(60), stream=True))
    again = client.responses.retrieve(events[0].response.id, stream=True)
    assert list(again) == events


def test_a_streamed_trigger_ends_with_the_item(client, says):
    events = list(ask(client, [*HISTORY, {"type": "compaction_trigger"}], stream=True))
    assert [event.type.removeprefix("response.") for event in events][2:] == [
        "output_item.added", "compaction.compacting", "output_item.done", "completed",
    ]  # fmt: skip


def test_a_conversation_beyond_the_context_is_summarized_in_passes(client, says, engine, prompt_of):
    engine.max_model_len = 4096
    long = "word after word after word " * 60
    talk = [{"role": "user", "content": f"{number}. {long}"} for number in range(12)]
    answer = ask(client, [*talk, QUESTION], context_management=managed(CONTEXT * 4))
    assert answer.output_text == "It is Tom."
    assert len(engine.requests) > 2
    assert all(request.prompt_len < CONTEXT for request in engine.requests)
    assert answer.usage.compaction["original_input_tokens"] > CONTEXT
    assert prompt_of().count(HEAD) == 1


def test_a_prompt_that_is_too_long_names_by_how_much_and_what_compaction_leaves(client, says):
    long = "word after word after word " * 600
    talk = [{"role": "user", "content": long}, {"role": "assistant", "content": "ok"}, QUESTION]
    with pytest.raises(openai.BadRequestError, match="prompt is too long") as info:
        ask(client, talk)
    message = info.value.body["message"]
    counted = int(message.split(": ")[1].split()[0])
    assert f"The prompt is {counted - CONTEXT + 1} tokens too long." in message
    assert "Compaction (context_management, or POST /v1/responses/compact) would leave" in message
    assert f"a summary of at most {CONTEXT // 2}." in message
    assert info.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Compaction cannot shorten it"):
        ask(client, long)


def altered(text: str) -> str:
    return text[:-8] + ("AAAA" if text[-8:-4] != "AAAA" else "BBBB") + text[-4:]


@pytest.mark.parametrize(
    "change",
    [altered, lambda text: text[:40], lambda text: "gAAAAABn", lambda text: "ä", lambda _: ""],
)
def test_an_altered_item_is_refused_by_its_path(client, says, change):
    item = plain(compact(client).output[-1])
    item["encrypted_content"] = change(item["encrypted_content"])
    with pytest.raises(openai.BadRequestError) as info:
        ask(client, [QUESTION, item, QUESTION])
    assert info.value.param == "input[1].encrypted_content"


def test_an_item_of_another_server_or_salt_or_key_is_refused(serve, says):
    def post(server, **fields):
        return httpx.post(f"{server.url}/v1/responses", json=fields, timeout=20)

    one, same, other = serve(seal_key="a"), serve(seal_key="a"), serve(seal_key="b")
    body = {"model": "tiny/model", "input": HISTORY}
    item = httpx.post(f"{one.url}/v1/responses/compact", json=body, timeout=20).json()["output"][-1]
    assert post(same, input=[item, QUESTION]).status_code == 200
    for answer in (
        post(other, input=[item, QUESTION]),
        post(one, input=[item, QUESTION], cache_salt="x"),
        post(one, input=[item, QUESTION], nvext={"cache_salt": "x"}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"context_management": [{"type": "other"}]}, "context_management[0].type"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 0}]},
         "context_management[0].compact_threshold"),
        ({"context_management": {"type": "compaction"}}, "context_management"),
        ({"input": [{"type": "compaction_trigger"}, QUESTION]}, "input[0]"),
        ({"input": [{"type": "compaction_trigger"}]}, "input"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(server, fields, param):
    body = {"input": "hi", **fields}
    answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_empty_summary_is_an_error_to_retry(client, says):
    says("", "ok")
    with pytest.raises(openai.InternalServerError) as info:
        compact(client)
    assert info.value.status_code == 503
    events = list(ask(client, [*HISTORY, QUESTION], context_management=managed(60), stream=True))
    assert events[-1].type == "response.failed"
    assert "no summary" in events[-1].response.error.message


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
def test_a_client_that_leaves_during_the_summary_ends_it(server, engine, path):
    engine.by_hand = True
    body = {"input": [*HISTORY, QUESTION], "context_management": managed(60)}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{path}", json=body, timeout=0.5)
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == 1


def test_a_client_that_leaves_a_stream_during_the_summary_ends_it(client, engine):
    engine.by_hand = True
    with ask(client, [*HISTORY, QUESTION], context_management=managed(60), stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
        assert engine.submitted.acquire(timeout=10)
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_after_the_summary_ends_the_answer(
    server, says, engine, tokenizer, is_stream
):
    ids = [*tokenizer.encode_word("Sum."), tokenizer.vocab["<|im_end|>"]]

    def answers(request: Any) -> list[int]:
        engine.by_hand = len(engine.requests) == 1  # the answer is the second request
        return ids

    engine.answers = answers
    body = {"input": [*HISTORY, QUESTION], "context_management": managed(60), "stream": is_stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/responses", json=body, timeout=1)
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == 2
