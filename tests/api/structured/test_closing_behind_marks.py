"""Thoughts end and calls close in time, in every format, whatever the model prefers."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest

from foretoken import SamplingParams
from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_format import THINKING, Syntax
from foretoken.api.structured.matcher import Grammar
from foretoken.api.types.results import Tool, ToolChoice
from support.parse_harness import WEATHER, by_kind, parse
from support.random_walk_model import END, Model

FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
THOUGHT_MARKS = [mark for each in THINKING.values() for mark in (each.begin, each.end)]
SPARE = (1, 12)  # tokens above the shortest answer


@pytest.fixture(scope="module", params=["spelt", "text", "special"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with asyncio.Runner() as runner:
        made = Model(request.param, runner, THOUGHT_MARKS)
        yield made
        made.close()


def stubborn(model: Model, grammar: Grammar, limit: int, seed: int) -> tuple[list[int], bool]:
    """An answer of a model that ends only where it must, and whether it was closed early.

    An even seed draws at random, an odd one prefers the longest words.
    """
    matcher, rng = grammar.matcher(frozenset({END}), limit), np.random.default_rng(seed)
    texts = grammar.vocabulary.texts
    lengths = np.array([len(text) if text.isalnum() else 0 for text in texts]) * (seed % 2)
    output = array("q")
    while len(output) < limit and END not in output:
        mask = matcher.allowed(output, 0, ())
        assert mask is not None
        allowed = np.flatnonzero(np.frombuffer(mask, dtype=np.bool_))
        wanted = allowed[allowed != END]
        scores = lengths[wanted] + rng.random(len(wanted))
        output.append(int(wanted[np.argmax(scores)]) if len(wanted) else END)
    return output.tolist(), matcher.closed_early(len(output))


def answers(
    model: Model, syntax: Syntax, text: str | None, shown: frozenset[int]
) -> Iterator[tuple[str, bool]]:
    """Texts of stubborn answers at tight limits, each of which must be whole."""
    grammar = model.grammar(text)
    assert grammar.least is not None
    for seed, spare in enumerate(SPARE):
        ids, is_closed = stubborn(model, grammar, grammar.least + spare, seed)
        assert ids[-1] == END, model.spell(ids, shown)
        yield model.spell(ids[:-1], shown), is_closed


@pytest.mark.parametrize("name", [*THINKING, "harmony"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "free"])
def test_a_form_behind_a_thought_is_whole(model: Model, name: str, is_open: bool) -> None:
    family, reasoning = ("harmony", "none") if name == "harmony" else ("none", name)
    syntax = model.syntax(family, reasoning=reasoning)
    marks = syntax.thought_marks
    assert marks is not None
    tail = marks.begin + marks.label if is_open and name != "harmony" else ""
    text = syntax.constrain(SamplingParams(json_schema=FORM), prompt_tail=tail)
    shown = syntax.shown_ids(tools=False)
    for answer, _ in answers(model, syntax, text, shown):
        found = by_kind(parse(syntax.parser(prompt_tail=tail, has_form=True), [answer]))
        jsonschema.validate(json.loads(found.words), FORM)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_is_whole(model: Model, family: str) -> None:
    syntax = model.syntax(family)
    text = syntax.constrain(SamplingParams(), tools=[WEATHER], choice=ToolChoice(mode="required"))
    shown = syntax.shown_ids(tools=True)
    for answer, _ in answers(model, syntax, text, shown):
        found = by_kind(parse(syntax.parser(tools=[WEATHER]), [answer]))
        assert found.calls, answer
        assert all(is_whole for _, _, is_whole in found.calls), answer
        assert "city" in json.loads(found.calls[0][1]), answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parameters", [None, {}], ids=["null", "empty"])
def test_a_forced_call_without_parameters_has_none(
    model: Model, family: str, parameters: dict[str, object] | None
) -> None:
    tool = Tool(name="now", parameters=parameters)
    syntax = model.syntax(family)
    text = syntax.constrain(SamplingParams(), tools=[tool], choice=ToolChoice(mode="required"))
    ids, _ = stubborn(model, model.grammar(text), 96, seed=1)
    answer = model.spell(ids[:-1], syntax.shown_ids(tools=True))
    found = by_kind(parse(syntax.parser(tools=[tool]), [answer]))
    assert {arguments for _, arguments, _ in found.calls} == {"{}"}, answer


def test_a_thought_that_cannot_end_in_time_is_cut_and_not_called_closed(model: Model) -> None:
    syntax = model.syntax("none", reasoning="think")
    text = syntax.constrain(SamplingParams(json_schema=FORM), prompt_tail="<think>")
    grammar = model.grammar(text)
    assert grammar.least is not None
    ids, is_closed = stubborn(model, grammar, grammar.least, seed=1)
    assert END not in ids
    assert not is_closed
