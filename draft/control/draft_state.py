"""DraftState: the speculator's record of one request, with its guesses and paused look-ups."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

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
FRUITLESS = 2  # number of steps without a draft in a row before a request backs off
MAX_PERIOD = 8  # maximum number of steps from one look-up to the next; a power of two


@dataclass(slots=True)
class DraftState:
    """The speculator's data of one request: guesses, paused look-ups, and length of draft KV."""

    request: Request
    # Guesses that are not scored yet, each with the number of tokens that they follow. The outcome
    # of a step is scored after the next step was planned, so there may be guesses of two steps.
    unscored: list[tuple[int, Sequence[Guess]]] = field(default_factory=list)
    tree: GuessTree | None = None
    proposer_len: int = 0  # approximate number of tokens whose KV the proposer has
    num_fruitless: int = 0  # number of steps in a row without a draft
    paused_until: int = 0  # length of the request, in tokens, at which look-ups resume

    @property
    def is_sampled(self) -> bool:
        """Whether the temperature is above 0. Sampled requests accept fewer draft tokens."""
        return self.request.sampling.params.temperature > 0

    def is_paused(self, num_new_tokens: int) -> bool:
        """Whether look-ups are still paused once the request has ``num_new_tokens`` more tokens."""
        return len(self.request.tokens) + num_new_tokens < self.paused_until

    def note_drafted(self, num_rows: int, *, step: int, may_back_off: bool) -> None:
        """Record the number of rows drafted in a step; pause look-ups after steps without drafts.

        Each pause is twice as long as the one before, up to `MAX_PERIOD` steps. ``step``: number of
        the engine's step. A pause of n steps ends at a step whose number is a multiple of n. Then
        many requests look up in the same step, and the other steps need no look-ups.
        ``may_back_off``: whether look-ups may be paused.
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
        """Return the merged guesses of all sources, or None if there are none.

        Each guess has at most ``most`` tokens. ``grammar`` cuts guesses before the first token that
        the request's constraint forbids.
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
        num_tokens = len(request.tokens)
        self.unscored = [each for each in self.unscored[-1:] if each[0] < num_tokens]
        if not guesses:
            return None
        self.unscored.append((num_tokens, guesses))
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


def _to_the_end(guess: Guess, stop_ids: frozenset[int]) -> Guess:
    """Cut a guess after the first stop token, and before the first image placeholder (id < 0)."""
    if guess.token_ids and min(guess.token_ids) < 0:
        end = next(at for at, token in enumerate(guess.token_ids) if token < 0)
        guess = replace(guess, token_ids=guess.token_ids[:end])
    if stop_ids.isdisjoint(guess.token_ids):
        return guess
    end = next(at for at, token in enumerate(guess.token_ids) if token in stop_ids)
    return replace(guess, token_ids=guess.token_ids[: end + 1])


def _allowed(guesses: Sequence[Guess], request: Request, grammar: GrammarSource) -> list[Guess]:
    """Cut the guesses before the first token that the constraint forbids; drop empty ones."""
    left = [
        guess if guess.source == grammar.name else grammar.trim(request, guess) for guess in guesses
    ]
    return [guess for guess in left if guess is not None]


def padded(rows: Sequence[Survival]) -> Survival:
    """Return the rows as one array [len(rows), length of the longest row], padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for index, row in enumerate(rows):
        if len(row):
            table[index, : len(row)] = row
    return table
