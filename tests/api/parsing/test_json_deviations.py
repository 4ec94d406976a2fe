"""JSON between marks, a little off its format: what is certain is a call, with whole arguments."""

from __future__ import annotations

import json

import pytest

from support.deviations import MARKS, ONE, SI, TWO, F, G, check

BLOCKS = {
    "one object": (ONE, [F]),
    "two objects, a line each": (f"{ONE}\n{TWO}", [F, G]),
    "two objects with a comma between them": (f"{ONE}, {TWO}", [F, G]),
    "a list": (f"[{ONE}, {TWO}]", [F, G]),
    "a list without commas": (f"[{ONE} {TWO}]", [F, G]),
    "a list with a comma too many": (f"[{ONE},]", [F]),
    "a list that is not closed": (f"[{ONE}", [F]),
    "a list that is not closed and a comma": (f"[{ONE}, {TWO},", [F, G]),
    "two lists": (f"[{ONE}]\n[{TWO}]", [F, G]),
    "an object behind a list": (f"[{ONE}], {TWO}", [F, G]),
    "a comma behind the object": (f"{ONE},", [F]),
    "a name with its namespace": (ONE.replace('"f"', '"functions.f"'), [F]),
    "arguments left out behind their key": ('{"name": "g", "arguments": }', [G]),
    "a comma too many in every object": ('{"name": "f", "arguments": {"s": "x",},}', [F]),
    "the last brace left out": (ONE[:-1], [F]),
    "the last two braces left out": (ONE[:-2], [F]),
    "the last quote left out": (ONE[:-3], [F]),
    "braces too many": (ONE + "}}", [F]),
    "two braces for one": ("{" + ONE + "}", [F]),
    "a fence around it": (f"```json\n{ONE}\n```", [F]),
    "Python's quotes": (ONE.replace('"', "'"), [F]),
    "a function inside": ('{"type": "function", "function": ' + ONE + "}", [F]),
    "the name as the function": ('{"function": "f", "parameters": {"s": "x"}}', [F]),
    "arguments as a text": ('{"name": "f", "arguments": "{\\"s\\": \\"x\\"}"}', [F]),
    "arguments in bare quotes": ('{"name": "f", "arguments": "{"s": "x"}"}', [F]),
    "arguments beside the name": ('{"name": "f", "s": "x", "i": 3, "id": "1"}', [SI]),
    "arguments that are another text": (
        '{"name": "f", "arguments": "hello"}',
        [("f", {"INVALID_JSON": "hello"})],
    ),
    "arguments that are a list": (
        '{"name": "f", "arguments": [1]}',
        [("f", {"INVALID_JSON": "[1]"})],
    ),
    "no comma behind the name": ('{"name": "f" "arguments": {"s": "x"}}', [F]),
    "no arguments": ('{"name": "g"}', [G]),
    "no arguments and no brace": ('{"name": "g"', [G]),
    "an empty list of arguments": ('{"name": "g", "arguments": []}', [G]),
    "an empty text of arguments": ('{"name": "g", "arguments": ""}', [G]),
}


@pytest.mark.parametrize("title", BLOCKS)
@pytest.mark.parametrize("family", MARKS)
def test_json_between_marks(family, title):
    body, calls = BLOCKS[title]
    begin, end = MARKS[family]
    is_open = title == "the last quote left out"  # which nothing but a mark can end
    if end or not is_open:
        check(family, f"Ok.\n{begin}{body}{end}", *calls, words="Ok.\n")
    if not is_open:
        check(family, f"{begin}{body}", *calls)
    if end and not is_open:
        check(family, f"{begin}{body}{end}{end} So.", *calls, words=" So.")


@pytest.mark.parametrize("family", MARKS)
def test_the_next_mark_ends_a_call(family):
    begin, end = MARKS[family]
    second = f"{begin}[{TWO}]{end}" if family == "mistral" else f"{begin}{TWO}{end}"
    for first in (ONE, ONE[:-1], ONE[:-2]):
        check(family, f"{begin}{first}\n{second}", F, G)


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder", "hunyuan", "cohere"])
def test_the_next_mark_ends_a_string_and_a_mark_that_nothing_follows_is_text_in_it(family):
    begin, end = MARKS[family]
    check(family, f"{begin}{ONE[:-3]}{end}\n{begin}{TWO}{end}", F, G)
    check(family, f"{begin}{ONE[:-3]}\n{begin}{TWO}{end}", F, G)
    for inner in (end, f"{end}{begin}", f" {begin} ", f"{begin}{{}}{end}", f"a{end} b"):
        value = {"s": f"x{inner}"}
        body = json.dumps({"name": "f", "arguments": value})
        check(family, f"{begin}{body}{end}", ("f", value))
