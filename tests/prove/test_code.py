"""Code and tests are found by their names, in whichever file they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from prove.code import Code
from prove.mutation import DoesNotApply, Mutation

SUMS = """\
LIMIT = 2


class Sum:
    most: int = 2

    def double(self, x):
        return 2 * x


def half(x):
    return x / 2
"""
SUMS_IN_C = """\
#define LIMIT (2 * \\
    4)

static inline int double_of(int x) {
    if (x) {
        return 2 * x;
    }
    return 2;
}

int half(const int *x,
         int at) { return x[at] / 2; }
"""
TESTS = "def test_two():\n    pass\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "core/deep/sums.py": SUMS,
        "core/sums.c": SUMS_IN_C,
        "tests/a/test_sums.py": TESTS,
        "tests/a/unit.c": "int unit(void) { return 1; }\n",
        "tests/b/test_sums.py": TESTS + "\n\nasync def test_three():\n    LIMIT = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def mutated(root: Path, place: str, before: str, after: str) -> tuple[str, str]:
    found, text = Code(root).mutate(Mutation("name", place, before, after, ("test",), "a law"))
    return found.file, text


@pytest.mark.parametrize(
    ("place", "before", "after", "file"),
    [
        ("LIMIT", "= 2", "= 3", "core/deep/sums.py"),
        ("LIMIT", "4)", "5)", "core/sums.c"),
        ("Sum", "2 * x", "3 * x", "core/deep/sums.py"),
        ("Sum.double", "2 * x", "3 * x", "core/deep/sums.py"),
        ("Sum.most", "2", "3", "core/deep/sums.py"),
        ("half", "x / 2", "x / 3", "core/deep/sums.py"),
        ("double_of", "2 * x", "3 * x", "core/sums.c"),
        ("half", "x[at] / 2", "x[at]", "core/sums.c"),
        ("unit", "return 1", "return 2", "tests/a/unit.c"),
    ],
)
def test_a_name_and_a_pattern_say_which_place_changes(
    root: Path, place: str, before: str, after: str, file: str
) -> None:
    text = (root / file).read_text(encoding="utf-8")
    where, changed = mutated(root, place, before, after)
    assert (where, changed.replace(after, before)) == (file, text)
    assert changed != text


@pytest.mark.parametrize(
    ("place", "before"),
    [
        ("quarter", "x"),  # no such function
        ("half", "x * 2"),  # it does something else
        ("half", "2"),  # two functions of that name have it
        ("double_of", "2"),  # twice in one function
        ("double", "2 * x"),  # a method is named with its class
        ("test_three", "LIMIT"),  # tests are not mutated
    ],
)
def test_a_mutation_of_code_that_has_changed_does_not_apply(
    root: Path, place: str, before: str
) -> None:
    with pytest.raises(DoesNotApply):
        mutated(root, place, before, "")


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("test_three", ["tests/b/test_sums.py::test_three"]),
        ("a/test_sums.py", ["tests/a/test_sums.py"]),
        ("a/test_sums.py::test_two", ["tests/a/test_sums.py::test_two"]),
        ("test_sums.py", ["tests/a/test_sums.py", "tests/b/test_sums.py"]),
        ("test_tw", []),
    ],
)
def test_a_test_is_named_by_as_much_of_its_end_as_it_takes(
    root: Path, name: str, tests: list[str]
) -> None:
    assert Code(root).tests_named(name) == tests
