"""Comments and docstrings of finished rooms have the shape of a sentence."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DONE_ROOMS = ("radix_cache", "core", "draft", "api", "bench")
FRAGMENT = re.compile(r"(of|that|those|in|as|what|which|where|whose)\b", re.IGNORECASE)
RIDDLE = re.compile(r"\b(what is|those of|that of|of these|is none|nobody)\b|; how many")
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
NO_VERB = re.compile(r"(The|A|An|One|It|Its|This|All|Each|Every|No|If|When)\b")


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment; lines of one block are one text."""
    text, first, last = "", 0, 0
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT:
                continue
            line, words = token.start[0], token.string.lstrip("#: ")
            if text and line == last + 1 and token.line.lstrip().startswith("#"):
                text, last = f"{text} {words}", line
                continue
            if text:
                yield first, text
            text, first, last = words, line, line
    if text:
        yield first, text


def c_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment of a C file."""
    source = path.read_text("utf-8")
    for found in C_COMMENT.finditer(source):
        line = source.count("\n", 0, found.start()) + 1
        text = " ".join(each.strip(" */") for each in found[0].split("\n"))
        yield line, " ".join(text.split())


def docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the text of each docstring, and whether it describes a call."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = {ast.unparse(each) for each in getattr(node, "decorator_list", ())}
        is_call = "FunctionDef" in type(node).__name__ and not marks & {
            "property",
            "cached_property",
        }
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, " ".join(text.split()), is_call


def test_comments_and_docstrings_are_sentences() -> None:
    wrong = []
    for path in sorted(each for room in DONE_ROOMS for each in (ROOT / room).rglob("*.py")):
        found = [(line, text, False) for line, text in comments(path)]
        for line, text, is_call in [*found, *docstrings(path)]:
            if FRAGMENT.match(text) or RIDDLE.search(text) or (is_call and NO_VERB.match(text)):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert not wrong, "\n".join(wrong)


def test_comments_of_the_kernels_are_sentences() -> None:
    kernels = ROOT / "core" / "ops" / "native" / "kernels"
    wrong = []
    for path in sorted(each for each in kernels.rglob("*") if each.suffix in (".c", ".h")):
        for line, text in c_comments(path):
            if FRAGMENT.match(text) or RIDDLE.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text}")
    assert not wrong, "\n".join(wrong)
