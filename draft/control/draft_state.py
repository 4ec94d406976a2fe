"""DraftState: the speculator's record of one request, with its guesses and paused look-ups."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.interface.plan import ScheduledRequest
from ...core.interface.request import Request
from ..sources.merge import common_len
from ..sources.source import Guess
from .estimators import TRIAL_WEIGHT, AcceptanceModel, NodeWorth
from .outcome import DraftOutcome

FRUITLESS = 2  # number of steps without a draft in a row before a request backs off
MAX_PERIOD = 8  # maximum number of steps from one look-up to the next; a power of two


@dataclass(slots=True)
class DraftState:
    """The speculator's data of one request: guesses, paused look-ups, and length of draft KV."""

    request: Request
    # Guesses that are not scored yet, each with the number of tokens that they follow. The outcome
    # of a step is scored after the next step was planned, so there may be guesses of two steps.
    unscored: list[tuple[int, Sequence[Guess]]] = field(default_factory=list)
    # Whether the temperature is above 0. Sampled requests accept fewer draft tokens.
    is_sampled: bool = field(init=False)
    proposer_len: int = 0  # approximate number of tokens whose KV the proposer has
    num_fruitless: int = 0  # number of steps in a row without a draft
    paused_until: int = 0  # length of the request, in tokens, at which look-ups resume

    def __post_init__(self) -> None:
        """Read the request's temperature, which never changes."""
        self.is_sampled = self.request.sampling.params.temperature > 0

    def is_paused(self, num_new_tokens: int) -> bool:
        """Whether look-ups are still paused once the request has ``num_new_tokens`` more tokens."""
        return len(self.request.tokens) + num_new_tokens < self.paused_until

    def note_fruitless(self, *, step: int, may_back_off: bool) -> None:
        """Record a step without a draft; pause look-ups after some such steps in a row.

        Each pause is twice as long as the one before, up to `MAX_PERIOD` steps. ``step``: number of
        the engine's step. A pause of n steps ends at a step whose number is a multiple of n. Then
        many requests look up in the same step, and the other steps need no look-ups.
        ``may_back_off``: whether look-ups may be paused.
        """
        self.num_fruitless += 1
        if may_back_off and self.num_fruitless > FRUITLESS:
            period = min(MAX_PERIOD, 1 << (self.num_fruitless - FRUITLESS - 1))
            pause = period - (step + 1) % period
            self.paused_until = len(self.request.tokens) + 1 + pause

    def score(self, acceptance: AcceptanceModel, served: array[int]) -> None:
        """Score every guess, verified or not, against the committed tokens ``served``."""
        num_before = len(self.request.tokens) - len(served)
        scored = [each for at, guesses in self.unscored if at == num_before for each in guesses]
        self.unscored = [each for each in self.unscored if each[0] > num_before]
        for guess in scored:
            hits = common_len(guess.token_ids, served)
            acceptance.score(
                guess.source,
                guess.kind,
                self.request.request_id,
                hits,
                missed=hits < min(len(guess.token_ids), len(served)),
                sampled=self.is_sampled,
            )

    def judge_proposer(
        self,
        node_worth: NodeWorth,
        scheduled: ScheduledRequest,
        outcome: DraftOutcome,
        num_served: int,
        *,
        is_trial: bool,
    ) -> None:
        """Learn from the nodes of the proposer that were accepted, and update the length of its KV.

        ``num_served``: tokens that the step committed. ``is_trial``: whether the draft was a probe.
        """
        plan, num_uncached = scheduled.draft_plan, outcome.note.num_uncached
        self.proposer_len = scheduled.stop - num_uncached + num_served - 1
        if plan.draft.token_ids and not plan.row_prices:
            return  # The verified chain is the better of two, which is a biased sample.
        num_ranked = outcome.num_ranked
        if num_ranked or not num_uncached:  # False if the proposer only computed missing KV.
            node_worth.observe(
                plan.max_draft,
                num_ranked,
                outcome.accepted_ranks,
                sampled=self.is_sampled,
                weight=TRIAL_WEIGHT if is_trial else 1.0,
            )
