"""Accounting of steps: charges to tenants, usage, and the speculator's statistics.

Planned tokens are charged when they are planned. The next plan does not depend on the rest, which
is done while the next step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ..interface.output import RequestOutput
from ..interface.plan import ScheduledRequest
from ..interface.protocols import Speculator
from ..interface.request import Delta, Request, Tenant


class CommittedRow(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one request in a committed step, with the delta that its reader gets."""

    request: Request
    scheduled: ScheduledRequest
    out: RequestOutput
    delta: Delta
    now: float  # time of the commit, on the engine's clock
    is_plain: bool  # whether no request of the step drafted


class StepAccounts:
    """Charges for planned tokens, and the rows of the last commit that are not accounted for yet.

    ``charge`` charges a tenant for a number of tokens. A row is accounted for before its delta is
    delivered and before the next commit.
    """

    def __init__(self, speculator: Speculator, charge: Callable[[Tenant, int], None]) -> None:
        self._speculator, self._charge = speculator, charge
        self._open: list[CommittedRow] = []

    def add(self, row: CommittedRow) -> None:
        """Account for a row later, in `settle`.

        A row that ends its request, or may have a draft from the proposer, is accounted for now:
        the speculator forgets a request at its end, and its next plan depends on the proposer's KV.
        """
        delta = row.delta
        is_over = delta.finish_reason is not None or delta.error is not None
        if is_over or row.scheduled.draft_plan.max_draft:
            self._account(row)
        else:
            self._open.append(row)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge the request's tenant for ``num_tokens`` planned tokens.

        Tokens that were charged earlier but not computed are deducted.
        """
        num_due = max(0, num_tokens - request.num_charged_not_computed)
        request.num_charged_not_computed -= num_tokens - num_due
        self._charge(request.tenant, num_due)

    def charge_decodes(self, requests: Iterable[Request]) -> None:
        """Charge the tenant of each request for one planned token, as `charge` does.

        Drafts are charged after verification, because their number is not known before.
        """
        num_due: dict[Tenant, int] = {}
        for request in requests:
            if request.num_charged_not_computed:
                request.num_charged_not_computed -= 1
            elif request.tenant in num_due:
                num_due[request.tenant] += 1
            else:
                num_due[request.tenant] = 1
        for tenant, num_tokens in num_due.items():
            self._charge(tenant, num_tokens)

    def settle(self) -> None:
        """Account for all rows that are not accounted for yet."""
        rows, self._open = self._open, []
        for row in rows:
            self._account(row)

    def _account(self, row: CommittedRow) -> None:
        request, out, delta = row.request, row.out, row.delta
        num_drafted, num_tokens = len(out.draft.token_ids), len(delta.token_ids)
        if num_drafted:  # each draft token cost a row, accepted or not
            self._charge(request.tenant, num_drafted)
        if num_tokens:
            _count(row, num_drafted, num_tokens)
            if not row.is_plain:
                self._speculator.observe(request, row.scheduled, out, num_tokens)


def _count(row: CommittedRow, num_drafted: int, num_tokens: int) -> None:
    """Count the tokens of a row in the usage of its request and in its delta."""
    usage, out, delta = row.request.usage, row.out, row.delta
    draft = out.draft
    if usage.completion_tokens == 0:
        usage.time_to_first_token = row.now - row.request.arrival_time
    usage.completion_tokens += num_tokens
    usage.verify_steps += 1
    if not num_drafted:
        usage.steps_by_accepted[0] = usage.steps_by_accepted.get(0, 0) + 1
        delta.token_sources = [""] * num_tokens
        return
    names = set(draft.sources)
    is_single = len(names) == 1
    if is_single:  # the most frequent case, in which tokens need not be looked up
        served = min(len(out.path), num_tokens)
        accepted = [*names] * served
    else:
        accepted = [draft.sources[node] for node in out.path[:num_tokens]]
        served = len(accepted)
    usage.steps_by_accepted[served] = usage.steps_by_accepted.get(served, 0) + 1
    usage.proposed_tokens += num_drafted
    usage.accepted_tokens += served
    usage.draft_steps += 1
    usage.tree_steps += bool(draft.parents) and not draft.is_chain
    delta.token_sources = [*accepted, *[""] * (num_tokens - served)]
    delta.num_proposed = num_drafted
    delta.proposed_sources = [*draft.sources]
    delta.accepted_sources = accepted
    proposed_by_source, accepted_by_source = usage.proposed_by_source, usage.accepted_by_source
    for name in names:
        num_proposed = num_drafted if is_single else delta.proposed_sources.count(name)
        proposed_by_source[name] = proposed_by_source.get(name, 0) + num_proposed
        if num_accepted := served if is_single else accepted.count(name):
            accepted_by_source[name] = accepted_by_source.get(name, 0) + num_accepted
