"""docs/troubleshooting.md: the errors that it explains are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
FOREIGN = {"address already in use", "events", "ray", "otel", "mooncake"}  # the system's; extras
NAMES = {"param", "Host"}  # of a field of errors and of a header, in the table of answers
GAP = "\0"  # where a message has a value
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def quoted() -> Iterator[str]:
    """The words in code of the tables' first column, but for paths."""
    for line in PAGE.splitlines():
        for each in re.findall(r"`([^`]+)`", line.split(" | ")[0] if line[:2] == "| " else ""):
            if each not in FOREIGN | NAMES and not each.startswith("/"):
                yield each


def printed(source: str) -> Iterator[str]:
    """The texts of a program: its string literals, but for docstrings."""
    tree = ast.parse(source)
    said = {
        id(each.body[0].value)
        for each in ast.walk(tree)
        if isinstance(each, DOCUMENTED) and each.body and isinstance(each.body[0], ast.Expr)
    }
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in each.values]
            yield "".join(map(str, parts))
        elif isinstance(each, ast.Constant) and id(each) not in said:
            yield str(each.value)


SOURCES = [path for name in ("api", "core", "draft") for path in (ROOT / name).rglob("*.py")]
MESSAGES = "\n".join(text for path in SOURCES for text in printed(path.read_text("utf-8")))


@pytest.mark.parametrize("message", list(quoted()))
def test_a_message_that_is_explained_is_one_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("...")]
    assert [part for part in parts if part not in MESSAGES] == []


def test_messages_are_literals_and_neither_docstrings_nor_comments() -> None:
    source = '"""said"""\nx = 1  # noted\ndef f(): "told"\nprint(f"one {x} " "two", "three")\n'
    found = "".join(printed(source))
    assert f"one {GAP} two" in found
    assert "three" in found
    assert not any(each in found for each in ("said", "noted", "told"))


def test_codes_of_answers_are_those_of_the_code() -> None:
    section = PAGE.partition("## Answers")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| \d{3} `([a-z_]+)`", section, re.MULTILINE)
    assert len(codes) == 4
    assert [code for code in codes if code not in MESSAGES.splitlines()] == []
