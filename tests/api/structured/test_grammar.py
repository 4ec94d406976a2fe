"""Grammars: what may follow, for any vocabulary, along any path; and what is refused, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import foretoken.api.structured.compiler as grammar_module
import foretoken.api.structured.matcher as matcher_module
from foretoken import InvalidRequest, SamplingParams
from foretoken.api.structured.compiler import Grammars
from foretoken.api.structured.grammar_text import json_rule, lark_text
from foretoken.api.structured.matcher import Grammar, GrammarMatcher, Vocabulary
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.core.errors import EngineDead, QueueFull
from foretoken.core.interface.sampling import ConstraintFailed

FOLDERS = ("byte_level_folder", "metaspace_folder", "byte_fallback_folder")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large", None]},
        "ids": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}  # fmt: skip


class EndlessAnswer(Exception):
    """A random answer that may go on and does."""


class Bench:
    """A tokenizer with padding behind its vocabulary, and the grammars over it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer.vocab) + 37
        named = (tokenizer.vocab.get(name) for name in ("<|im_end|>", "</s>"))
        self.eos = next(token_id for token_id in named if token_id is not None)

    async def compile(self, **form: object) -> Grammar:
        grammars = Grammars(self.tokenizer, self.size, frozenset({self.eos}))
        try:
            compiled = await grammars.compile(SamplingParams(**form))  # type: ignore[arg-type]
            assert compiled is not None
            return compiled
        finally:
            grammars.close()

    def matcher(self, *stop_ids: int, **form: object) -> GrammarMatcher:
        return asyncio.run(self.compile(**form)).matcher(frozenset(stop_ids or {self.eos}))

    def text(self, ids: array[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()

    def write(self, matcher: GrammarMatcher, seed: int, most: int = 200) -> str:
        """A random answer, from its first token to its end."""
        rng, output = random.Random(seed), array("q")
        while len(output) < most:
            mask = matcher.allowed(output, 0, ())
            assert mask is not None
            assert mask.shape == (self.size,)
            token_id = int(rng.choice(np.flatnonzero(mask)))
            if token_id == self.eos:
                return self.text(output)
            output.append(token_id)
        raise EndlessAnswer


@pytest.fixture(params=FOLDERS)
def any_bench(request) -> Iterator[Bench]:
    loaded = Tokenizer.load(request.getfixturevalue(request.param), max_model_len=256)
    yield Bench(loaded)
    loaded.close()


@pytest.fixture
def bench(tokenizer) -> Bench:
    return Bench(tokenizer)


# -- what may follow ------------------------------------------------------------------------------


def follow(matcher: GrammarMatcher, path: list[int]) -> list[int] | None:
    mask = matcher.allowed(array("q"), 0, path)
    return None if mask is None else np.flatnonzero(mask).tolist()


def test_every_vocabulary_writes_json_of_the_schema(any_bench: Bench) -> None:
    narrow = {"type": "array", "items": {"enum": ["ab ef", 12, "é"]}, "minItems": 1, "maxItems": 3}
    compact = re.compile(r'\[("ab ef"|12|"é")(, ("ab ef"|12|"é")){0,2}\]')
    fallback = any_bench.tokenizer.vocab.get("<0x41>") or any_bench.tokenizer.is_byte_level
    matcher = any_bench.matcher(json_schema=narrow) if fallback else None
    for seed in range(5 if matcher else 0):
        assert compact.fullmatch(any_bench.write(matcher.fork(), seed))
    words = any_bench.matcher(choice=["hello world", "return the answer"])
    if not any_bench.tokenizer.vocab.get("<0x41>"):
        assert {any_bench.write(words.fork(), seed) for seed in range(12)} == {
            "hello world", "return the answer"
        }  # fmt: skip


def test_masks_are_those_of_the_path_however_it_was_reached(bench: Bench) -> None:
    """Drafts lead a matcher to and fro; what it says must be what a new one says."""
    matcher = bench.matcher(json_schema=SCHEMA)
    rng, output, num_jumps = random.Random(3), array("q"), 0
    for _ in range(400):
        tail = wander(matcher.fork(), output, rng)
        mask, fresh = matcher.allowed(output, 0, tail), matcher.fork().allowed(output, 0, tail)
        assert (mask is None) == (fresh is None)
        assert mask is None or np.array_equal(mask, fresh)
        num_jumps += mask is not None and len(tail) > 1
        if rng.random() < 0.2:
            allowed = matcher.allowed(output, 0, ())
            assert allowed is not None
            token_id = int(rng.choice(np.flatnonzero(allowed)))
            if token_id != bench.eos:
                output.append(token_id)
    assert num_jumps > 50
    assert len(output) > 20


def wander(matcher: GrammarMatcher, output: array[int], rng: random.Random) -> list[int]:
    """A draft: allowed tokens, now and then one that is not, an end or an id that is none."""
    tail: list[int] = []
    for _ in range(rng.randrange(6)):
        mask = matcher.allowed(output, 0, tail)
        allowed = [] if mask is None else np.flatnonzero(mask).tolist()
        wild = rng.randrange(-3, 500)
        tail.append(int(rng.choice(allowed)) if allowed and rng.random() < 0.85 else wild)
    return tail


@pytest.mark.parametrize("bad", [[-1], [10**12], [0], [5, 5]], ids=str)
def test_a_refused_tail_does_no_harm(bench: Bench, bad: list[int]) -> None:
    matcher = bench.matcher(json_schema=SCHEMA)
    first = follow(matcher, [])
    assert first is not None
    assert follow(matcher, bad) is None
    assert follow(matcher, [first[0], *bad]) is None
    assert follow(matcher, [first[0], *bad, first[0]]) is None
    assert follow(matcher, []) == first


def test_a_tail_that_breaks_the_matcher_breaks_nothing_else(bench: Bench) -> None:
    """Behind "b" lie a million letters, which is more than llguidance goes along with."""
    million = "start: /a[0-9]/ | /b/ r\nr: s{100}\ns: t{100}\nt: /x/{100}"
    matcher, vocab = bench.matcher(grammar=million), bench.tokenizer.vocab
    first, whole = follow(matcher, []), matcher._live
    for tail in ([vocab["b"]], [vocab["b"], vocab["x"]]):
        with contextlib.suppress(ConstraintFailed):
            matcher.allowed(array("q"), 0, tail)
    assert matcher._live is not whole, "nothing broke, so nothing was shown"
    assert follow(matcher, []) == first
    output, digit = array("q", [vocab["a"]]), vocab["7"]
    assert len(follow(matcher, [vocab["a"]]) or []) == 10
    assert np.flatnonzero(matcher.allowed(output, 0, [digit])).tolist() == [bench.eos]
    assert list(matcher.forced(array("q", [*output, digit]), 0, 4)) == [bench.eos]


def test_a_drafts_end_is_no_path_of_the_grammar(bench: Bench) -> None:
    matcher = bench.matcher(regex="a*")
    a = bench.tokenizer.vocab["a"]
    start = follow(matcher, [])
    assert start is not None
    assert bench.eos in start
    assert follow(matcher, [bench.eos]) is None
    assert follow(matcher, [a, bench.eos, a]) is None
    assert bench.eos in (follow(matcher, [a]) or [])


def test_an_output_that_the_grammar_cannot_have_allowed_is_an_error(bench: Bench) -> None:
    matcher = bench.matcher(regex="[0-9]+")
    with pytest.raises(ConstraintFailed, match="does not match the answer so far"):
        matcher.allowed(array("q", [bench.tokenizer.vocab["a"]]), 0, ())


def test_a_complete_answer_ends_with_any_stop_id_and_with_nothing_else(bench: Bench) -> None:
    digit, other = bench.tokenizer.vocab["7"], 1
    matcher = bench.matcher(bench.eos, other, regex="7")
    assert follow(matcher, []) == [digit]
    assert follow(matcher, [digit]) == sorted([bench.eos, other])


@pytest.mark.parametrize("form", [{"regex": r"(.|\n)*"}, {"grammar": "start: T\nT: ~/ab/"}])
def test_padding_and_special_tokens_are_never_allowed(bench: Bench, form: dict[str, str]) -> None:
    matcher = bench.matcher(**form)
    allowed = set(follow(matcher, []) or [])
    assert not allowed & (bench.tokenizer.special_ids - {bench.eos})
    assert max(allowed) < len(bench.tokenizer.vocab)


def test_a_special_token_may_be_named_by_a_grammar(bench: Bench) -> None:
    start = bench.tokenizer.vocab["<|im_start|>"]
    matcher = bench.matcher(grammar='start: <|im_start|> "x"')
    assert follow(matcher, []) == [start]
    assert follow(matcher, [start]) == [bench.tokenizer.vocab["x"]]
    assert follow(matcher, [start, start]) is None
    assert follow(matcher, []) == [start]


# -- what is forced -------------------------------------------------------------------------------


def test_what_is_forced_is_all_that_is_allowed(any_bench: Bench) -> None:
    if any_bench.tokenizer.vocab.get("<0x41>") is None and not any_bench.tokenizer.is_byte_level:
        matcher = any_bench.matcher(choice=["hello world, hello there"])
    else:
        matcher = any_bench.matcher(json_schema={"const": {"ab ef": ["cd ab", 12]}})
    run = list(matcher.forced(array("q"), 0, 64))
    assert len(run) > 3
    assert run[-1] == any_bench.eos
    other = matcher.fork()
    for index, token_id in enumerate(run):
        assert follow(other, run[:index]) == [token_id]
    assert list(matcher.forced(array("q"), 0, 2)) == run[:2]


def test_a_forced_text_is_tokenised_as_the_tokenizer_does_it(bench: Bench) -> None:
    text = "Hello world, hello there. Stop here."
    run = bench.matcher(choice=[text]).forced(array("q"), 0, 64)
    assert list(run) == [*bench.tokenizer.encode_word(text), bench.eos]


def test_two_ways_to_end_are_not_forced(bench: Bench) -> None:
    matcher = bench.matcher(bench.eos, 1, regex="7")
    assert list(matcher.forced(array("q"), 0, 9)) == [bench.tokenizer.vocab["7"]]


def test_guesses_are_counted_up_to_what_cannot_be(bench: Bench) -> None:
    matcher, vocab = bench.matcher(regex="[0-9]{3}"), bench.tokenizer.vocab
    one, a, eos = vocab["1"], vocab["a"], bench.eos
    count = lambda *guess: matcher.count_allowed(array("q"), 0, guess)  # noqa: E731
    assert [count(one, one), count(one, a, one), count(a), count(-1), count()] == [2, 1, 0, 0, 0]
    assert count(one, one, one, eos, one) == 4
    assert follow(matcher, [one, one, one]) == [eos]


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "naïve 東京 \x02 é", " x", "\n"])
def test_a_text_becomes_tokens_that_spell_it_and_are_not_special(any_bench: Bench, text) -> None:
    vocabulary = Vocabulary(any_bench.tokenizer, any_bench.size, frozenset({any_bench.eos}))
    ids = vocabulary(text)
    spelt = b"".join(vocabulary.tokens[token_id] for token_id in ids)
    assert text.encode().startswith(spelt)
    if any_bench.tokenizer.is_byte_level:
        assert spelt == text.encode()
    assert not any_bench.tokenizer.special_ids & set(ids)


# -- forms ----------------------------------------------------------------------------------------

CHOICES = [
    "a",
    "ab",
    'say "hi"',
    "back\\slash",
    "two\nlines",
    "tab\t\x01",
    "é 東 😀",
    "/x/ | y",
    "%",
]


def test_a_choice_is_written_exactly_and_one_may_begin_another(bench: Bench) -> None:
    matcher = bench.matcher(choice=CHOICES)
    assert {bench.write(matcher.fork(), seed) for seed in range(150)} == set(CHOICES)


REGEXES = [
    (r"[a-f]{2,3}-\d{2}", "[a-f]{2,3}-[0-9]{2}"),
    (r"\\d[\d.]\D", r"\\d[0-9.][^0-9]"),
    (r"(yes|no)\.?", r"(yes|no)\.?"),
    (r"\p{Lu}x*", r"\wx*"),
    ("é/\n!", "é/\n!"),
]


@pytest.mark.parametrize(("regex", "pattern"), REGEXES)
def test_a_regex_is_matched_from_end_to_end(bench: Bench, regex: str, pattern: str) -> None:
    matcher = bench.matcher(regex=regex)
    for seed in range(10):
        text = bench.write(matcher.fork(), seed, most=2000)
        assert re.fullmatch(pattern, text, re.DOTALL)


def test_a_grammar_may_be_lark_or_gbnf(bench: Bench) -> None:
    lark = 'start: "x" item+ "."\nitem: /[a-c]{2}/ ","\n'
    gbnf = 'root ::= "x" item+ "."\nitem ::= [a-c] [a-c] ","\n'
    for grammar in (lark, gbnf):
        text = bench.write(bench.matcher(grammar=grammar), 1)
        assert re.fullmatch(r"x([a-c]{2},)+\.", text)


def test_json_of_a_schema_may_stand_inside_a_grammar(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    grammar = f"start: {lark_text('call: ')} body\nbody: {json_rule(schema)}"
    text = bench.write(bench.matcher(grammar=grammar), 1)
    assert re.fullmatch(r'call: \{"a": [12]\}', text)


def test_json_has_no_free_white_space_whatever_the_schema_says(bench: Bench) -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": True, "item_separator": " ,"}}
    matcher = bench.matcher(json_schema=json.dumps(schema))
    for seed in range(5):
        text = bench.write(matcher.fork(), seed)
        assert json.dumps(json.loads(text), ensure_ascii=False) == text or "\\u" in text


# -- refusals -------------------------------------------------------------------------------------

LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
DEEP: dict[str, object] = {}
for _ in range(5000):
    DEEP = {"items": DEEP}
BAD = [
    ("json_schema", {"type": "nothing"}),
    ("json_schema", {"type": "array", "uniqueItems": True}),
    ("json_schema", {"$ref": "#/nowhere"}),
    ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}),
    ("json_schema", {"enum": []}),
    ("json_schema", LOOP),
    ("json_schema", DEEP),
    ("json_schema", {"x": {1, 2}}),
    ("json_schema", {"const": float("nan")}),
    ("json_schema", {"enum": ["x" * 2**18]}),
    ("json_schema", "{"),
    ("json_schema", "[1]"),
    ("json_schema", "[" * 100_000),
    ("regex", "("),
    ("regex", "(?=a)b"),
    ("regex", "(" * 100_000),
    ("grammar", "start: nothing"),
    ("grammar", "start: <|no_such_token|>"),
    ("grammar", "start: " + "(" * 50_000),
    ("grammar", "root ::= ("),
    ("grammar", "root ::= " + "(" * 50_000),
    ("grammar", "start: start"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=range(len(BAD)))
def test_a_bad_form_is_refused_by_name_and_in_few_words(bench: Bench, field, value) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bench.matcher(**{field: value})
    assert caught.value.param == field
    assert len(str(caught.value)) < 600
    assert "<state>" not in str(caught.value)


def test_one_of_is_served_where_its_branches_exclude_each_other(bench: Bench) -> None:
    matcher = bench.matcher(json_schema={"oneOf": [{"const": "a"}, {"const": 7}]})
    assert {bench.write(matcher.fork(), seed) for seed in range(20)} == {'"a"', "7"}
    overlapping = [{"type": "object", "properties": {name: {}}} for name in ("a", "b")]
    with pytest.raises(InvalidRequest, match="exclude each other; use anyOf"):
        bench.matcher(json_schema={"oneOf": overlapping})


def chain(num_rules: int) -> str:
    names = "\n".join(f"a{i}:a{i + 1}" for i in range(num_rules))
    return f'start: a0\n{names}\na{num_rules}:"z"'


GREEDY_FORMS = [
    ("grammar", chain(15_000)),
    ("regex", "(a|b)*a" + "(a|b)" * 200),
    ("regex", "((a|b){1,1000}c){1,1000}"),
    ("regex", "a*" * 2000),
    ("grammar", "start: a{100}\na: b{100}\nb: /x/{100}"),
    ("json_schema", {"allOf": [{"anyOf": [{"const": [i, j]} for j in range(3)]}
                               for i in range(20)]}),
    ("json_schema", {"type": "integer", "multipleOf": 1000003, "minimum": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GREEDY_FORMS, ids=range(len(GREEDY_FORMS)))
def test_a_form_made_to_be_expensive_ends_alone(bench: Bench, field, value) -> None:
    """Each is served, refused or fails its own request; none overflows a stack."""
    with contextlib.suppress(InvalidRequest, ConstraintFailed, EndlessAnswer):
        bench.write(bench.matcher(**{field: value}), 1, most=30)


# -- compiling ------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch) -> Iterator[threading.Event]:
    """Compiling stands still until this is set."""
    event, compile_now = threading.Event(), grammar_module.compile_grammar
    event.begun = False  # type: ignore[attr-defined]

    def wait(*args):
        event.begun = True  # type: ignore[attr-defined]
        assert event.wait(20)
        return compile_now(*args)

    monkeypatch.setattr(grammar_module, "compile_grammar", wait)
    yield event
    event.set()


def with_grammars(bench: Bench, body: Callable) -> None:
    async def inner() -> None:
        grammars = Grammars(bench.tokenizer, bench.size, frozenset({bench.eos}))
        try:
            await asyncio.wait_for(body(grammars), 20)
        finally:
            grammars.close()

    asyncio.run(inner())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a thread is waited for
        await asyncio.sleep(0)


def test_an_answer_may_spend_so_much_time_on_its_grammar_and_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 0.9, 1.0, 1.2])  # before and after each call
    monkeypatch.setattr(matcher_module, "perf_counter", lambda: next(seconds))
    matcher = bench.matcher(regex="a*")
    assert follow(matcher, [])
    assert follow(matcher, [])
    with pytest.raises(ConstraintFailed, match="too much time"):
        follow(matcher, [])


def test_without_a_form_nothing_is_compiled(bench: Bench) -> None:
    async def body(grammars: Grammars) -> None:
        assert await grammars.compile(SamplingParams()) is None
        assert grammars._vocabulary is None

    with_grammars(bench, body)


def test_the_loop_runs_on_and_the_deadline_names_the_field(bench, held, monkeypatch) -> None:
    async def body(grammars: Grammars) -> None:
        monkeypatch.setattr(grammar_module, "SECONDS", 0.01)
        with pytest.raises(InvalidRequest, match="to compile: simplify it") as caught:
            await grammars.compile(SamplingParams(regex="a"))
        assert caught.value.param == "regex"
        monkeypatch.setattr(grammar_module, "SECONDS", 20)
        waiting = asyncio.create_task(grammars.compile(SamplingParams(regex="a")))
        await asyncio.sleep(0)
        held.set()  # what was begun goes on, and serves who asks again
        assert await waiting is not None
        assert len(grammars._grammars) == 1

    with_grammars(bench, body)


def test_equal_forms_are_compiled_once_and_failures_are_not_kept(bench, monkeypatch) -> None:
    calls, compile_now = [], grammar_module.compile_grammar
    monkeypatch.setattr(
        grammar_module,
        "compile_grammar",
        lambda *args: calls.append(args[:2]) or compile_now(*args),
    )

    async def body(grammars: Grammars) -> None:
        forms = [SamplingParams(json_schema=s) for s in (SCHEMA, json.dumps(SCHEMA), SCHEMA)]
        compiled = await asyncio.gather(*map(grammars.compile, forms))
        assert len({id(each) for each in compiled}) == len(calls) == 1
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await grammars.compile(SamplingParams(regex="("))
        assert len(calls) == 3
        text = SamplingParams(grammar="a"), SamplingParams(choice=["a"])
        with pytest.raises(InvalidRequest):
            await grammars.compile(text[0])
        assert await grammars.compile(text[1]) is not None

    with_grammars(bench, body)


def test_the_grammars_that_are_kept_are_bounded(bench, monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "NUM_GRAMMARS", 3)

    async def body(grammars: Grammars) -> None:
        for text in ("a", "b", "c", "a", "d"):
            await grammars.compile(SamplingParams(regex=text))
        assert [source for _, source in grammars._grammars] == ["c", "a", "d"]

    with_grammars(bench, body)


def test_a_caller_that_leaves_takes_nothing_along(bench, held) -> None:
    async def body(grammars: Grammars) -> None:
        callers = [
            asyncio.create_task(grammars.compile(SamplingParams(regex="a"))) for _ in range(2)
        ]
        await until(lambda: bool(grammars._grammars))
        callers[0].cancel()
        held.set()
        assert await callers[1] is not None
        assert callers[0].cancelled()

    with_grammars(bench, body)


def test_a_slow_grammar_fails_its_own_caller_and_no_other(bench, held, monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "SECONDS", 0.01)

    async def body(grammars: Grammars) -> None:
        slow = asyncio.create_task(grammars.compile(SamplingParams(regex="a")))
        await until(lambda: held.begun)
        other = asyncio.create_task(grammars.compile(SamplingParams(regex="b")))
        with pytest.raises(InvalidRequest, match="to compile"):
            await slow
        monkeypatch.setattr(grammar_module, "SECONDS", 20)
        assert not other.done()
        held.set()
        assert await other is not None

    with_grammars(bench, body)


def test_what_nobody_waits_for_any_more_is_not_compiled(bench, held, monkeypatch) -> None:
    calls, compile_now = [], grammar_module.compile_grammar
    monkeypatch.setattr(
        grammar_module,
        "compile_grammar",
        lambda *args: calls.append(args[1]) or compile_now(*args),
    )

    async def body(grammars: Grammars) -> None:
        first = asyncio.create_task(grammars.compile(SamplingParams(regex="a")))
        await until(lambda: held.begun)
        left = asyncio.create_task(grammars.compile(SamplingParams(regex="b")))
        await until(lambda: len(grammars._grammars) == 2)
        left.cancel()
        await asyncio.wait([left])
        held.set()
        assert await first is not None
        assert await grammars.compile(SamplingParams(regex="c")) is not None
        assert calls == ["a", "c"]

    with_grammars(bench, body)


def test_only_so_many_grammars_wait(bench, held, monkeypatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_PENDING", 1)

    async def body(grammars: Grammars) -> None:
        first = asyncio.create_task(grammars.compile(SamplingParams(regex="a")))
        await until(lambda: held.begun)
        with pytest.raises(QueueFull):
            await grammars.compile(SamplingParams(regex="b"))
        held.set()
        assert await first is not None
        assert await grammars.compile(SamplingParams(regex="b")) is not None

    with_grammars(bench, body)


def test_closing_refuses_what_waits(bench, held) -> None:
    async def body(grammars: Grammars) -> None:
        first = asyncio.create_task(grammars.compile(SamplingParams(regex="a")))
        await until(lambda: held.begun)
        second = asyncio.create_task(grammars.compile(SamplingParams(regex="b")))
        await until(lambda: len(grammars._grammars) == 2)
        grammars.close()
        with pytest.raises(EngineDead):
            await second
        with pytest.raises(EngineDead):
            await grammars.compile(SamplingParams(regex="c"))
        held.set()
        assert await first is not None

    with_grammars(bench, body)


# -- on the way to the engine ---------------------------------------------------------------------


def test_each_choice_has_a_matcher_of_its_own_and_eos_stays_a_stop_id(
    built, llm, engine, tokenizer
):
    eos = tokenizer.vocab["<|im_end|>"]
    engine.answers = lambda request: [*tokenizer.encode_word("yes"), eos]
    llm.generate("hi", SamplingParams(choice=["yes"], n=2, ignore_eos=True, stop_token_ids=[3]))
    first, second = (request.sampling.constraint for request in engine.requests)
    assert first is not None
    assert first is not second
    assert eos in built.eos_token_ids
    for request in engine.requests:
        assert request.stop_ids == request.sampling.stop_ids == {*built.eos_token_ids, 3}


def test_a_bad_form_never_reaches_the_engine(llm, engine):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("hi", SamplingParams(json_schema={"type": "nothing"}))
    assert caught.value.param == "json_schema"
    assert not engine.requests


def test_a_model_without_an_end_needs_stop_token_ids(built, llm, engine, tokenizer):
    built.eos_token_ids = frozenset()
    with pytest.raises(InvalidRequest) as caught:
        llm.generate("hi", SamplingParams(regex="a"))
    assert caught.value.param == "stop_token_ids"
    engine.answers = lambda request: [tokenizer.vocab["a"], 3]
    llm.generate("hi", SamplingParams(regex="a", stop_token_ids=[3]))
    assert len(engine.requests) == 1


def test_vocabularies_are_read_from_their_folder(byte_level_folder: Path) -> None:
    loaded = Tokenizer.load(byte_level_folder, max_model_len=64)
    vocabulary = Vocabulary(loaded, len(loaded.vocab) + 5, frozenset())
    loaded.close()
    assert vocabulary.end == len(loaded.vocab) + 5
    assert vocabulary.tokens[loaded.vocab["<think> é"]] == "<think> é".encode()
    assert vocabulary.tokens[-5:] == [b""] * 5


def test_requests_that_wear_the_lexer_out_break_nobody_else(bench: Bench) -> None:
    """Copies of a compiled grammar share its lexer, whose states are limited."""
    grammar = asyncio.run(bench.compile(regex="(a|b)*a(a|b){24}"))
    rng = random.Random(5)
    ab = [bench.tokenizer.encode_word(text)[0] for text in "ab"]
    for _ in range(40):
        matcher, tokens = grammar.matcher(frozenset({bench.eos})), array("q")
        for _ in range(100):
            assert matcher.allowed(tokens, 0, ()) is not None
            tokens.append(rng.choice(ab))
