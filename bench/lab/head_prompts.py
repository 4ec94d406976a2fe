"""Prompts for training SmolLM2's head, made of texts and names that every Python has.

Open questions about subjects (pictographs that `unicodedata` names, cities of `zoneinfo`, modules
and topics of `pydoc`, everyday subjects of the list beside this file), and work on texts of the
standard library: code to explain and to edit, passages to repeat and to sum up, JSON of a tool.

No prompt of `bench.common.real_tasks` is among them: its questions' own words are no subjects
here, and texts come from other modules than its texts do. One seed gives one file:

    python -m foretoken.bench.lab.head_prompts --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import textwrap
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..common import real_tasks

OPEN_SHARE = 0.75  # of the prompts; the others are work on a text
_PICTOGRAPHS = (
    *range(0x1F300, 0x1F550), *range(0x1F680, 0x1F6D0), *range(0x1F900, 0x1FA00),
    *range(0x1FA70, 0x1FAFF),
)  # fmt: skip
_NO_SUBJECT = re.compile(
    r"FACE|SYMBOL|SIGN|ARROW|HAND|FINGER|FITZPATRICK|COMPONENT|CLOCK|BUTTON|CIRCLE|SQUARE|SHAPE"
    r"|HEAD|WITH|BLACK|WHITE|MOON|INPUT|SHADOW|KEYCAP|REVERSED|BOX TRAY|MARK|SEX|NO |ONCOMING"
)


_WORDS = re.compile(r"[a-z]{4,}")
_LISTS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def prompts(seed: int = 0) -> Iterator[str]:
    """Messages of a user, without end and without one twice, in an order that the seed decides."""
    rng = random.Random(seed)
    subjects = Subjects()
    texts = _Texts()
    seen: set[str] = set()
    while True:
        make = subjects.draw if rng.random() < OPEN_SHARE else texts.draw
        prompt = make(rng)
        if prompt not in seen:
            seen.add(prompt)
            yield prompt


# -- open questions -------------------------------------------------------------------------------


class Subjects:
    """Subjects of open questions."""

    def __init__(self) -> None:
        taken = set(_WORDS.findall(" ".join(real_tasks._QUESTIONS).lower())) - set(_LISTS["common"])

        def free(names: Sequence[str]) -> list[str]:
            return [name for name in names if taken.isdisjoint(_WORDS.findall(name.lower()))]

        topics = [topic.replace("-", " ") for topic in sorted(pydoc_data.topics.topics)]
        self._kinds: list[tuple[int, Sequence[str], list[str]]] = [
            (8, _LISTS["about"], free(_LISTS["subjects"])),
            (4, _LISTS["things"], free(_things())),
            (1, _LISTS["travel"], free(_LISTS["cities"])),
            (1, _LISTS["python"], free(_modules())),
            (1, _LISTS["language"], free(topics)),
            (1, _LISTS["tasks"], free(_LISTS["jobs"])),
        ]

    def draw(self, rng: random.Random) -> str:
        """One question."""
        weights = [weight for weight, _, _ in self._kinds]
        _, templates, names = rng.choices(self._kinds, weights)[0]
        x, y = rng.sample(names, 2)
        question = rng.choice(templates).format(x=x, y=y)
        return rng.choice(_LISTS["openers"]) + question + rng.choice(_LISTS["closers"])


def _things() -> list[str]:
    """Pictographs that are things: "camera", "hot pepper", ..."""
    names = (unicodedata.name(chr(code), "") for code in _PICTOGRAPHS)
    return sorted(
        name.lower()
        for name in names
        if name and not _NO_SUBJECT.search(name) and 1 <= len(name.split()) <= 2
    )


def _modules() -> list[str]:
    """Public modules of the standard library."""
    return sorted(name for name in sys.stdlib_module_names if name[0] != "_" and len(name) > 2)


# -- work on a text -------------------------------------------------------------------------------


class _Texts:
    """Functions, passages and outlines of modules that `real_tasks` does not use."""

    def __init__(self) -> None:
        self._code: list[tuple[str, str]] = []  # and a name that stands in it
        self._passages: list[str] = []
        self._reports: list[str] = []
        for name, tree in _trees():
            self._add(name, tree)

    def _add(self, name: str, tree: ast.Module) -> None:
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            code = ast.unparse(function) + "\n"
            if 4 <= code.count("\n") <= 24 and len(code) < 1100 and function.args.args:
                self._code.append((code, function.args.args[-1].arg))
        nodes: list[ast.Module | ast.FunctionDef] = [tree, *functions]
        for node in nodes:
            for part in textwrap.dedent(ast.get_docstring(node) or "").split("\n\n"):
                if 30 <= len(part.split()) <= 110 and part[:1].isalpha() and ">>>" not in part:
                    self._passages.append(" ".join(part.split()))
        for at in range(0, len(functions) - 4, 5):
            found = [
                {"name": f.name, "line": f.lineno, "args": [a.arg for a in f.args.args]}
                for f in functions[at : at + 4]
            ]
            self._reports.append(json.dumps({"file": f"{name}.py", "found": found}, indent=1))

    def draw(self, rng: random.Random) -> str:
        """One text and what to do with it."""
        make: Callable[[random.Random], str] = rng.choice(
            (self._about_code, self._about_passage, self._about_report)
        )
        return make(rng)

    def _about_code(self, rng: random.Random) -> str:
        code, old = rng.choice(self._code)
        new = f"{old}_{rng.choice(('item', 'new', 'name', 'data', 'one'))}"
        return rng.choice(_LISTS["code"]).format(text=code, old=old, new=new)

    def _about_passage(self, rng: random.Random) -> str:
        return rng.choice(_LISTS["passages"]).format(text=rng.choice(self._passages))

    def _about_report(self, rng: random.Random) -> str:
        return rng.choice(_LISTS["reports"]).format(text=rng.choice(self._reports))


_SKIPPED = frozenset(
    ("test", "tests", "encodings", "idlelib", "pydoc_data", "site-packages", "lib2to3")
)


def _trees() -> Iterator[tuple[str, ast.Module]]:
    """Modules outside the list of `real_tasks`, packages and tests left out, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        skipped = {
            "test",
            "tests",
            "encodings",
            "idlelib",
            "pydoc_data",
            "site-packages",
            "lib2to3",
        }
        if skipped.isdisjoint(parts) and not set(parts) & set(real_tasks._MODULES):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 300_000:
                yield ".".join(parts), ast.parse(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Write chat JSONL without answers: `foretoken train-draft --regenerate on` asks for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    made = prompts(args.seed)
    with args.out.open("w", encoding="utf-8") as out:
        for _ in range(args.number):
            message = {"role": "user", "content": next(made)}
            out.write(json.dumps({"messages": [message]}) + "\n")


if __name__ == "__main__":
    main()
