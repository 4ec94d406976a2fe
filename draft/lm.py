"""LmProposer: a smaller language model drafts, with the noise that the verifier will use.

Drawing with the verifier's own Gumbel noise makes the two choices agree far more often than
independent draws would (Daliri, Musco, Suresh, arXiv 2408.07978).

The draft's KV lives in a pool of its own under the *same page ids* as the target's: a prefix hit
brings the draft's KV along. A page whose draft KV is whole carries a ready mark; what is missing
is caught up a window at a time in steps that follow the first token, never on the way to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..core.batch import Segment, build_batch
from ..core.kv_pool import KVPool
from ..core.model.decoder import Decoder
from ..core.proposer import DraftRow
from ..core.sampling import SampleRow
from ..core.step import Draft
from ..core.verify import sample

SOURCE = "lm"


@dataclass(slots=True)
class _Track:
    """How far the draft's KV of one request reaches."""

    num_computed: int = 0  # positions below it hold the draft KV of ``tokens``
    num_marked: int = 0  # whole pages among them that carry the ready mark
    drafted: list[int] = field(default_factory=list)  # KV computed beyond that, if they came true


class LmProposer:
    """Drafts by running ``decoder`` on the request's tokens.

    ``window``: tokens of missing KV that one step may catch up over the whole batch.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, *, window: int = 256) -> None:
        self._decoder = decoder
        self._pool = pool
        self._window = window
        self._ready = bytearray(pool.num_pages)  # 1: every position of the page has draft KV
        self._tracks: dict[str, _Track] = {}

    def forget(self, request_ids: Sequence[str], fresh_pages: array[int]) -> None:
        """Requests that left take their cursor along; pages that change hands lose their mark."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)
        for page_id in fresh_pages:
            self._ready[page_id] = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Catch up within the window, then draft one token at a time for rows that are whole."""
        tracks = [self._follow(row) for row in rows]
        drafted: list[list[int]] = [[] for _ in rows]
        live = self._catch_up(rows, tracks, drafted)
        while live := [i for i in live if len(drafted[i]) < rows[i].max_draft]:
            live = self._advance(rows, drafted, live)
        for track, tokens in zip(tracks, drafted, strict=True):
            track.drafted = tokens[:-1]  # the last one's KV was never computed
        return [Draft.of(tokens, SOURCE) for tokens in drafted]

    # -- cursor ---------------------------------------------------------------------------------

    def _follow(self, row: DraftRow) -> _Track:
        """Bring a request's track up to what was committed since."""
        track = self._tracks.setdefault(row.request_id, _Track())
        track.num_computed += _common_len(track.drafted, row.tokens[track.num_computed :])
        track.drafted = []
        self._skip_ready(row, track)
        return track

    def _skip_ready(self, row: DraftRow, track: _Track) -> None:
        """Move over pages that are ready, but leave the last token: its logits are wanted."""
        page_size, last = self._pool.page_size, len(row.tokens) - 1
        page = track.num_computed // page_size
        while (page + 1) * page_size <= last and self._ready[row.page_ids[page]]:
            page += 1
            track.num_computed = max(track.num_computed, page * page_size)
        track.num_computed = min(track.num_computed, last)
        self._mark_ready(row, track)

    def _mark_ready(self, row: DraftRow, track: _Track) -> None:
        num_whole = track.num_computed // self._pool.page_size
        for page_id in row.page_ids[track.num_marked : num_whole]:
            self._ready[page_id] = 1
        track.num_marked = max(track.num_marked, num_whole)

    # -- forward passes -------------------------------------------------------------------------

    def _catch_up(
        self, rows: Sequence[DraftRow], tracks: Sequence[_Track], drafted: list[list[int]]
    ) -> list[int]:
        """Compute missing KV; rows that reach their last token get their first draft token."""
        stops = self._stops(rows, tracks)
        if not stops:
            return []
        logits = self._forward(
            [
                self._segment(row, row.tokens[track.num_computed : stop], track.num_computed)
                for row, track, stop in ((rows[i], tracks[i], stop) for i, stop in stops.items())
            ]
        )
        for index, stop in stops.items():  # not before: a pass that fails computes nothing
            tracks[index].num_computed = stop
            self._mark_ready(rows[index], tracks[index])
        whole = [index for index, stop in stops.items() if stop == len(rows[index].tokens)]
        return self._draw(rows, drafted, whole, logits)

    def _stops(self, rows: Sequence[DraftRow], tracks: Sequence[_Track]) -> dict[int, int]:
        """How far each row gets within the window, those that lack least first."""
        room, stops = self._window + len(rows), {}
        for index in sorted(range(len(rows)), key=lambda i: _backlog(rows[i], tracks[i])):
            end = len(rows[index].tokens)
            stop = min(end, tracks[index].num_computed + room)
            fits = end + rows[index].max_draft <= self._decoder.config.max_model_len
            if fits and stop > tracks[index].num_computed:
                stops[index] = stop
                room -= stop - tracks[index].num_computed
        return stops

    def _advance(
        self, rows: Sequence[DraftRow], drafted: list[list[int]], live: Sequence[int]
    ) -> list[int]:
        """One more draft token for each live row; returns the rows that go on."""
        segments = []
        for index in live:
            end = len(rows[index].tokens) + len(drafted[index])
            segments.append(self._segment(rows[index], drafted[index][-1:], end - 1))
        return self._draw(rows, drafted, live, self._forward(segments))

    @staticmethod
    def _segment(row: DraftRow, token_ids: Sequence[int], start: int) -> Segment:
        """Logits are wanted where a segment reaches the last token, or goes beyond it."""
        is_whole = start + len(token_ids) >= len(row.tokens)
        return Segment(
            token_ids=token_ids, start=start, page_ids=row.page_ids, num_logits=int(is_whole)
        )

    def _forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        batch = build_batch(segments, page_size=self._pool.page_size, device=self._decoder.device)
        return self._decoder.forward(batch, self._pool)

    @staticmethod
    def _draw(
        rows: Sequence[DraftRow],
        drafted: list[list[int]],
        live: Sequence[int],
        logits: torch.Tensor,
    ) -> list[int]:
        """The target's own sampler on the draft's logits, [len(live), vocab]."""
        sample_rows = [SampleRow(rows[i].tokens, rows[i].sampling, drafted[i]) for i in live]
        choices = sample(logits, sample_rows)
        sound = [i for i, choice in zip(live, choices, strict=True) if choice.error is None]
        for index, choice in zip(live, choices, strict=True):
            if choice.error is None:
                drafted[index].append(choice.token_id)
        return sound


def _backlog(row: DraftRow, track: _Track) -> int:
    return len(row.tokens) - track.num_computed


def _common_len(drafted: Sequence[int], committed: Sequence[int]) -> int:
    """Length of the run on which the two agree."""
    length = 0
    for ours, theirs in zip(drafted, committed, strict=False):
        if ours != theirs:
            break
        length += 1
    return length
