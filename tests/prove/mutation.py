"""Mutation: one small mistake in the code, and the tests that must notice it.

Code and tests are named, not located: a list of mutations holds while files move.
"""

from __future__ import annotations

from dataclasses import dataclass


class DoesNotApply(Exception):
    """The code has changed: what a mutation replaces or names is not there, or not once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake as a real change might make it: a line or two, never one that changes nothing."""

    name: str
    place: str  # a function, class, constant or macro: its qualified name, without the module
    before: str  # stands in it exactly once
    after: str
    tests: tuple[str, ...]  # the end of pytest's name, as far as it takes, the surest first
    breaks: str  # which law, invariant or promise
    seconds: float = 120.0  # for its tests; a mistake that makes them hang is noticed, too
