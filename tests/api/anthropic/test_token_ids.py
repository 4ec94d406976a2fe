"""Token ids in Anthropic's bodies: an extension in the style of the others."""

from __future__ import annotations

import httpx
import pytest

HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "go on"}


@pytest.fixture
def say_oddly(engine, tokenizer):
    """Answer in one token for each character."""

    def tell(text):
        ids = [each for character in text for each in tokenizer.encode_word(character)]
        engine.answers = lambda request: [*ids, tokenizer.vocab["<|im_end|>"]]
        return ids

    return tell


@pytest.mark.parametrize("text", ["hello world", "<think>hm</think>hello"])
def test_a_message_comes_back_by_its_ids(post, engine, say_oddly, text):
    ids = say_oddly(text)
    said = post(return_token_ids=True).json()
    first = engine.requests[-1]
    start = list(first.tokens[: first.prompt_len])
    assert (said["prompt_token_ids"], said["token_ids"]) == (start, ids)
    message = {"role": "assistant", "content": said["content"], "token_ids": said["token_ids"]}
    usage = post(messages=[HI, message, ON]).json()["usage"]
    assert list(engine.requests[-1].tokens[: len(start) + len(ids)]) == [*start, *ids]
    assert usage["spliced_tokens"] == len(ids)
    assert "token_ids" not in post().json()


def test_a_stream_has_them_at_its_beginning_and_its_end(stream, engine, say_oddly):
    ids = say_oddly("hello world")
    events = stream(return_token_ids=True)
    request = engine.requests[-1]
    start = [each for each in events if each["type"] == "message_start"]
    end = [each for each in events if each["type"] == "message_delta"]
    assert start[0]["message"]["prompt_token_ids"] == list(request.tokens[: request.prompt_len])
    assert end[0]["token_ids"] == ids


def test_a_message_whose_thoughts_are_left_out_has_no_ids(post, say_oddly):
    say_oddly("<think>hm</think>hello")
    asked = {"thinking": {"type": "adaptive", "display": "omitted"}, "return_token_ids": True}
    assert "token_ids" not in post(**asked).json()


def test_wrong_ids_are_an_error_that_names_them(post, say_oddly):
    ids = say_oddly("hello")
    own = {"role": "assistant", "content": "hello", "token_ids": ids}
    for messages, index in (
        ([HI, {**own, "content": "other"}, ON], 1),
        ([HI, {**own, "token_ids": [10**7]}, ON], 1),
        ([{**HI, "token_ids": ids}], 0),
        ([HI, own, {"role": "assistant", "content": "more"}, ON], 1),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = post(path, messages=messages)
            assert answer.status_code == 400, answer.text
            assert f"messages[{index}].token_ids" in answer.json()["error"]["message"]


def test_a_text_that_comes_back_is_found_and_counted(post, engine, say_oddly):
    ids = say_oddly("hello world")
    said = post(cache_salt="a").json()
    talk = [HI, {"role": "assistant", "content": said["content"]}, ON]
    found = post(messages=talk, cache_salt="a").json()["usage"]
    assert found["spliced_tokens"] == len(ids)
    counted = post("/v1/messages/count_tokens", messages=talk, cache_salt="a", max_tokens=...)
    assert counted.json()["input_tokens"] == engine.requests[-1].prompt_len
    assert post(messages=talk, cache_salt="b").json()["usage"]["spliced_tokens"] == 0


def test_a_call_that_was_cut_comes_back_as_the_text_that_it_was(serve, engine, say_oddly):
    url = serve(tool_parser="hermes").url + "/v1/messages"
    ids = say_oddly('<tool_call>\n{"name": "f", "arguments": {"a": "b')
    tool = {"name": "f", "input_schema": {"type": "object"}}

    def ask(*messages):
        body = {"messages": messages, "max_tokens": len(ids), "tools": [tool]}
        return httpx.post(url, json=body, timeout=20).raise_for_status().json()

    said = ask(HI)
    (block,) = said["content"]
    assert block["input"] == {"INVALID_JSON": '{"a": "b'}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "it was cut"}
    talk = [HI, {"role": "assistant", "content": said["content"]}]
    found = ask(*talk, {"role": "user", "content": [result]})
    assert found["usage"]["spliced_tokens"] == len(ids)


def test_breakpoints_are_behind_answers_that_are_spliced(post, engine, say_oddly):
    ids = say_oddly("hello world")
    here = {"type": "ephemeral"}
    user = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": here}]}
    said = post(messages=[user]).json()
    start = engine.requests[-1].prompt_len
    more = {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": here}]}
    post(messages=[user, {"role": "assistant", "content": said["content"]}, more])
    first, last = (pin.num_tokens for pin in engine.requests[-1].cache.pins)
    assert first < start + len(ids) < last <= engine.requests[-1].prompt_len
