"""Places of the repository's functions, classes, constants and tests, found by their names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .mutation import DoesNotApply, Mutation

_NATIVE = (".c", ".h")
_OUTSIDE = {"docs", "examples", "build", "dist"}
# A definition begins in the first column and ends with a line that is nothing but its bracket,
# or with the line in which it began.
_FUNCTION_IN_C = re.compile(
    r"^\w[^\n;{}=]*?\b(\w+)\((?:[^;{}]*)\) \{(?:.*\}$|\n(?:.*\n)*?\}$)", re.MULTILINE
)
_MACRO = re.compile(r"^#define (\w+)(?:.*\\\n)*.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """Lines of a file below the root that a name stands for."""

    file: str
    start: int  # characters
    end: int

    @property
    def is_native(self) -> bool:
        """Whether the kernels must be compiled anew."""
        return self.file.endswith(_NATIVE)


class Code:
    """The files below ``root`` as they are when a name is first looked up."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def locate(self, mutation: Mutation) -> Place:
        """The place whose text the mutation changes. Raises `DoesNotApply`.

        A name may stand for several places; one of them has the text, once.
        """
        places = self._places.get(mutation.place, [])
        counts = [self._text_of(place).count(mutation.before) for place in places]
        if sum(counts) != 1:
            where = f"{mutation.place} ({len(places)} of that name)"
            raise DoesNotApply(f"{where} has {sum(counts)} of: {mutation.before}")
        return places[counts.index(1)]

    def source(self, name: str) -> str:
        """The text of a place that is the only one of its name. Raises `DoesNotApply`."""
        places = self._places.get(name, [])
        if len(places) != 1:
            raise DoesNotApply(f"{len(places)} places are named {name}")
        return self._text_of(places[0])

    def mutate(self, mutation: Mutation) -> tuple[Place, str]:
        """The place, and the text of its file with the mistake in it. Raises `DoesNotApply`."""
        place = self.locate(mutation)
        text = (self._root / place.file).read_text(encoding="utf-8")
        changed = self._text_of(place).replace(mutation.before, mutation.after)
        return place, text[: place.start] + changed + text[place.end :]

    def tests_named(self, name: str) -> list[str]:
        """Return the tests of a name, as pytest names them: a function, or a file and all in it.

        The name may begin with the file, or with its folder, where the end alone is not clear.
        """
        return [test for test in self._tests if f"/{test}".endswith((f"/{name}", f"::{name}"))]

    def _text_of(self, place: Place) -> str:
        text = (self._root / place.file).read_text(encoding="utf-8")
        return text[place.start : place.end]

    @cached_property
    def _places(self) -> Mapping[str, list[Place]]:
        found: dict[str, list[Place]] = defaultdict(list)
        for path in self._files():
            file = path.relative_to(self._root)
            # The C files of the tests stand in for hardware: they are held to it as well.
            suffixes = _NATIVE if file.parts[0] == "tests" else (".py", *_NATIVE)
            if path.suffix not in suffixes:
                continue
            text = path.read_text(encoding="utf-8")
            definitions = _in_python(text) if path.suffix == ".py" else _in_c(text)
            for name, start, end in definitions:
                found[name].append(Place(file.as_posix(), start, end))
        return found

    def _files(self) -> list[Path]:
        """Return what may be mutated, and folders; those of an environment would take seconds."""
        top = [each for each in self._root.iterdir() if each.name not in _OUTSIDE]
        inside = [each for each in top if not each.name.startswith(".")]
        return sorted(path for each in inside for path in (each, *each.rglob("*")))

    @cached_property
    def _tests(self) -> list[str]:
        found = []
        for path in sorted((self._root / "tests").rglob("test_*.py")):
            file = path.relative_to(self._root).as_posix()
            found.append(file)
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.append(f"{file}::{node.name}")
        return found


def _in_python(text: str) -> Iterator[tuple[str, int, int]]:
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line.decode()))

    def walk(body: list[ast.stmt], within: str) -> Iterator[tuple[str, int, int]]:
        for node in body:
            first, last = node.lineno, node.end_lineno or node.lineno
            for name in _names(node):
                yield within + name, starts[first - 1], starts[last]
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{within}{node.name}.")

    yield from walk(ast.parse(text).body, "")


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _in_c(text: str) -> Iterator[tuple[str, int, int]]:
    for pattern in (_FUNCTION_IN_C, _MACRO):
        for found in pattern.finditer(text):
            yield found[1], found.start(), found.end()
