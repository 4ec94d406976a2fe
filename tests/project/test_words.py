"""Texts that a user reads say what a thing is or does: flag helps, errors, log lines."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import foretoken
from foretoken.api.cli.commands import _parser

ROOT = Path(foretoken.__file__).resolve().parent
ROOMS = ("radix_cache", "core", "draft", "api", "bench")
FUNCTION_WORDS = frozenset(
    """a an and any are as at auto be because before behind beside beyond but by can every for from
    had has have how if in into is it its many may much none of off on only or over so such than
    that the their them these they this those to under until what when where which while who whose
    why with within without you your""".split()  # noqa: SIM905
)
"""Words that begin neither a noun nor a verb: what follows them must be read twice."""
RIDDLES = re.compile(
    r"\b(nobody|who|whose|whoever|anew|tells?|told|asks?|asked|says?|said|beside|behind|apart"
    r"|holds? no|cannot be had|our|ours|dear)\b",
    re.IGNORECASE,
)
"""Words of a story, not of a message: for each of them there is the name of a thing or an act."""
DANGLING = frozenset(
    """also and as but how it its likewise not of or same so such that their there these they this
    those what when where which while who whom whose""".split()  # noqa: SIM905
)
"""Words that begin docstrings which nobody understands without the caller."""
DESCRIBED = ("radix_cache", "core", "draft", "api", "bench", "tests")
MESSAGES = frozenset({"message", "problem", "why", "remedy"})  # variables that errors are made of


def flags() -> list[tuple[str, str | None]]:
    """All flags and arguments of all commands, and their help texts."""
    parser = _parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [
        (
            f"{name} {action.option_strings[-1] if action.option_strings else action.dest}",
            action.help,
        )
        for name, command in commands.choices.items()
        for action in command._actions
        if not isinstance(action, argparse._HelpAction)
    ]


def sources(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    """All files of these rooms, parsed."""
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))


def text_of(node: ast.expr) -> str | None:
    """A literal text; what an f-string puts in is X."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in parts)
    return None


def fault(help: str | None) -> str | None:
    """Return the fault of a help text, or None."""
    if not help:
        return "there is none"
    word = re.split(r"[^\w-]", help, maxsplit=1)[0]
    if not (word.isalpha() or "-" in word) or word.lower() in FUNCTION_WORDS:
        return f"it begins with {word!r}: {help}"
    return f"it ends with a full stop: {help}" if help.endswith(".") else None


def test_help_texts_begin_with_a_noun_or_a_verb() -> None:
    assert {name: wrong for name, help in flags() if (wrong := fault(help))} == {}


def test_help_texts_of_benchmarks_do_as_well() -> None:
    found = {
        f"{path}:{node.lineno}": wrong
        for path, tree in sources("bench", "draft")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "help"
        if (text := text_of(node.value)) is not None
        if (wrong := fault(text))
    }
    assert found == {}


def test_commands_say_what_they_do() -> None:
    [commands] = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {c.dest: wrong for c in commands._choices_actions if (wrong := fault(c.help))} == {}


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Literal texts of errors that are raised, and of log lines."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(args=args)):
                found = args
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger")), args=args):
                found = args
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in MESSAGES:
                found = [value]
            case _:
                continue
        for each in found:
            if (text := text_of(each)) is not None:
                yield node.lineno, text


def test_errors_and_log_lines_are_no_riddles() -> None:
    found = {
        f"{path}:{line}": text
        for path, tree in sources(*ROOMS)
        if "lab" not in path.parts
        for line, text in messages(tree)
        if RIDDLES.search(text)
    }
    assert found == {}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of the module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def test_docstrings_begin_with_a_verb_or_the_thing_itself() -> None:
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in sources(*DESCRIBED)
        for line, text in docstrings(tree)
        if re.split(r"\W", text, maxsplit=1)[0].lower() in DANGLING
    ]
    assert found == []
