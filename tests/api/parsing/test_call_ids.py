"""Ids that Mistral's templates take."""

from __future__ import annotations

from foretoken.api.parsing.formats.kimi import with_numbered_ids
from foretoken.api.parsing.formats.mistral import with_short_ids

CALL = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f"}}


def test_long_ids_become_nine_letters_and_digits_and_stay_paired():
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": CALL["id"]},
    ]
    user, assistant, tool = with_short_ids(talk)
    short = assistant["tool_calls"][0]["id"]
    assert (len(short), short.isalnum(), tool["tool_call_id"]) == (9, True, short)
    assert user == talk[0]
    assert assistant["tool_calls"][0]["function"] == {"name": "f"}
    assert talk[1]["tool_calls"][0] is CALL, "the caller's own messages are left alone"


def test_ids_that_fit_are_kept():
    message = {"role": "tool", "content": "1", "tool_call_id": "abcDEF123"}
    assert with_short_ids([message]) == [message]


def test_numbered_ids_name_the_calls_and_their_results():
    call = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {**call, "id": "call_def", "function": {"name": "g", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "call_def", "content": "2"},
        {"role": "tool", "tool_call_id": "unknown", "content": "3"},
    ]
    user, assistant, tool, unknown = with_numbered_ids(talk)
    assert user == talk[0]
    assert [each["id"] for each in assistant["tool_calls"]] == ["functions.f:0", "functions.g:1"]
    assert tool["tool_call_id"] == "functions.g:1"
    assert unknown == talk[3]
