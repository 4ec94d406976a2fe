"""The list of mutations cannot rot: each still applies, to code and tests that are there."""

from __future__ import annotations

from pathlib import Path

from prove.code import Code
from prove.mutation import DoesNotApply, Mutation
from prove.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
CODE = Code(ROOT)


def test_a_mutation_changes_code_that_is_there_and_names_tests_that_are() -> None:
    rotten = {each.name: why for each in MUTATIONS if (why := why_it_does_not_apply(each))}
    assert not rotten


def why_it_does_not_apply(mutation: Mutation) -> str:
    """Empty where it does."""
    try:
        place, mutated = CODE.mutate(mutation)
    except DoesNotApply as error:
        return str(error)
    if mutated == (ROOT / place.file).read_text(encoding="utf-8"):
        return "it changes nothing"
    found = {name: len(CODE.tests_named(name)) for name in mutation.tests}
    if not found or set(found.values()) != {1}:
        return f"tests of these names: {found}"
    return ""


def test_no_two_mutations_have_the_same_name_or_make_the_same_mistake() -> None:
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    assert len({(each.place, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)
