"""Mutation: one small mistake in the code, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


class DoesNotApply(Exception):
    """The code has changed: what a mutation replaces is not there, or not once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake as a real change might make it: a line or two, never one that changes nothing."""

    name: str
    file: str  # below the repository's root
    before: str  # stands in the file exactly once
    after: str
    tests: tuple[str, ...]  # files and functions as pytest names them, the surest first
    breaks: str  # which law, invariant or promise

    @property
    def is_native(self) -> bool:
        """Whether the kernels must be compiled anew."""
        return self.file.endswith((".c", ".h"))

    def apply(self, text: str) -> str:
        """The file's text with the mistake in it. Raises `DoesNotApply`."""
        count = text.count(self.before)
        if count != 1:
            raise DoesNotApply(f"{self.file} has {count} of: {self.before}")
        return text.replace(self.before, self.after)
