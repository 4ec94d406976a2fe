"""Draws the imports between rooms of a package: the drawing in docs/architecture/rooms.md.

A room is a sub-package or a module that stands directly in a package. Its floor is one above the
highest floor that it imports, so every arrow points down unless rooms import each other in a
circle. All imports count, also those inside functions and those for type checkers.

    python -m foretoken.bench.lab.import_graph          print the drawings
    python -m foretoken.bench.lab.import_graph --write  put them into docs/architecture/rooms.md
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture" / "rooms.md"
PACKAGES = ("radix_cache", "core", "draft", "api")
_MARK = re.compile(r"(<!-- drawing of (\w+) -->\n```text\n).*?(```\n)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Graph:
    """The rooms of a package and, for each, the rooms that it imports."""

    package: str
    imports: Mapping[str, frozenset[str]]

    @property
    def num_arrows(self) -> int:
        """Number of pairs of rooms of which one imports the other."""
        return sum(map(len, self.imports.values()))

    def circles(self) -> list[str]:
        """Return the rooms that import themselves through others, in alphabetical order."""
        return sorted(room for room in self.imports if room in self._reached(room))

    def floors(self) -> dict[str, int]:
        """Return the floor of each room, from 1. Raises ValueError if rooms form a circle."""
        if circles := self.circles():
            raise ValueError(f"rooms of {self.package} import each other: {', '.join(circles)}")
        floors: dict[str, int] = {}
        while len(floors) < len(self.imports):
            for room, imported in self.imports.items():
                if room not in floors and imported <= floors.keys():
                    floors[room] = 1 + max((floors[each] for each in imported), default=0)
        return floors

    def _reached(self, start: str) -> set[str]:
        reached: set[str] = set()
        todo = [start]
        while todo:
            new = self.imports[todo.pop()] - reached
            reached |= new
            todo += new
        return reached

    def draw(self) -> str:
        """Return a drawing with one line per room, the highest floor first."""
        floors = self.floors()
        height = max(floors.values(), default=0)
        width = max(map(len, floors), default=0)
        lines = [f"{self.package}: {len(floors)} rooms, {height} floors, {self.num_arrows} arrows"]
        for floor in range(height, 0, -1):
            for room in sorted(room for room, at in floors.items() if at == floor):
                below = sorted(self.imports[room], key=lambda each: (-floors[each], each))
                arrow = f"{room:{width}}  ->  {', '.join(below)}" if below else room
                lines.append(f"  {floor}  {arrow}")
        return "\n".join(lines) + "\n"


def graph_of(package: str, root: Path = ROOT) -> Graph:
    """Read the imports of a package from its sources."""
    imports: dict[str, set[str]] = {}
    for path in sorted((root / package).rglob("*.py")):
        room = _room(path.relative_to(root / package).with_suffix("").parts)
        if room is None:
            continue  # The package's own __init__ belongs to no room.
        found = imports.setdefault(room, set())
        for name in imported_names(path, root):
            parts = name.split(".")
            if parts[:2] == ["foretoken", package] and len(parts) > 2:
                found.add(parts[2])
    rooms = set(imports)
    return Graph(package, {room: frozenset(imports[room] & rooms - {room}) for room in imports})


def _room(parts: Sequence[str]) -> str | None:
    return None if parts == ("__init__",) else parts[0]


def imported_names(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield the dotted names of everything that a file imports, relative ones resolved."""
    package = ("foretoken", *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def redrawn(page: str) -> str:
    """Return the page docs/architecture/rooms.md with up-to-date drawings."""
    return _MARK.sub(lambda mark: mark[1] + graph_of(mark[2]).draw() + mark[3], page)


def main() -> None:
    """Print the drawings, or write them into the page."""
    parser = argparse.ArgumentParser(description="Draw the imports between rooms.")
    parser.add_argument("--write", action="store_true", help="update docs/architecture/rooms.md")
    if parser.parse_args().write:
        PAGE.write_text(redrawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for package in PACKAGES:
        print(graph_of(package).draw())


if __name__ == "__main__":
    main()
