"""The comparison of an answer in chunks: one constraint follows it, and it ends with the answer's
first token that the constraint excludes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
import torch

from foretoken.core.execution.compared_answer import compare_answer
from foretoken.core.interface.extras.token_comparison import TokenComparison, comparisons_of
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import (
    ConstraintFailed,
    Mask,
    Pooling,
    SamplingMetadata,
    TokenSamplingParams,
)
from foretoken.core.sampling.sampler import TorchSampler

VOCAB_SIZE, PROMPT = 8, [1, 2, 3]
ANSWER = [1 + at % 3 for at in range(200)]


class Rule:
    """Allows the tokens below ``most``, and counts the tokens that it reads."""

    def __init__(self, most: int, forks: list[Rule] | None = None) -> None:
        self._most, self._num_settled = most, 0
        self.num_read = self.num_failures = 0
        self.forks: list[Rule] = [] if forks is None else forks

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        output = tokens[start:]
        new = output[self._num_settled :]
        self.num_read += len(new)
        if any(each >= self._most for each in new):
            self.num_failures += 1
            raise ConstraintFailed("the rule does not match the answer so far")
        self._num_settled = len(output)
        if any(each >= self._most for each in tail):
            return None
        return bytearray([1] * self._most + [0] * (VOCAB_SIZE - self._most))

    def fork(self) -> Rule:
        self.forks.append(Rule(self._most))
        return self.forks[-1]


def scored(answer: Sequence[int], own: Sequence[int]) -> torch.Tensor:
    """Logits whose best tokens are ``own``, and after the answer the token 0."""
    logits = torch.zeros(len(answer) + 1, VOCAB_SIZE)
    for at, token_id in enumerate([*own, 0]):
        logits[at, token_id] = 2.0
    return logits


def run(
    answer: Sequence[int],
    own: Sequence[int],
    *,
    rule: Rule | None = None,
    chunk: int = 100,
    restarts_at: int | None = None,
    compare_from: int = 0,
) -> list[TokenComparison]:
    """The comparisons of all chunks. ``restarts_at``: tokens after which it is preempted."""
    sampling = SamplingMetadata(
        params=TokenSamplingParams(temperature=0),
        seed=0,
        prompt_len=len(PROMPT),
        constraint=rule,
        pooling=Pooling(compare_from=compare_from),
    )
    tokens, logits = array("q", [*PROMPT, *answer]), scored(answer, own)
    found: list[TokenComparison] = []
    start = 0
    while start < len(tokens):
        stop = min(len(tokens), start + chunk)
        row = ScheduledRequest(
            request_id="a", tokens=tokens, start=start, stop=stop, page_ids=array("q"),
            sampling=sampling,
        )  # fmt: skip
        first = stop - row.num_pooled - len(PROMPT) + 1
        if row.pools:
            values = logits[first : first + row.num_pooled]
            found += comparisons_of(compare_answer(row, values, TorchSampler()))
        start = stop
        if restarts_at is not None and start >= restarts_at:
            start, restarts_at = 0, None
    return found


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 500])
def test_all_rows_are_compared_whatever_the_chunks(chunk: int) -> None:
    own = [*ANSWER]
    own[30], own[150] = 7, 6
    found = run(ANSWER, own, chunk=chunk)
    assert [each.position for each in found] == [*range(201)]
    assert [each.own for each in found] == [*own, 0]
    assert [at for at, each in enumerate(found) if each.margin] == [30, 150]
    assert not math.isnan(found[30].given_logprob + found[30].own_logprob)


def test_one_constraint_reads_the_answer_once() -> None:
    rule = Rule(6)
    found = run(ANSWER, ANSWER, rule=rule)
    assert len(found) == 201
    (fork,) = rule.forks
    assert fork.num_read <= len(ANSWER)


def test_a_preempted_request_gets_another_constraint() -> None:
    rule = Rule(6)
    found = run(ANSWER, ANSWER, rule=rule, restarts_at=150)
    assert len(rule.forks) == 2
    assert [each.position for each in found[-201:]] == [*range(201)]
    assert all(each.own >= 0 for each in found)


def test_nothing_is_asked_after_a_token_that_the_constraint_excludes() -> None:
    rule, answer = Rule(6), [*ANSWER]
    answer[40] = 7
    found = run(answer, ANSWER, rule=rule)
    assert [each.position for each in found] == [*range(41)]
    assert (found[40].own, found[40].margin) == (ANSWER[40], math.inf)
    assert found[40].excluder == "constraint"
    assert [each.num_failures for each in rule.forks] == [0]


def test_a_comparison_that_begins_after_such_a_token_fails_once() -> None:
    rule, answer = Rule(6), [*ANSWER]
    answer[40] = 7
    found = run(answer, ANSWER, rule=rule, compare_from=90)
    assert [(each.position, each.own) for each in found] == [(90, -1)]


def test_only_the_first_difference_is_explained() -> None:
    own = [each + 3 for each in ANSWER]
    found = run(ANSWER, own, chunk=500)
    known = [at for at, each in enumerate(found) if not math.isnan(each.given_logprob)]
    assert known == [0]
    assert all(each.margin == 2.0 for each in found[:-1])
