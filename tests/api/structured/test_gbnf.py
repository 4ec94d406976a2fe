"""GBNF as callers write it: escapes, classes, repetitions, comments, alternatives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from foretoken import InvalidRequest
from support.random_walk_model import Model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with asyncio.Runner() as runner:
        made = Model("spelt", runner)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        (r'root ::= "caf\u00e9"', ["café"], ["cafe", "caf"]),
        (r'root ::= "\U0001F600" [\U0001F601-\U0001F604]', ["😀😂"], ["😀", "😀😀"]),
        (r'root ::= "\x41\x42" "\n" "\t" "\\" "\""', ['AB\n\t\\"'], ["AB"]),
        ("root ::= [\\x30-\\x39]+", ["07"], ["", "a"]),
        (r"root ::= [a-c\-\]^]+", ["a-]^"], ["d"]),
        ("root ::= [^a-c\\n]{2}", ["xy"], ["xa", "x\n", "x"]),
        ("root ::= [-a]+ [b-]", ["-a-", "ab"], ["b"]),
        ('root ::= ("a" "b"?){2,3}', ["aba", "aaa"], ["a", "aaaa"]),
        ('root ::= (("a"{2}){2})*', ["", "aaaa"], ["aa"]),
        ('root ::= ("a"?)*  "b"', ["b", "aab"], ["a"]),
        ('root ::= "a"{2,} "b"{,2} "c"{0}', ["aa", "aaabb"], ["a", "aabbb", "aac"]),
        ('root ::= start end\nstart ::= "s"\nend ::= "e"', ["se"], ["s"]),
        ('root ::= a-b a_b\na-b ::= "1"\na_b ::= "2"', ["12"], ["11", "22"]),
        ('root ::= "a" | # one\n  "b" |\n  "c" # the last\n', ["a", "b", "c"], [""]),
        ('root ::= "a" ( | "b")', ["a", "ab"], ["b"]),
        ('root ::= "#" [#] # comment "x"', ["##"], ["#"]),
        ('root ::= "" | "a"', ["", "a"], ["aa"]),
        ("root ::= . .", ["ab", "é😀"], ["a"]),
        ('root ::= item ("," item)*\nitem ::= [0-9]+', ["1,23"], ["1,"]),
        ('root ::= list\nlist ::= list "," "x" | "x"', ["x", "x,x,x"], ["x,"]),
        ('RuleOne ::= "a"\nroot ::= RuleOne 1x\n1x ::= "b"', ["ab"], ["a"]),
    ],
)
def test_a_grammar_allows_what_it_says(
    model: Model, grammar: str, allowed: list[str], refused: list[str]
) -> None:
    assert [text for text in allowed if not model.accepts(grammar, text)] == []
    assert [text for text in refused if model.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        ('start ::= "a"', "root"),
        ("root ::= other", "other"),
        ('root ::= "a', "GBNF"),
        ("root ::= [a", "GBNF"),
        ('root ::= ("a"', "GBNF"),
        (r'root ::= "\u00"', "GBNF"),
        ('root ::= "a"{3,2}', "GBNF"),
        ("root ::= [z-a]", "GBNF"),
        ('root ::= * "a"', "GBNF"),
        ("root ::= root", "grammar"),
    ],
)
def test_what_is_wrong_is_refused_with_its_field(model: Model, grammar: str, part: str) -> None:
    with pytest.raises(InvalidRequest, match=part) as error:
        model.grammar(grammar)
    assert error.value.param == "grammar"
