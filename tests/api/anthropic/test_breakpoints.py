"""cache_control: where the pins stand, and what usage tells of them."""

from __future__ import annotations

from array import array

import httpx
import pytest

from foretoken.api.runtime.conversation.prompt_history import common_len
from foretoken.api.serving.caching.breakpoints import Breakpoints
from foretoken.core.interface.request import Pin

HERE = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(words, mark=()):
    return {"type": "text", "text": words, **dict(mark)}


@pytest.fixture
def pinned(post, say, engine, tokenizer):
    """The texts that a body's breakpoints pin, with their times."""

    def send(**fields):
        say("ok")
        post(**fields).raise_for_status()
        request = engine.requests[-1]
        ids = list(request.tokens)
        pins = request.cache.pins
        whole = [tokenizer.decode(ids[: p.num_tokens], skip_special_tokens=False) for p in pins]
        return [(said, pin.ttl) for said, pin in zip(whole, pins, strict=True)]

    return send


def test_a_block_is_pinned_with_all_before_it(pinned):
    [(system, hour), (first, minutes)] = pinned(
        system=[text("Be good."), text("Be kind.", HOUR)],
        messages=[
            {"role": "user", "content": [text("hello", HERE)]},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": "again"},
        ],
    )
    assert system.startswith("<|im_start|>system\nBe good.\nBe kind.<|im_end|>\n")
    assert "hello" not in system
    assert first.endswith("user\nhello<|im_end|>\n")
    assert (hour, minutes) == (3600.0, 300.0)


def test_a_breakpoint_inside_a_message_ends_there(pinned):
    [(said, _)] = pinned(
        messages=[{"role": "user", "content": [text("hello", HERE), text("there")]}]
    )
    assert said.endswith("user\nhello")


def test_a_tool_is_pinned_with_the_system_text_that_stands_before_it(pinned):
    tools = [
        {"name": "sun", "input_schema": {}, **HERE},
        {"name": "moon", "input_schema": {}},
    ]
    [(said, _)] = pinned(tools=tools, system="Be good.")
    assert said.endswith("Be good.sun"), "the space is a token with what follows"


def test_the_top_level_marks_the_last_block(pinned):
    talk = [{"role": "user", "content": "hello"}]
    [(said, _)] = pinned(messages=talk, **HERE)
    assert said.endswith("user\nhello<|im_end|>\n")


def test_a_result_s_inner_mark_is_its_own(pinned):
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("warm", HERE)]}
    [(said, _)] = pinned(messages=[{"role": "user", "content": [result]}])
    assert said.endswith("tool\nwarm<|im_end|>\n")


def test_without_a_mark_nothing_is_pinned_or_written(pinned, post):
    assert pinned() == []
    assert post().json()["usage"]["cache_creation_input_tokens"] == 0


def test_who_writes_nothing_pins_nothing(pinned):
    assert pinned(cache={"write": False}, **HERE) == []


def test_five_marks_are_too_many(post):
    blocks = [text("a", HERE)] * 5
    answer = post(messages=[{"role": "user", "content": blocks}])
    assert answer.status_code == 400
    assert "at most 4" in answer.json()["error"]["message"]
    four = [text("a", HERE)] * 4
    assert post(messages=[{"role": "user", "content": [*four, text("b")]}], **HERE).is_error


def test_usage_adds_up_to_the_prompt(post, say, engine):
    say("ok")
    blocks = [text("hello ", HOUR), text("there, world", HERE), text("and more")]
    usage = post(messages=[{"role": "user", "content": blocks}]).json()["usage"]
    first, last = (pin.num_tokens for pin in engine.requests[0].cache.pins)
    assert usage["cache_creation_input_tokens"] == last
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": last - first,
        "ephemeral_1h_input_tokens": first,
    }
    assert usage["input_tokens"] == engine.requests[0].prompt_len - last


@pytest.mark.parametrize("normalize", ["off", "safe"])
def test_marks_that_were_met_before_are_not_rendered_again(serve, say, normalize):
    server = serve(normalize=normalize, token_history=False)
    rendered = []
    render = server.llm.render_text

    async def count(messages, *args, **options):
        rendered.append(messages)
        return await render(messages, *args, **options)

    server.llm.render_text = count
    say("ok")
    talk = []
    for words in ("hello", "world"):
        talk.append({"role": "user", "content": [text(words, HERE)]})
        rendered.clear()
        nonce = f"x-anthropic-billing-header: cch={words};\n" if normalize == "safe" else ""
        body = {"max_tokens": 9, "messages": talk, "system": [text(f"{nonce}Be good.", HERE)]}
        httpx.post(f"{server.url}/v1/messages", json=body).raise_for_status()
        talk.append({"role": "assistant", "content": "ok"})
    whole, *openings = rendered
    assert len(whole) == 4
    assert [message["content"] for [message] in openings] == ["\x01", "\x01"]


def test_what_was_read_is_not_written():
    marks = Breakpoints((Pin(10, 3600.0), Pin(30, 300.0)))
    assert [marks.written(n) for n in (0, 4, 10, 25, 30, 64)] == [30, 26, 20, 5, 0, 0]
    assert [marks.written(n, 3600.0) for n in (0, 4, 10, 25)] == [10, 6, 0, 0]
    assert [marks.written(n, 300.0) for n in (0, 4, 10, 25)] == [20, 20, 20, 5]


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4, 5], 2), ([2], [1], 0)],
)
def test_common_len(one, other, length):
    assert common_len(array("i", one), array("i", other)) == length


def test_only_whole_pages_are_written():
    marks = Breakpoints((Pin(10, 3600.0), Pin(30, 300.0)), page_size=8)
    assert [marks.written(n) for n in (0, 8, 16, 24)] == [24, 16, 8, 0]
    assert [marks.written(n, 3600.0) for n in (0, 8)] == [8, 0]
    assert [marks.written(n, 300.0) for n in (0, 8, 16)] == [16, 16, 8]


def test_less_than_a_page_is_input_and_not_written(post, say, engine):
    say("ok")
    engine.page_size = 256
    usage = post(messages=[{"role": "user", "content": [text("hey", HERE)]}]).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    assert set(usage["cache_creation"].values()) == {0}
    assert usage["input_tokens"] == engine.requests[0].prompt_len
