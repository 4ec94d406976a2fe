"""Blocks of the Messages dialect that a turn's deltas become, without a server."""

from __future__ import annotations

import msgspec
import pytest

from foretoken.api.dialects.anthropic.blocks import INVALID, SIGNATURE, Blocks, read_arguments
from foretoken.api.types.results import CallDelta, TextDelta

TALK = [
    TextDelta(reasoning="I "),
    TextDelta(reasoning="see", text="\n\n"),
    TextDelta(text="Let me"),
    TextDelta(
        text=" look.\n", tool_calls=[CallDelta(index=0, id="call_a", name="sun", arguments='{"a')]
    ),
    TextDelta(
        tool_calls=[
            CallDelta(index=0, arguments='t": 1}', is_done=True),
            CallDelta(index=1, id="call_b", name="moon", arguments="{}", is_done=True),
        ],
        text="\n",
    ),
    TextDelta(tool_calls=[CallDelta(index=2, id="call_c", name="rain", arguments='{"no')]),
]
WHOLE = [
    {"type": "thinking", "thinking": "I see", "signature": SIGNATURE},
    {"type": "text", "text": "\n\nLet me look.\n"},
    {"type": "tool_use", "id": "toolu_a", "name": "sun", "input": {"at": 1}},
    {"type": "tool_use", "id": "toolu_b", "name": "moon", "input": {}},
    {"type": "tool_use", "id": "toolu_c", "name": "rain", "input": {INVALID: '{"no'}},
]


def play(talk, **options):
    blocks = Blocks(**options)
    events = [event for delta in talk for event in blocks.take(delta)]
    return blocks, msgspec.to_builtins(events + blocks.end())


def contents(blocks):
    return msgspec.to_builtins(blocks.contents)


def test_thoughts_words_and_calls_are_blocks_in_their_order():
    blocks, _ = play(TALK)
    assert contents(blocks) == WHOLE


def test_events_add_up_to_the_whole():
    _, events = play(TALK)
    built = []
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(built), "blocks are opened in order"
                built.append({**block, "json": "", "is_open": True})
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(built) - 1, "what is said belongs to the last block"
                assert built[index]["is_open"]
                name = {"partial_json": "json"}
                for key, piece in delta.items():
                    if key != "type":
                        built[index][name.get(key, key)] += piece
            case {"type": "content_block_stop", "index": index}:
                assert index == len(built) - 1
                built[index]["is_open"] = False
    assert not any(block.pop("is_open") for block in built)
    for block in built:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = read_arguments(text)
    assert built == WHOLE


def test_white_space_alone_is_a_block_only_if_it_is_all():
    call = CallDelta(index=0, id="call_a", name="sun", arguments="{}", is_done=True)
    blocks, _ = play(
        [TextDelta(reasoning="hm"), TextDelta(text="\n\n"), TextDelta(tool_calls=[call])]
    )
    assert [block["type"] for block in contents(blocks)] == ["thinking", "tool_use"]
    blocks, _ = play([TextDelta(text="\n"), TextDelta(text=" ")])
    assert contents(blocks) == [{"type": "text", "text": "\n "}]
    assert play([TextDelta()])[1] == []


def test_omitted_thoughts_are_a_block_without_words():
    blocks, events = play(TALK[:2], shows_thoughts=False)
    assert contents(blocks)[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["signature_delta"]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("[1]", {INVALID: "[1]"}),
        ('{"path": "/tmp', {INVALID: '{"path": "/tmp'}),
        ('{"a":' * 5000, {INVALID: '{"a":' * 5000}),
    ],
)
def test_arguments_that_are_no_object_are_never_taken_for_one(text, arguments):
    assert read_arguments(text) == arguments


@pytest.mark.parametrize("is_done", [True, False])
def test_a_call_without_arguments_is_an_empty_object_as_in_the_stream(is_done):
    call = CallDelta(index=0, id="call_a", name="sun", is_done=is_done)
    blocks, events = play([TextDelta(tool_calls=[call])])
    assert contents(blocks)[0]["input"] == events[0]["content_block"]["input"] == {}


def test_half_a_surrogate_pair_in_arguments_goes_out_as_it_was_written():
    text = r'{"a": "\ud800"}'
    assert msgspec.json.encode({"input": read_arguments(text)}) == b'{"input":%s}' % text.encode()
    assert read_arguments("NaN") == {INVALID: "NaN"}
    assert read_arguments(r'["\ud800"]') == {INVALID: r'["\ud800"]'}
