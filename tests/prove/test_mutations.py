"""The list of mutations cannot rot: each still applies, to code and tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from prove.code import Code
from prove.mutation import Mutation
from prove.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
CODE = Code(ROOT)


def name_of(mutation: Mutation) -> str:
    return mutation.name


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_mutation_changes_code_that_is_there_and_names_tests_that_are(mutation: Mutation) -> None:
    place, mutated = CODE.mutate(mutation)
    assert mutated != (ROOT / place.file).read_text(encoding="utf-8")
    if place.file.endswith(".py"):
        compile(mutated, place.file, "exec")
    assert mutation.tests
    for name in mutation.tests:
        tests = CODE.tests_named(name)
        assert len(tests) == 1, f"{len(tests)} tests are named {name}"


def test_no_two_mutations_have_the_same_name_or_make_the_same_mistake() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    assert len({(each.place, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)
