"""--normalize: volatile lines go, and nothing else; what was changed is named."""

from __future__ import annotations

import json
import logging
import lzma
from pathlib import Path

import httpx
import pytest

import foretoken.bench
from foretoken.api.runtime.conversation.chat_input import ChatInput
from foretoken.api.runtime.conversation.normalize import RULES, Normalizer, steady
from foretoken.api.types.results import Tool
from foretoken.api.types.sampling_params import SamplingParams

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"

LEFT = "date and time: 2026-11-21"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{HEADER.format('a1b2c')}\nYou are good.", "You are good."),
        (HEADER.format("00000"), ""),
        ("Current time: 2026-11-21T13:34:26.123Z", "Current time: 2026-11-21"),
        ("A\n- Current date and time: 2026-11-21 13:34 UTC.\nB", f"A\n- Current {LEFT}.\nB"),
        ("The current time is 2026-11-21 13:34:26+02:00", "The current time is 2026-11-21"),
        ("A\nRequest ID: 7f2c9b1e-0000-4000-8000-000000000000\nB", "A\nB"),
        ("x-request-id: req_0123456789abcdef", ""),
        ("The current date is 2026-11-21 13:34:26.", "The current date is 2026-11-21."),
    ],
)  # fmt: skip
def test_a_volatile_line_is_left_out(text, left):
    (rule,) = steady(text)[1]
    assert steady(text) == (left, [rule])


@pytest.mark.parametrize(
    "text",
    [
        "Today's date: 2026-11-21",
        "The meeting was at 2026-11-21T13:34:26Z.",
        "Send the x-anthropic-billing-header: as it is.",
        f"It is so:\n{HEADER.format('a1b2c')}",
        "Request id: ask the user for it",
        "Current time: ask for it. Start 2026 well.",
        "",
    ],
)
def test_other_words_stay(text):
    assert steady(text) == (text, [])


def conversation(messages, tools=()):
    return ChatInput(messages=messages, params=SamplingParams(), tools=tools)


def test_only_system_texts_are_touched():
    line = HEADER.format("1")
    talk = [{"role": role, "content": line} for role in ("system", "user", "assistant", "tool")]
    found, names = Normalizer("safe").apply(conversation(talk))
    assert [each["content"] for each in found.messages] == ["", line, line, line]
    assert names == ("billing-header",)


def test_every_rule_says_why():
    assert all(rule.name and rule.why for rule in RULES)


def recorded(name):
    """The first body of a recorded session of an agent."""
    path = Path(foretoken.bench.__file__).parent / "recordings" / f"{name}.jsonl.xz"
    return json.loads(lzma.decompress(path.read_bytes()).splitlines()[0])["body"]


@pytest.mark.parametrize("mode", ["off", "safe", "all"])
def test_two_prompts_that_differ_in_a_header_are_one(serve, engine, say, mode):
    say("ok")
    url = serve(normalize=mode).url
    answers = []
    for nonce in "12":
        system = f"{HEADER.format(nonce)}\nBe good."
        talk = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny/model", "max_tokens": 9, "system": system, "messages": talk}
        answers.append(httpx.post(f"{url}/v1/messages", json=body).raise_for_status().json())
        chat = {"messages": [{"role": "system", "content": system}, *talk]}
        found = httpx.post(f"{url}/v1/chat/completions", json=chat).raise_for_status().json()
        answers.append({"usage": found["usage"]["prompt_tokens_details"]})
    prompts = [list(each.tokens[: each.prompt_len]) for each in engine.requests]
    is_on = mode != "off"
    assert (prompts[0] == prompts[1]) or not is_on
    assert (prompts[0] == prompts[2]) == is_on
    assert (prompts[1] == prompts[3]) == is_on
    names = ["billing-header"] if is_on else None
    assert [each["usage"].get("normalized") for each in answers] == [names] * 4


def test_the_recorded_header_of_claude_code_goes_and_all_else_stays():
    lines = [block["text"] for block in recorded("claude")["system"]]
    assert lines[0].startswith("x-anthropic-billing-header:")
    text = "\n".join(lines)
    chat = conversation([{"role": "system", "content": text}])
    found, names = Normalizer("safe").apply(chat)
    assert names == ("billing-header",)
    assert found.messages[0]["content"] == "\n".join(lines[1:])
    assert Normalizer("off").apply(chat) == (chat, ())


def test_the_recorded_tools_of_codex_in_another_order_are_one_list():
    tools = [Tool(name=each["name"]) for each in recorded("codex")["tools"] if "name" in each]
    orders = [conversation([], order) for order in (tools, tools[::-1])]
    (first, names), (second, _) = (Normalizer("all").apply(each) for each in orders)
    assert first.tools == second.tools
    assert names == ("tool-order",)
    assert {tool.name for tool in first.tools} == {tool.name for tool in tools}
    assert Normalizer("safe").apply(orders[1]) == (orders[1], ())
    assert Normalizer("all").apply(first) == (first, ())


@pytest.mark.parametrize("agent", ["claude", "codex"])
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("Current time: 2026-11-21T13:34:26Z", "time-of-day"),
        ("request-id: req_0123456789abcdef", "request-id"),
    ],
)
def test_a_line_before_a_recorded_prompt_is_found(agent, line, rule):
    body = recorded(agent)
    given = body["system"] if agent == "claude" else body["input"][0]["content"]
    text = "\n".join(block["text"] for block in given if "billing" not in block["text"])
    assert steady(text) == (text, [])
    found, names = steady(f"{line}\n{text}")
    assert names == [rule]
    assert found.endswith(text)


def test_each_rule_is_logged_once(caplog):
    normalizer = Normalizer("safe")
    chat = conversation([{"role": "system", "content": HEADER.format("1")}])
    with caplog.at_level(logging.INFO):
        normalizer.apply(chat)
        normalizer.apply(chat)
    assert [each.message for each in caplog.records if "billing-header" in each.message] != []
    assert len(caplog.records) == 1


def test_no_pattern_goes_on_over_the_lines_around_it():
    text = "# Rules\n\n---\n{}\n---\n\n- never delete files"
    assert steady(text.format("request-id: abcdefgh12\n"))[0] == text.format("")
    late = "Current time:\n2026-11-21 10:00"
    assert steady(late) == (late, [])


@pytest.mark.parametrize("many", ["\n", "-", "\n---", "request-id: -", "current time "])
def test_a_system_text_of_any_kind_takes_time_in_proportion_to_its_length(many):
    text = many * 100_000 + "x"  # with the square of it this would not come to an end
    assert steady(text) == (text, [])
