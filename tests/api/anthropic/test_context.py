"""Edits that clear parts of a conversation: when they are made, what they leave, what is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foretoken.api.dialects.anthropic.bodies import ClearThinking, ClearToolUses, Message
from foretoken.api.dialects.anthropic.context.clearing import (
    CLEARED,
    clear_thinking,
    clear_tool_uses,
)

CONTEXT = 4096
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


@pytest.fixture
def built(built, engine):
    engine.max_model_len = built.max_model_len = CONTEXT
    return built


def call(number: int, name: str = "read") -> dict[str, Any]:
    return {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"path": f"f{number}"}}


def result(number: int, text: str = "some long text " * 10) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"{text}{number}"}


def turns(count: int, **named: str) -> list[dict[str, Any]]:
    """A user's question, and so many calls with their results."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Read all."}]
    for number in range(count):
        use = call(number, named.get(f"t{number}", "read"))
        talk.append({"role": "assistant", "content": [use]})
        talk.append({"role": "user", "content": [result(number)]})
    return talk


def read(talk: list[dict[str, Any]]) -> list[Message]:
    return msgspec.convert(talk, list[Message])


def cleared(talk: list[dict[str, Any]], **options: Any) -> tuple[list[Any], int]:
    """The results and the inputs after an edit, and how many uses it cleared."""
    edit = msgspec.convert({"type": USES, **options}, ClearToolUses)
    messages, count = clear_tool_uses(read(talk), edit)
    blocks = [block for each in messages[1:] for block in each.content]
    uses, results = blocks[::2], blocks[1::2]
    return [(use.input != {}, block.content != CLEARED)
            for use, block in zip(uses, results, strict=True)], count  # fmt: skip


WHOLE, NO_RESULT, BARE = (True, True), (True, False), (False, False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [NO_RESULT, NO_RESULT, WHOLE, WHOLE, WHOLE]),
        ({"keep": {"type": "tool_uses", "value": 4}}, [NO_RESULT, *[WHOLE] * 4]),
        ({"keep": {"type": "tool_uses", "value": 9}}, [WHOLE] * 5),
        ({"keep": {"type": "tool_uses", "value": 0}}, [NO_RESULT] * 5),
        ({"exclude_tools": ["write"]}, [NO_RESULT, WHOLE, WHOLE, WHOLE, WHOLE]),
        ({"clear_tool_inputs": True}, [BARE, BARE, WHOLE, WHOLE, WHOLE]),
        ({"clear_tool_inputs": ["write"]}, [NO_RESULT, BARE, WHOLE, WHOLE, WHOLE]),
        ({"clear_tool_inputs": False}, [NO_RESULT, NO_RESULT, WHOLE, WHOLE, WHOLE]),
    ],
)
def test_the_results_of_old_calls_are_cleared(options, expected):
    found, count = cleared(turns(5, t1="write"), **options)
    assert found == expected
    assert count == sum(each != WHOLE for each in expected)


def test_token_ids_of_a_message_are_dropped_only_with_a_changed_block():
    talk = turns(4)
    talk[1]["token_ids"] = talk[7]["token_ids"] = [1, 2]
    edit = ClearToolUses(clear_tool_inputs=True)
    messages, _ = clear_tool_uses(read(talk), edit)
    assert (messages[1].token_ids, messages[7].token_ids) == (None, [1, 2])


def thought(number: int) -> dict[str, Any]:
    return {"type": "thinking", "thinking": f"Hm {number}.", "signature": "unsigned"}


THOUGHTS: list[dict[str, Any]] = [
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": [thought(0), call(0)]},
    {"role": "user", "content": [result(0)]},
    {"role": "assistant", "content": [thought(1), {"type": "text", "text": "a"}]},
    {"role": "user", "content": "Two."},
    {"role": "assistant", "content": "no thought"},
    {"role": "user", "content": "Three."},
    {"role": "assistant", "content": [thought(2), call(1)]},
    {"role": "user", "content": [result(1)]},
]


@pytest.mark.parametrize(
    ("keep", "kept", "count"),
    [
        (None, ["Hm 2."], 1),
        ({"type": "thinking_turns", "value": 1}, ["Hm 2."], 1),
        ({"type": "thinking_turns", "value": 2}, ["Hm 0.", "Hm 1.", "Hm 2."], 0),
        ({"type": "thinking_turns", "value": 9}, ["Hm 0.", "Hm 1.", "Hm 2."], 0),
        ({"type": "all"}, ["Hm 0.", "Hm 1.", "Hm 2."], 0),
        ("all", ["Hm 0.", "Hm 1.", "Hm 2."], 0),
    ],
)
def test_the_thoughts_of_earlier_turns_are_cleared(keep, kept, count):
    given = {"type": THINKING} if keep is None else {"type": THINKING, "keep": keep}
    messages, num_cleared = clear_thinking(read(THOUGHTS), msgspec.convert(given, ClearThinking))
    blocks = [b for each in messages if isinstance(each.content, list) for b in each.content]
    assert [b.thinking for b in blocks if hasattr(b, "thinking")] == kept
    assert num_cleared == count


def edits(*given: dict[str, Any]) -> dict[str, Any]:
    return {"context_management": {"edits": list(given)}}


def trigger(value: int, kind: str = "input_tokens") -> dict[str, Any]:
    return {"trigger": {"type": kind, "value": value}}


def test_cleared_results_are_told_and_not_in_the_prompt(post, say, prompt):
    say("ok")
    whole = post(messages=turns(5)).json()["usage"]["input_tokens"]
    answer = post(messages=turns(5), **edits({"type": USES, **trigger(50)})).json()
    assert prompt().count(CLEARED) == 2
    assert "long text 1<" not in prompt()
    assert "long text 2<" in prompt()
    told = {"type": USES, "cleared_tool_uses": 2}
    told["cleared_input_tokens"] = whole - answer["usage"]["input_tokens"]
    assert answer["context_management"] == {"applied_edits": [told]}


@pytest.mark.parametrize(
    ("edit", "is_made"),
    [
        (trigger(4000), False),
        ({}, False),
        (trigger(5, "tool_uses"), False),
        (trigger(4, "tool_uses"), True),
        (trigger(50) | {"clear_at_least": {"type": "input_tokens", "value": 1000}}, False),
        (trigger(50) | {"exclude_tools": ["read"]}, False),
    ],
)
def test_an_edit_is_made_only_above_its_trigger(post, say, prompt, edit, is_made):
    say("ok")
    answer = post(messages=turns(5), **edits({"type": USES, **edit})).json()
    assert (CLEARED in prompt()) == is_made
    assert bool(answer["context_management"]["applied_edits"]) == is_made


def test_edits_are_told_at_the_end_of_a_stream(stream, say):
    say("ok")
    given = edits({"type": THINKING}, {"type": USES, **trigger(1, "tool_uses")})
    events = stream(messages=[*THOUGHTS, *turns(4)[1:]], **given)
    [told] = [e["context_management"] for e in events if e["type"] == "message_delta"]
    found = {each["type"]: each for each in told["applied_edits"]}
    assert list(found) == [THINKING, USES]
    assert found[THINKING]["cleared_thinking_turns"] == 1
    assert all(each["cleared_input_tokens"] for each in found.values())


def test_without_context_management_nothing_is_told(post, say):
    say("ok")
    assert "context_management" not in post(messages=turns(5)).json()


def test_a_count_is_of_the_edited_conversation(post):
    path, given = "/v1/messages/count_tokens", edits({"type": USES, **trigger(50)})
    whole = post(path, messages=turns(5)).json()
    assert "context_management" not in whole
    count = post(path, messages=turns(5), **given).json()
    assert count["context_management"] == {"original_input_tokens": whole["input_tokens"]}
    assert count["input_tokens"] < whole["input_tokens"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (edits({"type": "clear_other"}), "context_management.edits[0].type"),
        (edits({"type": USES, "trigger": {"type": "input_tokens"}}),
         "context_management.edits[0].trigger"),
        (edits(*[{"type": USES}] * 4), "length <= 3"),
        (edits({"type": USES}, {"type": USES}), "context_management.edits[1]"),
        (edits({"type": USES}, {"type": USES, "keep": {"type": "tool_uses", "value": -1}}),
         "context_management.edits[1].keep.value"),
        (edits({"type": THINKING, "keep": "some"}), "context_management.edits[0].keep"),
        (edits({"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 1}}),
         "context_management.edits[0].trigger.type"),
        ({"context_management": []}, "context_management"),
        ({"compaction": {"type": "other"}}, "compaction.type"),
    ],
)  # fmt: skip
def test_a_bad_edit_is_named(post, given, named):
    answer = post(**given)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]
