"""The rows of a step that need logits are limited; other rows of prompts are not."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import BranchPooling, Pooling
from foretoken.core.scheduling import scored_rows
from support.fake_model import VOCAB_SIZE, Driver, FakeRunner, make_request, make_scheduler

PROMPT = [1 + at % 5 for at in range(40)]
LIMIT = 16


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored_rows, "SCORED_LOGITS", LIMIT * VOCAB_SIZE)


def compared(request_id: str, prompt: Sequence[int], answer: Sequence[int], first: int) -> Request:
    pooling = Pooling(compare_from=first)
    request = make_request(request_id, prompt, pooling=pooling, depth=0)
    request.tokens = array("q", [*prompt, *answer])
    return request


def branching(request_id: str, num_branches: int) -> Request:
    branches = tuple(BranchPooling(-1, (1,)) for _ in range(num_branches))
    tokens = [*PROMPT, *[2] * num_branches]
    return make_request(request_id, tokens, pooling=Pooling((1,), branches=branches), depth=0)


def num_scored(row: ScheduledRequest) -> int:
    if row.extras.branches is not None:
        return max(0, row.stop - row.extras.branches.first + 1)
    if row.sampling.params.prompt_logprobs is not None:
        return row.stop - row.start if row.start + 1 < row.sampling.prompt_len else 0
    return row.num_pooled


def run(*requests: Request) -> list[list[tuple[str, int, int]]]:
    scheduler = make_scheduler(max_batch_tokens=64, num_pages=128)
    driver = Driver(scheduler, FakeRunner(scheduler.cache.page_size))
    driver.add(*requests)
    driver.run()
    assert all(driver.ended[each.request_id] in ("stop", "length") for each in requests)
    plans = [plan.requests for plan in driver.runner.plans]
    for rows in plans:
        counts = [count for row in rows if (count := num_scored(row))]
        assert sum(counts) <= LIMIT or len(counts) == 1
    return [[(row.request_id, row.start, row.stop) for row in rows] for rows in plans]


def test_a_recorded_answer_is_compared_in_several_steps() -> None:
    steps = run(compared("a", PROMPT, PROMPT, 0))
    assert steps[0] == [("a", 0, 39 + LIMIT)], "the rows of the prompt need no logits"
    assert steps[1] == [("a", 39 + LIMIT, 39 + 2 * LIMIT)]


def test_tokens_that_are_taken_as_given_are_computed_at_once() -> None:
    (step, *_) = run(compared("a", PROMPT, PROMPT, 30))
    assert step == [("a", 0, 64)]


def test_the_requests_of_a_step_share_the_limit() -> None:
    names = ("a", "b", "c")
    steps = run(*(compared(each, PROMPT[at:], PROMPT, 0) for at, each in enumerate(names)))
    assert len(steps) >= 3 * len(PROMPT) // LIMIT


def test_log_probabilities_of_a_prompt_are_limited_too() -> None:
    steps = run(make_request("a", PROMPT, prompt_logprobs=0, max_tokens=1))
    assert [stop - start for ((_, start, stop),) in steps[:3]] == [LIMIT, LIMIT, 8]


def test_branches_beyond_the_limit_are_computed_alone() -> None:
    steps = run(*(branching(each, 20) for each in ("a", "b")), branching("c", 9))
    assert sum(any(stop > 40 for _, _, stop in rows) for rows in steps) == 3


def test_usual_prompts_are_not_limited() -> None:
    (first, *_) = run(make_request("a", PROMPT, max_tokens=1))
    assert first == [("a", 0, 40)]
