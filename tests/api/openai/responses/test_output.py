"""Items of an answer, from its deltas."""

from __future__ import annotations

import msgspec

from foretoken.api.dialects.responses.output import Output
from foretoken.api.dialects.responses.writing import response_error
from foretoken.api.types.results import CallDelta, TextDelta
from foretoken.core.errors import ForetokenError, InvalidRequest, QueueFull


def output_of(*deltas, is_complete=True):
    output = Output(lambda logprobs: [])
    events = [event for delta in deltas for event in output.add(delta)]
    events += output.end(is_complete=is_complete)
    return msgspec.to_builtins(output.items), msgspec.to_builtins(events)


def test_words_behind_a_call_are_a_message_of_their_own():
    begun = CallDelta(index=0, id="call_1", name="f", arguments="{")
    ended = CallDelta(index=0, arguments="}", is_done=True)
    items, events = output_of(
        TextDelta(text="a", tool_calls=[begun]), TextDelta(text="b", tool_calls=[ended])
    )
    shown = [(item["type"], item["status"]) for item in items]
    assert shown == [(kind, "completed") for kind in ("message", "function_call", "message")]
    assert items[1]["arguments"] == "{}"
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in items]


def test_a_call_that_breaks_off_is_incomplete_even_when_words_follow():
    broken = CallDelta(index=0, id="call_1", name="f", arguments="{")
    items, _ = output_of(TextDelta(tool_calls=[broken]), TextDelta(text="sorry"))
    assert [item["status"] for item in items] == ["incomplete", "completed"]
    items, _ = output_of(TextDelta(tool_calls=[broken]))
    assert [item["status"] for item in items] == ["incomplete"]


def test_an_answer_of_thought_alone_has_an_empty_message_when_it_is_whole():
    items, _ = output_of(TextDelta(reasoning="hm"))
    assert [item["type"] for item in items] == ["reasoning", "message"]
    items, _ = output_of(TextDelta(reasoning="hm"), is_complete=False)
    assert [item["status"] for item in items] == ["incomplete"]


def test_errors_that_callers_can_mend_keep_their_codes():
    codes = [response_error(e).code for e in (InvalidRequest("a"), QueueFull("b"))]
    assert codes == ["invalid_prompt", "rate_limit_exceeded"]
    assert response_error(ForetokenError("c")).code == "server_error"
