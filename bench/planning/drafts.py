"""Drafts of a plan: a fixed number of tokens per step, of which a given mean is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.interface.draft import NO_DRAFT, NO_DRAFT_PLAN, Draft, DraftPlan
from ...core.interface.output import RequestOutput
from ...core.interface.plan import ScheduledRequest, StepPlan
from ...core.interface.protocols import Speculator
from ...core.interface.request import Request

ANSWER_ID = 1  # Every token of an answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts of all requests. ``depth``: tokens of each draft; 0: none.

    ``tokens_per_step``: mean number of tokens that a step adds to a request, from 1 to ``depth +
    1``. ``seconds``: time that proposing takes in a step.
    """

    depth: int = 0
    tokens_per_step: float = 1.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError if such drafts cannot reach ``tokens_per_step``."""
        if not 1.0 <= self.tokens_per_step <= self.depth + 1:
            raise ValueError(
                f"drafts of {self.depth} tokens give 1 to {self.depth + 1} tokens per step, "
                f"not {self.tokens_per_step:g}"
            )


NO_DRAFTS = Drafts()


class DraftsOfDepth(Speculator):
    """Gives every request the same draft depth, within an equal share of the budget."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        """Whether the depth is 0."""
        del requests, num_new_tokens
        return not self._depth

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Return plans of the same depth, within each limit and an equal share of the budget."""
        del num_prefill
        most = min(self._depth, budget // max(1, len(requests)))
        return [
            DraftPlan(max_draft=min(most, limit)) if min(most, limit) else NO_DRAFT_PLAN
            for limit in limits
        ]


class Answers:
    """The outputs of one engine's steps, whose drafts are accepted as `Drafts` says.

    Nothing is random: a request has gained the mean times its number of steps, rounded down.
    """

    def __init__(self, drafts: Drafts) -> None:
        self._drafts = drafts
        self._credits: dict[str, float] = {}  # Accepted tokens that a request has not received yet.

    def seconds_of(self, plan: StepPlan) -> float:
        """Return the seconds that proposing takes."""
        drafts = any(row.draft_plan.num_rows for row in plan.requests)
        return self._drafts.seconds if drafts else 0.0

    def of(self, plan: StepPlan) -> list[RequestOutput]:
        """Return the outputs of a step."""
        for request_id in plan.released_request_ids:
            self._credits.pop(request_id, None)
        return list(map(self._output, plan.requests))

    def _output(self, row: ScheduledRequest) -> RequestOutput:
        if not row.samples:
            return RequestOutput(request_id=row.request_id)
        num_drafted = row.draft_plan.num_rows
        num_accepted = self._num_accepted(row.request_id, num_drafted) if num_drafted else 0
        return RequestOutput(
            request_id=row.request_id,
            token_ids=(ANSWER_ID,) * (num_accepted + 1),
            draft=Draft.of((ANSWER_ID,) * num_drafted, "planned") if num_drafted else NO_DRAFT,
            path=range(num_accepted),
        )

    def _num_accepted(self, request_id: str, most: int) -> int:
        credit = self._credits.get(request_id, 0.0) + self._drafts.tokens_per_step - 1.0
        found = min(most, int(credit))
        self._credits[request_id] = credit - found
        return found
