"""Recorded sessions: which conversations are counted, and which results were known before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.bench.lab.repeated_results import counted, read


def talk(name: str, *results: str) -> list[dict[str, Any]]:
    """A conversation that calls the same tool for each result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": name}]
    function = {"name": "read", "arguments": '{"path": "a"}'}
    for index, result in enumerate(results):
        call = {"id": str(index), "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(index), "content": result})
    return messages


def test_a_conversation_counts_once_in_whatever_order_its_turns_are_recorded(
    tmp_path: Path,
) -> None:
    turns = [talk("one", "a", "a"), talk("one", "a"), talk("two", "b"), talk("one", "a", "a", "c")]
    path = tmp_path / "session.jsonl"
    path.write_text("\n".join(json.dumps({"messages": each}) for each in turns[:3]))
    assert sorted(read(path), key=len) == [turns[2], turns[0]]
    path.write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    assert sorted(read(path), key=len) == [turns[2], turns[3]]


def test_a_result_is_repeated_if_the_last_one_of_its_call_was_equal() -> None:
    counts = counted([talk("one", "aa", "aa", "b")])
    assert (counts.results, counts.same_calls, counts.repeated) == (3, 2, 1)
    assert (counts.repeated_chars, counts.wasted_chars) == (2, 2)
    assert counts.new_chars == len("one") + len("aa") + len("aa") + len("b")
