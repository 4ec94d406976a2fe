"""LmProposer: a smaller language model drafts with the noise that the verifier will use.

Drawing with the verifier's own Gumbel noise makes the two choices agree far more often than
independent draws would (Daliri, Musco, Suresh, arXiv 2408.07978).

The draft's KV lives in a pool of its own under the *same page ids* as the target's: a prefix hit
brings the draft's KV along. A page whose draft KV is whole carries a ready mark; what is missing
is caught up a window at a time in steps that follow the first token, never on the way to it.

Where the device chooses the tokens (`DeviceSampler`), each pass takes its tokens from the pass
before it on the device, and the host reads all of them at the end.

If asked for, a draft is sharpened as temperature_tuner.py learns, which cannot change the output of
`verify`: it sees tokens alone. For rejection sampling a draft is ``independent``: all its
``max_draft`` tokens, drawn with noise of its own, and what they were drawn from.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from ...core.execution.proposer import DraftRow, VerifiedRow
from ...core.interface.step import Draft
from ...core.model.decoder import Decoder
from ...core.ops.batch import (
    DeviceTokens,
    ForwardOutput,
    RaggedBatch,
    SamplingPlan,
    Segment,
    Taps,
    Wanted,
)
from ...core.ops.kv_pool import KVPool
from ...core.sampling.logits_processors import SampleRow
from ...core.sampling.rejection import SampledDraft, draw
from ...core.sampling.sampler import DeviceSampler, PendingTokens
from ...core.sampling.verifier import Choice
from ..sources.merge import common_len
from .temperature_tuner import TemperatureTuner

SOURCE = "lm"


@dataclass(slots=True)
class _Chain:
    """One request's draft as it grows."""

    token_ids: list[int] = field(default_factory=list)
    has_failed: bool = False  # a token could not be drawn: nothing follows
    drawn_from: list[torch.Tensor] = field(default_factory=list)  # [vocab] each, if independent
    page_ids: Sequence[int] = ()  # of its KV, from the page of its first token on

    def extend(self, choice: Choice) -> None:
        """Append a drawn token, unless one before it could not be drawn."""
        self.has_failed = self.has_failed or choice.error is not None
        if not self.has_failed:
            self.token_ids.append(choice.token_id)

    def may_grow(self, max_len: int) -> bool:
        """Whether one more token can be drawn."""
        return not self.has_failed and len(self.token_ids) < max_len


class _Drawn(NamedTuple):
    """The tokens of one pass, which may be on the device still."""

    live: Sequence[int]  # indices of the rows; token i belongs to row live[i]
    tokens: PendingTokens | Sequence[Choice]


@dataclass(slots=True)
class _Track:
    """How far the draft's KV of one request reaches."""

    num_computed: int = 0  # positions below it hold the draft KV of ``tokens``
    num_marked: int = 0  # whole pages among them that carry the ready mark
    chain: _Chain = field(default_factory=_Chain)  # all but its last token have KV beyond that


class LmProposer:
    """Drafts by running ``decoder`` on the request's tokens.

    ``window``: tokens of missing KV that one step may catch up over the whole batch.
    ``temperature_scale`` divides the draft's logits on top of the temperature; None: it is tuned.
    """

    taps: Taps = ()

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        *,
        window: int = 256,
        independent: bool = False,
        temperature_scale: float | None = 1.0,
    ) -> None:
        self._decoder = decoder
        self._sampler = decoder.sampler
        self._pool = pool
        self._window = window
        self._ready = bytearray(pool.num_pages)  # 1: every position of the page has draft KV
        self._tracks: dict[str, _Track] = {}
        self._independent = independent
        self._draws_on_device = isinstance(decoder.sampler, DeviceSampler) and not independent
        self._fixed_temperature_scale = 1.0 if independent else temperature_scale
        self._tuner = TemperatureTuner(self._sampler)

    @property
    def temperature_scale(self) -> float:
        """What divides the draft's logits at present, on top of the temperature."""
        return (
            self._tuner.temperature_scale
            if self._fixed_temperature_scale is None
            else self._fixed_temperature_scale
        )

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget the tracks of these requests and the ready marks of these pages."""
        for request_id in request_ids:
            self._tracks.pop(request_id, None)
        for page_id in newly_allocated_pages:
            self._ready[page_id] = 0
        if fresh := frozenset(newly_allocated_pages):
            for track in self._tracks.values():
                kept = takewhile(lambda page_id: page_id not in fresh, track.chain.page_ids)
                track.chain.page_ids = tuple(kept)
        self._tuner.forget(request_ids)

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRow]
    ) -> None:
        """Do nothing: the next row's tokens show which draft tokens were accepted."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """Catch up within the window, then draft one token at a time for rows that are whole."""
        tracks = [self._follow(row) for row in rows]
        chains = [_Chain() for _ in rows]
        self._extend(rows, chains, self._catch_up(rows, tracks, chains))
        for row, track, chain in zip(rows, tracks, chains, strict=True):
            track.chain = chain
            chain.page_ids = row.page_ids[len(row.tokens) // self._pool.page_size :]
        return [self._draft(*each) for each in zip(rows, tracks, chains, strict=True)]

    def _draft(self, row: DraftRow, track: _Track, chain: _Chain) -> Draft:
        # At the end of the context the missing KV is never computed: it does not count.
        num_uncached_draft_tokens = (
            _num_uncached_draft_tokens(row, track) if self._has_room(row) else 0
        )
        sources = (SOURCE,) * len(chain.token_ids)
        if not chain.drawn_from:
            return Draft(chain.token_ids, sources, num_uncached_draft_tokens)
        return SampledDraft(
            chain.token_ids, sources, num_uncached_draft_tokens, probs=torch.stack(chain.drawn_from)
        )

    # -- cursor ---------------------------------------------------------------------------------

    def _follow(self, row: DraftRow) -> _Track:
        """Bring a request's track up to what was committed since."""
        track = self._tracks.setdefault(row.request_id, _Track())
        chain, track.chain = track.chain, _Chain()
        if chain.token_ids:
            self._learn(row, track, chain)
        self._skip_ready(row, track)
        return track

    def _learn(self, row: DraftRow, track: _Track, chain: _Chain) -> None:
        """Count the KV of the last draft that was accepted."""
        committed = row.tokens[track.num_computed :]
        agreed = common_len(chain.token_ids, committed)
        right = min(agreed, len(chain.token_ids) - 1)
        track.num_computed += min(right, self._num_kept(row, track, chain))
        self._tuner.settle(row)

    def _num_kept(self, row: DraftRow, track: _Track, chain: _Chain) -> int:
        """Positions from the cursor on whose pages are those that a draft was written to.

        Where the step behind it failed, its pages may have gone to others since.
        """
        page_size = self._pool.page_size
        first = track.num_computed // page_size
        num_pages = common_len(chain.page_ids, row.page_ids[first:])
        return max(0, (first + num_pages) * page_size - track.num_computed)

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
        self, rows: Sequence[DraftRow], tracks: Sequence[_Track], chains: Sequence[_Chain]
    ) -> _Drawn:
        """Compute missing KV; rows that reach their last token get their first draft token."""
        stops = self._stops(rows, tracks)
        if not stops:
            return _Drawn((), ())
        segments = [
            self._segment(row, row.tokens[track.num_computed : stop], track.num_computed)
            for row, track, stop in ((rows[i], tracks[i], stop) for i, stop in stops.items())
        ]
        whole = [index for index, stop in stops.items() if stop == len(rows[index].tokens)]
        sample_rows = self._sample_rows(rows, chains, whole)
        output = self._forward(self._batch(segments), sample_rows)
        for index, stop in stops.items():  # not before: a pass that fails computes nothing
            tracks[index].num_computed = stop
            self._mark_ready(rows[index], tracks[index])
        if self._fixed_temperature_scale is None:
            for index, values in zip(whole, output.logits, strict=True):
                self._tuner.keep(rows[index], values)
        return _Drawn(whole, self._choose(output, sample_rows, [chains[i] for i in whole]))

    def _stops(self, rows: Sequence[DraftRow], tracks: Sequence[_Track]) -> dict[int, int]:
        """Where each row's catch-up stops, within the window; rows that lack least come first."""
        room, stops = self._window + len(rows), {}
        for index in sorted(
            range(len(rows)), key=lambda i: _num_uncached_draft_tokens(rows[i], tracks[i])
        ):
            end = len(rows[index].tokens)
            stop = min(end, tracks[index].num_computed + room)
            if self._has_room(rows[index]) and stop > tracks[index].num_computed:
                stops[index] = stop
                room -= stop - tracks[index].num_computed
        return stops

    def _has_room(self, row: DraftRow) -> bool:
        return len(row.tokens) + row.max_draft <= self._decoder.config.max_model_len

    def _extend(self, rows: Sequence[DraftRow], chains: Sequence[_Chain], first: _Drawn) -> None:
        """Draft the tokens behind the first one of each live row."""
        is_read = isinstance(first.tokens, Sequence)
        if is_read or any(rows[index].sampling.reads_text for index in first.live):
            self._extend_on_host(rows, chains, first)
        else:
            self._extend_on_device(rows, chains, first)

    def _extend_on_host(
        self, rows: Sequence[DraftRow], chains: Sequence[_Chain], drawn: _Drawn
    ) -> None:
        """Read the tokens of each pass before the next one begins."""
        _read(drawn, chains)
        while live := [i for i in drawn.live if chains[i].may_grow(rows[i].max_draft)]:
            drawn = self._advance(rows, chains, live)
            _read(drawn, chains)

    def _extend_on_device(
        self, rows: Sequence[DraftRow], chains: Sequence[_Chain], drawn: _Drawn
    ) -> None:
        """Launch all passes, each with the tokens of the one before it; then read the tokens.

        The host waits once: when it reads the last pass, the others are over.
        """
        passes = [drawn]
        while live := [i for i in drawn.live if len(passes) < rows[i].max_draft]:
            drawn = self._advance(rows, chains, live, drawn, num_ahead=len(passes))
            passes.append(drawn)
        for each in passes:
            _read(each, chains)

    def _advance(
        self,
        rows: Sequence[DraftRow],
        chains: Sequence[_Chain],
        live: Sequence[int],
        before: _Drawn | None = None,
        *,
        num_ahead: int = 0,
    ) -> _Drawn:
        """Draw one more token for each live row.

        The last ``num_ahead`` tokens of each row are on the device; ``before`` drew the last one.
        """
        segments = []
        for index in live:
            token_ids = chains[index].token_ids
            end = len(rows[index].tokens) + len(token_ids) + num_ahead
            segments.append(self._segment(rows[index], token_ids[-1:] or [0], end - 1))
        device_tokens = None if before is None else self._device_tokens(before, live)
        sample_rows = self._sample_rows(rows, chains, live, num_ahead)
        output = self._forward(self._batch(segments, device_tokens), sample_rows)
        return _Drawn(live, self._choose(output, sample_rows, [chains[i] for i in live]))

    def _device_tokens(self, before: _Drawn, live: Sequence[int]) -> DeviceTokens:
        """The tokens that the pass ``before`` drew for the live rows, one row of the batch each."""
        assert not isinstance(before.tokens, Sequence)
        places = {index: place for place, index in enumerate(before.live)}
        sources = np.array([places[index] for index in live], np.int32)
        return DeviceTokens(before.tokens.words, sources, self._decoder.config.vocab_size)

    @staticmethod
    def _segment(row: DraftRow, token_ids: Sequence[int], start: int) -> Segment:
        """Logits are wanted where a segment reaches the last token, or goes beyond it."""
        is_whole = start + len(token_ids) >= len(row.tokens)
        return Segment(
            token_ids=token_ids, start=start, page_ids=row.page_ids, num_logits=int(is_whole)
        )

    @staticmethod
    def _sample_rows(
        rows: Sequence[DraftRow],
        chains: Sequence[_Chain],
        live: Sequence[int],
        num_ahead: int = 0,
    ) -> list[SampleRow]:
        """The next token of each live row; the host lacks the last ``num_ahead`` before it."""
        return [
            SampleRow(rows[i].tokens, rows[i].sampling, chains[i].token_ids, num_ahead)
            for i in live
        ]

    def _batch(
        self, segments: Sequence[Segment], device_tokens: DeviceTokens | None = None
    ) -> RaggedBatch:
        page_size = self._pool.page_size
        return self._decoder.batch(segments, page_size=page_size, device_tokens=device_tokens)

    def _forward(self, batch: RaggedBatch, sample_rows: Sequence[SampleRow]) -> ForwardOutput:
        """One pass, with a row of logits for each of ``sample_rows``."""
        draws = (
            SamplingPlan(sample_rows, [1] * len(sample_rows), self.temperature_scale)
            if self._draws_on_device
            else None
        )
        return self._decoder.forward(batch, self._pool, Wanted(draws))

    # -- tokens ---------------------------------------------------------------------------------

    def _choose(
        self, output: ForwardOutput, sample_rows: Sequence[SampleRow], chains: Sequence[_Chain]
    ) -> PendingTokens | Sequence[Choice]:
        """Draw by the target's own sampler, or as rejection sampling wants it."""
        if output.tokens is not None or not sample_rows:
            return output.tokens or ()
        sampler, scale = self._sampler, self.temperature_scale
        if self._independent:
            return self._choose_independently(output, sample_rows, chains)
        if isinstance(sampler, DeviceSampler):
            return sampler.begin(output.logits, sample_rows, temperature_scale=scale)
        return sampler.sample(output.logits, sample_rows, temperature_scale=scale)

    @staticmethod
    def _choose_independently(
        output: ForwardOutput, sample_rows: Sequence[SampleRow], chains: Sequence[_Chain]
    ) -> Sequence[Choice]:
        """Draw with noise of its own, and keep what each token was drawn from."""
        choices, drawn_from = draw(output.logits, sample_rows)
        for choice, chain, probs in zip(choices, chains, drawn_from, strict=True):
            if choice.error is None:
                chain.drawn_from.append(probs)
        return choices


def _read(drawn: _Drawn, chains: Sequence[_Chain]) -> None:
    """Append the tokens of a pass to the chains; waits for the device if they are there still."""
    tokens = drawn.tokens
    choices = tokens if isinstance(tokens, Sequence) else tokens.choices()
    for index, choice in zip(drawn.live, choices, strict=True):
        chains[index].extend(choice)


def _num_uncached_draft_tokens(row: DraftRow, track: _Track) -> int:
    return len(row.tokens) - track.num_computed
