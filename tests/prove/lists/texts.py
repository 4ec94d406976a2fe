"""Mistakes in the text of an answer: stop strings, pieces, usage."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "text-keeps-the-stop-string",
        "AnswerText._cut",
        "whole[: len(whole) - (len(text) - consumed) - len(stop)]",
        "whole[: len(whole) - (len(text) - consumed)]",
        ("test_what_is_taken_adds_up_to_the_whole_text_cut_at_the_stop",),
        "a stop string ends the text before its first character",
    ),
)
