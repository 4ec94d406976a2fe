"""GrammarSource: drafts the tokens that a request's constraint forces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.interface.request import Request
from ...core.interface.sampling import Constraint, ConstraintFailed
from .merge import common_len
from .source import Guess, Priors, Source


@dataclass(slots=True)
class _Follower:
    """The event loop's matcher of one request's constraint, and the last run of forced tokens."""

    constraint: Constraint | None  # None after a failure, which the model thread meets as well
    num_tokens: int = 0  # length of the request in tokens when ``run`` was computed
    most: int = 0  # maximum length of ``run`` when it was computed
    run: array[int] | None = None  # token ids that the constraint forces


class GrammarSource(Source):
    """Drafts runs of forced tokens, for requests with a constraint.

    A token is forced if the constraint allows no other; then the target must choose it. So all
    tokens of such a run are accepted. `trim` cuts the guesses of other sources before the first
    forbidden token.
    """

    name = "grammar"
    priors = Priors.constant(0.999)

    def __init__(self) -> None:
        self._followers: dict[Request, _Follower] = {}

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        """Return the run of at most ``most`` forced tokens as the only guess, if there is one.

        O(new tokens + length of the run).
        """
        if request.sampling.constraint is None:
            return ()
        run = self._forced(request, most)
        return (Guess(run, self.name, 0),) if run else ()

    def trim(self, request: Request, guess: Guess) -> Guess | None:
        """Cut a guess before its first forbidden token; return None if no token is left."""
        length = self._count_allowed(request, guess.token_ids)
        if length == len(guess.token_ids):
            return guess
        return Guess(guess.token_ids[:length], guess.source, guess.kind) if length else None

    def leave(self, request: Request) -> None:
        """Forget the request's matcher."""
        self._followers.pop(request, None)

    def _follower(self, request: Request) -> _Follower | None:
        constraint = request.sampling.constraint
        if constraint is None:
            return None
        if request not in self._followers:
            self._followers[request] = _Follower(constraint.fork())
        return self._followers[request]

    def _forced(self, request: Request, most: int) -> array[int]:
        """Return the forced tokens after the request's tokens, at most ``most``.

        The result is cached until the request has new tokens. It is empty if the constraint failed.
        """
        follower = self._follower(request)
        if follower is None or follower.constraint is None:
            return array("q")
        size = len(request.tokens)
        if follower.run is None or (follower.num_tokens, follower.most) != (size, most):
            try:
                run = follower.constraint.forced(request.tokens, request.prompt_len, most)
            except ConstraintFailed:
                follower.constraint, run = None, ()
            follower.run, follower.num_tokens, follower.most = array("q", run), size, most
        return follower.run

    def _count_allowed(self, request: Request, guess: array[int]) -> int:
        follower = self._follower(request)
        if follower is None or follower.constraint is None:
            return len(guess)
        run = self._forced(request, follower.most)
        same = common_len(run, guess)
        if same < min(len(run), len(guess)):
            return same
        try:
            return follower.constraint.count_allowed(request.tokens, request.prompt_len, guess)
        except ConstraintFailed:
            follower.constraint = None
            return 0
