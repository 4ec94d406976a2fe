"""The operators: what they change, what they leave alone, and names that hold while lines move."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

from prove.code import Code
from prove.operators import Target, generated
from prove.targets import EQUIVALENT, TARGETS, generated_mutations

METHOD = '''    @limited(3)
    def find(self, most: int = 3) -> int:
        """Find 1 of 2."""
        if most < 1 and self.é > 2:
            raise ValueError(f"no {most + 1}")
        self.left, self.right = most, most
        while (found := self.next(most)) >= 0:
            if not found:
                return
            self.seen += found
        found = self.last
        return 1 if found else 0
'''
CHANGES = {
    "negate most < 1 and self.é > 2": "        if (not (most < 1 and self.é > 2)):",
    "bound most < 1": "        if most <= 1 and self.é > 2:",
    "off by one 1": "        if most < 2 and self.é > 2:",
    "bound self.é > 2": "        if most < 1 and self.é >= 2:",
    "off by one 2": "        if most < 1 and self.é > 3:",
    'drop raise ValueError(f"no {most + 1}")': "            pass",
    "drop self.left, self.right = most, most": "        pass",
    "negate (found := self.next(most)) >= 0": (
        "        while (not ((found := self.next(most)) >= 0)):"
    ),
    "bound (found := self.next(most)) >= 0": "        while (found := self.next(most)) > 0:",
    "off by one 0": "        while (found := self.next(most)) >= 1:",
    "negate not found": "            if (not (not found)):",
    "drop return": "                pass",
    "drop self.seen += found": "            pass",
    "off by one 1 #2": "        return 2 if found else 0",
    "negate found": "        return 1 if (not (found)) else 0",
    "off by one 0 #2": "        return 1 if found else 1",
}
CODE = Code(Path(__file__).resolve().parents[2])


def changed_lines(source: str) -> dict[str, str]:
    """The line that differs, by the name of the mutation without its place."""
    lines = {}
    for mutation in generated(Target("Finder.find", ("test",)), source):
        ast.parse(dedent(mutation.after))
        pairs = zip(source.splitlines(), mutation.after.splitlines(), strict=True)
        [lines[mutation.name.removeprefix("Finder.find: ")]] = [b for a, b in pairs if a != b]
    return lines


def test_conditions_bounds_whole_numbers_and_statements_of_a_body_change_and_nothing_else() -> None:
    assert changed_lines(METHOD) == CHANGES


def test_a_mutation_keeps_its_name_when_lines_are_put_above_it() -> None:
    longer = METHOD.replace('2."""\n', '2."""\n        found = self.first\n')
    assert changed_lines(longer).keys() == CHANGES.keys()


def test_every_target_is_one_function_that_is_there_and_names_tests_that_are() -> None:
    assert len({target.place for target in TARGETS}) == len(TARGETS)
    assert {target.place for target in TARGETS} == {m.place for m in generated_mutations(CODE)}
    tests = {name for target in TARGETS for name in target.tests}
    assert {name for name in tests if len(CODE.tests_named(name)) != 1} == set()


def test_what_is_equivalent_is_still_generated() -> None:
    names = {
        mutation.name
        for target in TARGETS
        for mutation in generated(target, CODE.source(target.place))
    }
    assert EQUIVALENT.keys() - names == set()
