"""Files of recorded requests: which turns belong together, and lines that are no records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretoken.api.certify.records import Asked, RecordedRequest
from foretoken.api.replay.changes import Changes, read_change
from foretoken.api.replay.conversation import Conversation
from foretoken.api.replay.outcome import CallLine, Played, Side, sides_by_text
from foretoken.api.replay.report import turn_lines
from foretoken.api.replay.sessions import find_session, only_session
from foretoken.core.errors import InvalidRequest

USER, AGAIN = {"role": "user", "content": "go on"}, {"role": "user", "content": "and then?"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def record(name: str, *messages: dict[str, Any], at: float = 0, **asked: Any) -> RecordedRequest:
    body = {"messages": list(messages), **asked.pop("body", {})}
    path = asked.pop("path", "/v1/chat/completions")
    sent = Asked(http=name, at=at, path=path, body=body, **asked)
    return RecordedRequest(id=name, model="m", prompt=[1], params={}, seed=1, asked=sent)


def written(file: Path, *records: RecordedRequest, end: bytes = b"\n") -> Path:
    file.write_bytes(b"".join(msgspec.json.encode(each) + end for each in records))
    return file


def test_two_runs_with_the_same_first_message_are_not_mixed(tmp_path: Path) -> None:
    """The longest turn before is of the other run, whose answer was another one."""
    one = USER, said("left"), AGAIN
    two = USER, said("right"), AGAIN
    records = [
        record("first", USER, at=1),
        record("one", *one, at=2),
        record("two", *two, at=3),
        record("end of one", *one, said("up"), AGAIN, at=4),
        record("end of two", *two, said("down"), AGAIN, at=5),
    ]
    session = only_session(written(tmp_path / "a.jsonl", *records))
    for name in ("one", "two"):
        last = next(each for each in session.turns if each.id == f"end of {name}")
        assert [each.id for each in session.conversation(last)] == ["first", name, f"end of {name}"]
        assert last.place == 3


def test_edited_messages_still_continue_the_turn_with_the_same_first_message(
    tmp_path: Path,
) -> None:
    records = [record("a", USER, at=1), record("b", USER, said("left"), AGAIN, at=2)]
    edited = USER, {**said("left"), "cache_control": {}}, {**AGAIN, "content": "x"}
    records.append(record("c", *edited, said("up"), AGAIN, at=3))
    session = only_session(written(tmp_path / "a.jsonl", *records))
    assert [each.id for each in session.conversation()] == ["a", "b", "c"]


def test_a_response_that_names_itself_or_a_later_one_continues_none(tmp_path: Path) -> None:
    own = [
        record("r1", at=1, path="/v1/responses", body={"previous_response_id": "r1"}),
        record("r2", at=2, path="/v1/responses", body={"previous_response_id": "r3"}),
        record("r3", at=3, path="/v1/responses", body={"previous_response_id": "r2"}),
    ]
    written(tmp_path / "a.jsonl", *own)
    session, turn = find_session("r3", tmp_path)
    assert turn is not None
    assert [each.id for each in session.conversation(turn)] == ["r2", "r3"]


def test_a_session_of_two_callers_is_asked_for_by_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / f"{name}.jsonl", record(name, USER, session="s"))
    with pytest.raises(InvalidRequest, match=r"s is a session of a\.jsonl, b\.jsonl; give one"):
        find_session("s", tmp_path)
    session, _ = find_session("s", tmp_path / "b.jsonl")
    assert [each.id for each in session.turns] == ["b"]
    session, turn = find_session("a", tmp_path)
    assert (session.name, turn) == ("s", session.turns[0])


def test_line_ends_of_windows_and_empty_lines_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", record("a", USER), end=b"\r\n")
    file.write_bytes(file.read_bytes() + b"\r\n\n")
    assert [each.id for each in only_session(file).turns] == ["a"]
    assert find_session("a", tmp_path)[0].turns[0].id == "a"


def test_a_torn_line_of_another_caller_hides_no_session(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", record("a", USER))
    file.write_bytes(file.read_bytes() + b'{"id": "to')
    written(tmp_path / "b.jsonl", record("b", USER, session="s"))
    assert [each.id for each in find_session("s", tmp_path)[0].turns] == ["b"]


def test_a_name_of_a_session_cannot_control_the_terminal(tmp_path: Path) -> None:
    names = ("\x1b[2J", "other")
    records = [record(name, USER, session=name) for name in names]
    with pytest.raises(InvalidRequest, match="has 2 sessions") as refused:
        only_session(written(tmp_path / "a.jsonl", *records))
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("kind", ["equal", "changed", "new"])
def test_calls_and_notes_cannot_control_the_terminal(kind: Any) -> None:
    call = "weather(\x1b]0;x\x07 \x9b2J \u202e \ud800)"
    turn = Played(number=1, id="a", kind=kind, recorded=Side(call), now=Side(call, num_tokens=3))
    turn.calls, turn.notes = [CallLine(call, call, "recording")], [call]
    text = "".join(turn_lines(turn, 100))
    assert "weather(" in text
    assert text.isprintable()


def test_a_character_of_several_tokens_is_not_a_difference() -> None:
    data = "a\U0001f600b"
    tokens = [*data.encode()]

    def decode(ids: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")

    recorded, now, position = sides_by_text("a\U0001f600c", tokens, decode)
    assert (position, recorded.rest) == (len(tokens) - 1, "c")
    assert now.token == "b"


@pytest.mark.parametrize("given", [{}, {"input": None}])
def test_a_response_without_input_can_be_changed(tmp_path: Path, given: dict[str, Any]) -> None:
    asked = record("a", path="/v1/responses", body={"instructions": "x", **given})
    session = only_session(written(tmp_path / "a.jsonl", asked))
    changes = Changes(bodies=[read_change("instructions=y")])
    conversation = Conversation(session.turns, changes)
    body = conversation.body(0, conversation.items(0))
    assert (body["instructions"], body["input"]) == ("y", [])
