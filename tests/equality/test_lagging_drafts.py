"""Drafts that are planned before the outcome of the step before them is known.

With two drafted steps in flight (docs/architecture/planning-ahead.md), a draft continues the one
before it as if that one were accepted whole. If it was not, the later draft is wrong throughout.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import pytest

from foretoken import LLM, SamplingParams
from foretoken.api.build.drafts import FREE
from foretoken.bench.common.oracle import OracleSource
from foretoken.core.interface.request import Request
from foretoken.draft.sources.source import Guess

PROMPTS = ["def quicksort(items):\n", "import os\n\ndef main():\n", "The cache of a "]


class LaggingOracle(OracleSource):
    """An oracle that knows the outcome of every step but the last one."""

    def __init__(self, accuracy: float) -> None:
        super().__init__(accuracy)
        self.num_misplaced = 0  # drafts that follow a rejected one
        self._planned: dict[str, tuple[int, int]] = {}  # by request: start and tokens of a draft

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        first, count = self._planned.get(request.request_id, (request.num_output - 1, 0))
        start = first + count + 1
        self.num_misplaced += start != request.num_output
        answer = self._live.get(request)
        if answer is None:
            answer = self._live[request] = self._recall(request)
        token_ids = array("q", answer[start : start + most])
        self._planned[request.request_id] = request.num_output, len(token_ids)
        return (Guess(token_ids, self.name, 0),) if token_ids else ()


@pytest.mark.parametrize("accuracy", [1.0, 0.7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_lag_change_no_token(
    accuracy: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40)
    with LLM("builtin", speculation="off") as llm:
        plain = llm.generate(PROMPTS, params)
    oracle = LaggingOracle(accuracy)
    monkeypatch.setitem(FREE, "lagging", partial(lambda: oracle))
    with LLM("builtin", draft="lagging", speculation=4) as llm:
        llm.generate(PROMPTS, params)
        drafted = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    num_accepted = sum(each.usage.accepted_tokens for each in drafted)
    assert num_accepted > 0
    if accuracy == 1.0:
        assert num_accepted >= 90, "nothing is rejected, so no draft is misplaced"
    else:
        assert oracle.num_misplaced > 10
