"""DraftState: the speculator's state of one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.interface.request import Request
from ...core.interface.step import RequestOutput, ScheduledRequest
from ..sources.merge import GuessTree, Survival, common_len
from ..sources.source import Guess
from .acceptance import TRIAL_WEIGHT, AcceptanceModel, NodeWorth

NO_SURVIVAL: Survival = np.zeros(0)
FRUITLESS = 2  # steps in a row in which nothing was worth a row, until back-off begins
MAX_PAUSE = 8  # tokens of an answer for which nothing is looked up


@dataclass(slots=True)
class DraftState:
    """One request's guesses for the step under way, and how much KV the draft model has."""

    request: Request
    guesses: Sequence[Guess] = ()
    tree: GuessTree | None = None
    lm_len: int = 0  # tokens whose KV the draft model has, about
    num_fruitless: int = 0  # steps in a row in which nothing was drafted
    paused_until: int = 0  # tokens of the request: with fewer, nothing is looked up

    @property
    def is_sampled(self) -> bool:
        """Whether its tokens are drawn at a temperature above 0: fewer drafts are accepted then."""
        return self.request.sampling.params.temperature > 0

    def drafts_nothing(self, num_new_tokens: int) -> bool:
        """Whether nothing would be looked up once it has ``num_new_tokens`` more tokens."""
        return len(self.request.tokens) + num_new_tokens < self.paused_until

    def drafted(self, num_rows: int, *, may_back_off: bool) -> None:
        """Note the rows drafted; after a few steps without any, look-ups pause ever longer."""
        if num_rows:
            self.num_fruitless = 0
            return
        self.num_fruitless += 1
        if may_back_off and self.num_fruitless > FRUITLESS:
            pause = min(MAX_PAUSE, 1 << (self.num_fruitless - FRUITLESS - 1))
            self.paused_until = len(self.request.tokens) + 1 + pause

    def score(self, odds: AcceptanceModel, served: array[int]) -> None:
        """Compare every guess, verified or not, with what was committed."""
        for guess in self.guesses:
            hits = common_len(guess.token_ids, served)
            odds.score(
                guess.source,
                guess.kind,
                self.request.request_id,
                hits,
                missed=hits < min(len(guess.token_ids), len(served)),
                sampled=self.is_sampled,
            )
        self.guesses = ()

    def judge_lm(
        self,
        worth: NodeWorth,
        scheduled: ScheduledRequest,
        output: RequestOutput,
        num_served: int,
        *,
        is_trial: bool,
    ) -> None:
        """Count what the draft model's nodes brought, and note how much KV it has now."""
        self.lm_len = scheduled.stop - output.num_uncached_draft_tokens + num_served - 1
        if output.num_ranked or not output.num_uncached_draft_tokens:  # else it was catching up
            worth.observe(
                scheduled.max_draft,
                output.num_ranked,
                output.accepted_ranks,
                sampled=self.is_sampled,
                weight=TRIAL_WEIGHT if is_trial else 1.0,
            )


def padded(rows: Sequence[Survival]) -> Survival:
    """One row each, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for index, row in enumerate(rows):
        if len(row):
            table[index, : len(row)] = row
    return table
