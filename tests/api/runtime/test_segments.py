"""Segments of a choice: what opens, grows and closes, from its deltas."""

from __future__ import annotations

import pytest

from foretoken.api.runtime.segments import Close, Grow, Open, Segments
from foretoken.api.types.results import CallDelta, TextDelta
from foretoken.core.interface.output import TokenLogprob

ONE, TWO = (TokenLogprob(token_id, -0.5, []) for token_id in (1, 2))


def begun(arguments="", *, index=0, is_done=False):
    call = CallDelta(
        index=index, id=f"call_{index}", name="f", arguments=arguments, is_done=is_done
    )
    return TextDelta(tool_calls=[call])


def gone_on(arguments="", *, text="", is_done=False):
    call = CallDelta(index=0, arguments=arguments, is_done=is_done)
    return TextDelta(text=text, tool_calls=[call])


def told(change):
    match change:
        case Open(segment):
            return f"open {segment.index} {segment.kind}"
        case Grow(segment, text, logprobs):
            return f"grow {segment.index} {text!r}" + "".join(f" {e.token_id}" for e in logprobs)
        case Close(segment, is_complete):
            return f"{'close' if is_complete else 'cut'} {segment.index}"


def play(*deltas, holds_space=False, **end):
    segments = Segments(holds_space=holds_space)
    changes = [change for delta in deltas for change in segments.take(delta)]
    changes += segments.end(**end)
    return [told(change) for change in changes], segments.all


def test_each_segment_is_opened_and_closed_once_in_the_order_of_the_answer():
    changes, segments = play(
        TextDelta(reasoning="a", text="b"),
        TextDelta(text="c"),
        TextDelta(text="d", tool_calls=begun("{").tool_calls),
        gone_on("}", text="e", is_done=True),
    )
    assert changes == [
        "open 0 reasoning", "grow 0 'a'", "close 0",
        "open 1 text", "grow 1 'b'", "grow 1 'c'", "grow 1 'd'", "close 1",
        "open 2 call", "grow 2 '{'", "grow 2 '}'", "close 2",
        "open 3 text", "grow 3 'e'", "close 3",
    ]  # fmt: skip
    assert [(each.kind, each.text) for each in segments] == [
        ("reasoning", "a"), ("text", "bcd"), ("call", "{}"), ("text", "e"),
    ]  # fmt: skip
    call = segments[2].call
    assert (call.id, call.name, call.arguments) == ("call_0", "f", "{}")


def test_calls_in_one_step_are_segments_of_their_own():
    calls = [*begun("{}", is_done=True).tool_calls, *begun(index=1, is_done=True).tool_calls]
    changes, segments = play(TextDelta(tool_calls=calls))
    assert changes == ["open 0 call", "grow 0 '{}'", "close 0", "open 1 call", "close 1"]
    assert [each.id for each in segments] == ["call_0", "call_1"]


def test_a_call_that_is_not_done_is_cut_whatever_follows_it():
    assert play(begun("{"), TextDelta(text="a"))[0][2:4] == ["cut 0", "open 1 text"]
    assert play(begun("{"))[0][-1] == "cut 0"
    assert play(begun("{"), gone_on(is_done=True), is_complete=False)[0][-1] == "close 0"


def test_the_end_of_a_cut_answer_cuts_its_last_segment():
    assert play(TextDelta(text="a"), is_complete=False)[0][-1] == "cut 0"
    assert play(TextDelta(reasoning="a"), TextDelta(text="b"), is_complete=False)[0][-4:] == [
        "close 0", "open 1 text", "grow 1 'b'", "cut 1",
    ]  # fmt: skip


def test_an_answer_without_text_and_calls_gets_an_empty_text_where_one_is_needed():
    assert play(needs_text=True)[0] == ["open 0 text", "close 0"]
    assert play(TextDelta(reasoning="a"), needs_text=True)[0][2:] == [
        "close 0", "open 1 text", "close 1",
    ]  # fmt: skip
    assert play(begun(is_done=True), needs_text=True)[0] == ["open 0 call", "close 0"]
    assert play(TextDelta())[0] == []


@pytest.mark.parametrize("space", ["\n", " \n\t"])
def test_white_space_opens_a_text_unless_it_is_held_back(space):
    deltas = [TextDelta(reasoning="a"), TextDelta(text=space), begun(is_done=True)]
    assert [each.kind for each in play(*deltas)[1]] == ["reasoning", "text", "call"]
    assert [each.kind for each in play(*deltas, holds_space=True)[1]] == ["reasoning", "call"]


def test_white_space_that_is_held_back_comes_with_the_words_behind_it():
    changes, _ = play(TextDelta(text="\n"), TextDelta(text="a"), holds_space=True)
    assert changes == ["open 0 text", "grow 0 '\\na'", "close 0"]
    assert play(TextDelta(text="a"), TextDelta(text=" "), holds_space=True)[0][2] == "grow 0 ' '"
    assert play(TextDelta(text=" "), holds_space=True)[0] == [
        "open 0 text",
        "grow 0 ' '",
        "close 0",
    ]


def test_log_probabilities_belong_to_the_text_that_shows_their_tokens():
    changes, _ = play(TextDelta(logprobs=[ONE]), TextDelta(text="a", logprobs=[TWO]))
    assert changes[1] == "grow 0 'a' 1 2"
    changes, _ = play(TextDelta(text="a", logprobs=[ONE]), TextDelta(logprobs=[TWO]))
    assert changes[1:3] == ["grow 0 'a' 1", "grow 0 '' 2"]


def test_log_probabilities_of_thoughts_and_calls_are_dropped():
    changes, _ = play(TextDelta(reasoning="a", logprobs=[ONE]), TextDelta(text="b", logprobs=[TWO]))
    assert changes[-2] == "grow 1 'b' 2"
    done = gone_on("}", is_done=True)
    done.logprobs = [ONE]
    changes, _ = play(begun("{"), done, TextDelta(text="b", logprobs=[TWO]))
    assert changes[-2] == "grow 1 'b' 2"


def test_a_call_that_was_not_begun_cannot_go_on():
    with pytest.raises(RuntimeError, match="not opened"):
        play(gone_on("}"))
    with pytest.raises(RuntimeError, match="not opened"):
        play(begun(is_done=True), gone_on("}"))
