"""Draws sentences for readers to judge: ``python tests/support/draw_sentences.py [SEED]``.

A reader sees a sentence and the name that it stands at, and marks it if it is not understood the
first time. The seed is the hash of the last commit by default, so nobody can prepare for the draw.
"""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "draft", "radix_cache", "api", "bench")
COUNTS = {"docstring": 100, "comment": 100, "help": 60, "error": 40, "log": 40}
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
IN_C = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*(.*?)\*/|//([^\n]*(?:\n[ \t]*//[^\n]*)*)', re.DOTALL)
MARK = re.compile(r"^[ \t*/#:]+", re.MULTILINE)

Sentence: TypeAlias = tuple[str, str]
"""The name that a sentence stands at, and its text."""


def _text(node: ast.expr) -> str:
    """Return the text of a literal or an f-string, with `…` for values; "" for other nodes."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(each) or "…" for each in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + (_text(right) or "…")
    return ""


def _in_nodes(tree: ast.AST, name: str) -> Iterator[tuple[str, Sentence]]:
    """Yield docstrings, errors and log messages below a node, each with its kind."""
    for node in ast.iter_child_nodes(tree):
        at = f"{name}.{node.name}" if isinstance(node, ast.ClassDef | FUNCTIONS) else name
        if isinstance(node, ast.ClassDef | FUNCTIONS) and (text := ast.get_docstring(node)):
            yield "docstring", (at, text)
        match node:
            case ast.Raise(exc=ast.Call(args=arguments)):
                texts = max(map(_text, arguments), key=len, default="")
                if len(texts.split()) > 2:
                    yield "error", (at, texts)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level), args=args):
                if level in LEVELS and args and len(_text(args[0]).split()) > 1:
                    yield "log", (at, f"[{level}] {_text(args[0])}")
        yield from _in_nodes(node, at)


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _in_python(path: Path) -> Iterator[tuple[str, Sentence]]:
    """Yield the sentences of a Python file, each with its kind."""
    source, name = path.read_text("utf-8"), str(path.relative_to(ROOT))
    tree, lines = ast.parse(source), source.splitlines()
    if text := ast.get_docstring(tree):
        yield "docstring", (name, text)
    yield from _in_nodes(tree, name)
    blocks: list[tuple[int, int, str]] = []  # first and last line, text
    stood_alone = False
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT or re.match(r"#( fmt:| type:| noqa|!| --)", token[1]):
                continue
            line, text = token.start[0], token.string.lstrip("#: ")
            stands_alone = token.line.lstrip().startswith("#")
            if blocks and stands_alone and stood_alone and line == blocks[-1][1] + 1:
                blocks[-1] = (blocks[-1][0], line, f"{blocks[-1][2]} {text}")
            else:
                blocks.append((line, line, text))
            stood_alone = stands_alone
    for first, last, text in blocks:
        code = lines[first - 1].partition("#")[0].strip() or "".join(lines[last : last + 1])
        yield "comment", (f"{name}: {code.strip()}", text)


def _in_c(path: Path) -> Iterator[tuple[str, Sentence]]:
    """Yield the comments of a C source, each with the line of code that it stands at."""
    source, name = path.read_text("utf-8"), str(path.relative_to(ROOT))
    for found in IN_C.finditer(source):
        text = MARK.sub("", found[1] or found[2] or "")
        if text.strip() and not text.startswith("--"):  # a heading
            before = source[: found.start()].rpartition("\n")[2].strip()
            code = before or source[found.end() :].lstrip().partition("\n")[0]
            yield "comment", (f"{name}: {code}", text)


def _helps() -> Iterator[Sentence]:
    """Yield the help of each flag, which docs/flags.md has from the code."""
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", page, re.MULTILINE)
    yield from dict(rows).items()  # several commands share flags


def sentences() -> dict[str, list[Sentence]]:
    """Return every sentence of the packages by its kind, in a fixed order."""
    found: dict[str, list[Sentence]] = {kind: [] for kind in COUNTS}
    found["help"] = [*_helps()]
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix == ".py":
                pairs = [*_in_python(path)]
            else:
                pairs = [*_in_c(path)] if path.suffix in {".c", ".h"} else []
            for kind, sentence in pairs:
                found[kind].append(sentence)
    return found


def main() -> None:
    head = subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, check=True)
    seed = sys.argv[1] if len(sys.argv) > 1 else head.stdout.decode().strip()
    chosen, number = random.Random(seed), 0
    print(f"seed {seed}")
    for kind, all_of_kind in sentences().items():
        print(f"\n## {kind}: {COUNTS[kind]} of {len(all_of_kind)}\n")
        for name, text in chosen.sample(all_of_kind, COUNTS[kind]):
            number += 1
            print(f"{number}. `{name}`\n   {' '.join(text.split())}")


if __name__ == "__main__":
    main()
