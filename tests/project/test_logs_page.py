"""docs/logs.md: its tables have each message logged at warning or above, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/logs.md").read_text("utf-8")
LEVELS = ("warning", "error", "exception", "critical")
ROW = re.compile(r"^\| (\w+) \| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
VALUE = re.compile(r"%[-.\d]*[sdrf]")


def logged(source: str) -> Iterator[tuple[str, str]]:
    """Yield level and text of each message that is a literal; `…` stands for a value."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                args=[ast.Constant(value=str(text)), *_],
            ) if level in LEVELS:
                yield level, VALUE.sub("…", text)


def test_each_message_has_a_row_and_each_row_a_message() -> None:
    found = {
        message
        for package in ("api", "core", "draft", "radix_cache")
        for path in (ROOT / package).rglob("*.py")
        for message in logged(path.read_text("utf-8"))
        if re.search(r"\w", message[1])  # others pass on a reason that is explained elsewhere
    }
    rows = {(level, text) for level, text, _, _ in ROW.findall(PAGE)}
    assert sorted(found - rows) == []
    assert sorted(rows - found) == []


def test_every_row_has_a_cause_and_an_action() -> None:
    assert all(cause.strip() and action.strip() for _, _, cause, action in ROW.findall(PAGE))


def test_values_become_dots_and_quieter_messages_are_left_out() -> None:
    source = 'logger.warning("%s: %.0f s", a, b)\nlogger.info("quiet")\nlogger.error(text)\n'
    assert list(logged(source)) == [("warning", "…: … s")]
