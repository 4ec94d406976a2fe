"""JSON schemas as others wrote them: answers at random are valid, and what is refused is named."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.structured.matcher import Grammar
from foretoken.api.types.results import Tool, ToolChoice
from support.parse_harness import by_kind, parse
from support.random_walk_model import END, Model

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with exactly these properties, all of them required unless ``more`` says."""
    closed = {"type": "object", "properties": properties, "required": [*properties]}
    return {**closed, "additionalProperties": False, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "digits": of({"a": {"type": "string", "pattern": "^[0-9]+$"}}),
    "contains a digit": of({"a": {"type": "string", "pattern": "[0-9]"}}),
    "contains equals": of({"a": {"type": "string", "pattern": "="}}),
    "version": of({"v": {"type": "string", "pattern": r"^v\d+\.\d+\.\d+(-[a-z]+)?$"}}),
    "phone": of({"p": {"type": "string", "pattern": r"^\+?[0-9]{3}-[0-9]{4}$"}}),
    "alternatives": of({"p": {"type": "string", "pattern": "^(red|green|blue)$"}}),
    "uri": of({"u": {"type": "string", "format": "uri"}}),
    "duration": of({"d": {"type": "string", "format": "duration"}}),
    "time": of({"t": {"type": "string", "format": "time"}}),
    "date-time": of({"t": {"type": "string", "format": "date-time"}}),
    "uuid": of({"i": {"type": "string", "format": "uuid"}}),
    "email": of({"m": {"type": "string", "format": "email"}}),
    "ipv4": of({"h": {"type": "string", "format": "ipv4"}}),
    "unknown format": of({"x": {"type": "string", "format": "made-up"}}),
    "open unit interval": of(
        {"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}
    ),
    "multiple of 7": of({"n": {"type": "integer", "multipleOf": 7, "minimum": 8}}),
    "negative": of({"n": {"type": "integer", "maximum": -11}}),
    "decimals": of({"n": {"type": "number", "minimum": 1.25, "maximum": 1.75}}),
    "lengths": of({"s": {"type": "string", "minLength": 3, "maxLength": 5}}),
    "enum of kinds": of({"e": {"enum": ["a", 1, None, True, [1], {"k": "v"}]}}),
    "constant": of({"c": {"const": {"deep": [1, "x"]}}}),
    "null or text": of({"n": {"type": ["null", "string"], "maxLength": 4}}),
    "any of": {"anyOf": [of({"a": TEXT}), of({"b": NUMBER}), {"type": "null"}]},
    "one of by constant": {
        "oneOf": [of({"k": {"const": "a"}, "x": NUMBER}), of({"k": {"const": "b"}, "y": TEXT})]
    },
    "one of by type": of({"v": {"oneOf": [TEXT, NUMBER, {"type": "boolean"}]}}),
    "all of": {"allOf": [of({"a": NUMBER}, additionalProperties=True), {"required": ["a"]}]},
    "reference": {"$ref": "#/$defs/x", "$defs": {"x": of({"a": NUMBER})}},
    "definitions": {"$ref": "#/definitions/x", "definitions": {"x": of({"a": TEXT})}},
    "tree": {
        "$ref": "#/$defs/t",
        "$defs": {"t": of({"kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}})},
    },
    "tuple": {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False, "minItems": 2},
    "bounded list": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
    "list of lists": {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 1}},
    "optional": of({"a": NUMBER, "b": TEXT, "c": NUMBER}, required=["b"]),
    "map of numbers": {"type": "object", "additionalProperties": NUMBER, "maxProperties": 3},
    "free object": {"type": "object"},
    "record": {"type": "object", "propertyNames": TEXT, "additionalProperties": NUMBER},
    "pattern properties": {
        "type": "object", "patternProperties": {"^x-": NUMBER}, "additionalProperties": False,
    },
    "two of a pattern": {
        "type": "object", "patternProperties": {"^x[0-9]": NUMBER},
        "additionalProperties": False, "minProperties": 2,
    },
    "one property at least": {"type": "object", "additionalProperties": NUMBER, "minProperties": 1},
    "dependent": of(
        {"card": NUMBER, "address": TEXT}, required=[], dependentRequired={"card": ["address"]}
    ),
    "dependencies": of({"a": NUMBER, "b": NUMBER}, required=[], dependencies={"a": ["b"]}),
    "many required": of({f"property_{number}": NUMBER for number in range(24)}),
    "deep": of({"a": of({"b": of({"c": of({"d": {"type": "boolean"}})})})}),
    "quotes in keys": of({'a"b': NUMBER, "c\\d": NUMBER, "é": TEXT}),
    "not a keyword": of({"type": TEXT, "properties": NUMBER, "$ref": TEXT, "enum": NUMBER}),
    "annotations": of(
        {"a": {**TEXT, "title": "A", "description": "d", "default": "x", "examples": ["y"]}},
        **{"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://x.y/z"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with asyncio.Runner() as runner:
        made = Model("spelt", runner)
        yield made
        made.close()


def compiled(model: Model, schema: dict[str, Any]) -> Grammar:
    work = model.grammars.compile(SamplingParams(json_schema=schema))
    grammar = model._runner.run(work)
    assert grammar is not None
    return grammar


def answer(model: Model, grammar: Grammar, limit: int, seed: int) -> str:
    """An answer at random that ends only where it must."""
    matcher, rng, output = (
        grammar.matcher(frozenset({END}), limit),
        np.random.default_rng(seed),
        array("q"),
    )
    while len(output) < limit and END not in output:
        mask = matcher.allowed(output, 0, ())
        assert mask is not None
        allowed = np.flatnonzero(np.frombuffer(mask, dtype=np.bool_))
        wanted = allowed[allowed != END]
        output.append(int(rng.choice(wanted)) if len(wanted) else END)
    assert output[-1] == END, model.tokenizer.decode(output)
    return model.tokenizer.decode(output[:-1])


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_of_any_length_are_whole_and_valid(model: Model, name: str) -> None:
    grammar = compiled(model, SCHEMAS[name])
    assert grammar.least is not None
    for seed, spare in enumerate((1, 12)):
        text = answer(model, grammar, grammar.least + spare, seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name], jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "keys",
    [
        {"additionalProperties": {"type": "null"}},
        {"patternProperties": {"^x-[a-z]{1,3}$": NUMBER}, "additionalProperties": False},
        {"patternProperties": {"^[ab]$": NUMBER}, "additionalProperties": False},
    ],
    ids=["free", "pattern", "two at all"],
)
def test_equal_keys_do_not_count_twice(model: Model, keys: dict[str, Any]) -> None:
    grammar = compiled(model, {"type": "object", "minProperties": 2, **keys})
    assert grammar.least is not None
    for seed, spare in enumerate((1, 6, 30)):
        text = answer(model, grammar, grammar.least + spare, seed)
        names = json.loads(text, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
        assert len(names) == len(set(names)) >= 2, text


def test_where_no_other_key_is_left_the_object_ends(model: Model) -> None:
    few = {"^k[ab]$": {"enum": [1]}}
    schema = {"type": "object", "minProperties": 2, "patternProperties": few}
    grammar = compiled(model, {**schema, "additionalProperties": False})
    assert grammar.least is not None
    for seed, spare in enumerate((1, 40, 90)):
        text = answer(model, grammar, grammar.least + spare, seed)
        assert sorted(json.loads(text, object_pairs_hook=list)) == [("ka", 1), ("kb", 1)], text


BAD = {
    "look-ahead": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
    "word boundary": {"type": "string", "pattern": r"\bword\b"},
    "back-reference": {"type": "string", "pattern": r"(a)\1"},
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "dangling reference": {"$ref": "#/$defs/nothing"},
    "unique items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_part_of_a_tool_does_not_end_a_forced_call(model: Model, name: str) -> None:
    syntax, choice = model.syntax("hermes"), ToolChoice(mode="required")
    tool = Tool(name="f", parameters=of({"bad": BAD[name], "good": {"enum": ["only"]}}))
    text = syntax.constrain(SamplingParams(), tools=[tool], choice=choice)
    said = answer(model, model.grammar(text), 96, seed=1)
    calls = by_kind(parse(syntax.parser(tools=[tool]), [said])).calls
    for arguments in [json.loads(text) for _, text, _ in calls]:
        assert set(arguments) == {"bad", "good"}
        assert arguments["good"] == "only"
    assert calls


@pytest.mark.parametrize("name", ["look-ahead", "dangling reference", "unique items"])
def test_a_strict_tool_is_refused_with_the_name_of_its_part(model: Model, name: str) -> None:
    syntax, choice = model.syntax("hermes"), ToolChoice(mode="required")
    tool = Tool(name="f", strict=True, parameters=of({"bad": BAD[name]}))
    text = syntax.constrain(SamplingParams(), tools=[tool], choice=choice)
    with pytest.raises(InvalidRequest, match="bad") as error:
        model.grammar(text)
    assert error.value.param == "tools"
