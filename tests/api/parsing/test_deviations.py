"""Calls a little off their format, by reader: what is certain is a call, with whole arguments."""

from __future__ import annotations

import json

import pytest

from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_parser import CallBegin, CallEnd
from support.deviations import MARKS, ONE, SI, TOOLS, TWO, F, G, check, of
from support.format_texts import BOTH, WRAPPED
from support.parse_harness import Read, by_kind, parse, syntax

# -- tags -----------------------------------------------------------------------------------------


def coder(
    *parts: str, name: str = "f", begin: str = "<tool_call>", end: str = "</tool_call>"
) -> str:
    return "\n".join([begin, f"<function={name}>", *parts, "</function>", end])


S = "<parameter=s>\nx\n</parameter>"
I3 = "<parameter=i>\n3\n</parameter>"
CODER = {
    "no first mark": (coder(S, begin=""), [F]),
    "no marks at all": (f"<function=f>\n{S}\n</function>", [F]),
    "no line breaks": (
        "<tool_call><function=f><parameter=s>x</parameter></function></tool_call>",
        [F],
    ),
    "two functions in a block": (coder(S, "</function>", "<function=g>"), [F, G]),
    "two functions without marks": (
        f"<function=f>\n{S}\n</function>\n<function=g>\n</function>",
        [F, G],
    ),
    "</parameter> left out before the next": (coder("<parameter=s>\nx", I3), [SI]),
    "</parameter> left out at the end": (coder("<parameter=s>\nx"), [F]),
    "</parameter> left out in one line": (
        "<tool_call><function=f><parameter=s>x<parameter=i>3</function></tool_call>",
        [SI],
    ),
    "</function> left out": (f"<tool_call>\n<function=f>\n{S}\n</tool_call>", [F]),
    "</function> left out before the next": (
        f"<tool_call>\n<function=f>\n{S}\n<function=g>\n</function>\n</tool_call>",
        [F, G],
    ),
    "</tool_call> left out": (coder(S, end=""), [F]),
    "</tool_call> left out before the next": (coder(S, end="") + coder(name="g"), [F, G]),
    "all closing tags left out": (f"<tool_call>\n<function=f>\n{S}", [F]),
    "all closing tags left out before the next": (
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n" + coder(name="g"),
        [F, G],
    ),
    "no parameters and no closing tags": ("<tool_call>\n<function=g>", [G]),
    "a parameter without a name": (coder(I3, "<parameter=\necho $A\n</parameter>", S), [SI]),
    "a parameter with an empty name": (coder("<parameter=>\nq\n</parameter>", S, I3), [SI]),
    "the first parameter without a name": (coder("<parameter=\nls\n</parameter>"), [("f", {})]),
    "a parameter without an attribute": (coder("<parameter>\nq\n</parameter>", S, I3), [SI]),
    "a parameter without a name behind one that is not closed": (
        coder("<parameter=s>\nx\n<parameter=\nq\n</parameter>", I3),
        [SI],
    ),
    "names as attributes": (
        coder(S.replace("=s", ' name="s"'), "<parameter name=i>3</parameter>").replace(
            "=f", ' name="f"'
        ),
        [SI],
    ),
    "a value with a comma too many": (
        coder("<parameter=l>\n[1, 2,]\n</parameter>"),
        [("f", {"l": [1, 2]})],
    ),
    "a value with Python's words": (
        coder("<parameter=l>\n['a', None, {'b': True}]\n</parameter>"),
        [("f", {"l": ["a", None, {"b": True}]})],
    ),
    "a value without its bracket": (coder("<parameter=l>\n[1, 2"), [("f", {"l": [1, 2]})]),
    "a value of another type": (coder("<parameter=l>\na, b\n</parameter>"), [("f", {"l": "a, b"})]),
    "XML as a value": (
        coder("<parameter=s>\n<parameter>\n<parameter name='i'>\n</parameter>\n</parameter>"),
        [("f", {"s": "<parameter>\n<parameter name='i'>\n</parameter>"})],
    ),
    "text between parameters": (coder("<parameter=>a</parameter>", "junk", S), [F]),
    "quotes around names": (
        '<tool_call>\n<function="f">\n<parameter="s">\nx\n</parameter>\n</function>\n</tool_call>',
        [F],
    ),
    "the tag of the name not closed": (
        f"<tool_call>\n<function=f\n{S}\n</function>\n</tool_call>",
        [F],
    ),
    "JSON in a function": (coder('{"s": "x"}'), [F]),
    "an attribute's form": (
        '<tool_call>\n<invoke name="f"><parameter name="s">x</parameter></invoke>\n</tool_call>',
        [F],
    ),
    "the name of a tool that begins no call": (
        coder("<parameter=s>\nsay <function=f> so\n</parameter>"),
        [("f", {"s": "say <function=f> so"})],
    ),
    "</parameter> inside a value": (
        coder("<parameter=s>\na </parameter> b\n</parameter>"),
        [("f", {"s": "a </parameter> b"})],
    ),
    "a value that ends with </parameter>": (
        coder("<parameter=s>\n<p>\n</parameter>\n</parameter>"),
        [("f", {"s": "<p>\n</parameter>"})],
    ),
    "a whole function as a value": (
        coder("<parameter=s>\n<function=k>\n</function>\n</parameter>"),
        [("f", {"s": "<function=k>\n</function>"})],
    ),
    "<parameter=> of another tool inside a value": (
        coder("<parameter=s>\na <parameter=q> b\n</parameter>"),
        [("f", {"s": "a <parameter=q> b"})],
    ),
    "a quoted call as a value": (
        coder("<parameter=s>\nt = '" + coder(S, name="k") + "'\n</parameter>"),
        [("f", {"s": "t = '" + coder(S, name="k") + "'"})],
    ),
    "a quoted call of the same tool as a value": (
        coder("<parameter=s>\nt = '" + coder(S) + "'\n</parameter>"),
        [("f", {"s": "t = '" + coder(S) + "'"})],
    ),
    "the beginning of a call as a value": (
        coder("<parameter=s>\nIt begins with <function=k>.\n</parameter>"),
        [("f", {"s": "It begins with <function=k>."})],
    ),
    "</tool_call> inside a value": (
        coder("<parameter=s>\nthe </tool_call> mark\n</parameter>"),
        [("f", {"s": "the </tool_call> mark"})],
    ),
}


@pytest.mark.parametrize("title", CODER)
@pytest.mark.parametrize("family", ["qwen3-coder", "seed"])
def test_functions_between_tags(family, title):
    text, calls = CODER[title]
    if family == "seed":
        text = text.replace("tool_call>", "seed:tool_call>")
        calls = json.loads(json.dumps(calls).replace("tool_call>", "seed:tool_call>"))
        calls = [(name, arguments) for name, arguments in calls]
    check(family, text, *calls)
    check(family, f"I look.\n\n{text.lstrip()}", *calls, words="I look.\n\n")


def minimax(*parts: str, end: str = "\n</minimax:tool_call>") -> str:
    return "\n".join(["<minimax:tool_call>", '<invoke name="f">', *parts, "</invoke>"]) + end


MS, MI = '<parameter name="s">x</parameter>', '<parameter name="i">3</parameter>'
MINIMAX = {
    "no marks": (f'<invoke name="f">\n{MS}\n</invoke>', [F]),
    "</parameter> left out": (minimax(MS.removesuffix("</parameter>"), MI), [SI]),
    "the last </parameter> left out": (minimax(MS.removesuffix("</parameter>")), [F]),
    "</invoke> left out": (minimax(MS).replace("</invoke>\n", ""), [F]),
    "the last mark left out": (minimax(MS, end=""), [F]),
    "all closing tags left out": (minimax(MS, end="").removesuffix("</invoke>"), [F]),
    "a parameter without a name": (minimax('<parameter name="">a</parameter>', MI, MS), [SI]),
    "names in the form of others": (
        minimax(MS, MI).replace(' name="', "=").replace('">', ">"),
        [SI],
    ),
    "a parameter that breaks off": (minimax(MI, "<parameter name=\nq</parameter>", MS), [SI]),
    "no quotes": (minimax(MS, MI).replace('"', ""), [SI]),
    "</parameter> in a value": (
        minimax(MS.replace("x", "a</parameter>b")),
        [("f", {"s": "a</parameter>b"})],
    ),
    "</invoke> in a value": (
        minimax(MS.replace("x", "a</invoke>b")),
        [("f", {"s": "a</invoke>b"})],
    ),
}


def test_words_may_follow_the_last_tag_at_once():
    for word in ("Done.", '"Done."', "`x`", ")"):
        check("qwen3-coder", coder(S) + word, F, words=word)


@pytest.mark.parametrize("title", MINIMAX)
def test_minimax(title):
    text, calls = MINIMAX[title]
    check("minimax", text, *calls)


def glm(*parts: str, end: str = "</tool_call>") -> str:
    return "\n".join(["<tool_call>f", *parts]) + end


def pair(key: str, value: str, end: str = "</arg_value>") -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}{end}"


GLM = {
    "</tool_call> left out": (glm(pair("s", "x"), end=""), [F]),
    "</tool_call> left out before the next": (
        glm(pair("s", "x"), end="\n<tool_call>g</tool_call>"),
        [F, G],
    ),
    "</arg_value> left out": (glm(pair("s", "x\n", ""), pair("i", "3")), [SI]),
    "the last </arg_value> left out": (glm(pair("s", "x", "")), [F]),
    "</arg_value> in a value": (glm(pair("s", "x</arg_value>y")), [("f", {"s": "x</arg_value>y"})]),
    "</tool_call> in a value": (glm(pair("s", "x</tool_call>y")), [("f", {"s": "x</tool_call>y"})]),
    "a key without a name": (glm(pair("", "q"), pair("s", "x")), [F]),
    "</arg_key> left out": (glm("<arg_key>s\n<arg_value>x</arg_value>", pair("i", "3")), [SI]),
    "<arg_value> left out": (glm("<arg_key>i</arg_key>3</arg_value>", pair("s", "x")), [F]),
    "no arguments and no end": ("<tool_call>g", [G]),
    "JSON": (glm('{"s": "x"}'), [F]),
}


@pytest.mark.parametrize("title", GLM)
def test_glm(title):
    text, calls = GLM[title]
    check("glm", text, *calls)


# -- marks around every call ----------------------------------------------------------------------

DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
DS_END = "<｜tool▁calls▁end｜>"


def deepseek(*calls: str, begin: str = DS[0], end: str = DS_END) -> str:
    return begin + "".join(calls) + end


V31 = f'{DS[1]}f{DS[2]}{{"s": "x"}}{DS[3]}'
V31_G = f"{DS[1]}g{DS[2]}{{}}{DS[3]}"
V3 = f'{DS[1]}function{DS[2]}f\n```json\n{{"s": "x"}}\n```{DS[3]}'
DEEPSEEK = {
    "no marks around all": (V31, [F]),
    "no marks around all of V3": (V3, [F]),
    "the last mark left out": (deepseek(V31, end=""), [F]),
    "the last marks left out": (deepseek(V3.removesuffix(DS[3]), end=""), [F]),
    "the mark behind a call left out": (deepseek(V31.removesuffix(DS[3]), V31_G), [F, G]),
    "the fence not closed": (deepseek(V3.replace("\n```<", "<")), [F]),
    "no fence": (deepseek(V3.replace("```json\n", "").replace("\n```", "")), [F]),
    "a fence of no language": (deepseek(V3.replace("json", "")), [F]),
    "no brace": (deepseek(V31.replace("}", "")), [F]),
    "no quote and no brace": (deepseek(V31.replace('"}', ""), V31_G), [F, G]),
    "no mark before the arguments": (deepseek(V31.replace(DS[2], "\n")), [F]),
    "no mark before the call": (deepseek(V31.removeprefix(DS[1])), [F]),
    "an object with a name": (deepseek(DS[1], ONE, DS[3]), [F]),
    "an object with a name and no mark before it": (deepseek(ONE), [F]),
    "no arguments": (deepseek(V31_G.replace("{}", "")), [G]),
    "arguments as a text": (deepseek(V31.replace('{"s": "x"}', '"{\\"s\\": \\"x\\"}"')), [F]),
    "two marks before the arguments": (deepseek(V3.replace("f\n", f"f{DS[2]}\n")), [F]),
}


@pytest.mark.parametrize("title", DEEPSEEK)
def test_deepseek(title):
    text, calls = DEEPSEEK[title]
    check("deepseek", text, *calls)
    check("deepseek", f"Ok.{text}", *calls, words="Ok.")


SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KB, KA, KE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KF, KG = f'{KB}functions.f:0{KA}{{"s": "x"}}{KE}', f"{KB}functions.g:1{KA}{{}}{KE}"


def section(*calls: str, begin: str = SECTION, end: str = SECTION_END) -> str:
    return begin + "".join(calls) + end


KIMI = {
    "no section": (KF, [F]),
    "no end of the section": (section(KF, end=""), [F]),
    "no end of a call": (section(KF.removesuffix(KE), KG), [F, G]),
    "no ends": (section(KF.removesuffix(KE), end=""), [F]),
    "no mark before the arguments": (section(KF.replace(KA, " ")), [F]),
    "no mark before the call": (section(KF.removeprefix(KB)), [F]),
    "an object with a name": (section(KB, ONE, KE), [F]),
    "a comma behind the arguments": (section(KF.replace("}", "},")), [F]),
    "a name alone": (section(KF.replace("functions.f:0", "f")), [F]),
    "no index": (section(KF.replace(":0", ":")), [F]),
    "no brace": (section(KF.replace("}", ""), KG), [F, G]),
    "no quote and no brace": (section(KF.replace('"}', ""), KG), [F, G]),
    "no arguments": (section(KG.replace("{}", "")), [G]),
    "lines between them": (section(KF, "\n", KG, "\n"), [F, G]),
}


@pytest.mark.parametrize("title", KIMI)
def test_kimi(title):
    text, calls = KIMI[title]
    check("kimi", text, *calls)
    check("kimi", f"Ok.{text}", *calls, words="Ok.")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in WRAPPED - {"kimi-k3"}])
@pytest.mark.parametrize("tag", ["tool_call", "tool_calls", "function_calls"])
def test_functions_between_tags_of_others(family, tag):
    parameters = '<parameter name="s">x</parameter>\n<parameter name="i">3</parameter>'
    invoke = f'<invoke name="f">\n{parameters}\n</invoke>\n<invoke name="g">\n</invoke>'
    function = f"<function=f>\n{S}\n{I3}\n</function>\n<function=g>\n</function>"
    for functions in (invoke, function):
        check(family, f"Ok.\n\n{functions}", SI, G, words="Ok.\n\n")
        if (family, tag) not in (("hunyuan", "tool_calls"), ("olmo3", "function_calls")):
            check(family, f"<{tag}>\n{functions}\n</{tag}>", SI, G)
    unknown = '<invoke name="k">\n<parameter name="s">x</parameter>\n</invoke>'
    assert of(family, unknown) == Read(words=unknown)


MISTRAL = {
    "no [ARGS]": ('[TOOL_CALLS]f{"s": "x"}', [F]),
    "space around [ARGS]": ('[TOOL_CALLS]f [ARGS] {"s": "x"}', [F]),
    "the mark before the second left out": ('[TOOL_CALLS]f[ARGS]{"s": "x"}g[ARGS]{}', [F, G]),
    "no brace before the next": ('[TOOL_CALLS]f[ARGS]{"s": "x"[TOOL_CALLS]g[ARGS]{}', [F, G]),
    "no arguments before the next": ("[TOOL_CALLS]g[ARGS][TOOL_CALLS]g[ARGS]{}", [G, G]),
    "arguments as a text": ('[TOOL_CALLS]f[ARGS]"{\\"s\\": \\"x\\"}"', [F]),
    "no mark before a list": (f"[{ONE}]", [F]),
}


@pytest.mark.parametrize("title", MISTRAL)
def test_mistral(title):
    text, calls = MISTRAL[title]
    check("mistral", text, *calls)


LLAMA3 = {
    "arguments for parameters": (ONE, [F]),
    "a type": ('{"type": "function", "name": "f", "parameters": {"s": "x"}}', [F]),
    "a function inside": ('{"type": "function", "function": ' + ONE + "}", [F]),
    "no last brace": (ONE[:-1], [F]),
    "no braces": (ONE[:-2], [F]),
    "a list": (f"[{ONE}, {TWO}]", [F, G]),
    "a line each": (f"{ONE}\n{TWO}", [F, G]),
    "a semicolon at the end": (f"{ONE}; {TWO};", [F, G]),
    "a tag before each": (f"<|python_tag|>{ONE}; <|python_tag|>{TWO}", [F, G]),
    "a function with JSON": ('<function=f>{"s": "x"}</function>', [F]),
    "Python's words": (
        "{'name': 'f', 'parameters': {'b': True, 'i': None}}",
        [("f", {"b": True, "i": None})],
    ),
}


@pytest.mark.parametrize("title", LLAMA3)
def test_llama3(title):
    text, calls = LLAMA3[title]
    check("llama3", text, *calls)


def test_llama3_behind_words():
    check("llama3", f"Ok.<|python_tag|>{ONE}", F, words="Ok.")
    check("llama3", f"Ok.\n{ONE}", F, words="Ok.\n")


Q = '<|"|>'
GEMMA = {
    "no end": (f"call:f{{s:{Q}x{Q}}}", [F]),
    "no brace": (f"call:f{{s:{Q}x{Q}<tool_call|>", [F]),
    "no quote": (f"call:f{{s:{Q}x<tool_call|>", [F]),
    "no comma": (f"call:f{{s:{Q}x{Q} i:3}}<tool_call|>", [SI]),
    "a comma too many": (f"call:f{{s:{Q}x{Q},}}<tool_call|>", [F]),
    "quotes of JSON": ('call:f{"s":"x","i":3}<tool_call|>', [SI]),
    "two words without quotes": (
        "call:f{s:two words,i:3}<tool_call|>",
        [("f", {"s": "two words", "i": 3})],
    ),
    "no arguments": ("call:g<tool_call|>", [G]),
    "no call:": (f"f{{s:{Q}x{Q}}}<tool_call|>", [F]),
    "two calls, a line each": (f"call:f{{s:{Q}x{Q}}}\ncall:g{{}}<tool_call|>", [F, G]),
    "two calls and a comma": (f"call:f{{s:{Q}x{Q}}}, call:g{{}}<tool_call|>", [F, G]),
    "two commas": (f"call:f{{s:{Q}x{Q},,i:3}}<tool_call|>", [SI]),
    "two calls": (f"call:f{{s:{Q}x{Q}}}call:g{{}}<tool_call|>", [F, G]),
    "the next mark": (f"call:f{{s:{Q}x{Q}}}<|tool_call>call:g{{}}<tool_call|>", [F, G]),
    "the next mark in a text": (f"call:f{{s:{Q}x<|tool_call>call:g{{}}<tool_call|>", [F, G]),
    "the wrong bracket": (f"call:f{{l:[{Q}a{Q}}}<tool_call|>", [("f", {"l": ["a"]})]),
    "the end as text": (
        f"call:f{{s:{Q}a <tool_call|> b{Q}}}<tool_call|>",
        [("f", {"s": "a <tool_call|> b"})],
    ),
    "a value left out": (f"call:f{{i:,s:{Q}x{Q}}}<tool_call|>", [("f", {"i": None, "s": "x"})]),
}


@pytest.mark.parametrize("title", GEMMA)
@pytest.mark.parametrize("family", ["gemma4", "function-gemma"])
def test_gemma(family, title):
    text, calls = GEMMA[title]
    text = f"<|tool_call>{text}"
    if family == "function-gemma":
        marks = {
            "<|tool_call>": "<start_function_call>",
            "<tool_call|>": "<end_function_call>",
            Q: "<escape>",
        }
        for old, new in marks.items():
            text = text.replace(old, new)
            calls = [(name, json.loads(json.dumps(each).replace(old, new))) for name, each in calls]
    check(family, text, *calls)


# -- Python ---------------------------------------------------------------------------------------

PYTHON = {
    "as it should be": ("[f(s='x'), g()]", [F, G]),
    "no bracket": ("[f(s='x'), g()", [F, G]),
    "no parenthesis": ("[f(s='x']", [F]),
    "no comma": ("[f(s='x') g()]", [F, G]),
    "commas too many": ("[f(s='x',),]", [F]),
    "quotes in quotes": ('[f(s="a "b" c", i=3)]', [("f", {"s": 'a "b" c', "i": 3})]),
    "an apostrophe": ("[f(s='it's')]", [("f", {"s": "it's"})]),
    "an expression": ("[f(s=str(1, 2), i=3)]", [("f", {"s": "str(1, 2)", "i": 3})]),
    "a value left out": ("[f(i=, s='x')]", [("f", {"i": None, "s": "x"})]),
    "no names": ("[f('x', 3)]", [SI]),
    "the wrong bracket": ("[f(l=[1, {'a': 2], s='x')]", [("f", {"l": [1, {"a": 2}], "s": "x"})]),
    "JSON": (f"[{ONE}]", [F]),
    "a break in a string": ("[f(s='a\nb')]", [("f", {"s": "a\nb"})]),
}


@pytest.mark.parametrize("title", PYTHON)
def test_python(title):
    text, calls = PYTHON[title]
    check("pythonic", text, *calls)
    if title != "JSON":
        check("pythonic", f"```python\n{text}\n```", *calls)
    check("lfm2", f"Ok.<|tool_call_start|>{text}<|tool_call_end|>", *calls, words="Ok.")
    check("lfm2", f"<|tool_call_start|>{text}", *calls)
    check("olmo3", f"<function_calls>\n{text}\n</function_calls>", *calls)


def test_python_that_a_mark_cuts():
    check("lfm2", "<|tool_call_start|>[f(s='x<|tool_call_end|>", F)
    check("olmo3", "<function_calls>\nf(s='x', i=\n</function_calls>", ("f", {"s": "x", "i": None}))
    check("olmo3", "<function_calls>\nf(s='x'); g()\n</function_calls>", F, G)
    check("olmo3", "<function_calls>\nf(s='x'),\ng(),\n</function_calls>", F, G)
    check("pythonic", "Ok. <|python_start|>[f(s='x')]", F, words="Ok. ")


# -- harmony --------------------------------------------------------------------------------------

CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "x"}<|call|>'
HARMONY = {
    "no end": CALL.removesuffix("<|call|>"),
    "another end": CALL.replace("<|call|>", "<|end|>"),
    "no constraint": CALL.replace(" <|constrain|>json", ""),
    "the constraint as a word": CALL.replace("<|constrain|>", ""),
    "another constraint": CALL.replace("json", "code"),
    "no message": CALL.replace("<|message|>", ""),
    "in the analysis": CALL.replace("commentary", "analysis"),
    "in the final channel": CALL.replace("commentary", "final"),
    "no namespace": CALL.replace("functions.", ""),
    "a longer namespace": CALL.replace("functions.", "assistant.functions."),
    "the recipient in the role": CALL.replace(
        "<|channel|>commentary to=functions.f",
        "<|start|>assistant to=functions.f<|channel|>commentary",
    ),
    "a role that the prompt has begun": CALL.replace(
        "<|channel|>commentary to=functions.f", " to=functions.f<|channel|>commentary"
    ),
    "no mark before the channel": CALL.removeprefix("<|channel|>"),
    "the channel twice": CALL.replace("to=functions.f", "to=functions.f<|channel|>commentary"),
    "space around the sign": CALL.replace("to=", "to = "),
    "a comma behind the name": CALL.replace("functions.f", "functions.f,"),
    "no brace": CALL.replace("}", ""),
    "no quote and no brace": CALL.replace('"}', ""),
    "a brace too many": CALL.replace("}", "}}"),
    "a fence": CALL.replace('{"s": "x"}', '```json\n{"s": "x"}\n```'),
    "arguments as a text": CALL.replace('{"s": "x"}', '"{\\"s\\": \\"x\\"}"'),
    "JSON in the final channel": f"<|channel|>final<|message|>{ONE}<|return|>",
}


@pytest.mark.parametrize("title", HARMONY)
def test_harmony(title):
    check("harmony", HARMONY[title], F)
    if not HARMONY[title].startswith((" to", "commentary")):
        found = of("harmony", f"<|channel|>analysis<|message|>Hm.<|end|>{HARMONY[title]}")
        assert (found.thought, len(found.calls)) == ("Hm.", 1)


def test_a_message_of_harmony_ends_where_the_next_one_begins():
    for first in (CALL, CALL.replace("<|call|>", ""), CALL.replace('"}<|call|>', "<|end|>")):
        check("harmony", f"{first}<|start|>assistant{CALL}", F, F)


def test_arguments_of_harmony_that_are_no_object_are_kept_in_one():
    check("harmony", CALL.replace('{"s": "x"}', "hi"), ("f", {"INVALID_JSON": "hi"}))


# -- all readers ----------------------------------------------------------------------------------

WHOLE = {
    **BOTH,
    **{family: f"{begin}{ONE}\n{TWO}{end}" for family, (begin, end) in MARKS.items()},
    "qwen3-coder": coder(S, I3) + "\n" + coder(S, I3),
    "minimax": minimax(MS, MI),
    "glm": glm(pair("s", "x"), pair("i", "3")),
    "deepseek": deepseek(V3, V31),
    "kimi": section(KF, KG),
    "mistral": '[TOOL_CALLS]f[ARGS]{"s": "x", "i": 3}',
    "llama3": f"{ONE}; {TWO}",
    "gemma4": f"<|tool_call>call:f{{s:{Q}x{Q},i:3}}<tool_call|>",
    "function-gemma": "<start_function_call>call:f{s:<escape>x<escape>}<end_function_call>",
    "pythonic": "[f(s='x', i=3), g()]",
    "lfm2": "<|tool_call_start|>[f(s='x', i=3), g()]<|tool_call_end|>",
    "olmo3": "<function_calls>\nf(s='x', i=3)\ng()\n</function_calls>",
    "harmony": CALL,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_a_limit_cuts_has_an_end_only_if_its_arguments_are_all_there(family):
    text = WHOLE[family]
    whole = [(name, json.loads(arguments)) for name, arguments, _ in of(family, text).calls]
    assert whole
    for length in range(len(text)):
        parser = syntax(family).parser(tools=TOOLS)
        events = [*parser.feed(text[:length]), *parser.end(is_cut=True)]
        done = [call for call in by_kind(events).calls if call[2]]
        assert [(name, json.loads(arguments)) for name, arguments, _ in done] == whole[: len(done)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_has_its_end_before_the_next_one_has_a_name(family):
    """Then a tool can start although the answer goes on."""
    parser = syntax(family).parser(tools=TOOLS)
    events = [event for char in WHOLE[family] + "\n" + WHOLE[family] for event in parser.feed(char)]
    kinds = [type(each) for each in events if isinstance(each, CallBegin | CallEnd)]
    assert kinds == ([CallBegin, CallEnd] * len(kinds))[: len(kinds)]
    assert kinds.count(CallBegin) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_ends_by_itself_has_an_end_only_with_a_whole_object(family):
    text = WHOLE[family]
    for length in range(len(text)):
        events = parse(syntax(family).parser(tools=TOOLS), [text[:length]])
        for name, arguments, is_whole in by_kind(events).calls:
            assert name
            assert not is_whole or isinstance(json.loads(arguments), dict)


def test_what_a_limit_cuts_is_not_forgiven():
    for family, text in (
        ("glm", glm(pair("s", "x"), end="")),
        ("hermes", f"<tool_call>{ONE[:-2]}"),
    ):
        assert of(family, text).calls[0][2]
        parser = syntax(family).parser(tools=TOOLS)
        events = [*parser.feed(text), *parser.end(is_cut=True)]
        [(name, _, is_whole)] = by_kind(events).calls
        assert (name, is_whole) == ("f", False)


def test_the_text_of_an_argument_streams_and_what_may_be_a_tag_waits():
    parser = syntax("qwen3-coder").parser(tools=TOOLS)
    assert by_kind(parser.feed("<tool_call>\n<function=f>\n<parameter=s>\nab")).calls == [
        ("f", '{"s": "ab', False)
    ]
    assert parse(parser, ["</para"])[0].text == "</para"  # type: ignore[union-attr]
