"""HeadKV: tracks which positions of requests have head KV, the keys and values of a trained head.

Head KV has its own pool with the same page ids as the target's. It is written from the target's
hidden states, for committed positions only. KV of draft tokens is never kept, so there is no
rollback. The KV of a position depends only on tokens up to that position, so a prefix hit includes
it. Head KV is not written at once: committed positions wait until they complete a page, or until a
draft reads them. So a step in which the head does not draft only copies hidden states.

A page whose positions all have head KV has a ready mark. If head KV is missing after a failure of
the proposer, or in a page that was loaded without it, drafts attend only to the positions after the
gap. The target does not compute positions again to fill the gap.
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
    """The positions of one request that have head KV, or wait for it.

    All positions from ``start`` to ``stop`` have head KV. Earlier positions have it if their page
    is marked as ready. Positions from ``stop`` on may wait to be written.
    """

    start: int = 0
    stop: int = 0
    feature: Tensor | None = None  # [hidden] feature of position ``stop - 1``, if the head has any
    waiting: list[Tensor] = field(default_factory=list)  # taps of the positions from ``stop`` on
    waiting_ids: list[int] = field(default_factory=list)  # token ids of the waiting positions

    @property
    def reached(self) -> int:
        """Position after the last one that has head KV or waits for it."""
        return self.stop + len(self.waiting_ids)


class Written(NamedTuple):
    """Positions of all requests of a step whose head KV is to be written."""

    taps: Tensor  # [num, num_taps * target_hidden]
    token_ids: Tensor  # [num]
    positions: IntArray  # [num]
    slots: IntArray  # [num] slots of the positions' head KV
    firsts: IntArray  # [num_requests] index of each request's first position
    lens: IntArray  # [num_requests] number of positions of each request
    before: Sequence[Tensor | None]  # [num_requests] feature of the preceding position, if known


Write: TypeAlias = Callable[[Written], Tensor | None]
"""Writes head KV; returns the features ``[num, hidden]`` of the positions, if the head has any."""


class HeadKV:
    """The head KV of all requests in one pool. ``write`` computes and writes it."""

    def __init__(self, config: TapConfig, pool: KVPool, write: Write) -> None:
        self.pool, self._write = pool, write
        self._first = config.first_position
        self.ready = np.zeros(pool.num_pages, dtype=np.bool_)  # [num_pages] ready marks
        self._ready_elsewhere = np.zeros_like(self.ready)  # [num_pages] marks loaded from a tier
        self.spans: dict[str, Span] = {}  # spans by request id
        self._page_features: Tensor | None = None  # [num_pages, hidden] each page's last feature
        if config.keeps_page_features:
            shape = (pool.num_pages, config.hidden_size)
            self._page_features = torch.zeros(shape, dtype=pool.dtype, device=pool.data.device)

    @property
    def stored(self) -> list[PageRows]:
        """The data per page that KV tiers store: head KV, last position's feature, ready mark.

        The ready mark of a loaded page takes effect in `adopt`; until then the page counts as new.
        """
        kept = [each for each in (self.pool.data, self._page_features) if each is not None]
        marks = [torch.from_numpy(each) for each in (self.ready, self._ready_elsewhere)]
        return [*(PageRows(each, each) for each in kept if each.numel()), PageRows(*marks)]

    def adopt(self, page_ids: array[int]) -> None:
        """Take over pages that were loaded from a KV tier; restore their ready marks."""
        ids = np.asarray(page_ids)
        self.ready[ids] = self._ready_elsewhere[ids]

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests without pages, and the ready marks of newly allocated pages."""
        for request_id in request_ids:
            self.spans.pop(request_id, None)
        if newly_allocated_pages:
            self.ready[np.asarray(newly_allocated_pages)] = False

    # -- committed positions --------------------------------------------------------------------

    def is_live(self, verified: VerifiedRequest) -> bool:
        """Whether a step committed tokens of a request that still owns its pages.

        A step that was launched ahead may finish after the step in which its request ended. Then
        the request has been forgotten, and its pages may belong to other requests. The dummy
        request of a health check is not live either: it has no id and would never be forgotten.
        """
        scheduled = verified.scheduled
        is_known = len(scheduled.tokens) >= scheduled.stop
        return (
            bool(verified.batch_rows and scheduled.request_id)
            and is_known
            and not (scheduled.is_ahead and scheduled.request_id not in self.spans)
        )

    def add(self, live: Sequence[VerifiedRequest], taps: Sequence[Tensor]) -> None:
        """Add the committed positions of requests; write the head KV of those that complete a page.

        ``taps[i]`` [positions, num_taps * target_hidden]: taps of request ``i``, a view of the taps
        of the whole step. Taps of positions that must wait are copied.
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
        """Return the request's span if it ends where the step began, or start a new one there."""
        span = self.spans.get(scheduled.request_id)
        if span is None or span.reached != scheduled.start:
            span = Span(scheduled.start, scheduled.start, self._feature_before(scheduled))
            self.spans[scheduled.request_id] = span
        return span

    def _feature_before(self, scheduled: ScheduledRequest) -> Tensor | None:
        """Return the feature of the position before ``start``, if a ready page ends there."""
        page, rest = divmod(scheduled.start, self.pool.page_size)
        if self._page_features is None or rest or not page:
            return None
        page_id = scheduled.page_ids[page - 1]
        return self._page_features[page_id] if self.ready[page_id] else None

    def _ends_page(self, scheduled: ScheduledRequest) -> bool:
        """Whether the waiting positions complete a page, which other requests may then share."""
        span = self.spans[scheduled.request_id]
        return span.reached // self.pool.page_size > span.stop // self.pool.page_size

    # -- writing --------------------------------------------------------------------------------

    def waits(self, scheduled: ScheduledRequest) -> bool:
        """Whether positions of a request wait to be written."""
        span = self.spans.get(scheduled.request_id)
        return span is not None and bool(span.waiting_ids)

    def write_waiting(self, requests: Sequence[ScheduledRequest]) -> None:
        """Write the head KV of all waiting positions; each request must have at least one."""
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
        """Record ``count`` written positions of a request; mark completed pages as ready."""
        begin, page_size = span.stop, self.pool.page_size
        if features is not None and span.feature is None and span.start == begin:
            # Without the preceding feature, the KV of the first position is invalid.
            span.start = begin + 1
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
        """Return the first position after the last gap in the request's head KV."""
        page_size = self.pool.page_size
        num_whole = (len(scheduled.tokens) - 1) // page_size
        if span.start > num_whole * page_size:
            return span.start
        missing = np.flatnonzero(~self.ready[np.asarray(scheduled.page_ids[:num_whole], np.int64)])
        return max(self._first, (int(missing[-1]) + 1) * page_size if len(missing) else 0)


def _token_ids(verified: VerifiedRequest) -> Sequence[int]:
    """Return the token ids of the committed positions: pending tokens, then accepted ones."""
    scheduled = verified.scheduled
    pending = scheduled.text_ids(scheduled.start, scheduled.stop)
    num_accepted = len(verified.batch_rows) - len(pending)
    return [*pending, *verified.output.token_ids[:num_accepted]]
