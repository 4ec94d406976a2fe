"""A Lark grammar as a pattern has the texts of the grammar."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from foretoken.api.structured.lark_regex import COMMON, MAX_CHARS, _tokenizer, matches, regex_of
from support.patches import PATCH_GRAMMAR

TOKENIZER = _tokenizer()


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def in_json(grammar: str, text: str) -> bool:
    schema = {"type": "string", "pattern": f"^(?:{regex_of(grammar)})$"}
    made = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return accepts(made, json.dumps(text, ensure_ascii=False))


PATCHES = (
    "*** Begin Patch\n*** Delete File: a b\n*** End Patch",
    '*** Begin Patch\n*** Add File: a/"b\\c.txt\n+hi "x" \\n\n+\n*** End Patch\n',
    "*** Begin Patch\n*** Update File: z.py\n@@ def f\n-a\n+b\tc\n d\n*** End Patch",
)


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (PATCH_GRAMMAR, PATCHES, [PATCHES[0][:-1], PATCHES[2].replace("+b", "b"), ""]),
        (
            r"start: /^(?P<month>January|May)\s+(?P<day>\d{1,2})(?:st)?$/",
            ["May 3", "January\n12st"],
            ["May at", "May 333"],
        ),
        ('start: A+ /./ "z".."|"\nA: "ab\\n"i', ["AB\nab\nxz", 'ab\n"{'], ["ab\n\nz", "xz"]),
        ("start: /[^a-c]+/", ['"\\\n\t', "x[]"], ["ab", ""]),
        (r"start: /a.b/s", ["a\nb", 'a"b'], ["ab"]),
        (r'start: /[a-z]+\/x/i "q"', ["AB/Xq"], ["ab/xQ"]),
        (
            'start: e\ne: INT | "(" e ")" | e "+" e\n%import common.INT\n%ignore " "',
            ["1", "((1+2)+3)", "1 + ( 2 )", "1+1+1+1+1+1"],
            ["(1", "1+", "+1"],
        ),
        (
            'start: w{2,3} ("," w)~1..2 [x]\nw: "a"\nx: "x"',
            ["aa,a", "aaa,a,ax"],
            ["a,a", "aa,a,a,a", "aa"],
        ),
        (
            'start: s+\ns: "if" "(" NAME ")" s\n | NAME ";" // a comment\nNAME: /[a-z]+/\n'
            "%ignore /[ \\n]+/",
            ["a;", "if (a) b; c;", "if (a) if (b)\nc;"],
            ["if a", "a b;"],
        ),
        (
            'start: expr\nexpr: term (SP "+" SP term)* -> add\n | term\nterm: NUMBER\nSP: " "\n'
            "%import common (NUMBER, LF)\n",
            ["1 + 2.5", "3"],
            ["+", "1+2"],
        ),
        ("%import common.CNAME -> NAME\nstart: NAME", ["a_1"], ["1a"]),
    ],
)
def test_a_pattern_has_the_texts_of_its_grammar(grammar, inside, outside):
    own, pattern = LLMatcher.grammar_from_lark(grammar), regex_of(grammar)
    for text in inside:
        assert matches(pattern, text), text
        assert accepts(own, text), text
        assert in_json(grammar, text), text
    for text in outside:
        assert not matches(pattern, text), text
        assert not accepts(own, text), text
        assert not in_json(grammar, text), text


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("text", ["\n", " \t", "7", "-7", "1.5e3", ".5", "a", "Z", "ab", '"a\\"b"'])
def test_the_terminals_of_the_library_are_those_of_the_matcher(name, text):
    grammar = f"start: {name}\n%import common.{name}\n"
    assert in_json(grammar, text) == accepts(LLMatcher.grammar_from_lark(grammar), text)


def test_nesting_is_cut_where_the_pattern_would_be_too_long():
    grammar = 'start: e\ne: "(" (e ("," e)*)? ")" | "[" (e ("," e)*)? "]"\n'
    assert len(regex_of(grammar)) <= MAX_CHARS
    assert in_json(grammar, "([],())")


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ("start: a", "no rule named a"),
        ("start: <[1]>", "not supported"),
        ("start: %json {}", "not supported"),
        ("start: start", "never ends"),
        ('start: a\na: "(" a ")"', "never ends"),
        ("start: a\na: (", "not closed"),
        ('x: "a"', "no rule named start"),
        ('"a"', "before the first rule"),
        ("%import python.X\nstart: X", "only terminals of the library common"),
        ("%import common.NONE\nstart: NONE", "no terminal NONE"),
        ('start: "a" & "b"', "not supported"),
        ('start: ~"b"', "not supported"),
        ("%declare A\nstart: A", "not supported"),
        ("start: )", "not expected"),
        (f'start: "{"a" * 10_000}"', "characters"),
    ],
)
def test_what_no_pattern_can_say_is_an_error(grammar, error):
    with pytest.raises(ValueError, match=error):
        regex_of(grammar)


def test_rules_that_double_each_other_are_an_error_soon():
    doubled = [f"r{index}: r{index + 1} r{index + 1}" for index in range(60)]
    for last in ('r60: ""', 'r60: "a"'):
        with pytest.raises(ValueError, match=r"times|characters|never ends"):
            regex_of("\n".join(["start: r0", *doubled, last]))


def test_a_text_is_checked_in_linear_time_and_a_wrong_pattern_matches_nothing():
    assert not matches("(a+)+b", "a" * 5_000)
    assert matches("(a+)+", "a" * 5_000)
    assert not matches("(", "(")
