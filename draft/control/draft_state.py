"""DraftState: the speculator's state of one request: its guesses, and when it backs off."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ...core.interface.plan import ScheduledRequest
from ...core.interface.request import Request
from ..sources.grammar import GrammarSource
from ..sources.merge import GuessTree, Survival, common_len, merge
from ..sources.source import GuardedSource, Guess
from .estimators import TRIAL_WEIGHT, AcceptanceModel, NodeWorth
from .outcome import DraftOutcome

NO_SURVIVAL: Survival = np.zeros(0)
FRUITLESS = 2  # steps in a row in which nothing was worth a row, until back-off begins
MAX_PERIOD = 8  # steps from one look-up to the next, at most; a power of two


@dataclass(slots=True)
class DraftState:
    """One request's guesses for the step under way, and how much KV the proposer has."""

    request: Request
    guesses: Sequence[Guess] = ()
    tree: GuessTree | None = None
    proposer_len: int = 0  # tokens whose KV the proposer has, about
    num_fruitless: int = 0  # steps in a row in which nothing was drafted
    paused_until: int = 0  # tokens of the request: with fewer, nothing is looked up

    @property
    def is_sampled(self) -> bool:
        """Whether its tokens are drawn at a temperature above 0: fewer drafts are accepted then."""
        return self.request.sampling.params.temperature > 0

    def drafts_nothing(self, num_new_tokens: int) -> bool:
        """Whether nothing would be looked up once it has ``num_new_tokens`` more tokens."""
        return len(self.request.tokens) + num_new_tokens < self.paused_until

    def drafted(self, num_rows: int, *, step: int, may_back_off: bool) -> None:
        """Note the rows drafted; after a few steps without any, look-ups pause ever longer.

        ``step``: the number of the step among all. Pauses of all requests end at multiples of
        their lengths: so the steps in which something is looked up are few, and common to all.
        """
        if num_rows:
            self.num_fruitless = 0
            return
        self.num_fruitless += 1
        if may_back_off and self.num_fruitless > FRUITLESS:
            period = min(MAX_PERIOD, 1 << (self.num_fruitless - FRUITLESS - 1))
            pause = period - (step + 1) % period
            self.paused_until = len(self.request.tokens) + 1 + pause

    def look_up(
        self,
        sources: Sequence[GuardedSource],
        grammar: GrammarSource | None,
        acceptance: AcceptanceModel,
        most: int,
    ) -> GuessTree | None:
        """Merge the guesses of all sources, of at most ``most`` tokens each; None without a guess.

        ``grammar`` cuts guesses where the request's constraint forbids a token.
        """
        request, is_sampled = self.request, self.is_sampled
        guesses = [
            cut
            for source in sources
            for guess in source.propose(request, most)
            if (cut := _to_the_end(guess, request.stop_ids)).token_ids
        ]
        if request.sampling.constraint is not None and grammar is not None:
            guesses = _allowed(guesses, request, grammar)
        self.guesses = guesses
        if not guesses:
            return None
        survivals = [
            acceptance.survival(
                each.source,
                each.kind,
                request.request_id,
                len(each.token_ids),
                sampled=is_sampled,
            )
            for each in guesses
        ]
        return merge(guesses, survivals)

    def score(self, acceptance: AcceptanceModel, served: array[int]) -> None:
        """Compare every guess, verified or not, with what was committed."""
        for guess in self.guesses:
            hits = common_len(guess.token_ids, served)
            acceptance.score(
                guess.source,
                guess.kind,
                self.request.request_id,
                hits,
                missed=hits < min(len(guess.token_ids), len(served)),
                sampled=self.is_sampled,
            )
        self.guesses = ()

    def judge_proposer(
        self,
        node_worth: NodeWorth,
        scheduled: ScheduledRequest,
        outcome: DraftOutcome,
        num_served: int,
        *,
        is_trial: bool,
    ) -> None:
        """Count what the proposer's nodes brought, and note how much KV it has now."""
        plan, num_uncached = scheduled.draft_plan, outcome.note.num_uncached
        self.proposer_len = scheduled.stop - num_uncached + num_served - 1
        if plan.draft.token_ids and not plan.row_prices:
            return  # of two chains the better was verified: no fair sample of the proposer's
        num_ranked = outcome.num_ranked
        if num_ranked or not num_uncached:  # else it was catching up
            node_worth.observe(
                plan.max_draft,
                num_ranked,
                outcome.accepted_ranks,
                sampled=self.is_sampled,
                weight=TRIAL_WEIGHT if is_trial else 1.0,
            )


def _to_the_end(guess: Guess, stop_ids: frozenset[int]) -> Guess:
    """Cut the guess behind the first token that ends the answer, and before rows of an image."""
    if guess.token_ids and min(guess.token_ids) < 0:
        end = next(at for at, token in enumerate(guess.token_ids) if token < 0)
        guess = replace(guess, token_ids=guess.token_ids[:end])
    if stop_ids.isdisjoint(guess.token_ids):
        return guess
    end = next(at for at, token in enumerate(guess.token_ids) if token in stop_ids)
    return replace(guess, token_ids=guess.token_ids[: end + 1])


def _allowed(guesses: Sequence[Guess], request: Request, grammar: GrammarSource) -> list[Guess]:
    """Cut the guesses at the first token that the request's constraint forbids."""
    left = [
        guess if guess.source == grammar.name else grammar.trim(request, guess) for guess in guesses
    ]
    return [guess for guess in left if guess is not None]


def padded(rows: Sequence[Survival]) -> Survival:
    """One row each, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for index, row in enumerate(rows):
        if len(row):
            table[index, : len(row)] = row
    return table
