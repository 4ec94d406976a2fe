"""Small mistakes that any function may have: a wrong condition or bound, a statement left out.

Each operator turns a node of a function's syntax tree into the text that replaces it; all of them
at all places of a function are its generated mutations. They are named by what they change, so
that a name holds while lines move.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

from .mutation import Mutation

_BOUNDS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
_SHOWN = 50  # characters of what a mutation changes, in its name


@dataclass(frozen=True, slots=True)
class Target:
    """A function that must bear any small mistake, and the tests that must notice it."""

    place: str  # as in `Mutation`
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Change:
    operator: str
    start: int  # characters of the function's text
    end: int
    text: str  # in place of these


def generated(target: Target, source: str) -> list[Mutation]:
    """All mutations of the function, whose text is ``source``, in the order of its lines."""
    seen: Counter[str] = Counter()
    mutations = []
    for change in sorted(_changes(source), key=lambda each: (each.start, each.operator)):
        was = " ".join(source[change.start : change.end].split())
        name = f"{target.place}: {change.operator} {was[:_SHOWN]}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} #{seen[name]}"
        after = source[: change.start] + change.text + source[change.end :]
        mutations.append(
            Mutation(name, target.place, source, after, target.tests, _shown(change, source))
        )
    return mutations


def _shown(change: _Change, source: str) -> str:
    """The line that begins what changes, as it becomes."""
    start = source.rfind("\n", 0, change.start) + 1
    end = source.find("\n", change.end)
    after = source[start : change.start] + change.text + source[change.end : end]
    return f"line {source.count(chr(10), 0, change.start) + 1}: {' '.join(after.split())}"


def _changes(source: str) -> Iterator[_Change]:
    """Everything that the operators change; ``source`` may be indented as a method is."""
    indent = len(source) - len(source.lstrip())
    [function] = ast.parse(dedent(source)).body
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        """Characters, from a line and its bytes without the indent."""
        inner = lines[line - 1][indent:].encode()
        return starts[line - 1] + indent + len(inner[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        last = node.end_lineno or node.lineno
        return at(node.lineno, node.col_offset), at(last, node.end_col_offset or 0)

    for node in _inside(function):
        for condition in _conditions(node):
            start, end = span(condition)
            yield _Change("negate", start, end, f"(not ({source[start:end]}))")
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BOUNDS:
            was, becomes = _BOUNDS[type(node.ops[0])]
            (start, end), left = span(node), span(node.left)[1]
            sign = source.index(was, left)
            changed = source[start:sign] + becomes + source[sign + len(was) : end]
            yield _Change("bound", start, end, changed)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            start, end = span(node)
            yield _Change("off by one", start, end, str(node.value + 1))
        if _can_be_dropped(node):
            start, end = span(node)
            yield _Change("drop", start, end, "pass")


def _inside(function: ast.stmt) -> Iterator[ast.expr | ast.stmt | ast.comprehension]:
    """Nodes of the body: neither decorators, defaults nor annotations."""
    todo: list[ast.AST] = list(getattr(function, "body", []))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.AnnAssign):
            todo += [node.value] if node.value is not None else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.JoinedStr):
            todo += getattr(node, "body", [])  # of text only what is not formatted
        else:
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.expr | ast.stmt | ast.comprehension):
            yield node


def _conditions(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return [test]
        case ast.comprehension(ifs=ifs):
            return ifs
    return []


def _can_be_dropped(node: ast.AST) -> bool:
    """A statement without which the rest still runs: one that assigns to a name is not."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield()) | ast.Return(value=None):
            return True
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.Assign(targets=[ast.Tuple(elts=elements)]):
            return all(isinstance(each, ast.Attribute) for each in elements)
    return False
