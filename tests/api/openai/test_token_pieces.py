"""``token_sources``: every token once, and text only where the answer has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.dialects.openai.token_pieces import TokenPieces
from foretoken.api.parsing.reasoning import THINK, Thinking
from foretoken.api.types.results import CallDelta, TextDelta

END = "<end>"


def pieces_of(
    *steps: tuple[str, dict[str, Any]], thinking: Thinking | None = THINK
) -> list[tuple[str, str | None, str]]:
    """The pieces of steps: their tokens, parted by "|" and drafted but for the last; and the delta.

    A token that is written in hex is one of bytes; the end is a special token.
    """
    vocab = [token for tokens, _ in steps for token in tokens.split("|") if tokens]
    data = [bytes.fromhex(each[1:]) if each[:1] == "#" else each.encode() for each in vocab]
    tokenizer = SimpleNamespace(
        special_ids={number for number, token in enumerate(vocab) if token == END},
        token_bytes=lambda token_id: data[token_id],
    )
    reader, told, at = TokenPieces(tokenizer, thinking), [], 0  # type: ignore[arg-type]
    for tokens, fields in steps:
        count = len(tokens.split("|")) if tokens else 0
        sources = [*["suffix"] * (count - 1), ""][:count]
        delta = TextDelta(token_ids=[*range(at, at + count)], sources=sources, **fields)
        at += count
        reader.hold(delta)
        told += reader.read(delta)
    return told + reader.rest()


def text_of(pieces: list[tuple[str, str | None, str]], channel: str) -> str:
    return "".join(text for text, _, where in pieces if where == channel)


def test_marks_have_no_text_and_each_part_has_its_channel() -> None:
    pieces = pieces_of(
        ("<th|ink>|\nI t", {"reasoning": "I t"}),
        ("hink.|</|think>", {"reasoning": "hink."}),
        ("\n\n|So: 4|" + END, {"text": "So: 4", "finish_reason": "stop"}),
    )
    assert text_of(pieces, "reasoning") == "I think."
    assert text_of(pieces, "content") == "So: 4"
    assert [source for _, source, _ in pieces] == ["suffix", "suffix", ""] * 3
    assert pieces[-1] == ("", "", "content")


def test_a_text_that_a_mark_holds_too_is_looked_for_behind_the_mark() -> None:
    pieces = pieces_of(
        ("<think>|ink", {"reasoning": "ink"}), ("</think>|\n|think", {"text": "think"})
    )
    assert pieces == [
        ("", "suffix", "reasoning"), ("ink", "", "reasoning"), ("", "suffix", "content"),
        ("", "suffix", "content"), ("think", "", "content"),
    ]  # fmt: skip


@pytest.mark.parametrize("thinking", [None, THINK])
def test_a_token_in_two_deltas_is_counted_once(thinking: Thinking | None) -> None:
    steps = ("a <|b", {"text": "a "}), ("", {"text": "<"}), ("c", {"text": "bc"})
    assert pieces_of(*steps, thinking=thinking) == [
        ("a ", "suffix", "content"), ("<", None, "content"), ("b", "", "content"),
        ("c", "", "content"),
    ]  # fmt: skip


def test_the_tokens_of_one_character_are_told_one_by_one() -> None:
    pieces = pieces_of(("#e2|#82", {}), ("#ac|!", {"text": "€!"}))
    assert pieces == [
        ("", "suffix", "content"), ("", "", "content"), ("€", "suffix", "content"),
        ("!", "", "content"),
    ]  # fmt: skip


def test_a_call_is_told_as_the_model_wrote_it_and_text_that_no_token_has_is_not_lost() -> None:
    call = {"tool_calls": [CallDelta(index=0, id="x", name="f", arguments="{}")]}
    pieces = pieces_of(("Look.|<call>", {"text": "Look."}), ("f|()", call), ("", {"text": "Q"}))
    assert text_of(pieces, "tool") == "<call>f()"
    assert pieces[0] == ("Look.", "suffix", "content")
    assert pieces[-1] == ("Q", None, "content")
