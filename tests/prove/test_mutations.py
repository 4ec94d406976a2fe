"""The list of mutations cannot rot: each still applies, to code and tests that are there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from prove.mutation import DoesNotApply, Mutation
from prove.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


def name_of(mutation: Mutation) -> str:
    return mutation.name


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_mutation_changes_code_that_is_there_and_names_tests_that_are(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    mutated = mutation.apply(text)
    assert mutated != text
    if mutation.file.endswith(".py"):
        compile(mutated, mutation.file, "exec")
    assert mutation.tests
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file()
        assert not function or function in functions_of(file)


def test_no_two_mutations_have_the_same_name_or_make_the_same_mistake() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    assert len({(each.file, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("text", ["", "a = 1\n", "a = 2\na = 2\n"])
def test_a_mutation_of_code_that_has_changed_does_not_apply(text: str) -> None:
    mutation = Mutation("name", "file.py", "a = 2", "a = 3", ("tests/test_a.py",), "a law")
    with pytest.raises(DoesNotApply):
        mutation.apply(text)
