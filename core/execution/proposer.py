"""Proposer: the protocol of drafters with a model of their own.

A proposer runs in the model thread. It proposes before the target's forward pass and observes the
outcome of every step, steps without its drafts included. Its drafts never change the output (see
core/sampling/verifier.py), only the number of tokens that a step yields; so it may fail, guess
wrong or return nothing. A drafter that needs only token ids is a `Source` in the event loop (see
draft/sources/source.py).
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
    or if some of its tokens have lost their KV (`num_packed_away`).
    """

    scheduled: ScheduledRequest
    batch_rows: Sequence[int]
    output: RequestOutput


class PageRows(NamedTuple):
    """Rows that a proposer keeps for each page, ``[num_pages or more, ...]``; row p is page p's.

    Tiers that store pages outside the pool read rows from ``source`` and write loaded rows to
    ``target``.
    """

    source: Tensor
    target: Tensor


class Proposer(Protocol):
    """Guesses the next tokens of a batch of requests."""

    @property
    def source(self) -> str:
        """Name of this drafter in answers and metrics."""

    @property
    def traits(self) -> ProposerTraits:
        """Traits that determine the cost of its drafts; fixed."""

    @property
    def taps(self) -> Taps:
        """Layer boundaries of the target whose hidden states `observe` receives; fixed."""

    def propose(self, requests: Sequence[ScheduledRequest]) -> Sequence[Draft]:
        """Return one draft for each request, in order, of at most ``draft_plan.max_draft`` nodes.

        ``draft_plan.draft`` holds the looked-up draft: a returned draft replaces it, `NO_DRAFT`
        keeps it. Nodes of a tree off the trunk are verified only as far as ``spare_page_ids`` have
        slots for them. A proposer that keeps KV of its nodes uses the same slots in its own pool,
        and moves the KV of accepted nodes in `observe`.
        """

    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Observe a step after its verification, plain and prefill steps included.

        ``verified`` [requests of the plan]. All arguments are valid only during the call. If a
        later step was already launched, ``output.hidden`` and ``output.logits`` are overwritten and
        must not be used.
        """

    @property
    def stored(self) -> Sequence[PageRows]:
        """The proposer's rows that KV tiers store with each page; fixed, and empty by default.

        A proposer that stores none recomputes its rows from the text.
        """
        return ()

    def adopt(self, page_ids: array[int]) -> None:
        """Adopt pages that a tier loaded, with their rows of `stored`; called after `forget`."""
        del page_ids  # A proposer without stored rows has nothing to adopt.

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        """Forget requests that released their pages, and the content of newly allocated pages."""
        del request_ids, newly_allocated_pages  # By default a proposer keeps nothing.

    # -- before the first request ---------------------------------------------------------------

    device: torch.device  # device that computes its passes
    models: Sequence[tuple[Decoder, KVPool]] = ()  # decoders that it runs, with their pools

    def warm_up(self, max_len: int, num_best: int) -> None:
        """Prepare for passes over at most ``max_len`` tokens, except passes of `models`.

        The engine prepares those. ``num_best``: number of candidate tokens chosen at each position.
        """
        del max_len, num_best

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute one draft pass for ``num_requests`` requests with ``num_tokens`` tokens each.

        The values of the KV do not matter. The engine calls this before any `propose` to measure
        its time, and zeroes the pools of `models` first.
        """
