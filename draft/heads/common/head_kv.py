"""HeadKV: which positions of which requests have head KV, and which wait for it.

A head's KV lies under the same page ids as the target's, in a pool of its own. It is written from
the target's hidden states, for the positions that were committed: KV of draft tokens is void by
then, wherever it was, so nothing is ever rolled back. The KV of a position depends on tokens up to
that position alone, hence a prefix hit brings it along. Positions wait until a page is whole, or
until a draft reads them: while nothing is drafted, a step costs a copy of its hidden states.

A page whose positions all have head KV carries a ready mark. Where head KV is missing (a proposer
that failed, a page that came without it) drafts see only what lies behind the hole. The target
computes nothing for a head.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ....core.execution.proposer import PageRows, VerifiedRequest
from ....core.interface.plan import ScheduledRequest
from ....core.ops.batch import IntArray
from ....core.ops.kv_pool import KVPool
from .layers import TapConfig


@dataclass(slots=True)
class Span:
    """The positions of one request that have head KV: ``start`` to ``stop``, and those of pages
    before that are ready. Some behind ``stop`` may wait to be written.
    """

    start: int = 0
    stop: int = 0
    feature: Tensor | None = None  # [hidden] of position ``stop - 1``, for heads that have features
    waiting: list[Tensor] = field(default_factory=list)  # taps of the positions from ``stop`` on
    waiting_ids: list[int] = field(default_factory=list)  # their tokens

    @property
    def reached(self) -> int:
        """Position behind the last that has head KV or waits for it."""
        return self.stop + len(self.waiting_ids)


class Written(NamedTuple):
    """Positions that the target has computed, over all requests of a step, to be written."""

    taps: Tensor  # [num, num_taps * target_hidden]
    token_ids: Tensor  # [num]
    positions: IntArray  # [num]
    slots: IntArray  # [num] where their head KV lies
    firsts: IntArray  # [num_requests] where the positions of each begin
    lens: IntArray  # [num_requests] positions of each
    before: Sequence[Tensor | None]  # [num_requests] the feature of the position before; or None


Write: TypeAlias = Callable[[Written], Tensor | None]
"""Writes head KV; returns the features ``[num, hidden]`` of the positions, if the head has such."""


class HeadKV:
    """The head KV of all requests in one pool. ``write`` computes and writes it."""

    def __init__(self, config: TapConfig, pool: KVPool, write: Write) -> None:
        self.pool, self._write = pool, write
        self._first = config.first_position
        self.ready = np.zeros(pool.num_pages, dtype=np.bool_)  # [num_pages]
        self._ready_elsewhere = np.zeros_like(self.ready)  # marks of pages that came from a tier
        self.spans: dict[str, Span] = {}  # by request
        self._page_features: Tensor | None = None  # [num_pages, hidden] of a page's last position
        if config.keeps_page_features:
            shape = (pool.num_pages, config.hidden_size)
            self._page_features = torch.zeros(shape, dtype=pool.dtype, device=pool.data.device)

    @property
    def stored(self) -> list[PageRows]:
        """The head KV of a page, the feature of its last position, and whether it is ready.

        The mark of a page that comes back waits for `adopt`: until then the page counts as new.
        """
        kept = [each for each in (self.pool.data, self._page_features) if each is not None]
        marks = [torch.from_numpy(each) for each in (self.ready, self._ready_elsewhere)]
        return [*(PageRows(each, each) for each in kept if each.numel()), PageRows(*marks)]

    def adopt(self, page_ids: array[int]) -> None:
        """Take pages that came from a tier: they are ready if they were when they were stored."""
        ids = np.asarray(page_ids)
        self.ready[ids] = self._ready_elsewhere[ids]

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests that released their pages; pages that were allocated are void."""
        for request_id in request_ids:
            self.spans.pop(request_id, None)
        if newly_allocated_pages:
            self.ready[np.asarray(newly_allocated_pages)] = False

    # -- what the target computed ---------------------------------------------------------------

    def is_live(self, verified: VerifiedRequest) -> bool:
        """Whether a request was committed, to pages that are still the request's.

        A step launched ahead may end behind the one in which its request did: then its pages may
        have gone to others, and the request has been forgotten. The dummy request of a health
        check has no id, and would never be forgotten.
        """
        scheduled = verified.scheduled
        is_known = len(scheduled.tokens) >= scheduled.stop
        return (
            bool(verified.batch_rows and scheduled.request_id)
            and is_known
            and not (scheduled.is_ahead and scheduled.request_id not in self.spans)
        )

    def add(self, live: Sequence[VerifiedRequest], taps: Sequence[Tensor]) -> None:
        """Note the committed positions of requests; those that end a page are written.

        ``taps``: [positions, num_taps * target_hidden] of each, views of the whole step's.
        """
        for each, part in zip(live, taps, strict=True):
            span = self._reached(each.scheduled)
            span.waiting.append(part)
            span.waiting_ids += _token_ids(each)
        self.write_waiting([each.scheduled for each in live if self._ends_page(each.scheduled)])
        for each in live:
            waiting = self.spans[each.scheduled.request_id].waiting
            if waiting:
                waiting[-1] = waiting[-1].clone()

    def _reached(self, scheduled: ScheduledRequest) -> Span:
        """The span of a request whose positions from ``start`` on were committed."""
        span = self.spans.get(scheduled.request_id)
        if span is None or span.reached != scheduled.start:
            span = Span(scheduled.start, scheduled.start, self._feature_before(scheduled))
            self.spans[scheduled.request_id] = span
        return span

    def _feature_before(self, scheduled: ScheduledRequest) -> Tensor | None:
        """The feature of the position before the first one, if a ready page ends there."""
        page, rest = divmod(scheduled.start, self.pool.page_size)
        if self._page_features is None or rest or not page:
            return None
        page_id = scheduled.page_ids[page - 1]
        return self._page_features[page_id] if self.ready[page_id] else None

    def _ends_page(self, scheduled: ScheduledRequest) -> bool:
        """Whether positions that wait end a page, which others may find once it is released."""
        span = self.spans[scheduled.request_id]
        return span.reached // self.pool.page_size > span.stop // self.pool.page_size

    # -- writing --------------------------------------------------------------------------------

    def waits(self, scheduled: ScheduledRequest) -> bool:
        """Whether positions of a request wait to be written."""
        span = self.spans.get(scheduled.request_id)
        return span is not None and bool(span.waiting_ids)

    def write_waiting(self, requests: Sequence[ScheduledRequest]) -> None:
        """Write the head KV of the positions that wait for it, of requests that have such."""
        if not requests:
            return
        spans = [self.spans[scheduled.request_id] for scheduled in requests]
        written = self._written(requests, spans)
        features = self._write(written)
        firsts, lens = written.firsts.tolist(), written.lens.tolist()
        for scheduled, span, first, num in zip(requests, spans, firsts, lens, strict=True):
            own = None if features is None else features[first : first + num]
            self._advance(scheduled, span, num, own)
            span.waiting, span.waiting_ids = [], []

    def _written(self, requests: Sequence[ScheduledRequest], spans: Sequence[Span]) -> Written:
        page_size, device = self.pool.page_size, self.pool.data.device
        lens = np.array([len(span.waiting_ids) for span in spans])
        firsts = np.cumsum(lens) - lens
        owners = np.repeat(np.arange(len(requests)), lens)
        starts = np.array([span.stop for span in spans])
        positions = np.arange(len(owners)) + (starts - firsts)[owners]
        at_pages = zip(owners.tolist(), (positions // page_size).tolist(), strict=True)
        pages = np.array([requests[owner].page_ids[page] for owner, page in at_pages])
        return Written(
            torch.cat([part for span in spans for part in span.waiting]),
            torch.tensor([i for span in spans for i in span.waiting_ids], device=device),
            positions,
            pages * page_size + positions % page_size,
            firsts,
            lens,
            [span.feature for span in spans],
        )

    def _advance(
        self, scheduled: ScheduledRequest, span: Span, count: int, features: Tensor | None
    ) -> None:
        """Head KV of a request was written: mark the pages that became whole."""
        begin, page_size = span.stop, self.pool.page_size
        if features is not None and span.feature is None and span.start == begin:
            span.start = begin + 1  # the first position lacks the feature before it
        span.stop = begin + count
        for page in range(begin // page_size, span.stop // page_size):
            if max(page * page_size, self._first) >= span.start:
                self.ready[scheduled.page_ids[page]] = True
            if features is not None and self._page_features is not None:
                last = (page + 1) * page_size - 1
                self._page_features[scheduled.page_ids[page]] = features[last - begin]
        if features is not None:
            span.feature = features[-1].clone()

    # -- reading --------------------------------------------------------------------------------

    def first_seen(self, scheduled: ScheduledRequest, span: Span) -> int:
        """The lowest position from which on all head KV is there."""
        page_size = self.pool.page_size
        num_whole = (len(scheduled.tokens) - 1) // page_size
        if span.start > num_whole * page_size:
            return span.start
        missing = np.flatnonzero(~self.ready[np.asarray(scheduled.page_ids[:num_whole], np.int64)])
        return max(self._first, (int(missing[-1]) + 1) * page_size if len(missing) else 0)


def _token_ids(verified: VerifiedRequest) -> Sequence[int]:
    """Token ids of the committed positions: pending tokens, then accepted ones."""
    scheduled = verified.scheduled
    pending = scheduled.text_ids(scheduled.start, scheduled.stop)
    num_accepted = len(verified.batch_rows) - len(pending)
    return [*pending, *verified.output.token_ids[:num_accepted]]
