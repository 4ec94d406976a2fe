"""Conversations in the form that templates of many kinds take: nothing in a history is an error,
and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import InvalidRequest
from support import templates
from support.templates import KINDS, Written, assistant, call, result, system, user

CALLED = call("look", {"where": "here"})
OTHER = call("count", {"what": "sheep"}, "call00002")
CUT = '{"where": "he said "here" and'

HISTORIES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a system message between": (
        [user("list"), system("agents: a, b"), user("go on")],
        ["list", "agents: a, b", "go on"],
    ),
    "a system message at the end": (
        [system("terse"), user("list"), assistant("done"), user("more"), system("agents: a")],
        ["terse", "list", "done", "more", "agents: a"],
    ),
    "system messages alone": ([system("terse"), system("polite")], ["terse", "polite"]),
    "two questions": ([user("one"), user("two"), assistant("ok"), user("three")], ["one", "two"]),
    "two answers": ([user("one"), assistant("ok"), assistant("well"), user("two")], ["ok", "well"]),
    "an answer first": ([assistant("hello"), user("hi")], ["hello", "hi"]),
    "a result without a call": ([user("one"), result("found"), user("two")], ["one", "found"]),
    "a result first": ([result("found"), user("two")], ["found", "two"]),
    "a call without a result": ([user("one"), assistant("", CALLED), user("two")], ["look", "two"]),
    "two calls": (
        [user("one"), assistant("", CALLED, OTHER), result("A"), result("B", "call00002")],
        ["one", "look"],
    ),
    "results in another order": (
        [user("one"), assistant("", CALLED, OTHER), result("B", "call00002"), result("A")],
        ["one", "look"],
    ),
    "one of two results": (
        [user("one"), assistant("", CALLED, OTHER), result("A"), user("two")],
        ["one", "look", "A", "two"],
    ),
    "a call id twice": (
        [user("one"), assistant("", CALLED), result("A"), assistant("", CALLED), result("B")],
        ["one", "look", "A", "look", "B"],
    ),
    "a result without an id": (
        [user("one"), assistant("", CALLED), {"role": "tool", "content": "found"}, user("two")],
        ["look", "found", "two"],
    ),
    "words and a call": (
        [user("one"), assistant("let me see", CALLED), result("found"), user("two")],
        ["one", "look", "found", "two"],
    ),
    "a user behind results": (
        [user("one"), assistant("", CALLED), result("found"), user("wait"), assistant("ok")],
        ["look", "found", "wait", "ok"],
    ),
    "a system message behind results": (
        [user("one"), assistant("", CALLED), result("found"), system("hurry")],
        ["look", "found", "hurry"],
    ),
    "arguments that were cut": (
        [user("one"), assistant("", call("look", CUT)), result("no JSON"), user("again")],
        ["look", "he said", "no JSON", "again"],
    ),
    "arguments that are a list": (
        [user("one"), assistant("", call("look", "[1, 2]")), result("x"), user("again")],
        ["look", "1, 2", "x"],
    ),
    "no arguments": (
        [user("one"), assistant("", call("look", "")), result("x"), user("again")],
        ["look", "x"],
    ),
    "null for arguments": (
        [user("one"), assistant("", call("look", None)), result("x"), user("again")],
        ["look", "x"],
    ),
}


@pytest.fixture
def written(byte_level_folder: Path) -> Iterator[Callable[..., Written]]:
    made: list[Written] = []

    def make(template: str, **options: Any) -> Written:
        made.append(Written(byte_level_folder, template, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def missing(text: str, words: list[str]) -> str | None:
    """The first of the words that the text does not have behind those before it."""
    at = 0
    for word in words:
        at = text.find(word, at) + 1
        if not at:
            return word
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_no_history_is_refused_and_nothing_of_it_is_lost(written, kind):
    own = written(KINDS[kind])
    lost = {}
    for name, (messages, words) in HISTORIES.items():
        if (word := missing(own.text(*messages), words)) is not None:
            lost[name] = word
    assert not lost


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_template_takes_stays_as_it_is(written, kind):
    own = written(KINDS[kind])
    facts = own.facts()
    talk = [user("one"), assistant("two"), user("three")]
    if facts.system:
        talk.insert(0, system("terse"))
    plain = [in_parts(each) for each in talk] if facts.parts_only else talk
    assert own.text(*talk) == own.raw(plain)


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_conversation_keeps_its_beginning(written, kind):
    """Every prompt goes on where the one before it and its answer ended."""
    own = written(KINDS[kind])
    talk = [system("terse"), user("list"), system("agents: a, b"), user("go on")]
    turns = [
        [assistant("Wait.")],
        [user("now"), system("time: noon")],
        [assistant("", CALLED), result("found"), system("be quick")],
        [assistant("Done."), user("thanks")],
    ]
    for more in turns:
        before = own.text(*talk, opens=False)
        talk += more
        assert own.text(*talk).startswith(before), more


def test_a_later_system_message_is_marked_and_in_its_place(written):
    text = written(templates.STRICT).text(user("a"), system("b"), user("c"))
    assert text == (
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>user\n<system_message>\nb\n</system_message><|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_joins_the_question_where_the_template_knows_no_system(written):
    text = written(templates.ALTERNATING).text(system("Be brief."), user("hi"))
    assert text.startswith("<|im_start|>user\nBe brief.\n\nhi<|im_end|>")


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("items", '{"a": 1}', "<parameter=a>\n1\n"),
        ("items", CUT, f"<parameter=INVALID_JSON>\n{CUT}\n"),
        ("items", '"text"', '<parameter=INVALID_JSON>\n"text"\n'),
        ("items", "7", "<parameter=INVALID_JSON>\n7\n"),
        ("items", "null", "<function=look>\n</function>"),
        ("texts", '{"a": 1}', 'look {"a": 1}'),
        ("texts", CUT, f"look {CUT}"),
        ("either", {"a": 1}, 'look {"a": 1}'),
        ("either", CUT, f"look {CUT}"),
        ("calling", CUT, '"arguments": {"INVALID_JSON": "{'),
        ("null_content", '{"a": "é"}', 'look\n{"a": "é"}'),
    ],
)
def test_arguments_have_the_form_that_the_template_reads(written, kind, arguments, expected):
    own = written(KINDS[kind], tool_parser="hermes")
    assert expected in own.text(user("one"), assistant("", call("look", arguments)), result("x"))


def test_parallel_calls_come_one_by_one_with_their_results_where_only_one_is_taken(written):
    own = written(templates.ONE_CALL)
    talk = [user("q"), assistant("", CALLED, OTHER), result("B", "call00002"), result("A")]
    assert missing(own.text(*talk), ["look", "A", "count", "B"]) is None


def test_only_a_template_that_is_told_apart_by_null_content_gets_it(written):
    talk = [user("q"), assistant("", CALLED), result("r")]
    assert "None" not in written(templates.CALLING).text(*talk)
    own = written(templates.NULL_CONTENT, tool_parser="hermes")
    assert "look" in own.text(*talk)
    text = own.text(user("q"), assistant("I look.", CALLED), result("r"))
    assert missing(text, ["I look.", "look", "r"]) is None


@pytest.mark.parametrize(
    ("condition", "cause"),
    [("'bad' in m.content", "never say that"), ("m.content == 'bad'", "never say that")],
)
def test_an_error_of_a_template_names_the_message_and_the_cause(written, caplog, condition, cause):
    own = written(templates.each(templates.refusing(condition, cause) + templates.TURN))
    talk = [user("a"), assistant("b"), user("bad")]
    with pytest.raises(InvalidRequest) as info:
        own.text(*talk)
    assert str(info.value) == f"the chat template rejects messages[2]: {cause}"
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


def test_blank_words_beside_a_call_stay_as_they_are(written):
    own = written(templates.CALLING)
    talk = [user("q"), assistant("\n ", CALLED), result("r")]
    assert own.text(*talk) == own.raw(talk)


def test_what_is_found_out_about_a_template_is_found_out_once(written, monkeypatch):
    own = written(templates.STRICT)
    own.text(user("a"))
    monkeypatch.setattr(own.tokenizer, "try_chat", None)
    own.text(user("a"), system("b"))


def test_a_model_without_a_template_says_so(written, monkeypatch):
    own = written(templates.PLAIN)
    monkeypatch.setattr(type(own.tokenizer), "chat_template", "")
    monkeypatch.setattr(own.tokenizer._template, "own", "")
    monkeypatch.setattr(own.tokenizer._template._hf, "chat_template", None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        own.text(user("a"))
