"""Items of an answer, from its deltas."""

from __future__ import annotations

from foretoken.api.openai.responses.events import error_body
from foretoken.api.openai.responses.output import Output
from foretoken.api.types.results import CallDelta, TextDelta
from foretoken.core.errors import ForetokenError, InvalidRequest, QueueFull


def output_of(*deltas, is_whole=True):
    output = Output(lambda logprobs: [])
    events = [event for delta in deltas for event in output.add(delta)]
    return output, events + output.end(is_whole=is_whole)


def test_words_behind_a_call_are_a_message_of_their_own():
    begun = CallDelta(index=0, id="call_1", name="f", arguments="{")
    ended = CallDelta(index=0, arguments="}", is_done=True)
    output, events = output_of(
        TextDelta(text="a", tool_calls=[begun]), TextDelta(text="b", tool_calls=[ended])
    )
    shown = [(item["type"], item["status"]) for item in output.items]
    assert shown == [(kind, "completed") for kind in ("message", "function_call", "message")]
    assert output.items[1]["arguments"] == "{}"
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in output.items]


def test_a_call_that_breaks_off_is_incomplete_even_when_words_follow():
    broken = CallDelta(index=0, id="call_1", name="f", arguments="{")
    output, _ = output_of(TextDelta(tool_calls=[broken]), TextDelta(text="sorry"))
    assert [item["status"] for item in output.items] == ["incomplete", "completed"]
    output, _ = output_of(TextDelta(tool_calls=[broken]))
    assert [item["status"] for item in output.items] == ["incomplete"]


def test_an_answer_of_thought_alone_has_an_empty_message_when_it_is_whole():
    output, _ = output_of(TextDelta(reasoning="hm"))
    assert [item["type"] for item in output.items] == ["reasoning", "message"]
    output, _ = output_of(TextDelta(reasoning="hm"), is_whole=False)
    assert [item["status"] for item in output.items] == ["incomplete"]


def test_errors_that_callers_can_mend_keep_their_codes():
    codes = [error_body(e)["code"] for e in (InvalidRequest("a"), QueueFull("b"))]
    assert codes == ["invalid_prompt", "rate_limit_exceeded"]
    assert error_body(ForetokenError("c"))["code"] == "server_error"
