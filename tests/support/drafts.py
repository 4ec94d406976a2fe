"""Shares of a step that draft, and outcomes of drafts that a proposer took part in."""

from __future__ import annotations

from msgspec.structs import replace

from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.draft.control.outcome import DraftNote


def with_drafts(row: ScheduledRequest, **plan: object) -> ScheduledRequest:
    """The same share of a step with these fields in its `DraftPlan`."""
    return replace(row, draft_plan=replace(row.draft_plan, **plan))


def proposed(
    num_nodes: int, num_hits: int, *, num_own: int, num_own_hits: int, num_uncached: int = 0
) -> Draft:
    """A chain of ``num_nodes``, or more, of which the first ``num_hits`` come true.

    The proposer found ``num_own`` nodes, ``num_own_hits`` of those that come true among them.
    """
    num_wrong = num_own - num_own_hits
    survival = [0.9] * num_own_hits + [0.0] * (num_hits - num_own_hits) + [0.1] * num_wrong
    survival += [0.0] * (num_nodes - len(survival))
    note = DraftNote((1,) * num_own, num_uncached=num_uncached)
    return Draft((0,) * len(survival), ("",) * len(survival), survival=survival, note=note)
