"""Compaction in Anthropic's API: blocks, triggers, pauses, what stays, broken seals."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretoken.api.runtime.compaction.summarizer import HEAD, INSTRUCTIONS

CONTEXT = 4096
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "My cat is Tom."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "My dog is Rex."},
    {"role": "assistant", "content": "Noted, too."},
]
QUESTION: dict[str, Any] = {"role": "user", "content": "Who is my cat?"}
SUMMARY = "Tom is a cat, Rex is a dog."
CALL = {"role": "assistant", "content": [
    {"type": "tool_use", "id": "t1", "name": "read", "input": {}}]}  # fmt: skip
RESULT = {"role": "user", "content": [
    {"type": "tool_result", "tool_use_id": "t1", "content": "file text"}]}  # fmt: skip
EDIT = "compact_20260112"
START = f"<|im_start|>user\n{HEAD}\n\n{SUMMARY}"
OPENS = "<|im_start|>assistant\n"


@pytest.fixture
def built(built, engine):
    engine.max_model_len = built.max_model_len = CONTEXT
    return built


@pytest.fixture(autouse=True)
def says(engine, tokenizer):
    """The engine answers the request for a summary and other requests each in their own words."""
    ends = [tokenizer.vocab["<|im_end|>"]]

    def tell(summary: str, answer: str = "It is Tom.") -> None:
        def answers(request: Any) -> list[int]:
            ids = list(request.tokens[: request.prompt_len])
            asked = "Write a summary" in tokenizer.decode(ids, skip_special_tokens=False)[-900:]
            return [*tokenizer.encode_word(summary if asked else answer), *ends]

        engine.answers = answers

    tell(SUMMARY)
    return tell


def managed(value: int = 40, **options: Any) -> dict[str, Any]:
    edit = {"type": EDIT, "trigger": {"type": "input_tokens", "value": value}, **options}
    return {"context_management": {"edits": [edit]}}


def summarize(**options: Any) -> dict[str, Any]:
    return {"compaction": {"type": "summarize", **options}}


def kinds(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


def test_a_conversation_above_the_trigger_is_compacted_before_its_answer(post, prompt):
    whole = post(messages=[*HISTORY, QUESTION], system="Be kind.").json()["usage"]["input_tokens"]
    answer = post(messages=[*HISTORY, QUESTION], system="Be kind.", **managed()).json()
    assert kinds(answer) == ["compaction", "text"]
    block, text = answer["content"]
    assert (block["content"], text["text"]) == (SUMMARY, "It is Tom.")
    assert "signature" not in block
    assert answer["stop_reason"] == "end_turn"
    expected = f"<|im_start|>system\nBe kind.<|im_end|>\n{START}\nWho is my cat?<|im_end|>\n{OPENS}"
    assert prompt() == expected
    usage = answer["usage"]
    cleared = whole - usage["input_tokens"]
    told = [{"type": EDIT, "cleared_input_tokens": cleared}]
    assert answer["context_management"]["applied_edits"] == told
    compaction, message = usage["iterations"]
    assert (compaction["type"], message["type"]) == ("compaction", "message")
    assert compaction["input_tokens"] > message["input_tokens"] == usage["input_tokens"]
    assert compaction["output_tokens"] > 1
    assert message["output_tokens"] == usage["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pauses", [False, True])
def test_the_cost_includes_the_summary(serve, stream, pauses):
    url = serve(prices={"input": 2, "output": 8}).url
    body = {"model": "tiny/model", "max_tokens": 100, "messages": [*HISTORY, QUESTION]}
    body |= managed(pause_after_compaction=pauses)
    sent = httpx.post(f"{url}/v1/messages", json={**body, "stream": stream}).raise_for_status()
    if stream:
        events = [json.loads(line[6:]) for line in sent.text.splitlines() if line[:6] == "data: "]
        [usage] = [each["usage"] for each in events if each["type"] == "message_delta"]
    else:
        usage = sent.json()["usage"]
    assert len(usage["iterations"]) == (1 if pauses else 2)
    counted = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    cost = sum(
        2 * sum(each[name] for name in counted) + 8 * each["output_tokens"]
        for each in usage["iterations"]
    )
    assert usage["cost"] == pytest.approx(cost / 1e6)


def test_a_block_stands_for_all_before_it(post, prompt):
    answer = post(messages=[*HISTORY, QUESTION], **managed()).json()
    said = {"role": "assistant", "content": answer["content"]}
    later = {"role": "user", "content": "And my dog?"}
    post(messages=[*HISTORY, QUESTION, said, later])
    expected = (
        f"{START}\nWho is my cat?<|im_end|>\n<|im_start|>assistant\nIt is Tom.<|im_end|>\n"
        f"<|im_start|>user\nAnd my dog?<|im_end|>\n{OPENS}"
    )
    assert prompt() == expected
    post(messages=[said, later])
    assert prompt() == expected, "what stands before the block does not matter"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*HISTORY, QUESTION], **managed(1000)},
        {"messages": [QUESTION], **managed(1)},
        {"messages": [CALL, RESULT], **managed(1)},
        {"messages": [*HISTORY, QUESTION], "context_management": {"edits": [{"type": EDIT}]}},
    ],
)
def test_nothing_is_compacted_below_the_trigger_or_without_earlier_turns(post, engine, fields):
    answer = post(**fields).json()
    assert kinds(answer) == ["text"]
    assert answer["context_management"] == {"applied_edits": []}
    assert "iterations" not in answer["usage"]
    assert len(engine.requests) == 1


def test_a_prompt_that_is_only_cached_is_not_compacted(post, engine):
    answer = post(messages=[*HISTORY, QUESTION], max_tokens=0, **managed()).json()
    assert answer["content"] == []
    assert len(engine.requests) == 1


def test_calls_whose_results_are_awaited_stay(post, prompt):
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    post(messages=[*HISTORY, QUESTION, CALL, RESULT], tools=tools, **managed())
    assert prompt().endswith(
        f"{START}<|im_end|>\n"
        f'{OPENS}<tool_call>{{"name": "read", "arguments": {{}}}}</tool_call><|im_end|>\n'
        f"<|im_start|>tool\nfile text<|im_end|>\n{OPENS}"
    )


def test_a_pause_summarizes_everything_and_stops(post, prompt, engine):
    answer = post(messages=[*HISTORY, QUESTION], **managed(pause_after_compaction=True)).json()
    assert (kinds(answer), answer["stop_reason"]) == (["compaction"], "compaction")
    assert len(engine.requests) == 1
    assert [each["type"] for each in answer["usage"]["iterations"]] == ["compaction"]
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (0, 0)
    said = {"role": "assistant", "content": answer["content"]}
    post(messages=[*HISTORY, QUESTION, said, QUESTION])
    assert prompt() == f"{START}\nWho is my cat?<|im_end|>\n{OPENS}"
    post(messages=[*HISTORY, QUESTION, said])
    assert prompt() == f"{START}<|im_end|>\n{OPENS}"


def test_instructions_add_to_an_edit_and_replace_those_of_a_compaction(post, prompt):
    post(messages=[*HISTORY, QUESTION],
         **managed(pause_after_compaction=True, instructions="Names first."))  # fmt: skip
    assert f"{INSTRUCTIONS}\n\nNames first." in prompt()
    post(messages=HISTORY, **summarize(instructions="Write a summary: names."))
    assert prompt().endswith(f"<|im_start|>user\nWrite a summary: names.<|im_end|>\n{OPENS}")
    post(messages=HISTORY, **summarize(instructions=" "))
    assert INSTRUCTIONS in prompt()


@pytest.mark.parametrize("fields", [managed(), summarize()])
def test_the_request_for_a_summary_has_the_options_of_the_body(post, engine, fields):
    options = {
        "cache": {"read": True, "write": False},
        "cache_salt": "tenant",
        "priority": 7,
        "deadline_ms": 60_000,
        "seed": 11,
        "temperature": 0.5,
        "nvext": {"agent_hints": {"speculative_prefill": True}},
    }
    assert post(messages=[*HISTORY, QUESTION], **fields, **options).status_code == 200
    asked = engine.requests[0]
    assert (asked.cache.read, asked.cache.write) == (True, False)
    assert (asked.namespace, asked.tenant, asked.priority) == ("tenant", "tenant", 7)
    assert 0 < asked.deadline <= 60
    assert (asked.sampling.params.seed, asked.sampling.params.temperature) == (11, 0.5)


def test_a_compaction_is_a_signed_block_alone(post, prompt):
    talk = [*HISTORY, *HISTORY]
    count = "/v1/messages/count_tokens"
    whole = post(count, messages=talk).json()["input_tokens"]
    answer = post(messages=talk, **summarize()).json()
    [block] = answer["content"]
    assert (block["type"], block["content"]) == ("compaction", SUMMARY)
    assert block["signature"]
    assert "encrypted_content" not in block
    assert answer["stop_reason"] == "compaction"
    left = post(count, messages=[{"role": "assistant", "content": [block]}]).json()["input_tokens"]
    [told] = answer["context_management"]["applied_edits"]
    assert told == {"type": EDIT, "cleared_input_tokens": whole - left}
    post(messages=[{"role": "assistant", "content": [block]}, QUESTION])
    assert prompt() == f"{START}\nWho is my cat?<|im_end|>\n{OPENS}"


def test_a_block_without_content_or_without_a_seal(post, prompt):
    """Failed compactions have no effect, and some clients send the content alone."""
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}
    post(messages=[HISTORY[0], failed, QUESTION])
    assert HEAD not in prompt()
    assert "My cat is Tom." in prompt()
    bare = {"role": "assistant", "content": [{"type": "compaction", "content": SUMMARY}]}
    post(messages=[*HISTORY, bare, QUESTION])
    assert prompt() == f"{START}\nWho is my cat?<|im_end|>\n{OPENS}"


def test_a_stream_has_the_block_before_the_answer(stream):
    events = stream(messages=[*HISTORY, QUESTION], **managed())
    names = [event["type"] for event in events if event["type"] != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names[:4] == ["message_start", *block]
    assert names[4:6] == ["content_block_start", "content_block_delta"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    indexes = [event["index"] for event in events if "index" in event]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1}
    assert events[1]["content_block"] == {"type": "compaction", "content": None}
    delta = events[2]["delta"]
    assert (delta["type"], delta["content"]) == ("compaction_delta", SUMMARY)
    assert delta["encrypted_content"]
    last = events[-2]
    assert last["context_management"]["applied_edits"][0]["type"] == EDIT
    assert [each["type"] for each in last["usage"]["iterations"]] == ["compaction", "message"]


def test_a_streamed_compaction_has_its_signature_in_its_first_event(stream):
    events = stream(messages=HISTORY, **summarize())
    assert events[1]["content_block"]["signature"]
    assert events[2]["delta"] == {"type": "compaction_delta", "content": SUMMARY}
    assert events[-2]["delta"]["stop_reason"] == "compaction"


def test_a_conversation_beyond_the_context_is_summarized_in_passes(post, engine, prompt):
    long = "word after word after word " * 60
    talk = [{"role": role, "content": f"{number}. {long}"}
            for number in range(12) for role in ("user", "assistant")]  # fmt: skip
    answer = post(messages=[*talk, QUESTION], **managed(4 * CONTEXT)).json()
    assert kinds(answer) == ["compaction", "text"], answer
    assert len(engine.requests) > 2
    assert all(request.prompt_len < CONTEXT for request in engine.requests)
    assert prompt() == f"{START}\nWho is my cat?<|im_end|>\n{OPENS}"


def test_a_prompt_that_is_too_long_names_by_how_much_and_what_compaction_leaves(post):
    long = {"role": "user", "content": "word after word after word " * 600}
    answer = post(messages=[long, HISTORY[1], QUESTION])
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    counted = int(message.split(": ")[1].split()[0])
    assert f"The prompt is {counted - CONTEXT + 1} tokens too long." in message
    assert "Compaction (context_management or compaction) would leave" in message
    assert "Compaction cannot shorten it" in post(messages=[long]).json()["error"]["message"]


def altered(text: str) -> str:
    return text[:-8] + ("AAAA" if text[-8:-4] != "AAAA" else "BBBB") + text[-4:]


@pytest.mark.parametrize(
    ("fields", "name"), [(managed(), "encrypted_content"), (summarize(), "signature")]
)
def test_an_altered_block_is_refused_by_its_path(post, fields, name):
    [block, *_] = post(messages=[*HISTORY, QUESTION], **fields).json()["content"]
    for field, change, code in (
        (name, altered, "signature_invalid"),
        (name, lambda _: "x", "signature_invalid"),
        ("content", lambda text: f"{text}!", "content_mismatch"),
    ):
        said = {"role": "assistant", "content": [{**block, field: change(block[field])}]}
        answer = post(messages=[QUESTION, said, QUESTION])
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["message"].startswith(f"messages[1].content[0].{field} ")
        assert error["details"]["error_code"] == f"compaction_{code}"


def test_a_block_of_another_server_is_refused(serve):
    def post(server, **fields):
        body = {"model": "tiny/model", "max_tokens": 50, **fields}
        return httpx.post(f"{server.url}/v1/messages", json=body, timeout=20)

    one, same, other = serve(seal_key="a"), serve(seal_key="a"), serve(seal_key="b")
    said = {
        "role": "assistant",
        "content": post(one, messages=HISTORY, **summarize()).json()["content"],
    }
    assert post(same, messages=[said, QUESTION]).status_code == 200
    assert post(other, messages=[said, QUESTION]).status_code == 400
    assert post(one, messages=[said, QUESTION], cache_salt="x").status_code == 400


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [*HISTORY, CALL], **summarize()}, "compaction_incomplete_turn"),
        ({"messages": [{"role": "user", "content": " "}], **summarize()},
         "compaction_nothing_to_summarize"),
        ({"messages": HISTORY, **summarize(), **managed()}, None),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_compacted_is_refused(post, fields, code):
    answer = post(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"].get("details") == (code and {"error_code": code})


def test_the_paths_of_messages_behind_a_block_are_those_of_the_body(post):
    [block] = post(messages=HISTORY, **summarize()).json()["content"]
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "So."}]}
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    answer = post(messages=[*HISTORY, said, {"role": "user", "content": [image]}])
    assert "messages[5].content[0]" in answer.json()["error"]["message"]


def test_an_empty_summary_is_an_error_to_retry(post, stream, says):
    says("")
    assert post(messages=HISTORY, **summarize()).status_code == 503
    events = stream(messages=[*HISTORY, QUESTION], **managed())
    assert events[-1]["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("fields", [managed(), summarize()])
def test_a_client_that_leaves_during_the_summary_ends_it(server, engine, fields):
    engine.by_hand = True
    body = {"max_tokens": 50, "messages": [*HISTORY, QUESTION], **fields}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/messages", json=body, timeout=0.5)
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == 1


def test_a_client_that_leaves_a_stream_during_the_summary_ends_it(serve, engine):
    server = serve(ping_seconds=0.01)
    engine.by_hand = True
    body = {"max_tokens": 50, "messages": [*HISTORY, QUESTION], "stream": True, **managed()}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=body, timeout=20) as answer:
        next(answer.iter_bytes())
        assert engine.submitted.acquire(timeout=10)
    assert engine.was_aborted.acquire(timeout=20)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_after_the_summary_ends_the_answer(
    server, engine, tokenizer, is_stream
):
    ids = [*tokenizer.encode_word("Sum."), tokenizer.vocab["<|im_end|>"]]

    def answers(request: Any) -> list[int]:
        engine.by_hand = len(engine.requests) == 1  # the answer is the second request
        return ids

    engine.answers = answers
    body = {"max_tokens": 50, "messages": [*HISTORY, QUESTION], "stream": is_stream, **managed()}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/messages", json=body, timeout=1)
    assert engine.was_aborted.acquire(timeout=10)
    assert len(engine.requests) == 2
