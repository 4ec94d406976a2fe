"""Going back over tokens that a grammar names by number, though they have a text of their own."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator

import pytest

from support.random_walk_model import END, Model

FORM = 'form: %json {"type": "object"}'


@pytest.fixture(scope="module", params=["text", "special"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with asyncio.Runner() as runner:
        made = Model(request.param, runner)
        yield made
        made.close()


def test_drafts_of_a_call_are_dropped_for_another_branch(model: Model) -> None:
    begin, end = (model.tokenizer.vocab[mark] for mark in ("<tool_call>", "</tool_call>"))
    grammar = model.grammar(f"start: form | <[{begin}]> form <[{end}]>\n{FORM}")
    matcher, output = grammar.matcher(frozenset({END})), array("q")
    words = model.tokenizer.encode_word('{"a":1}')
    call = [begin, *words, end]
    for length in (len(call), 0, 1, len(call) - 1, 0, len(call)):
        assert matcher.allowed(output, 0, call[:length]) is not None
    for length in range(len(words) + 1):
        assert matcher.allowed(output, 0, words[:length]) is not None
    assert matcher.allowed(output, 0, call) is not None
    assert matcher.count_allowed(output, 0, [*call, END]) == len(call) + 1
    output.extend(call[:2])
    assert matcher.allowed(output, 0, call[2:]) is not None
    assert matcher.allowed(output, 0, ()) is not None
