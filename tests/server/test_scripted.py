"""The scripted model that real clients are tested against."""

from __future__ import annotations

import pytest

from support.scripted_server import progress, wanted_answer

TOLD = "[[own]]<|im_end|>\n<|im_start|>tool\n[[[1]]]<|im_end|>\n"
PROMPT = "<|im_start|>system\n[[s]]<|im_end|>\n<|im_start|>user\n[[a]] and [[b]]<|im_end|>\n"
REPLY = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (PROMPT + REPLY, "b"),
        (PROMPT + "<|im_start|>user\nhi<|im_end|>\n" + REPLY, "OK."),
        (
            PROMPT + REPLY + "[[own]]<|im_end|>\n<|im_start|>tool\n[[[1]]]<|im_end|>\n" + REPLY,
            "[1]",
        ),
        ("no conversation, [[two\nlines]]", "two\nlines"),
    ],
)
def test_the_answer_is_the_last_marked_text_of_the_last_message(prompt: str, answer: str) -> None:
    assert wanted_answer(prompt) == answer


@pytest.mark.parametrize(
    ("said", "done"),
    [
        ('{"a": "b c', len('{"a": "b c')),
        ('{"a":"b c', len('{"a": "b c')),
        ('{ "a" : "b c', len('{"a": "b c')),
        ('{"a": "c', None),
        ('{"a": "b c"}x', None),
        ("", 0),
    ],
)
def test_what_was_said_is_followed_with_other_white_space(said: str, done: int | None) -> None:
    assert progress(b'{"a": "b c"}', said.encode()) == done
