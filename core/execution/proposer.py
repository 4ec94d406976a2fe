"""Proposer: the protocol of drafters with a model of their own.

A proposer runs in the model thread. It proposes drafts before the target's forward pass and
observes the outcome of every step, including steps without its drafts. Its drafts never change the
output (see core/sampling/verifier.py), only the number of tokens that a step yields; so it may
fail, guess wrong or return nothing. A drafter that needs only token ids is a `Source` in the event
loop (see draft/sources/source.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from ..interface.draft import Draft
from ..interface.output import RequestOutput
from ..interface.plan import ScheduledRequest
from ..interface.protocols import ProposerTraits
from ..model.decoder import Decoder
from ..ops.batch import ForwardOutput, RaggedBatch, Taps
from ..ops.kv_pool import KVPool


class VerifiedRequest(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one scheduled request.

    ``batch_rows[i]`` is the row of the batch that holds position ``scheduled.start + i``: first the
    pending tokens, then the accepted draft tokens. ``batch_rows`` is empty if the request failed,
    or if packing dropped the KV of some of its tokens.
    """

    scheduled: ScheduledRequest
    batch_rows: Sequence[int]
    output: RequestOutput


class PageRows(NamedTuple):
    """Data that a proposer keeps for each page, [num_pages or more, ...]; row p belongs to page p.

    Tiers store this data with the pages: they read rows from ``source`` and write loaded rows to
    ``target``.
    """

    source: Tensor
    target: Tensor


class Proposer(Protocol):
    """Drafter with a model of its own, which guesses the next tokens of a batch of requests."""

    @property
    def source(self) -> str:
        """Name of this drafter in answers and metrics."""

    @property
    def traits(self) -> ProposerTraits:
        """Traits that determine the cost of its drafts; they never change."""

    @property
    def taps(self) -> Taps:
        """Layer boundaries of the target whose hidden states `observe` gets; they never change."""

    def propose(self, requests: Sequence[ScheduledRequest]) -> Sequence[Draft]:
        """Return a draft of at most ``draft_plan.max_draft`` nodes for each request, in order.

        ``draft_plan.draft`` is the looked-up draft: a returned draft replaces it, and `NO_DRAFT`
        keeps it. Nodes off the trunk of a tree are verified only if ``spare_page_ids`` have slots
        for them. A proposer that keeps KV of its nodes uses the same slots in its own pool, and
        moves the KV of accepted nodes in `observe`.
        """

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Observe the outcome of any step after its verification, with or without drafts.

        ``verified`` has one item for each request of the plan. All arguments are valid only during
        the call. If a later step was already launched, ``output.hidden`` and ``output.logits`` are
        overwritten and must not be used.
        """

    @property
    def stored(self) -> Sequence[PageRows]:
        """Data of the proposer that KV tiers store with each page; empty by default.

        It never changes. A proposer without stored data recomputes it from the text.
        """
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Use the rows of `stored` that a tier loaded for these pages; called after `forget`."""
        del page_ids  # A proposer without stored rows ignores loaded pages.

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Drop data of requests that released their pages, and of newly allocated pages."""
        del request_ids, newly_allocated_pages  # By default a proposer keeps nothing.

    # -- before the first request ---------------------------------------------------------------

    device: torch.device  # device that computes the proposer's passes
    models: Sequence[tuple[Decoder, KVPool]] = ()  # the proposer's decoders, with their pools

    def warm_up(self, max_len: int, num_best: int) -> None:
        """Prepare for passes over at most ``max_len`` tokens.

        The engine itself prepares the passes of `models`. ``num_best``: number of candidate tokens
        to choose at each position.
        """
        del max_len, num_best

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute one draft pass for ``num_requests`` requests with ``num_tokens`` tokens each.

        The engine measures the time of this call before it calls `propose`. It zeroes the pools of
        `models` first, and the content of the KV does not matter.
        """
