"""--normalize: volatile lines go, and nothing else."""

from __future__ import annotations

import httpx
import pytest

from foretoken.api.runtime.normalize import RULES, normalized, steady

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
    ],
)  # fmt: skip
def test_a_volatile_line_is_left_out(text, left):
    assert steady(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "Today's date: 2026-11-21",
        "The meeting was at 2026-11-21T13:34:26Z.",
        "Send the x-anthropic-billing-header: as it is.",
        "Request id: ask the user for it",
        "Current time: ask for it. Start 2026 well.",
        "",
    ],
)
def test_other_words_stay(text):
    assert steady(text) == text


def test_only_system_texts_are_touched():
    line = HEADER.format("1")
    talk = [{"role": role, "content": line} for role in ("system", "user", "assistant", "tool")]
    assert [each["content"] for each in normalized(talk)] == ["", line, line, line]


def test_every_rule_says_why():
    assert all(rule.name and rule.why for rule in RULES)


@pytest.mark.parametrize("is_on", [True, False])
def test_two_prompts_that_differ_in_a_header_are_one(serve, engine, say, is_on):
    say("ok")
    url = serve(normalize=is_on).url
    for nonce in "12":
        system = f"{HEADER.format(nonce)}\nBe good."
        talk = [{"role": "user", "content": "hi"}]
        body = {"model": "tiny/model", "max_tokens": 9, "system": system, "messages": talk}
        httpx.post(f"{url}/v1/messages", json=body).raise_for_status()
        chat = {"messages": [{"role": "system", "content": system}, *talk]}
        httpx.post(f"{url}/v1/chat/completions", json=chat).raise_for_status()
    prompts = [list(each.tokens[: each.prompt_len]) for each in engine.requests]
    assert (prompts[0] == prompts[1]) or not is_on
    assert (prompts[0] == prompts[2]) == is_on
    assert (prompts[1] == prompts[3]) == is_on


def test_no_pattern_goes_on_over_the_lines_around_it():
    text = "# Rules\n\n---\n{}\n---\n\n- never delete files"
    assert steady(text.format("request-id: abcdefgh12\n")) == text.format("")
    late = "Current time:\n2026-11-21 10:00"
    assert steady(late) == late


@pytest.mark.parametrize("many", ["\n", "-", "\n---", "request-id: -", "current time "])
def test_a_system_text_of_any_kind_takes_time_in_proportion_to_its_length(many):
    text = many * 100_000 + "x"  # with the square of it this would not come to an end
    assert steady(text) == text
