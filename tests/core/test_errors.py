"""Errors of requests and the names of their fields."""

from __future__ import annotations

import pytest

from foretoken.core.errors import InvalidRequest, PromptTooLong


@pytest.mark.parametrize(
    ("message", "renamed"),
    [
        ("stop must be a text", "stop_sequences must be a text"),
        ("stop: too long", "stop_sequences: too long"),
        ("stop[0] is empty", "stop_sequences[0] is empty"),
        ("stop_token_ids go with stop", "stop_token_ids go with stop"),
        ("unstoppable", "unstoppable"),
        ("it does not stop", "it does not stop"),
        ("", ""),
    ],
)
def test_a_field_is_renamed_where_it_is_the_first_word_of_a_message(message, renamed):
    error = InvalidRequest(message, param="stop")
    error.rename("stop_sequences")
    assert (str(error), error.param) == (renamed, "stop_sequences")


def test_an_error_without_a_field_gets_one_and_keeps_its_message():
    error = InvalidRequest("stop it")
    error.rename("stop")
    assert (str(error), error.param) == ("stop it", "stop")


def test_a_prompt_that_is_too_long_keeps_the_words_that_frameworks_know():
    error = PromptTooLong(9, 8)
    error.rename("contents")
    assert str(error).startswith("prompt is too long: 9 tokens > 8 maximum.")
    assert error.param == "contents"
