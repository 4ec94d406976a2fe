"""Make each mistake of the list, one after the other, and see whether a test notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .mutation import DoesNotApply, Mutation
from .workplace import TestRun, Workplace

BASELINE_TIMEOUT_S = 1200.0
_TESTS_FAILED = 1  # pytest's exit status; below 0: the process was ended by a signal

Outcome = Literal["caught", "survived", "does not apply", "not compiled", "its tests fail anyway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome of one mutation."""

    mutation: Mutation
    outcome: Outcome
    caught_by: str = ""  # the test that failed first
    detail: str = ""  # why it was not caught
    seconds: float = 0.0


def prove(workplace: Workplace, mutations: Sequence[Mutation]) -> Iterator[Verdict]:
    """A verdict for each, in order. Tests that fail without any mistake prove nothing."""
    tests = dict.fromkeys(test for each in mutations for test in workplace.tests_of(each))
    clean = workplace.run_tests(list(tests), timeout_s=BASELINE_TIMEOUT_S, stop_early=False)
    if clean.status not in (0, _TESTS_FAILED):
        raise RuntimeError(f"the tests cannot be run as they are:\n{clean.output[-3000:]}")
    for mutation in mutations:
        tests_of = workplace.tests_of(mutation)
        broken = [name for name in clean.failed if _covers(tests_of, name)]
        if broken:
            yield Verdict(mutation=mutation, outcome="its tests fail anyway", detail=broken[0])
        else:
            yield _judge(workplace, mutation)


def _judge(workplace: Workplace, mutation: Mutation) -> Verdict:
    num_libraries = workplace.num_libraries
    try:
        with workplace.mutated(mutation) as place:
            run = workplace.run_tests(workplace.tests_of(mutation), timeout_s=mutation.seconds)
    except DoesNotApply as error:
        return Verdict(mutation=mutation, outcome="does not apply", detail=str(error))
    is_compiled = not place.is_native or workplace.num_libraries > num_libraries
    outcome = _outcome(run) if is_compiled else "not compiled"
    return Verdict(
        mutation=mutation,
        outcome=outcome,
        caught_by=_caught_by(run) if outcome == "caught" else "",
        detail="" if outcome == "caught" else run.output[-2000:],
        seconds=run.seconds,
    )


def _outcome(run: TestRun) -> Outcome:
    """A file that cannot even be imported is no proof of a test: that has a status of its own.

    So has a pytest that finds more at its end, such as sockets that were left open.
    """
    has_failed = run.status in (_TESTS_FAILED, None) or run.status < 0
    has_failed = has_failed or any("::" in name for name in run.failed)  # else a file's name
    return "caught" if has_failed else "survived"


def _caught_by(run: TestRun) -> str:
    if run.status is None:
        return "the clock"
    return run.failed[0] if run.failed else "a crash"


def _covers(tests: Sequence[str], name: str) -> bool:
    """Whether pytest runs a test of this name when asked for ``tests``."""
    return any(name == each or name.startswith(f"{each}::") for each in tests)
