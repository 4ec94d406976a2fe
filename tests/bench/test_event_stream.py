"""Server-sent events out of bytes that were cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.bench.load import event_stream as sse
from foretoken.bench.load.event_stream import Event, EventParser

LINE_END = sse._LINE_END

STREAM = (
    "\ufeff: hello\n\ndata: one\r\ndata: more\r\n\r\nevent: tick\rdata:two\rdata:  three\r\r"
    'id: 7\ndata: {"text":"zażółć 東京 😀"}\n\nretry: 3\nnothing\ndata\n\nevent: lost\n\n'
    "data: [DONE]\n\ndata: never ended"
).encode()
EVENTS = [
    Event("one\nmore"),
    Event("two\n three", "tick"),
    Event('{"text":"zażółć 東京 😀"}', id="7"),
    Event("", id="7"),
    Event("[DONE]", id="7"),
]


def parse(chunks) -> list[Event]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_every_line_end_comments_and_data_of_several_lines_are_read():
    assert parse([STREAM]) == EVENTS


def test_bytes_one_by_one_give_the_same():
    assert parse(STREAM[i : i + 1] for i in range(len(STREAM))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts):
    marks = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in pairwise(marks)]
    assert parse(chunks) == EVENTS


def test_an_event_is_given_as_soon_as_its_empty_line_is_there():
    parser = EventParser()
    assert parser.feed(b"data: x\r\n") == []
    assert parser.feed(b"\r") == [Event("x")]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"data: y\n\n") == [Event("y")]


def test_a_line_feed_that_ends_a_line_is_not_taken_for_the_rest_of_an_older_carriage_return():
    assert parse([b"data: x\r", b"\n", b"", b"\n"]) == [Event("x")]


class Searched:
    """Counts the bytes that are looked through."""

    def __init__(self):
        self.num_bytes = 0

    def split(self, data):
        self.num_bytes += len(data)
        return LINE_END.split(data)


def test_a_line_in_many_pieces_is_searched_once(monkeypatch):
    searched = Searched()
    monkeypatch.setattr(sse, "_LINE_END", searched)
    pieces = [b"data: ", *[b"y" * 64] * 1000, b"\n\n"]
    assert parse(pieces) == [Event("y" * 64_000)]
    assert searched.num_bytes == sum(map(len, pieces))


def test_a_line_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)
    assert len(parse([b"data: " + b"y" * 90 + b"\n"] * 3 + [b"\n"])) == 1
    for last in (b"y" * 50, b"y" * 50 + b"\n"):
        with pytest.raises(ValueError, match="a line of more than 100 bytes"):
            parse([b"data: " + b"y" * 50, last])
