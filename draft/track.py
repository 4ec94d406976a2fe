"""Track: what the speculator knows of one request, and how its guesses turned out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.request import Request
from ..core.step import PlanRow, RowOutput
from .calibration import Calibration
from .source import Guess
from .trie import Path, Survival, common_len

LM = "lm"
LEAST_ODDS = 0.35  # of a free draft's token in a batch: rows of lower odds cost more than they seem
NO_SURVIVAL: Survival = np.zeros(0)


@dataclass(slots=True)
class Track:
    """Guesses for the step under way, and how far the draft model has come."""

    request: Request
    guesses: Sequence[Guess] = ()
    lm_len: int = 0  # tokens whose KV the draft model has, about
    paths: list[Path] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether it may draft in the next step: it lacks one token, and not its first."""
        return self.request.num_pending == 1 and self.request.num_output > 0

    @property
    def lm_kind(self) -> int:
        """The draft model is right more often where nothing is drawn."""
        return 0 if self.request.sampling.params.temperature == 0 else 1

    def free_survival(self, num_requests: int) -> Survival:
        """Of the trunk; what is unlikely is left out where others would wait for it."""
        if not self.paths:
            return NO_SURVIVAL
        survival = self.paths[0].survival
        return survival if num_requests == 1 else survival[survival >= LEAST_ODDS]

    def score(self, calibration: Calibration, served: array[int]) -> None:
        """Every guess, verified or not, against what was committed."""
        for guess in self.guesses:
            hits = common_len(guess.token_ids, served)
            missed = hits < min(len(guess.token_ids), len(served))
            calibration.score(guess.source, guess.kind, self.request.request_id, hits, missed)
        self.guesses = ()

    def score_lm(
        self, calibration: Calibration, row: PlanRow, output: RowOutput, num_served: int
    ) -> None:
        """What the draft model said, and how far it has come by that."""
        hits = min(output.num_accepted, num_served)
        self.lm_len = row.stop - output.backlog + num_served - 1
        is_silent = not output.draft_len and not output.backlog  # nothing to catch up, nothing said
        if output.draft_len or is_silent:
            missed = is_silent or hits < min(output.draft_len, num_served)
            calibration.score(LM, self.lm_kind, self.request.request_id, hits, missed)


@dataclass(slots=True)
class Drafters:
    """Who is there, by request id."""

    tracks: dict[str, Track] = field(default_factory=dict)  # those that may draft
    own_depth: set[str] = field(default_factory=set)  # of these, who said how deep
    constrained: set[str] = field(default_factory=set)  # of these, with a grammar
    silent: dict[str, Request] = field(default_factory=dict)  # those that may not draft

    def decoding(self, request_ids: Iterable[str]) -> Iterator[Track]:
        """Which of these may draft in the next step."""
        tracks = (self.tracks[each] for each in request_ids)
        return (track for track in tracks if track.decodes)

    def of(self, request: Request) -> Track:
        """What is known of a request, from now on if it was not."""
        track = self.tracks.get(request.request_id)
        if track is None:
            track = self.tracks[request.request_id] = Track(request)
        return track

    def leave(self, request_id: str) -> bool:
        """Forget a request; whether it might draft."""
        self.silent.pop(request_id, None)
        self.own_depth.discard(request_id)
        self.constrained.discard(request_id)
        return self.tracks.pop(request_id, None) is not None


def padded(rows: Sequence[Survival]) -> Survival:
    """One row each, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for index, row in enumerate(rows):
        if len(row):
            table[index, : len(row)] = row
    return table
